"""Reading and writing of YAML."""

import re
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from fsdp_trainer.base.json_files import DEEPEST

# libyaml's, if it is installed, do the same in a quarter of the time
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
YAML_FILE = re.compile(r"[^=+~-][^=]*\.ya?ml")
"""A word of the command line that is the name of a YAML file."""
MOST_REPEATED = 10_000
"""Values that aliases may repeat: a few lines of aliases of aliases stand for billions."""


TOO_DEEP = f"more than {DEEPEST} lists and mappings within each other, or one that contains itself"


class Loader(_LOADER):  # type: ignore[misc, valid-type]
    """The loader of all YAML that is not our own. Raises yaml.YAMLError, also for what is too much.

    That is what is nested too deeply, contains itself, or repeats too much by aliases.
    """

    def get_single_node(self) -> yaml.Node | None:
        try:
            node = super().get_single_node()
        except RecursionError:  # of the loader without libyaml
            raise ComposerError(None, None, TOO_DEEP, None) from None
        if node is not None:
            self._sizes: dict[int, tuple[int, int]] = {}
            self._written = 0
            size, _ = self._size_of(node, 0)
            if size - self._written > MOST_REPEATED:
                reason = f"aliases that repeat more than {MOST_REPEATED:,} values"
                raise ComposerError(None, None, reason, node.start_mark)
        return node

    def _size_of(self, node: yaml.Node, depth: int) -> tuple[int, int]:
        """Return the number of values in a node with what aliases repeat, and the levels in it."""
        self._written += 1
        size, levels = self._sizes.get(id(node), (1, 0))
        if depth + levels > DEEPEST:
            raise ComposerError(None, None, TOO_DEEP, node.start_mark)
        if id(node) in self._sizes or isinstance(node, yaml.ScalarNode):
            return size, levels
        pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
        for part in (part for pair in pairs for part in pair):
            inner, below = self._size_of(part, depth + 1)
            size, levels = size + inner, max(levels, below + 1)
        self._sizes[id(node)] = size, levels
        return size, levels

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            # what the constructors of !!int, !!timestamp and others raise for another text
            reason = f"a value cannot be read: {error}"
            raise ConstructorError(None, None, reason, node.start_mark) from None


# a configuration has no dates and no sets
Loader.add_constructor("tag:yaml.org,2002:timestamp", Loader.construct_yaml_str)
for _kind in ("set", "omap", "pairs"):
    Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", Loader.construct_undefined)


def load_yaml(text: str) -> Any:
    return yaml.load(text, Loader)


def table_beside(module: str, name: str | None = None) -> Any:
    """Return the content of the YAML file beside a module of the program, called as it or `name`.

    module: its `__file__`.
    """
    file = Path(module)
    file = file.with_name(name) if name else file.with_suffix(".yaml")
    return load_yaml(file.read_text(encoding="utf-8"))


def dump_yaml(values: dict[str, Any], **options: Any) -> str:
    """Return `values` as YAML, in their order. options: arguments of yaml.dump."""
    return yaml.dump(values, Dumper=DUMPER, sort_keys=False, allow_unicode=True, **options)
