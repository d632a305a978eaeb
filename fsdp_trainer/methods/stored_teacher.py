"""A teacher whose top-k tokens are stored on disk, so that it is not in memory during training."""

import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base.distributed import gather, run_on_all_ranks
from fsdp_trainer.config.context_methods import context_method
from fsdp_trainer.config.methods import ObjectiveChoice, SecondModel
from fsdp_trainer.config.paths import (
    MANIFEST,
    base_of_adapter,
    downloaded,
    find_checkpoint,
    is_adapter,
    is_hub_id,
)
from fsdp_trainer.data.order.mixture import Mixture
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.store.fingerprint import contents
from fsdp_trainer.data.store.stored_values import (
    TEACHER,
    TOP_K,
    SampleColumns,
    TopKWriter,
    bytes_per_token,
    read_top_k,
    top_k_types,
)
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.world import World
from fsdp_trainer.methods.stored_columns import RunRows, StoredColumn, alone, read_all
from fsdp_trainer.methods.teacher import Teacher, require_fitting, shard_teacher, with_second_model
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.models.soft_targets import ListedTargets, TeacherLogits, TopTokens, likeliest
from fsdp_trainer.parallel.context import context_ranks
from fsdp_trainer.parallel.materialize import allocate
from fsdp_trainer.training.attention_setup import choose_attention
from fsdp_trainer.training.batches import Batches, BatchOptions, StepPlan
from fsdp_trainer.training.weights import fill

VERSION = 1
"""Version of the stored format, to increase with every change of it."""
NUMBER = "number"
"""Column of rows: the number of each supervised token in the store, from 1; 0: not supervised."""
MIB = 2**20


@dataclass
class ListedTeacher:
    """A teacher whose stored top-k tokens are read as columns of the rows.

    vocabulary: number of tokens that both models know.
    """

    choice: ObjectiveChoice
    vocabulary: int

    @contextmanager
    def reading(self, batch: MicroBatch) -> Iterator[MicroBatch]:
        choice = self.choice
        top = TopTokens(*(self._column(batch, name) for name in TOP_K))
        soft = ListedTargets(top, self.vocabulary, choice.temperature, choice.divergence)
        yield replace(batch, soft=soft)

    def _column(self, batch: MicroBatch, name: str) -> Tensor:
        """Return a column at the targets.

        For a batch without rows the column is zeros, since its targets have no weight.
        """
        if name in batch.columns:
            return batch.columns[name]
        _, shape = top_k_types(self.choice.top_k or 0, self.vocabulary)[name]
        return torch.zeros(len(batch.targets), *shape, device=batch.targets.device)


