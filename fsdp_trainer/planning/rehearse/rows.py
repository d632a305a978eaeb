"""Rows of a rehearsal: their lengths, with nothing in them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.config.data_files import entries
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.data.records.labelled_texts import LABELLED, POSITIVE, QUERIES, RANKED, TAGGED
from fsdp_trainer.data.records.record_formats import OF_HEADS
from fsdp_trainer.data.store.stored_values import TOKENS, top_k_types
from fsdp_trainer.data.tokens.samples import GOOD, MISMATCHED
from fsdp_trainer.methods.labels import MULTI, REGRESSION, labelled
from fsdp_trainer.models.config import ONE_LABEL
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.planned_model import IN_GROUPS
from fsdp_trainer.planning.plan.second_model import architecture_of
from fsdp_trainer.rl.rounds.answers import ADVANTAGE, SAMPLED
from fsdp_trainer.training.batches import Assembler, StepPlan
from fsdp_trainer.training.feed import StepBatches


class EmptyData:
    """The data of a run, without any: in place of what tokenization returns."""

    train: tuple[()] = ()
    validation = None


class RehearsedBatches(StepBatches):
    def __init__(self, assembler: Assembler, plan: StepPlan, rows: Rows, count: int):
        """assembler: makes a micro-batch of `rows`; count: their number."""
        self.plan, self.count = plan, count
        self.length = assembler.length(rows)
        """Tokens of a row."""
        self._assembler, self._rows = assembler, rows

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self._assembler.assemble(self._rows) for _ in range(self.count))

    def empty(self) -> MicroBatch:
        return self._assembler.empty()

    @property
    def data_missing(self) -> bool:
        return False

    @property
    def reader(self) -> tuple[int | None, int]:
        return self._assembler.options.rank, self._assembler.options.ranks


def whole_rows(run: Candidate, lengths: Sequence[Sequence[int]]) -> Rows:
    """Return rows of which every token is supervised.

    lengths: of each row's documents. A row of an objective that compares answers has pairs.
    """
    choice, seq_len = run.cfg.objective, run.cfg.batch.seq_len
    empty = Rows.empty(len(lengths), seq_len)
    for i, of_row in enumerate(lengths):
        filled = sum(of_row)
        empty.labels[i, :filled], empty.weights[i, :filled] = 0, 1.0
        empty.positions[i, :filled] = np.concatenate([np.arange(length) for length in of_row])
    size = IN_GROUPS.get(choice.method.reads, 1)
    second = MISMATCHED if choice.method.reads == "unpaired" else POSITIVE
    kinds = None
    if choice.method.reads in ("unpaired", QUERIES):
        kinds = [[second if i % 2 else GOOD for i in range(len(row))] for row in lengths]
    rows = replace(
        empty,
        documents=[[*of_row] for of_row in lengths],
        group_starts=[[i % size == 0 for i in range(len(of_row))] for of_row in lengths],
        kinds=kinds,
    )
    return with_columns(run, rows)


def with_columns(run: Candidate, rows: Rows) -> Rows:
    """Return rows with the columns that a second model, or a head's labels, would add."""
    choice, config = run.cfg.objective, run.config
    columns: dict[str, np.ndarray] = {}
    reads, shape = choice.method.reads, rows.weights.shape
    if choice.method.samples:
        columns = {name: np.zeros_like(rows.weights) for name in (ADVANTAGE, SAMPLED)}
    if run.cfg.second_model is not None and run.cfg.second_model.has_lists:
        assert choice.teacher
        assert choice.top_k
        vocabulary = min(architecture_of(choice.teacher).vocab_size, config.vocab_size)
        types = top_k_types(choice.top_k, vocabulary).items()
        columns |= {name: np.zeros((*shape, *size), dtype) for name, (dtype, size) in types}
        columns[TOKENS] = columns[TOKENS].astype(np.int32)  # as TopKValues
    reference = label_values = None
    if choice.method.compares_answers and reads not in OF_HEADS:
        reference = [[0.0 for _ in of_row] for of_row in rows.documents]
    if reads in (LABELLED, RANKED, QUERIES):
        several = config.scores if config.problem in (MULTI, REGRESSION) else 1
        numbers = 2 if reads == QUERIES else several
        label_values = [[[0.0] * numbers for _ in of_row] for of_row in rows.documents]
    return replace(rows, reference=reference, label_values=label_values, columns=columns)


def lengths_of_rows(choice: ObjectiveChoice, rows: int, seq_len: int) -> list[list[int]]:
    """Return the documents of full rows: one in each, or the two of a pair."""
    if choice.method.reads in IN_GROUPS:
        return [[seq_len - seq_len // 2, seq_len // 2]] * rows
    return [[seq_len]] * rows


def plan_of_step(count: int, rows: Rows) -> StepPlan:
    times = count // len(rows.documents)
    tokens = sum(map(sum, rows.documents)) * times
    supervised = int((rows.labels != -100).sum()) * times
    documents = sum(map(len, rows.documents)) * times
    return StepPlan(1, 0, count, float(supervised), tokens, supervised, 0, documents)


def full_rows(run: Candidate) -> Rows:
    batch = run.cfg.batch
    return whole_rows(run, lengths_of_rows(run.cfg.objective, batch.micro_rows, batch.seq_len))


def rows_of_run(run: Candidate) -> tuple[Candidate, Rows, list[str]]:
    """Return the rows of a micro-batch, and a sentence if they are not those of data.path.

    They are the first ones of the data if that is on this disk, else full. The run that is returned
    first has a head for the labels of the data. Raises UserError for data that cannot be read.
    """
    cfg = run.cfg
    full = run, full_rows(run)
    if cfg.data.path is None or cfg.objective.method.samples:
        return *full, []
    if not is_on_disk(cfg.data.path):
        return *full, [f"data.path={cfg.data.path}: it is not on this disk, and rows are full"]
    # imports packages that read data
    from fsdp_trainer.data.order.mixture import OrderMaker
    from fsdp_trainer.data.prepared_data import build_data
    from fsdp_trainer.data.store.component_store import Reporter

    prepared = build_data(cfg, Reporter(lambda line: None, lambda line: None))[2]
    if prepared.streamed:
        return *full, ["data.streaming: rows are full"]
    if cfg.objective.method.reads in (LABELLED, TAGGED):
        assumed = run.config.labels == ONE_LABEL
        bare = replace(run.config, labels=(), problem="") if assumed else run.config
        run = replace(run, config=labelled(bare, cfg.objective, prepared.train))
    order = OrderMaker.of(cfg, packs=run.config.packs).training(cfg.data, prepared)
    return run, with_columns(run, order.read_rows(np.arange(cfg.batch.micro_rows))), []


def is_on_disk(path: Any) -> bool:
    named = [Path(entry.path).expanduser() for entry in entries(path)]
    return all(each.parts[0].startswith("demo:") or glob(str(each)) for each in named)
