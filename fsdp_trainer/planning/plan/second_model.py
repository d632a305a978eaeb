"""Memory and time that a teacher or a reference model adds to a plan.

These are its weights, its forward before that of the trained model, and its logits, or the disk
space of its stored lists.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from fsdp_trainer.config.methods import ObjectiveChoice, SecondModel
from fsdp_trainer.config.schema import ActivationCheckpoint, Adapter, Model, TrainConfig
from fsdp_trainer.data.store.stored_values import bytes_per_token
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.planning.plan.fsdp_units import KnownModels
from fsdp_trainer.planning.plan.plan_inputs import architecture
from fsdp_trainer.planning.plan.planned_model import PlannedModel

COMPARED_BYTES = 12
"""Bytes for each logit while both models are compared.

The student's log-probabilities, the teacher's, and a temporary tensor of the same size, in float32.
"""
SOFT_BYTES = 60
"""Memory traffic for each logit of this comparison, in about fifteen passes that are not fused."""


class PlannedTeacher(NamedTuple):
    """A teacher, or a reference model.

    compares: True if all its logits are compared with the student's, in which case they are
    computed chunk by chunk inside the student's head; is_stored: True if its lists are stored, so
    that it is not in memory.
    """

    model: PlannedModel
    name: str
    compares: bool
    is_stored: bool


class TeacherUnits(NamedTuple):
    """The units of a teacher on one rank.

    states: bytes of its shards; ends: bytes of the gathered units at the ends; gathered: of all
    units, 0 if one rank holds them; stays: True if they are gathered all the time.
    """

    states: float
    ends: float
    gathered: float
    stays: bool


def named_teacher(
    cfg: TrainConfig, student: ModelConfig, world: int, known: KnownModels
) -> PlannedTeacher | None:
    """Return the teacher or reference model of a run on `world` ranks; None if there is neither.

    Raises UserError as `architecture` does.
    """
    second = cfg.second_model
    if second is None or not second.is_separate:
        return None
    precision = replace(cfg.precision, master_dtype=cfg.precision.param_dtype, float8=None)
    own = replace(
        cfg,
        model=cfg.model
        if second.is_start
        else replace(Model(), attention=cfg.model.attention, init_from=second.source),
        adapter=Adapter(),
        train=replace(cfg.train, freeze=[]),
        precision=precision,
        activation_checkpoint=ActivationCheckpoint(mode="full"),  # keeps only inputs of blocks
        objective=replace(cfg.objective, name="sft", teacher=None),
    )
    config = student if second.is_start else architecture_of(second.source)
    model = PlannedModel.of(own, config, world, known)
    return PlannedTeacher(model, second.role, second.role == "teacher", second.has_lists)


@lru_cache
def architecture_of(named: str) -> ModelConfig:
    """Return the architecture of another model. Cached, because plans need it hundreds of times."""
    return architecture(replace(TrainConfig(), model=Model(init_from=named)))[0]


def assumed_of(second: SecondModel | None) -> list[str]:
    if second is None or not second.is_separate or second.is_start:
        return []
    return architecture(replace(TrainConfig(), model=Model(init_from=second.source)))[1]


def list_bytes(choice: ObjectiveChoice) -> int:
    """Return the bytes on disk of stored lists for each supervised token; 0 without lists."""
    if choice.method.second != "teacher" or choice.teacher is None or choice.top_k is None:
        return 0
    return bytes_per_token(choice.top_k, architecture_of(choice.teacher).vocab_size)


def teacher_units(model: PlannedModel) -> TeacherUnits:
    layout = model.layout
    units = model.own.units(model.sizes, layout.sharding, layout.fsdp_ranks)
    return TeacherUnits(
        states=units.all.own * model.number,
        ends=units.first.gathered + units.last.gathered * (not units.tied),
        gathered=units.all.gathered * (layout.fsdp_ranks > 1),
        stays=model.keeps_gathered,
    )