@dataclass
class TeacherColumn(StoredColumn):
    """The top-k tokens of a teacher at each supervised token.

    They depend on the teacher's files, the number format, the temperature, k and the store, but not
    on packing, order or ranks.

    source: folder of the teacher. student: architecture of the model in training. progress: shows a
    temporary line. check: called before each micro-batch, on all ranks together; may raise.
    """

    source: Path
    student: ModelConfig
    world: World
    progress: Callable[[str], None]
    check: Callable[[], None] = lambda: None

    name = TEACHER
    read = staticmethod(read_top_k)

    @cached_property
    def models(self) -> tuple[ModelConfig, ModelConfig]:
        return with_second_model(self.student, self.source, self.cfg.sharding.tensor)

    @property
    def vocabulary(self) -> int:
        return min(config.vocab_size for config in self.models)

    @property
    def count(self) -> int:
        return self.cfg.objective.top_k or 0

    def prepare(self, digest: str) -> RunRows:
        if self.count > self.vocabulary:
            reason = f"is more than the {self.vocabulary:,} tokens of the vocabulary.\nUse  "
            fix = f"objective.top_k={min(64, self.vocabulary)}"
            raise UserError(
                "so many tokens cannot be listed", f"objective.top_k={self.count}", reason + fix
            )
        return super().prepare(digest)

    def decisive(self, order: RowOrder, digest: str) -> list[Any]:
        choice, store = self.cfg.objective, order.store
        # texts longer than a row are cut, so the lists then depend on seq_len
        is_cut = int(np.max(store.lengths)) > order.seq_len
        length = order.seq_len if is_cut else None
        return [
            [VERSION, digest, self.cfg.precision.param_dtype, store.fingerprint],
            [choice.top_k, choice.temperature, self.vocabulary, length],
        ]

    def compute(self, digest: str) -> list[SampleColumns]:
        student, config = self.models
        require_fitting(self.cfg, student, config)
        tokens = sum(order.store.supervised_tokens for order, _ in self.rows.stored)
        size = f"{tokens * bytes_per_token(self.count, self.vocabulary) / MIB:,.1f} MiB"
        self.say(
            f"teach  the teacher reads {tokens:,} supervised tokens once, before the first step: "
            f"the {self.count} likeliest of each take {size} of disk"
        )
        teacher = shard_teacher(self.cfg, self.source, config, student, self.dims, compiled=False)
        device = self.world.device
        kept_on = torch.device("cpu") if self.cfg.sharding.cpu_offload else device
        allocate(teacher.model, kept_on, device)
        fill(teacher.model, teacher.source, self.cfg.precision.param_dtype)
        try:
            for order, _ in self.rows.stored:
                self._store(order, digest, teacher)
        finally:
            del teacher
            gc.collect()  # modules and their hooks are in reference cycles
            if device.type == "cuda":
                torch.cuda.empty_cache()
        columns = self.stored(digest)
        if columns is None:
            folder = self.place(self.rows.stored[0][0], digest).parent
            reason = "what was written there is not there now: is the disk shared, and whole?"
            raise UserError("the teacher's lists cannot be kept", str(folder), reason)
        return columns

    def _store(self, order: RowOrder, digest: str, teacher: Teacher) -> None:
        """Compute the values of an order; write them where a node lacks them. Collective."""
        place, tokens = self.place(order, digest), order.store.supervised_tokens

        def open_writer() -> TopKWriter | None:
            if self.read(place, order.store) is not None or not tokens:
                return None
            return TopKWriter(place, tokens, self.count, self.vocabulary)

        writer = self._on_nodes(open_writer)
        try:
            for numbers, top in self._read(order, teacher):
                if writer:
                    write_top_k(writer, numbers, top)
            about = {
                "teacher": self.cfg.objective.teacher,
                "digest": digest,
                "param_dtype": self.cfg.precision.param_dtype,
                "top_k": self.count,
                "temperature": self.cfg.objective.temperature,
                "vocabulary": self.vocabulary,
                "tokens": tokens,
            }
            run_on_all_ranks(
                "keep the teacher's lists", lambda: writer.commit(about) if writer else None
            )
        finally:
            if writer:
                writer.close()

    def _on_nodes(self, work: Callable[[], TopKWriter | None]) -> TopKWriter | None:
        """Run `work` on rank 0, then on the first rank of each node with its own disk. Collective.

        Returns the result of `work`, None on other ranks.
        """
        writer: TopKWriter | None = None

        def on_rank(condition: bool) -> None:
            nonlocal writer
            writer = work() if condition else writer

        what = "store the teacher's lists next to the data (data.cache)"
        first = dist.get_rank() == 0
        run_on_all_ranks(what, lambda: on_rank(first))
        aside = gather(str(writer.aside) if writer else "")[0]
        # a disk that this node shares with rank 0 needs only one copy
        sees = bool(aside) and Path(aside).exists()
        starts_node = self.world.local_rank == 0
        run_on_all_ranks(what, lambda: on_rank(starts_node and not first and not sees))
        return writer

    @torch.no_grad()
    def _read(self, order: RowOrder, teacher: Teacher) -> Iterator[tuple[Tensor, TopTokens]]:
        """Yield (numbers, top-k) of all ranks' micro-batches, on every rank. Collective.

        numbers: see NUMBER; 0 for padding.
        """
        numbered = SampleColumns(of_tokens=lambda numbers: {NUMBER: numbers + 1})
        batches = self._batches(alone(order.with_columns(numbered)))
        rows = order.rows_per_epoch
        count = batches.count(StepPlan(1, 0, rows))
        for done, (_, batch) in enumerate(read_all(batches, rows), 1):
            self.check()
            with teacher.reading(batch) as read:
                assert isinstance(read.soft, TeacherLogits)
                top = likeliest(read.soft, self.count, batch.targets)
            numbers = batch.columns.get(NUMBER, torch.zeros_like(batch.targets))
            numbers, *parts = gather_padded([numbers, *top])
            yield numbers, TopTokens(*parts)
            self.progress(f"teach  {done / count:.0%} of {rows:,} rows")

    def _batches(self, mixture: Mixture) -> Batches:
        cfg, dims, (_, config) = self.cfg, self.dims, self.models
        part = config.on_tensor_rank(cfg.sharding.tensor)
        method = context_method(cfg.sharding, cfg.batch.seq_len, part).method
        attention = choose_attention(cfg, [config], self.world.device, False, method)
        return Batches(
            mixture,
            BatchOptions(
                micro_rows=cfg.batch.micro_rows,
                rank=dims.batch_rank,
                ranks=dims.batch_ranks,
                device=self.world.device,
                pad_to_multiple=cfg.data.pad_to_multiple,
                same_rows=dims.same_rows,
                context=context_ranks(dims, method, config.windows),
                attention=attention.layout,
            ),
        )


def write_top_k(writer: TopKWriter, numbers: Tensor, top: TopTokens) -> None:
    """Write each token's values at the index numbers - 1; skip padding, whose number is 0."""
    is_supervised = numbers > 0
    columns = dict(zip(TOP_K, top, strict=True))
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


def digest_of_teacher(
    second: SecondModel | None, source: Path | None, cache: Path, progress: Callable[[str], None]
) -> str | None:
    """Return a digest of the files with a teacher's weights, independent of their folder.

    None if the run stores no lists of a teacher. source: its folder. Digests of unchanged files are
    kept in `cache`. progress: shows a line, called repeatedly.
    """
    if source is None or second is None or not second.has_lists:
        return None
    files = [str(file) for file in files_of(source)]
    tick = partial(progress, "teach  hashing the teacher's files")
    known = contents(files, cache, tick)
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
