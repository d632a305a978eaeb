"""A bound on interpolations, which may repeat each other until memory ends."""

import re
from typing import Any

from omegaconf import OmegaConf

from fsdp_trainer.base.json_files import strings_in
from fsdp_trainer.errors import UserError

PLAIN = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
PLAIN_VARIABLE = re.compile(r"\$\{oc\.env:\w+\}")
START, ENVIRONMENT = "${", "${oc.env:"
MOST, LONGEST = 24, 1000
"""Interpolations of more than a short value (in the worst case 3 ** 8 values), and its length."""


def require_few_interpolations(composed: Any) -> None:
    """Raise UserError if interpolations refer to others so often that they might not end."""
    tree = OmegaConf.to_container(composed, resolve=False)

    def without_short(name: re.Match[str]) -> str:
        value: Any = tree
        for part in name[1].split("."):
            if not isinstance(value, dict) or part not in value:
                return name[0]
            value = value[part]
        if isinstance(value, dict | list):
            return name[0]
        text = PLAIN_VARIABLE.sub("", str(value))
        return "" if START not in text and len(text) <= LONGEST else name[0]

    rest = [PLAIN.sub(without_short, text) for text in strings_in(tree) if START in text]
    count = sum(text.count(START) - text.count(ENVIRONMENT) for text in rest)
    if count > MOST:
        reason = f"{count} of them refer to values with others, or to none: write the values out"
        raise UserError("a problem in the configuration", "${…}", reason)
