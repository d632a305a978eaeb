"""Stored log-probabilities of a reference model that is not the base of adapters.

They are computed once, before training, by the model in training with the reference's weights, in
the same rows and micro-batches as in training. They are stored next to the token store, one number
per sample. This way no second model is in memory. The file name is a hash of the weights, the
number formats and the layout of the rows, which all affect the last bits.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.checkpoint.frozen_weights import digests
from fsdp_trainer.checkpoint.store import read_progress
from fsdp_trainer.config.rules.rules_objective import stores_reference
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.order.mixture import Component, Mixture
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.methods.preferences import sums_by_document
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.parallel.convert import precompute_float8_scales
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.batches import Batches
from fsdp_trainer.training.weights import fill

FOLDER = "reference"
"""Name of the folder next to a store's columns, and of the key in a checkpoint."""


@dataclass
class ReferencePass:
    """Computation of a reference's log-probabilities for a run's stores.

    orders: each with its number of rows per step. assembler: options of Batches. init_from: see
    `fill`.
    """

    cfg: TrainConfig
    model: Decoder
    init_from: Path | None
    orders: list[tuple[RowOrder, int]]
    assembler: dict[str, Any]
    dims: Dims
    observer: Observer

    def prepare(self, checkpoint: Path | None) -> str | None:
        """Attach the reference's log-probabilities to every order; return its weights' digest.

        Returns None if the objective has no stored reference. checkpoint: the one that the run
        resumes from, None for a new run. The model may be left with the weights of the reference.
        Collective.
        """
        choice = self.cfg.objective
        if not stores_reference(self.cfg):
            return None
        known = read_progress(checkpoint).get(FOLDER) if checkpoint else None
        if known and self._are_stored(known):
            return known
        self._fill()
        digest = digest_of_weights(self.model)
        if known and digest != known:
            text = (
                f"the weights of the reference are not those that {checkpoint} was trained with."
                "\nGive  model.init_from  and  objective.reference  as they were"
            )
            what = f"objective.reference={choice.reference}"
            raise UserError("the reference is another one", [Problem(what, text)])
        if not self._are_stored(digest):
            self._compute(digest)
        return digest

    def _fill(self) -> None:
        """Load the reference's weights into the model. Collective."""
        cfg, source = self.cfg, self.init_from
        if cfg.objective.reference != "start":
            cfg = replace(cfg, adapter=replace(cfg.adapter, init_from=None))
            source = Path(cfg.objective.reference)
        fill(self.model, cfg, source)
        if cfg.sharding.tensor > 1:
            precompute_float8_scales(self.model, cfg.precision)

    def _are_stored(self, digest: str) -> bool:
        """Attach stored numbers to the orders if every rank finds all of them. Collective.

        Returns False if some are missing.
        """
        stored = [read_sums(self._file(order, digest), order) for order, _ in self.orders]
        if not all(gather(all(sums is not None for sums in stored))):
            return False
        for (order, _), sums in zip(self.orders, stored, strict=True):
            order.reference = sums
        return True

    def _compute(self, digest: str) -> None:
        """Compute and store all numbers, and attach them to the orders. Collective."""
        count = sum(len(order.store) for order, _ in self.orders)
        self.observer.say(
            f"refer  the reference reads {count:,} answers once, before the first step"
        )
        for order, rows in self.orders:
            order.reference = self._sums(order, rows)
            if dist.get_rank() == 0 or read_sums(self._file(order, digest), order) is None:
                write_sums(self._file(order, digest), order.reference)

    @torch.no_grad()
    def _sums(self, order: RowOrder, rows: int) -> np.ndarray:
        """Return Σ log-probability of each sample's targets, [samples] float64. Collective."""
        batches = Batches(Mixture([Component("", order)]), **self.assembler)
        sums = torch.zeros(len(order.store), dtype=torch.float64, device=batches.device)
        try:
            for samples, batch in self._micro_batches(batches, order, rows):
                phases.enter("start")  # a heartbeat
                scores = self.model(batch).scores
                sums[samples] = sums_by_document(scores.log_probability, batch)
        finally:
            reshard(self.model)
        self.dims.sum_over_tokens(sums)
        return sums.cpu().numpy()

    def _micro_batches(
        self, batches: Batches, order: RowOrder, rows: int
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yield this rank's micro-batches of an epoch, each after the indices of its samples."""
        for plan in batches.plans(rows, order.rows_per_epoch):
            for numbers in batches.assign_rows_to_ranks(plan)[:, batches.rank]:
                own = numbers[numbers >= 0]
                samples = [sample for row in own.tolist() for sample, _, _ in order.row(row)]
                places = torch.tensor(samples, dtype=torch.int64, device=batches.device)
                yield places, batches.assemble(order.read_rows(own))

    def _file(self, order: RowOrder, digest: str) -> Path:
        """Return the file for an order's numbers; its name is a hash of all that they depend on."""
        options = {
            name: self.assembler[name] for name in ("micro_rows", "attention", "pad_to_multiple")
        }
        decisive = [
            digest,
            order.store.fingerprint,
            [order.packing, order.seq_len, order.shuffle, self.cfg.run.seed],
            asdict(self.cfg.precision),
            [options, self.cfg.compile.enabled, str(self.assembler["device"])],
        ]
        name = hashlib.blake2b(json.dumps(decisive).encode(), digest_size=10).hexdigest()
        return order.store.folder / FOLDER / f"{name}.npy"


def digest_of_weights(model: Decoder) -> str:
    """Return a digest of all weights, the same for every sharding. Collective."""
    names = sorted(dict(model.whole.named_parameters()))
    each = digests(model, names, "float32")
    return hashlib.blake2b(json.dumps(each).encode(), digest_size=10).hexdigest()


def read_sums(file: Path, order: RowOrder) -> np.ndarray | None:
    """Return the stored numbers for an order's samples; None if the file is missing or broken."""
    try:
        sums = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return sums if sums.shape == (len(order.store),) else None


def write_sums(file: Path, sums: np.ndarray) -> None:
    """Write a file atomically. Errors are ignored: the run then only has the numbers in memory."""
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        descriptor, aside = tempfile.mkstemp(prefix=".", dir=file.parent)
        with open(descriptor, "wb") as opened:
            np.save(opened, sums)
            opened.flush()
            os.fsync(opened.fileno())
        os.chmod(aside, 0o644)  # mkstemp makes a file that only its owner can read
        os.replace(aside, file)
