"""Learning rate as a function of the step, without state to save."""

import math

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


def learning_rate(cfg: Schedule, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step` (1 is the first) out of `steps`.

    It rises linearly over the warm-up steps and reaches the peak at the last of them. Then it
    follows the schedule's shape from the peak towards min_ratio × peak, which it would reach one
    step after the last, so that no step has a rate of 0. wsd: warm-up, stable, then a linear decay
    over the last decay_share of the steps after warm-up (Hu et al. 2024).
    """
    if step <= cfg.warmup_steps:
        return peak * step / cfg.warmup_steps
    progress = (step - 1 - cfg.warmup_steps) / (steps - cfg.warmup_steps)
    return peak * (cfg.min_ratio + (1 - cfg.min_ratio) * SHAPES[cfg.name](progress, cfg))


def _wsd(progress: float, cfg: Schedule) -> float:
    return min(1.0, (1 - progress) / cfg.decay_share) if cfg.decay_share else 1.0


SHAPES = {
    "constant": lambda progress, cfg: 1.0,
    "linear": lambda progress, cfg: 1 - progress,
    "cosine": lambda progress, cfg: (1 + math.cos(math.pi * progress)) / 2,
    "wsd": _wsd,
}
