"""Each place of the package that can unpickle is known, with the reason why it may."""

import ast
import re
from functools import cache
from itertools import chain
from pathlib import Path

import yaml
from folders import table

import fsdp_trainer
from fsdp_trainer.config import yaml_text

ROOT = Path(fsdp_trainer.__file__).parents[1]
KNOWN = table("project/unpickling.yaml")
MODULES = KNOWN["modules"]
UNPICKLES = re.compile(
    rf"(?:{'|'.join(map(re.escape, KNOWN['modules']))})\.(\w|\.)+"
    r"|torch\.(?:(?:jit|export|serialization)\.)?load"
    r"|torch\.distributed\.\w+_object(?:_list|s)?"
    r"|.*\.(?:ProcessPoolExecutor|DataLoader|from_pretrained)|pandas\.read_pickle"
    r"|numpy\.(?:load|lib\.format\.read_array)"
    r"|yaml\.(?:(?:full_|unsafe_)?load(?:_all)?|(?:Full|Unsafe|C)?Loader)"
)
HARMLESS = re.compile(
    r"pickle\.(?:dumps(?:\..*)?|UnpicklingError|[A-Z0-9_]+)|.*\._Unpickler\.dispatch"
    r"|torch\.distributed\.checkpoint\.(?:save|(?:metadata|api|default_planner)\.\w+"
    r"|filesystem\._StorageInfo|utils\._create_file_view)"
)
"""Names of theirs that only write, name a class or read bytes."""
WORDS = re.compile(
    "pickle|dill|joblib|shelve|marshal|multiprocessing|rpc|launcher|elastic|torchft|datasets"
    "|load|Loader|_object|ProcessPool|from_pretrained|distributed.checkpoint|read_array|torch.hub"
    "|torch.package"
)


@cache
def trees():
    """Return the syntax tree of each file in which any such name may be."""
    files = [*ROOT.glob("fsdp_trainer/**/*.py"), *ROOT.glob("hydra_plugins/**/*.py")]
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    return {name: [*ast.walk(ast.parse(t))] for name, t in texts.items() if WORDS.search(t)}


def dotted(node):
    """Return the text of an attribute of a name, such as torch.load; "" for others."""
    rest = ""
    while isinstance(node, ast.Attribute):
        node, rest = node.value, f".{node.attr}{rest}"
    return node.id + rest if isinstance(node, ast.Name) else ""


def names_in(nodes):
    """Return the complete names that a file uses, with imported modules in place of aliases."""
    complete = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            complete |= {name.asname: name.name for name in node.names if name.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            complete |= {n.asname or n.name: f"{node.module}.{n.name}" for n in node.names}
    used = {*complete.values()}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, dot, rest = dotted(node).partition(".")
            used.add(complete.get(first, first) + dot + rest)
    return used


def places():
    return {
        (file.removeprefix("fsdp_trainer/"), name)
        for file, nodes in trees().items()
        for name in names_in(nodes)
        if UNPICKLES.fullmatch(name) and not HARMLESS.fullmatch(name)
    }


def test_nothing_unpickles_but_what_is_listed_with_a_reason():
    assert places() == {(file, name) for file, names in KNOWN["places"].items() for name in names}


def calls(name):
    """Yield the keywords of each call of a function, as text."""
    for node in chain.from_iterable(trees().values()):
        if isinstance(node, ast.Call) and dotted(node.func) == name:
            yield {word.arg: ast.unparse(word.value) for word in node.keywords}


def test_files_of_torch_and_numpy_are_read_without_code_and_yaml_without_objects():
    assert [words["weights_only"] for words in calls("torch.load")] == ["True"] * 3
    assert all(words.get("allow_pickle", "False") == "False" for words in calls("np.load"))
    assert issubclass(
        yaml_text.Loader, yaml.SafeLoader | getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
