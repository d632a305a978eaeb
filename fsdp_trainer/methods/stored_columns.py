"""Columns of a run's rows that a second model computes once, before the first step.

A reference gives Σ log-probability of each document, a teacher its top-k tokens for each supervised
token (stored_teacher.py). The values are stored next to the token store, under a hash of all that
they depend on, and no second model is in memory during training.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from fsdp_trainer.base import phases
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.base.recorded import as_written
from fsdp_trainer.checkpoint.store import read_progress
from fsdp_trainer.config.paths import checkpoint_configuration
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.order.mixture import Component, Mixture
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.store.stored_values import REFERENCE, SampleColumns, read_sums, write_sums
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.from_config.setup import WeightSource
from fsdp_trainer.parallel.convert import precompute_float8_scales
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.batches import Batches
from fsdp_trainer.training.data_source import Order
from fsdp_trainer.training.documents.document_sums import sums_by_document
from fsdp_trainer.training.weights import digest_of_weights, fill


@dataclass(frozen=True)
class RunRows:
    """The rows that a run reads.

    validation: read as one step; None: there is none. per_step: number of rows of a training step.
    """

    training: Order
    validation: Mixture | None
    per_step: int

    @property
    def stored(self) -> list[tuple[RowOrder, int]]:
        orders: list[tuple[RowOrder, int]] = []
        if isinstance(self.training, Mixture):
            orders += [(order, self.per_step) for order in self.training.orders]
        if self.validation is not None:
            orders += [(order, order.rows_per_epoch) for order in self.validation.orders]
        return orders

    def with_columns(self, columns: Iterable[SampleColumns]) -> "RunRows":
        """Return the same rows with these columns, one for each order in `stored`."""
        training, validation, rest = self.training, self.validation, iter(columns)
        if isinstance(training, Mixture):
            training = training.with_columns(rest)
        return replace(
            self, training=training, validation=validation and validation.with_columns(rest)
        )


@dataclass
class StoredColumn(ABC):
    """A column of a run's rows with what a second model says about them.

    rows: without the column. say: prints a line. digest, in all methods: of the second model.
    """

    cfg: TrainConfig
    rows: RunRows
    dims: Dims
    say: Callable[[str], None]

    name: ClassVar[str]
    """Folder of the values next to a store's columns, and key of the digest in a checkpoint."""
    suffix: ClassVar[str] = ""
    """End of the name of an order's file."""

    def prepare(self, digest: str) -> RunRows:
        """Return the rows with the column, which is computed if it is not stored.

        Collective. Raises UserError.
        """
        columns = self.stored(digest)
        return self.rows.with_columns(self.compute(digest) if columns is None else columns)

    def stored(self, digest: str) -> list[SampleColumns] | None:
        """Return the stored values of all orders; None unless every rank finds all. Collective."""
        orders = [order for order, _ in self.rows.stored]
        values = [self.read(self.place(order, digest), order.store) for order in orders]
        columns = [one for one in values if one is not None]
        return columns if all(gather(len(columns) == len(orders))) else None

    def place(self, order: RowOrder, digest: str) -> Path:
        text = json.dumps(self.decisive(order, digest))
        name = hashlib.blake2b(text.encode(), digest_size=10).hexdigest()
        return order.store.folder / self.name / f"{name}{self.suffix}"

    @staticmethod
    @abstractmethod
    def read(place: Path, store: TokenStore) -> SampleColumns | None:
        """Return the values of a store's samples; None if they are missing or damaged."""

    @abstractmethod
    def decisive(self, order: RowOrder, digest: str) -> list[Any]:
        """Return all that the values of an order depend on, as JSON."""

    @abstractmethod
    def compute(self, digest: str) -> list[SampleColumns]:
        """Compute, store and return the values of all orders. Collective. Raises UserError."""


