"""Rows of a rehearsal: their lengths, with nothing in them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.schema import Batch
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.data.tokens.samples import GOOD, MISMATCHED
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.rl.rounds.answers import ADVANTAGE, SAMPLED
from fsdp_trainer.training.batches import Assembler, StepPlan
from fsdp_trainer.training.feed import StepBatches

ANSWERS_OF_A_PAIR = 2


class EmptyData:
    """The data of a run, without any: in place of what tokenization returns."""

    train: tuple[()] = ()
    validation = None


class RehearsedBatches(StepBatches):
    """The micro-batches of one step, which all have the same rows."""

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


def whole_rows(choice: ObjectiveChoice, lengths: Sequence[Sequence[int]], seq_len: int) -> Rows:
    """Return rows of which every token is supervised.

    lengths: of each row's documents. A row of an objective that compares answers has pairs.
    """
    empty = Rows.empty(len(lengths), seq_len)
    for i, of_row in enumerate(lengths):
        filled = sum(of_row)
        empty.labels[i, :filled], empty.weights[i, :filled] = 0, 1.0
        empty.positions[i, :filled] = np.concatenate([np.arange(length) for length in of_row])
    size, reference = 1, None
    if choice.method.compares_answers:
        size, reference = ANSWERS_OF_A_PAIR, [[0.0 for _ in of_row] for of_row in lengths]
    columns, kinds = {}, None
    if choice.method.reads == "unpaired":  # each answer is followed by a mismatched one
        kinds = [[MISMATCHED if i % 2 else GOOD for i in range(len(row))] for row in lengths]
    if choice.method.samples:
        columns = {name: np.zeros_like(empty.weights) for name in (ADVANTAGE, SAMPLED)}
    return replace(
        empty,
        documents=[[*of_row] for of_row in lengths],
        group_starts=[[i % size == 0 for i in range(len(of_row))] for of_row in lengths],
        reference=reference,
        kinds=kinds,
        columns=columns,
    )


def lengths_of_rows(choice: ObjectiveChoice, rows: int, seq_len: int) -> list[list[int]]:
    """Return the documents of full rows: one in each, or the two answers of a pair."""
    if choice.method.compares_answers:
        return [[seq_len - seq_len // 2, seq_len // 2]] * rows
    return [[seq_len]] * rows


def plan_of_step(count: int, rows: Rows) -> StepPlan:
    times = count // len(rows.documents)
    tokens = sum(map(sum, rows.documents)) * times
    supervised = int((rows.labels != -100).sum()) * times
    documents = sum(map(len, rows.documents)) * times
    return StepPlan(1, 0, count, float(supervised), tokens, supervised, 0, documents)


def full_rows(batch: Batch, choice: ObjectiveChoice) -> Rows:
    count, length = batch.micro_rows, batch.seq_len
    return whole_rows(choice, lengths_of_rows(choice, count, length), length)


def rows_of_run(run: Candidate) -> tuple[Rows, list[str]]:
    """Return the rows of a micro-batch, and a sentence if they are not those of data.path.

    They are the first ones of the data if that is on this disk, else full. Raises UserError for
    data that cannot be read.
    """
    cfg = run.cfg
    full = full_rows(cfg.batch, cfg.objective)
    if cfg.data.path is None or cfg.objective.method.samples:
        return full, []
    if not is_on_disk(cfg.data.path):
        return full, [f"data.path={cfg.data.path}: it is not on this disk, and rows are full"]
    # imports packages that read data
    from fsdp_trainer.data.order.mixture import OrderMaker
    from fsdp_trainer.data.prepared_data import build_data
    from fsdp_trainer.data.store.component_store import Reporter

    prepared = build_data(cfg, Reporter(lambda line: None, lambda line: None))[2]
    if prepared.streamed:
        return full, ["data.streaming: rows are full"]
    order = OrderMaker.of(cfg, packs=run.config.packs).training(cfg.data, prepared)
    rows = order.read_rows(np.arange(cfg.batch.micro_rows))
    if cfg.objective.method.compares_answers:
        rows = replace(rows, reference=[[0.0 for _ in of_row] for of_row in rows.documents])
    return rows, []


def is_on_disk(path: Any) -> bool:
    """Return True for the demo's data, and for files and folders that exist."""
    if isinstance(path, str):
        return path.startswith("demo:") or Path(path).exists()
    return all(isinstance(each, str) and is_on_disk(each) for each in path)
