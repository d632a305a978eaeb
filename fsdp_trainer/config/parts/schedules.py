"""The shapes of the learning rate (schedule.name). No torch.

A new one is a function here and a file `conf/schedule/NAME.yaml`; it has no state.
"""

import math
from collections.abc import Callable
from typing import Any


def wsd(progress: float, cfg: Any) -> float:
    """Return 1, and 0 at the end of a linear decay over the last cfg.decay_share of the steps."""
    return min(1.0, (1 - progress) / cfg.decay_share) if cfg.decay_share else 1.0


SHAPES: dict[str, Callable[[float, Any], float]] = {
    "constant": lambda progress, cfg: 1.0,
    "linear": lambda progress, cfg: 1 - progress,
    "cosine": lambda progress, cfg: (1 + math.cos(math.pi * progress)) / 2,
    "wsd": wsd,
}
"""The share of the peak at a share of the steps after the warm-up. cfg: the keys of schedule."""
