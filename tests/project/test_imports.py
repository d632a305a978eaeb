"""The order of the rooms: every import points down this list, and no files import each other in a
circle."""

import ast
import importlib
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from pkgutil import resolve_name

import inject
import pytest
from folders import TESTS
from tables import rows

import fsdp_trainer
from fsdp_trainer.base import moved_modules

PACKAGE = Path(fsdp_trainer.__file__).parent
LAYERS = [
    layer.split()
    for (layer,) in rows("""
errors version base
config extensions interop.folders
models rl.rewards rl.environments rl.reasoning
# what composes a configuration asks the models' rules, which need no torch either
config.rules config.composing config.document
observe
# a row's way: files, records, templates, tokens, store, order, stream
data.token_files
data.files
data.records
data.images
data.media
data.templates
data.tokens
data.store
data.order
data.stream
data optim
checkpoint parallel generation interop.weights
rl.rollouts
# the head that a method trains, which a plan needs too
methods.labels
methods.trained_head
evaluation planning.plan optim.offload
launch
training
methods rl.rounds rl.serving
replicas
run
planning.rehearse
apps interop.convert
apps.chain apps.quickstart
cli api
__main__ __init__
""")
]
"""From the bottom to the top. Of several names that fit a file the longest counts."""


@cache
def modules():
    """Module name without the package's → the modules it imports, those in functions and for types
    included."""
    files = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return {
        name: {imported for imported in imports(path, files) if imported != name}
        for name, path in files.items()
    }


def imports(path, files):
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").partition(".")[0] == "fsdp_trainer"
        ):
            module = node.module.removeprefix("fsdp_trainer").removeprefix(".")
            for alias in node.names:
                inside = f"{module}.{alias.name}".removeprefix(".")
                yield inside if inside in files else module or "__init__"


def layer(name):
    fitting = [
        (len(part), number)
        for number, parts in enumerate(LAYERS)
        for part in parts
        if f"{name}.".startswith(f"{part}.")
    ]
    assert fitting, f"{name} is in no layer"
    return max(fitting)[1]


def test_every_import_points_down_the_list_of_rooms():
    upward = [
        f"{name} imports {other}"
        for name, others in modules().items()
        for other in others
        if layer(other) > layer(name)
    ]
    assert upward == []


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter(modules()).prepare()  # raises CycleError, which names the circle


def test_no_test_imports_from_another():
    for path in TESTS.rglob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE)
        assert imported == [], f"{path.name}: what tests share lies in a module of its own"


def test_every_slow_test_is_there():
    for line in (TESTS / "slow.txt").read_text().splitlines()[1:]:
        file, _, test = line.partition("::")
        text = (TESTS.parent / file).read_text()
        assert not test or f"def {test}(" in text, line


def test_every_place_where_tests_break_the_package_is_there():
    limits = [place for places in inject.SETTINGS.values() for place in places]
    for place in [*inject.POINTS.values(), *limits]:
        resolve_name(place)  # raises what names it: change it in tests/ranks/inject.py


@pytest.mark.parametrize(
    "name", ["environments.tool_calls", "rewards.reward", "plan.plan", "offload.parts"]
)
def test_a_module_that_moved_is_the_same_one_under_its_former_name(name):
    folder, _, rest = name.partition(".")
    moved = importlib.import_module(f"fsdp_trainer.{moved_modules.MOVED[folder]}.{rest}")
    assert importlib.import_module(f"fsdp_trainer.{name}") is moved
