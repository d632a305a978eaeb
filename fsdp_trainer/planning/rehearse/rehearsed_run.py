"""The run that is rehearsed: a configuration without what fake tensors cannot do."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.methods.teacher import with_second_model
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.planning.plan.block_memory import planned_attention
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.planned_model import PlannedModel
from fsdp_trainer.planning.plan.rollout_cost import rows_of_answers
from fsdp_trainer.planning.plan.second_model import architecture_of
from fsdp_trainer.planning.rehearse.fused_graphs import KeptGraphs

LEFT_OUT: dict[str, tuple[Any, str]] = {
    "sharding.messages": ("ordinary", "messages are ordinary tensors"),
    "objective.rewards": ([], "answers come with their rewards"),
    "objective.server": (None, "answers come without a server"),
}
"""Keys that a rehearsal sets to other values, and what that means."""


@dataclass(frozen=True)
class Rehearsed:
    """A run as it is rehearsed.

    cfg: its configuration, without what fake tensors cannot do; config: the trained model's
    architecture; world: number of ranks; device: cuda or cpu; attention: a key of LAYOUTS;
    second: the architecture of a second model, None if there is none or if it is that of the
    trained model; rows: those of a micro-batch; micro_batches: of the whole step; tensors: cpu or
    cuda, where the tensors without storage lie; graphs: of compiled blocks.
    """

    cfg: TrainConfig
    config: ModelConfig
    world: int
    device: str
    attention: str
    second: ModelConfig | None
    rows: Rows
    micro_batches: int
    tensors: str = "cpu"
    graphs: KeptGraphs = field(default_factory=KeptGraphs)

    @property
    def layout(self) -> Layout:
        return Layout(self.cfg.sharding, self.world, self.cfg.batch)

    @property
    def states_on_host(self) -> bool:
        return self.cfg.sharding.cpu_offload or self.cfg.optim.offload != "none"

    def expert_rows(self, length: int) -> int:
        """Return how many rows a rank sends to the experts of a block in a micro-batch.

        length: tokens of a row.
        """
        if EXPERTS not in self.config.feed_forwards:
            return 0
        sharding, rows = self.cfg.sharding, self.cfg.batch.micro_rows
        tokens = rows * length // sharding.context // sharding.tensor
        return tokens * self.config.num_experts_per_tok

    def with_micro_batches(self, count: int) -> "Rehearsed":
        rows = count * self.cfg.batch.micro_rows * self.layout.batch_ranks
        return replace(self, cfg=replace(self.cfg, batch=replace(self.cfg.batch, rows=rows)))


@contextmanager
def folder_of_second(config: ModelConfig | None) -> Iterator[Path | None]:
    if config is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_hf("bfloat16")))
        yield Path(folder)


def without_left_out(run: Candidate) -> tuple[Candidate, list[str]]:
    """Return a run without what a rehearsal leaves out, and a sentence for each such key."""
    left_out = []
    for key, (value, meaning) in LEFT_OUT.items():
        node, name = key.split(".")
        if getattr(getattr(run.cfg, node), name) not in (value, None):
            left_out.append(f"{key}: {meaning}")
            run = run.changed({key: value})
    if run.cfg.launch.groups > 1:
        left_out.append("launch.groups: there are no messages between groups of ranks")
    if run.config.reads_images:
        left_out.append("images: rows are of text, and plan.image_share is 0")
        run = run.changed({"plan.image_share": 0.0})
    compiled = run.cfg.compile.enabled
    if run.cfg.activation_checkpoint.mode == "budget" and not compiled:
        left_out.append("activation_checkpoint.mode=budget, which only compiled blocks have: full")
        run = run.changed({"activation_checkpoint.mode": "full"})
    return run, left_out


def rehearsed_run(run: Candidate, rows: Rows, graphs: KeptGraphs | None = None) -> Rehearsed:
    """Return what is rehearsed of a run that has nothing to be left out. Raises UserError.

    rows: those of a micro-batch; graphs: of a rehearsal of the same run.
    """
    cfg, device = rows_of_answers(run.cfg), "cuda" if run.on_gpu else "cpu"
    planned = PlannedModel.of(cfg, run.config, run.world, run.known)
    config = run.config
    ranks = cfg.sharding.tensor
    second = cfg.second_model
    other = None
    if second is not None and second.is_separate and not second.is_start:
        other = architecture_of(second.source)
    with folder_of_second(other) as folder:
        config = with_second_model(config, folder, ranks)[0] if folder else config
    return Rehearsed(
        cfg,
        config.with_equal_rows(ranks),
        run.world,
        device,
        planned_attention(planned, device),
        other,
        rows,
        planned.layout.micro_batches,
        graphs=graphs or KeptGraphs(),
    )
