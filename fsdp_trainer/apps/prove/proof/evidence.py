"""Recordings of a run for the checks, each made when it is first needed."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fsdp_trainer.apps.prove.proof.narrowing import SmallRun
from fsdp_trainer.apps.prove.proof.recordings import STEPS
from fsdp_trainer.apps.prove.proof.runs import ProofRun
from fsdp_trainer.apps.prove.proof.trajectories import LIMITS, Difference, Trajectory
from fsdp_trainer.data.order.epoch_ends import EpochEnds
from fsdp_trainer.data.order.mixture import Mixture, OrderMaker
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.data.prepared import Prepared
from fsdp_trainer.data.prepared_data import build_data
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.stream.row_stream import StreamedRow
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.from_config.resolve import with_trained_head
from fsdp_trainer.models.hf.read_architecture import read_architecture

NUDGED = 2e-7
"""Share by which weights differ at the start, to see how much a training amplifies rounding."""


@dataclass
class Evidence:
    """The runs of a proof and what they read.

    words: of the command line. scratch: the runs' folder. say: shows progress.
    """

    small: SmallRun
    words: list[str]
    scratch: Path
    say: Callable[[str], None]

    def command(self, more: str) -> str:
        keys = {word.partition("=")[0] for word in more.split()}
        own = [word for word in self.words if word.lstrip("+").partition("=")[0] not in keys]
        return f"{shlex.join(['fsdp-trainer', 'prove', *own])} {more}".strip()

    # --- runs

    @cached_property
    def plain(self) -> ProofRun:
        """The run in one process: nothing sharded, recomputed or kept elsewhere."""
        self.say("trains in one plain process")
        return ProofRun(self.small.plain, self.scratch).recorded()

    @cached_property
    def planned(self) -> ProofRun:
        self.say(f"trains in the planned layout, on {self.small.ranks} ranks")
        return ProofRun(self.small.planned, self.scratch).recorded()

    @cached_property
    def resumed(self) -> ProofRun:
        self.say("resumes on as many ranks")
        return self.planned.named("resumed").resumed_from(self.planned)

    @cached_property
    def resumed_elsewhere(self) -> ProofRun:
        self.say("resumes on one rank")
        return self.plain.named("resumed_elsewhere").resumed_from(self.planned)

    def rounding(self, kind: str, difference: Difference) -> float:
        """Return how much rounding at the start changes a kind of LIMITS; 0 if within its limit."""
        return self._nudged[kind].value if difference.value > LIMITS[kind] else 0.0

    @cached_property
    def _nudged(self) -> dict[str, Difference]:
        self.say("trains from weights that differ by rounding")
        run = self.plain.named("nudged").recorded(NUDGED)
        return Trajectory.of(run).differences(Trajectory.of(self.plain))

    # --- the model and the data

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture of the small model."""
        config = read_architecture(self.plain.checkpoints[-1] / "hf")
        return with_trained_head(config, self.small.plain.objective.mtp)

    @cached_property
    def data(self) -> tuple[TextTokenizer, Template, Prepared]:
        silent = Reporter(lambda line: None, lambda line: None)
        return build_data(self.small.plain, silent)

    @cached_property
    def order(self) -> Mixture | None:
        """The order of the rows; None for a stream and for prompts."""
        cfg, prepared = self.small.plain, self.data[2]
        if prepared.streamed or cfg.objective.method.samples:
            return None
        return OrderMaker.of(cfg, packs=self.config.packs).training(cfg.data, prepared)

    def indices_of_step(self, step: int) -> range:
        """Return the indices of the rows of a step, counted from 1."""
        assert self.order
        batch = self.small.plain.batch
        first, stop = (step - 1) * batch.rows, step * batch.rows
        if not batch.across_epochs:
            ends = EpochEnds(0, self.order.rows_per_epoch)
            first, stop = (ends.row_after(count, batch.rows, 0) for count in (step - 1, step))
        return range(first, stop)

    @cached_property
    def streamed_rows(self) -> list[StreamedRow]:
        """The rows of all steps of a stream, in order; none of stored data."""
        streamed = self.data[2].streamed
        return [*streamed.first_rows(STEPS * streamed.streams)] if streamed else []

    def rows_of_step(self, step: int) -> Rows:
        """Return the rows of a step, counted from 1."""
        if streamed := self.data[2].streamed:
            count = streamed.streams
            return streamed.padded(self.streamed_rows[(step - 1) * count : step * count])
        assert self.order
        return self.order.read_rows(np.array(self.indices_of_step(step)))
