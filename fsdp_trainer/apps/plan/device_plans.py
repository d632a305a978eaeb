"""The result of `plan` for one kind of device: a plan for each world size, with suggestions."""

from dataclasses import dataclass, replace

from fsdp_trainer.apps.plan.stored_answers import Store
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.fsdp_units import KnownModels
from fsdp_trainer.planning.plan.plan import RunPlan
from fsdp_trainer.planning.plan.plan_inputs import target, world_sizes
from fsdp_trainer.planning.plan.suggest import Suggestion, least_memory, suggest

NEAR = 0.005
"""Share of the bytes, and of the seconds, that the bound may miss."""
LIKELY = (0.2, 0.65)
"""Range of the share of a GPU's peak that published trainings of language models reach."""


@dataclass(frozen=True)
class DevicePlans:
    """The plans for one kind of device, smallest world first. Every list has an entry per world.

    uneven: the plan with plan.expert_load; None if experts are not divided among ranks;
    suggestions: changes that make the run fit or, if it fits, faster; least_memory: the changes
    with which a rank needs least memory; None if the run fits; assumed: a sentence for each
    assumption.
    """

    plans: list[RunPlan]
    uneven: list[RunPlan | None]
    suggestions: list[list[Suggestion]]
    least_memory: list[Suggestion | None]
    assumed: list[str]

    @property
    def chosen(self) -> int:
        """Index of the smallest world that fits, else of the largest."""
        return next((i for i, plan in enumerate(self.plans) if plan.fits), len(self.plans) - 1)


def plans_for_device(
    cfg: PlanConfig, config: ModelConfig, assumed: list[str], known: KnownModels, store: Store
) -> DevicePlans:
    """Return the answer for the device that `cfg` names. Raises UserError if it names none.

    known: models of earlier plans; store: of rehearsals.
    """
    runs = [Candidate(cfg, config, world, target(cfg, world), known) for world in world_sizes(cfg)]
    plans, reasons = rehearsed_plans(cfg, runs, store)
    runs = [with_correction(run, plan) for run, plan in zip(runs, plans, strict=True)]
    remarks = sorted({*reasons, *(run.device.remark for run in runs)} - {""})
    if cfg.plan.efficiency and not LIKELY[0] <= cfg.plan.efficiency <= LIKELY[1]:
        remarks.append(
            f"plan.efficiency={cfg.plan.efficiency:g}, though published trainings reach "
            f"{LIKELY[0]} to {LIKELY[1]} of the peak"
        )
    return DevicePlans(
        plans=plans,
        uneven=[uneven(cfg, run) for run in runs],
        suggestions=[suggest(run, plan) for run, plan in zip(runs, plans, strict=True)],
        least_memory=[
            None if plan.fits else least_memory(run, plan)
            for run, plan in zip(runs, plans, strict=True)
        ],
        assumed=assumed + remarks,
    )


def rehearsed_plans(
    cfg: PlanConfig, runs: list[Candidate], store: Store
) -> tuple[list[RunPlan], set[str]]:
    """Return the plans of some runs, and why some are not those of a rehearsal."""
    plans = [run.plan() for run in runs]
    if not cfg.plan.rehearse:
        return plans, set()
    # imports what training needs
    from fsdp_trainer.apps.plan.rehearsed_plan import rehearsed_plan

    pairs = [rehearsed_plan(run, plan, store) for run, plan in zip(runs, plans, strict=True)]
    return [plan for plan, _ in pairs], {reason for _, reason in pairs}


def with_correction(run: Candidate, plan: RunPlan) -> Candidate:
    """Return a run whose changes are planned with what a rehearsal shows that the bound misses."""
    bound = run.plan()
    correction = plan.memory.tensors / bound.memory.tensors, plan.seconds / bound.seconds
    is_near = all(abs(each - 1) < NEAR for each in correction)
    return run if is_near else replace(run, correction=correction)


def uneven(cfg: PlanConfig, run: Candidate) -> RunPlan | None:
    """Return the plan with plan.expert_load; None if experts are not divided among ranks."""
    if cfg.sharding.expert == 1 or cfg.plan.expert_load == 1:
        return None
    return run.plan(cfg.plan.expert_load)
