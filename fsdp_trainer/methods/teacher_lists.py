"""A teacher that is not in memory during training: lists of its likeliest tokens, stored on disk.

The teacher reads the rows once, before training. Its lists are stored next to the token store. They
depend on its files, the number format, the temperature, the length of a list and the store, but not
on packing, order or ranks.
"""

import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather, run_on_all_ranks
from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.config.paths import (
    MANIFEST,
    base_of_adapter,
    downloaded,
    find_checkpoint,
    is_adapter,
    is_hub_id,
)
from fsdp_trainer.config.rules.rules_objective import has_stored_teacher
from fsdp_trainer.config.schema import ObjectiveChoice, TrainConfig
from fsdp_trainer.data.order.mixture import Component, Mixture
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.prepared_data import cache_root
from fsdp_trainer.data.store.fingerprint import contents
from fsdp_trainer.data.store.top_lists import (
    FOLDER,
    LOGS,
    REST,
    TARGET,
    TOKENS,
    ListsWriter,
    array_types,
    bytes_per_token,
    open_lists,
)
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.methods.teacher import (
    Teacher,
    require_fitting,
    share_teacher,
    with_teacher,
)
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.soft_targets import (
    ListedTargets,
    TeacherLogits,
    TopTokens,
    likeliest,
)
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.training.attention_setup import choose_attention
from fsdp_trainer.training.batches import Batches, StepPlan
from fsdp_trainer.training.weights import fill

VERSION = 1
"""Version of the stored format, to increase with every change of it."""
NUMBER = "number"
"""Column of rows: the number of each supervised token in the store, from 1; 0: not supervised."""
MIB = 2**20


@dataclass
class ListedTeacher:
    """A teacher's stored lists, read as columns of the rows.

    vocabulary: number of tokens that both models know.
    """

    choice: ObjectiveChoice
    vocabulary: int

    @contextmanager
    def reading(self, batch: MicroBatch) -> Iterator[MicroBatch]:
        """Yield the batch with soft targets."""
        choice = self.choice
        top = TopTokens(*(self._column(batch, name) for name in (TOKENS, LOGS, REST, TARGET)))
        soft = ListedTargets(top, self.vocabulary, choice.temperature, choice.divergence)
        yield replace(batch, soft=soft)

    def _column(self, batch: MicroBatch, name: str) -> Tensor:
        """Return a column at the targets.

        For a batch without rows the column is zeros, since its targets have no weight.
        """
        columns = batch.columns or {}
        if name in columns:
            return columns[name]
        _, shape = array_types(self.choice.top_k or 0, self.vocabulary)[name]
        return torch.zeros(len(batch.targets), *shape, device=batch.targets.device)