@dataclass
class ReferenceColumn(StoredColumn):
    """Σ log-probability of each document under a reference that is not the base of adapters.

    It is computed by the model in training with the reference's weights, in the same rows and
    micro-batches as in training, since all of these affect the last bits.

    batches: makes this rank's micro-batches of training. start_formats: see Method.
    """

    model: Decoder
    batches: Callable[[Mixture], Batches]
    start_formats: dict[str, str] | None = None

    name, suffix = REFERENCE, ".npy"
    read = staticmethod(read_sums)

    def of_run(self, start: WeightSource, checkpoint: Path | None) -> tuple[RunRows, str]:
        """Return the rows with the column, and the digest of the reference's weights.

        start: the run's first weights. checkpoint: the one that the run resumes from, None for a
        new run. A reference in another folder than then is read and compared. The model may be
        left with the weights of the reference. Collective. Raises UserError.
        """
        second = self.cfg.second_model
        assert second
        known = read_progress(checkpoint).get(self.name) if checkpoint else None
        stored = self.stored(known) if known and self._is_named_in(checkpoint) else None
        if known and stored is not None:
            return self.rows.with_columns(stored), known
        formats = self._fill(
            start if second.is_start else WeightSource(start.seed, Path(second.source))
        )
        self.start_formats = formats if second.is_start else None
        digest = digest_of_weights(self.model)
        if known and digest != known:
            text = (
                f"the weights of the reference are not those that {checkpoint} was trained with."
                "\nGive  model.init_from  and  objective.reference  as they were"
            )
            raise UserError("the reference is another one", second.setting, text)
        return self.prepare(digest), digest

    def _is_named_in(self, checkpoint: Path | None) -> bool:
        second = self.cfg.second_model
        if checkpoint is None or second is None:
            return False
        stored = checkpoint_configuration(checkpoint)
        if second.is_start:
            name, now = stored["model"].get("init_from"), self.cfg.model.init_from
        else:
            name, now = stored["objective"].get("reference"), second.source
        return name in (now, as_written(now))

    def _fill(self, source: WeightSource) -> dict[str, str]:
        """Load the reference's weights into the model; return their formats. Collective."""
        formats = fill(self.model, source, self.cfg.precision.param_dtype)
        if self.cfg.sharding.tensor > 1:
            precompute_float8_scales(self.model, self.cfg.precision)
        return formats

    def decisive(self, order: RowOrder, digest: str) -> list[Any]:
        batches = self.batches(alone(order))
        options = {
            "micro_rows": batches.options.micro_rows,
            "attention": batches.options.attention,
            "pad_to_multiple": batches.options.pad_to_multiple,
        }
        return [
            digest,
            order.store.fingerprint,
            [order.packing, order.seq_len, order.shuffle, self.cfg.run.seed],
            asdict(self.cfg.precision),
            [options, self.cfg.compile.enabled, str(batches.options.device)],
        ]

    def compute(self, digest: str) -> list[SampleColumns]:
        count = sum(len(order.store) for order, _ in self.rows.stored)
        self.say(
            f"refer  the reference reads {counted(count, 'answer')} once, before the first step"
        )
        columns = []
        for order, rows in self.rows.stored:
            place, sums = self.place(order, digest), self._sums(order, rows)
            if dist.get_rank() == 0 or self.read(place, order.store) is None:
                write_sums(place, sums)
            columns.append(SampleColumns(reference=sums))
        return columns

    @torch.no_grad()
    def _sums(self, order: RowOrder, rows: int) -> np.ndarray:
        """Return Σ log-probability of each sample's targets, [samples] float64. Collective."""
        batches = self.batches(alone(order))
        sums = torch.zeros(len(order.store), dtype=torch.float64, device=batches.options.device)
        try:
            for numbers, batch in read_all(batches, rows):
                samples = [sample for row in numbers.tolist() for sample, _, _ in order.row(row)]
                places = torch.tensor(samples, dtype=torch.int64, device=batches.options.device)
                scores = self.model(batch).scores
                sums[places] = sums_by_document(scores.log_probability, batch)
        finally:
            reshard(self.model)
        self.dims.sum_over_tokens(sums)
        return sums.cpu().numpy()


def alone(order: RowOrder) -> Mixture:
    return Mixture([Component("", order)])


def read_all(batches: Batches, rows: int) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """Yield this rank's micro-batches of an epoch, each after the indices of its rows.

    rows: number of rows of a step.
    """
    order = batches.order
    for plan in batches.plans(rows, order.rows_per_epoch):
        for numbers in batches.assign_rows_to_ranks(plan)[:, batches.options.rank]:
            phases.enter("start")  # a heartbeat
            own = numbers[numbers >= 0]
            yield own, batches.assemble(order.read_rows(own))
