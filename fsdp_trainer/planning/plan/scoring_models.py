"""Memory and time that the reward models of objective=grpo add to a plan.

Each rank has every reward model as a whole on its device, and scores its own answers, a packed row
of `ROW_TOKENS` at a time, between their generation and the step.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fsdp_trainer.config.devices import Device
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.config.schema import (
    ActivationCheckpoint,
    Batch,
    Model,
    Precision,
    Sharding,
    TrainConfig,
)
from fsdp_trainer.planning.plan.block_memory import trace_blocks
from fsdp_trainer.planning.plan.compute import compute_seconds
from fsdp_trainer.planning.plan.fsdp_units import KnownModels
from fsdp_trainer.planning.plan.planned_model import PlannedModel
from fsdp_trainer.planning.plan.rollout_cost import answer_tokens, answers_of_rank
from fsdp_trainer.planning.plan.second_model import architecture_of
from fsdp_trainer.rl.rewards.model import ROW_TOKENS, ModelReward
from fsdp_trainer.rl.rewards.table import make_rewards


class ScoringModel(NamedTuple):
    """A reward model on one rank.

    title: of the reward; model: on a rank alone, with a packed row of answers as its batch; rows:
    of them in a step.
    """

    title: str
    model: PlannedModel
    rows: int

    @property
    def weights(self) -> float:
        return float(self.model.config.parameters() * self.model.number)

    def activations(self, device: str) -> float:
        """Return the bytes of the largest moment of a row's forward, in addition to the weights."""
        blocks, common = trace_blocks(self.model, device)
        row = self.model.layout.tokens * self.model.config.hidden_size * self.model.number
        # without gradients only the loop over the blocks keeps a block's input
        return common + row + max(block.forward for block in blocks)

    def seconds(self, device: Device, best: bool) -> float:
        """Return the seconds to score a step's answers. best: see `times`."""
        return self.rows * compute_seconds(self.model, device, best).forward


def scoring_models(cfg: TrainConfig, world: int, known: KnownModels) -> tuple[ScoringModel, ...]:
    there = [reward for reward, is_there in _model_rewards(cfg.objective) if is_there]
    if not there:
        return ()
    each = answer_tokens(cfg.objective, cfg.batch.seq_len)
    answers = cfg.batch.rows * cfg.objective.samples
    own = answers_of_rank(answers, cfg.sharding.tensor, cfg.launch.rollout_ranks or world)
    width = max(each, min(ROW_TOKENS, own * each))
    rows = math.ceil(own / (width // each))
    return tuple(
        ScoringModel(reward.title, _on_one_rank(reward, width, known), rows) for reward in there
    )


def uncounted(choice: ObjectiveChoice) -> list[str]:
    return [
        f"the reward model {reward.source} is not on this disk: its memory and time are not counted"
        for reward, is_there in _model_rewards(choice)
        if not is_there
    ]


def _model_rewards(choice: ObjectiveChoice) -> Iterator[tuple[ModelReward, bool]]:
    if not choice.method.samples:
        return
    for reward in make_rewards(choice.rewards):
        if isinstance(reward, ModelReward):
            folder = model_folder(str(reward.source))
            yield reward, (folder / "config.json").is_file()


def _on_one_rank(reward: ModelReward, width: int, known: KnownModels) -> PlannedModel:
    source = str(reward.source)
    own = replace(
        TrainConfig(),
        model=Model(init_from=source),
        batch=Batch(seq_len=width, rows=1, micro_rows=1),
        sharding=Sharding(),
        precision=Precision(param_dtype=reward.dtype, master_dtype=reward.dtype),
        activation_checkpoint=ActivationCheckpoint(mode="full"),  # keeps only inputs of blocks
    )
    return PlannedModel.of(own, architecture_of(source), 1, known)
