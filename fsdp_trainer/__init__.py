"""Native PyTorch FSDP2 training of large language models, configured by Hydra."""

import importlib
import sys
from typing import Any

from fsdp_trainer.base import moved_modules
from fsdp_trainer.extensions import Callback as Callback
from fsdp_trainer.extensions import RunInfo as RunInfo
from fsdp_trainer.extensions import TrackedRun as TrackedRun
from fsdp_trainer.extensions import Tracker as Tracker
from fsdp_trainer.extensions import register as register
from fsdp_trainer.version import __version__ as __version__

if sys.platform == "win32":
    print(
        "fsdp-trainer runs on Linux and macOS. On Windows use it within WSL:  wsl --install",
        file=sys.stderr,
    )
    raise SystemExit(2)
moved_modules.install()
LAZY = {"train": "fsdp_trainer.api", "load_model": "fsdp_trainer.checkpoint.load"}
"""Functions imported at their first use, so that a wrong key is reported without loading torch."""
__all__ = ["Callback", "RunInfo", "TrackedRun", "Tracker", "load_model", "register", "train"]


def __getattr__(name: str) -> Any:
    if name in LAZY:
        return getattr(importlib.import_module(LAZY[name]), name)
    raise AttributeError(f"module 'fsdp_trainer' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
