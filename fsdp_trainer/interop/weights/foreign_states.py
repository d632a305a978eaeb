"""States of AdamW as other tools have written them, before they are given to an optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.errors import UserError

MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"
"""States that AdamW keeps of a parameter, as torch names them."""
OPTIONS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class StatesByName:
    """States of AdamW of each parameter, by the tool's name of it: tensors, and the step's number.

    options: those of the first group of parameters, as far as they can be read.
    """

    by_name: Mapping[str, dict[str, Any]]
    options: dict[str, Any]


def known_options(groups: Any) -> dict[str, Any]:
    first = groups[0] if isinstance(groups, list) and groups else {}
    known = first if isinstance(first, dict) else {}
    return {name: known[name] for name in OPTIONS if _is_option(known.get(name))}


def _is_option(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(each, int | float) for each in value)
    return isinstance(value, int | float)


def unusable_states(place: Path, reason: str) -> UserError:
    return UserError(
        "cannot read the optimizer's states",
        str(place),
        f"{reason}.\nTo begin with the weights alone, drop  optim.init_from",
    )
