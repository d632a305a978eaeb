"""Modules under the names that they had until 1.0.0rc1, for files of users that import them."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "environments": "rl.environments",
    "rewards": "rl.rewards",
    "rollouts": "rl.rollouts",
    "plan": "planning.plan",
    "rehearse": "planning.rehearse",
    "offload": "optim.offload",
    "models.families": "config.parts.families",
}
"""Folder or module in the package → where it lies now."""


def moved_to(inner: str) -> str | None:
    names = (
        new + inner[len(old) :] for old, new in MOVED.items() if f"{inner}.".startswith(f"{old}.")
    )
    return next(names, None)


class MovedModules(MetaPathFinder, Loader):
    """Imports a module of a moved folder as the module of its new name: it exists once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        is_moved = package == "fsdp_trainer" and moved_to(inner)
        return ModuleSpec(name, self) if is_moved else None

    def exec_module(self, module: ModuleType) -> None:
        package, _, inner = module.__name__.partition(".")
        # what Python returns is the entry of this table, after this call
        sys.modules[module.__name__] = importlib.import_module(f"{package}.{moved_to(inner)}")


def install() -> None:
    sys.meta_path.insert(0, MovedModules())
