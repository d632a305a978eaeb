"""The permission of this process to run Python code that comes with a model's folder."""

from typing import Any

_ALLOWED: set[str] = set()


def allow_remote_code(cfg: Any) -> None:
    if getattr(getattr(cfg, "model", cfg), "trust_remote_code", False):
        _ALLOWED.add("remote code")


def remote_code_is_allowed() -> bool:
    return bool(_ALLOWED)