@dataclass
class ListPass:
    """Opening of the lists for a run's orders, which are computed first if they are not stored.

    source: folder of the teacher. digest: of the teacher's files. student: architecture of the
    model in training. orders: each with its number of rows per step. device: where the weights are
    kept. computing: device that computes. writes: True on the first rank of each node. say: prints
    a line. progress: shows a temporary line. check: called before each micro-batch, on all ranks
    together; may raise.
    """

    cfg: TrainConfig
    source: Path
    digest: str
    student: ModelConfig
    orders: list[tuple[RowOrder, int]]
    dims: Dims
    device: torch.device
    computing: torch.device
    writes: bool
    say: Callable[[str], None]
    progress: Callable[[str], None]
    check: Callable[[], None] = lambda: None

    def prepare(self) -> ListedTeacher:
        """Attach the lists of supervised tokens to every order. Collective. Raises UserError."""
        choice, count = self.cfg.objective, self.cfg.objective.top_k or 0
        student, config = with_teacher(self.student, self.source, self.cfg.sharding.tensor)
        known = min(config.vocab_size, student.vocab_size)
        if count > known:
            reason = f"is more than the {known:,} tokens of the vocabulary.\nUse  objective.top_k="
            problem = Problem(f"objective.top_k={count}", reason + str(min(64, known)))
            raise UserError("so many tokens cannot be listed", [problem])
        places = [self.folder(order, known) for order, _ in self.orders]
        if not self._open(places):
            require_fitting(self.cfg, student, config)
            self._compute(places, student, config, known)
        return ListedTeacher(choice, known)

    def folder(self, order: RowOrder, vocabulary: int) -> Path:
        """Return the folder for the lists of an order's store.

        Its name is a hash of all that they depend on. vocabulary: number of tokens that both know.
        """
        choice, store = self.cfg.objective, order.store
        # texts longer than a row are cut, so the lists then depend on seq_len
        is_cut = int(np.max(store.lengths)) > order.seq_len
        decisive = [
            [VERSION, self.digest, self.cfg.precision.param_dtype, store.fingerprint],
            [choice.top_k, choice.temperature, vocabulary, order.seq_len if is_cut else None],
        ]
        name = hashlib.blake2b(json.dumps(decisive).encode(), digest_size=10).hexdigest()
        return store.folder / FOLDER / name

    def _open(self, places: list[Path]) -> bool:
        """Attach stored lists to the orders if every rank finds all of them. Collective.

        Returns False if some are missing.
        """
        lists = [
            open_lists(place, supervised_tokens(order))
            for place, (order, _) in zip(places, self.orders, strict=True)
        ]
        if not all(gather(all(one is not None for one in lists))):
            return False
        for (order, _), one in zip(self.orders, lists, strict=True):
            order.supervised_values = one
        return True

    def _compute(
        self, places: list[Path], student: ModelConfig, config: ModelConfig, known: int
    ) -> None:
        """Run the teacher on all rows and store its lists. Collective."""
        cfg, count = self.cfg, self.cfg.objective.top_k or 0
        tokens = sum(supervised_tokens(order) for order, _ in self.orders)
        size = f"{tokens * bytes_per_token(count, known) / MIB:,.1f} MiB"
        self.say(
            f"teach  the teacher reads {tokens:,} supervised tokens once, before the first step: "
            f"the {count} likeliest of each take {size} of disk"
        )
        teacher = share_teacher(cfg, self.source, config, student, self.dims, compiled=False)
        allocate(teacher.model, self.device, self.computing)
        fill(teacher.model, teacher.cfg, self.source)
        try:
            for place, (order, _) in zip(places, self.orders, strict=True):
                self._store(place, order, teacher, config)
        finally:
            del teacher
            gc.collect()  # modules and their hooks are in reference cycles
            if self.computing.type == "cuda":
                torch.cuda.empty_cache()
        if not self._open(places):
            reason = "what was written there is not there now: is the disk shared, and whole?"
            raise UserError(
                "the teacher's lists cannot be kept", [Problem(str(places[0].parent), reason)]
            )

    def _store(self, place: Path, order: RowOrder, teacher: Teacher, config: ModelConfig) -> None:
        """Compute the lists of an order; write them on nodes where they are missing. Collective."""
        count, known = self.cfg.objective.top_k or 0, teacher.vocabulary
        tokens = supervised_tokens(order)

        def open_writer() -> ListsWriter | None:
            if open_lists(place, tokens) is not None or not tokens:
                return None
            return ListsWriter(place, tokens, count, known)

        writer = self._on_nodes(open_writer)
        try:
            for numbers, top in self._lists(order, teacher, config):
                if writer:
                    write_lists(writer, numbers, top)
            about = {
                "teacher": self.cfg.objective.teacher,
                "digest": self.digest,
                "param_dtype": self.cfg.precision.param_dtype,
                "top_k": count,
                "temperature": self.cfg.objective.temperature,
                "vocabulary": known,
                "tokens": tokens,
            }
            run_on_all_ranks(
                "keep the teacher's lists", lambda: writer.commit(about) if writer else None
            )
        finally:
            if writer:
                writer.close()

    def _on_nodes(self, work: Callable[[], ListsWriter | None]) -> ListsWriter | None:
        """Run `work` on rank 0, then on the first rank of each node with its own disk. Collective.

        Returns the result of `work`, None on other ranks.
        """
        writer: ListsWriter | None = None

        def on_rank(condition: bool) -> None:
            nonlocal writer
            writer = work() if condition else writer

        what = "store the teacher's lists next to the data (data.cache)"
        first = dist.get_rank() == 0
        run_on_all_ranks(what, lambda: on_rank(first))
        aside = gather(str(writer.aside) if writer else "")[0]
        # a disk that this node shares with rank 0 needs only one copy
        sees = bool(aside) and Path(aside).exists()
        run_on_all_ranks(what, lambda: on_rank(self.writes and not first and not sees))
        return writer

    @torch.no_grad()
    def _lists(
        self, order: RowOrder, teacher: Teacher, config: ModelConfig
    ) -> Iterator[tuple[Tensor, TopTokens]]:
        """Yield (numbers, lists) of all ranks' micro-batches, on every rank. Collective.

        numbers: see NUMBER; 0 for padding.
        """
        order.supervised_values = lambda numbers: {NUMBER: numbers + 1}
        batches = self._batches(order, config)
        slots = batches.assign_rows_to_ranks(StepPlan(1, 0, order.rows_per_epoch))
        for done, rows in enumerate(slots[:, batches.rank]):
            phases.enter("start")  # a heartbeat
            self.check()
            batch = batches.assemble(order.read_rows(rows[rows >= 0]))
            with teacher.reading(batch) as read:
                assert isinstance(read.soft, TeacherLogits)
                top = likeliest(read.soft, self.cfg.objective.top_k or 0, batch.targets)
            numbers = (batch.columns or {}).get(NUMBER, torch.zeros_like(batch.targets))
            numbers, *parts = gather_padded([numbers, *top])
            yield numbers, TopTokens(*parts)
            self.progress(f"teach  {(done + 1) / len(slots):.0%} of {order.rows_per_epoch:,} rows")

    def _batches(self, order: RowOrder, config: ModelConfig) -> Batches:
        """Return the micro-batches of an order in which the teacher reads it on these ranks."""
        cfg, dims = self.cfg, self.dims
        mixture = Mixture([Component("", order)])
        heads = config.num_attention_heads // cfg.sharding.tensor
        method = context_method(cfg, replace(config, num_attention_heads=heads)).method
        share = mixture.attention_cost_share(config.attention_cost)
        attention = choose_attention(cfg, [config], share, self.computing, False, method)
        return Batches(
            mixture,
            micro_rows=cfg.batch.micro_rows,
            rank=dims.batch_rank,
            ranks=dims.batch_ranks,
            device=self.computing,
            pad_to_multiple=cfg.data.pad_to_multiple,
            same_rows=dims.same_rows,
            context=context_ranks(dims, method, config.windows),
            attention=attention.layout,
        )


