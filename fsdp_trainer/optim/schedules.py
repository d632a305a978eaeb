"""Learning rate as a function of the step, without state to save."""

import math

from fsdp_trainer.config.parts.own_parts import usable_part
from fsdp_trainer.config.parts.schedules import SHAPES
from fsdp_trainer.config.schema import Batch, Optim, Schedule


def peak_learning_rate(optim: Optim, batch: Batch) -> float:
    """Return optim.lr, scaled with the tokens of a step according to optim.lr_scaling.

    Scaled by their square root, since Adam divides by the gradient's root mean square (Malladi et
    al. 2022), or linearly (Goyal et al. 2017).
    """
    if optim.lr_scaling is None or optim.lr_batch_tokens is None:
        return optim.lr
    ratio = batch.rows * batch.seq_len / optim.lr_batch_tokens
    return optim.lr * (math.sqrt(ratio) if optim.lr_scaling == "sqrt" else ratio)


def warmup_steps(cfg: Schedule, steps: int) -> int:
    """Return the number of warm-up steps in a run of `steps`, rounded up as transformers does."""
    return math.ceil(steps * cfg.warmup) if cfg.warmup else cfg.warmup_steps


def learning_rate(
    cfg: Schedule, peak: float, step: int, steps: int, warmup: int | None = None
) -> float:
    """Return the learning rate of optimizer step `step` (1 is the first) out of `steps`.

    warmup: number of warm-up steps; None: as many as `cfg` says.

    It rises linearly over the warm-up steps and reaches the peak at the last of them, with
    from_zero one step later, so that the first has a rate of 0. Then it
    follows the schedule's shape from the peak towards min_ratio × peak, which it would reach one
    step after the last, so that no step has a rate of 0. wsd: warm-up, stable, then a linear decay
    over the last decay_share of the steps after warm-up (Hu et al. 2024).
    """
    if warmup is None:
        warmup = warmup_steps(cfg, steps)
    if step <= warmup:
        return peak * (step - cfg.from_zero) / warmup
    progress = (step - 1 - warmup) / (steps - warmup)
    shape = SHAPES.get(cfg.name) or usable_part("schedule", cfg.name)
    return peak * (cfg.min_ratio + (1 - cfg.min_ratio) * shape(progress, cfg))


def steps_between(every: float | None, steps: int | None) -> int | None:
    """Return the steps of an interval; below 1 it is a share of all steps, rounded up.

    None: there is no interval, or nobody knows how many steps there are.
    """
    if every is None or every >= 1:
        return None if every is None else int(every)
    return None if steps is None else max(1, math.ceil(steps * every))