def write_lists(writer: ListsWriter, numbers: Tensor, top: TopTokens) -> None:
    """Write each list at the index numbers - 1; skip padding, whose number is 0."""
    is_supervised = numbers > 0
    columns = dict(zip((TOKENS, LOGS, REST, TARGET), top, strict=True))
    arrays = {name: column[is_supervised].cpu().numpy() for name, column in columns.items()}
    writer.write((numbers[is_supervised] - 1).cpu().numpy(), arrays)


def gather_padded(tensors: list[Tensor]) -> list[Tensor]:
    """Return each tensor concatenated over all ranks, after padding with zeros to equal length.

    tensors: each [count, ...], where count may differ between ranks. Collective.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return tensors
    longest = torch.tensor(len(tensors[0]), device=tensors[0].device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    together = []
    for tensor in tensors:
        padded = tensor.new_zeros(int(longest), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded)
        together.append(torch.cat(parts))
    return together


def supervised_tokens(order: RowOrder) -> int:
    """Return the number of supervised tokens in an order's store."""
    return int(np.sum(order.store.supervised, dtype=np.int64))


def digest_for_lists(
    cfg: TrainConfig, source: Path | None, progress: Callable[[str], None]
) -> str | None:
    """Return a digest of the files with a teacher's weights, independent of their folder.

    None if the run stores no lists of a teacher. Digests of unchanged files are kept in the cache
    of tokenised data. progress: shows a line of progress, called repeatedly.
    """
    if source is None or not has_stored_teacher(cfg):
        return None
    files = [str(file) for file in files_of(source)]
    tick = partial(progress, "teach  hashing the teacher's files")
    known = contents(files, cache_root(cfg), tick)
    each = [(Path(file).name, known[file].digest) for file in files]
    return hashlib.blake2b(json.dumps(each).encode(), digest_size=10).hexdigest()


def files_of(source: Path) -> list[Path]:
    """Return the files that determine a model's weights.

    For a checkpoint that is only its manifest, which has checksums of all its other files.
    """
    checkpoint = find_checkpoint(source)
    if checkpoint:
        return [checkpoint / MANIFEST]
    own = [source / "config.json", *sorted(source.glob("*.safetensors"))]
    if is_adapter(source):
        base = base_of_adapter(source)
        folder = downloaded(base) if is_hub_id(base) else Path(base)
        own = [*files_of(folder), *sorted(source.glob("adapter_*"))]
    return [file for file in own if file.is_file()]
