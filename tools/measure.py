"""Report the amount of code in each room of fsdp_trainer/, in tests/ and in benchmarks/, and what
makes it hard to read.

    python tools/measure.py             # the figures; exit code 1 if a limit is broken
    python tools/measure.py --where     # also the places that the last columns count

Columns, per room:

    lines      of Python files
    tokens     of Python: names, operators, numbers, strings
    branches   points of the syntax tree: if, for, while, except, and/or, conditional expressions,
               conditions of comprehensions, match cases
    long       functions with more than 10 branches
    wide       lines over 100 columns
    private    uses of private names of torch
    docs       docstrings
    unclear    docstrings that begin with neither a verb nor a noun
    vague      variables whose name does not describe their content
    whole      functions outside config/ that take the whole TrainConfig: their signature does not
               say what they depend on
    method     files that read the name of the training method; others ask its MethodSpec
    optimizer  files outside optim/ that decide by an optimizer's name; others ask its OptimizerSpec
    image      files that name images, the first kind of media; others speak of media
    foreign    attributes that are set on another object than self, after its construction
    tall       functions over 80 lines

and of the whole package: the most files that lie directly in one folder, and the pairs of folders
that import each other; of tests: their tokens for
1,000 of the package's.

Limits of the package: there are no circular imports; no class name exists twice; a function has at
most 10 branches, or is listed with a reason in tools/long_functions.txt. Limits of columns are in
LIMITS: they may be lowered, not raised.
"""

import ast
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fsdp_trainer"
BESIDE = ["tests", "benchmarks"]
"""Folders outside of the package; each is one room, and only LIMITS holds for it."""
LIMITS = {
    ("all", "whole"): 40,
    ("all", "method"): 4,
    ("all", "optimizer"): 2,
    ("all", "image"): 25,
    ("all", "foreign"): 194,
    ("all", "tall"): 0,
    ("all", "files in a folder"): 25,
    ("all", "pairs of folders"): 2,
    ("tests", "unclear"): 0,
    ("tests", "vague"): 0,
    ("tests", "tokens per 1,000"): 450,
    ("benchmarks", "unclear"): 0,
    ("benchmarks", "vague"): 0,
}
"""The largest allowed number by room and column; "all" is the whole package."""
ALLOWED = "tools/long_functions.txt"
TORCH_PRIVATE = "torch_private.py"
MAX_BRANCHES = 10
MAX_COLUMNS = 100
MAX_LINES = 80
COLUMNS = [
    *("lines", "tokens", "branches", "private", "docs", "unclear", "vague", "wide", "long"),
    *("whole", "method", "optimizer", "image", "foreign", "tall"),
]
READ_TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)
VAGUE = re.compile(
    r"found|told|of|seen|asked|taken|left|kept|laid|made|beside|apart|whose|why|so_far|many|most"
    r"|least"
)
UNCLEAR = re.compile(
    r"(of|whether|what|that|as|from|with|without|who|where|when|how|in|on|by|beside|besides"
    r"|behind|its|it|for|such|but|also|after|before)\b",
    re.IGNORECASE,
)
METHOD = re.compile(r"objective\.name|choice\.name\b")
OPTIMIZER = re.compile(r"""optim\.name\s*(==|!=|in\b|not in\b)|["'](muon|normuon)["']""")
IMAGE = re.compile(r"\bimages?\b")
PROSE = re.compile(r'"""[\s\S]*?"""|#.*')
OWN = {"self", "cls", "ctx"}
"""Names of objects whose attributes a function may set. ctx: state of torch.autograd.Function."""
PRIVATE = re.compile(
    r"(?:torch|dist|fsdp|dtensor|DTensor|checkpoint)[\w.]*\._(?!foreach|_)[a-z]\w+"
    r"|\._(?:local_tensor|spec|get_fsdp_state|fsdp_param_group|sharded_param_data"
    r"|all_gather_result)\b"
)


@dataclass
class Figures:
    """The sums over all files, and the data for checking the limits."""

    rooms: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The places that a column counts, each as FILE:LINE and the text there."""
    imports: dict[str, set[str]] = field(default_factory=dict)
    """The modules that each module imports, at any place in its file."""
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """The files that define a class, by its name."""
    long: dict[str, int] = field(default_factory=dict)
    """The number of branches of each long function, by FILE:NAME."""


def branches(tree: ast.AST) -> int:
    """Return the number of branch points in `tree`."""
    total = 0
    for node in ast.walk(tree):
        match node:
            case ast.BoolOp():
                total += len(node.values) - 1
            case ast.comprehension():
                total += len(node.ifs)
            case ast.Match():
                total += len(node.cases)
            case _:
                total += isinstance(node, BRANCHES)
    return total


def measure(folder: Path, room: str | None = None) -> Figures:
    """Return the figures of all files of a folder.

    room: the name of the only room. None if each folder within is a room, as in the package.
    """
    figures = Figures()
    for path in sorted(folder.rglob("*.py")):
        measure_file(path, folder, room, figures)
    modules = figures.imports.keys()
    figures.imports = {name: (used & modules) - {name} for name, used in figures.imports.items()}
    return figures


def measure_file(path: Path, folder: Path, only_room: str | None, figures: Figures) -> None:
    """Add the figures of one file to `figures`. only_room: see measure."""
    relative = path.relative_to(folder)
    text = path.read_text()
    tree = ast.parse(text)
    inner = relative.parts[0] if len(relative.parts) > 1 else "(top)"
    room = figures.rooms[only_room or inner]
    with path.open("rb") as file:
        room["tokens"] += sum(
            token.type in READ_TOKENS for token in tokenize.tokenize(file.readline)
        )
    room["lines"] += text.count("\n")
    room["branches"] += branches(tree)
    room["private"] += len(PRIVATE.findall(text))
    places: list[tuple[str, int, str]] = [
        ("wide", number, line.strip())
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]
    for node in ast.walk(tree):
        places += unclear_in(node)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            figures.classes[node.name].append(str(relative))
        if isinstance(node, DOCUMENTED):
            room["docs"] += ast.get_docstring(node) is not None
        if isinstance(node, FUNCTIONS) and branches(node) > MAX_BRANCHES:
            figures.long[f"{relative}:{node.name}"] = branches(node)
            places.append(("long", node.lineno, f"{node.name}: {branches(node)} branches"))
    places += unowned_in(tree, relative)
    places += [("method", 1, "")] * bool(METHOD.search(text))
    is_outside = relative.parts[0] != "optim"
    places += [("optimizer", 1, "")] * bool(is_outside and OPTIMIZER.search(text))
    places += [("image", 1, "")] * bool(IMAGE.search(PROSE.sub("", text)))
    for column, line, what in places:
        room[column] += 1
        figures.places[column].append(f"{relative}:{line} {what}")
    module = ".".join((folder.name, *relative.with_suffix("").parts)).removesuffix(".__init__")
    figures.imports[module] = imported(tree)


def unclear_in(node: ast.AST) -> list[tuple[str, int, str]]:
    """Return (column, line, text) for an unclear docstring or a vague name of `node` itself."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if VAGUE.fullmatch(name):
            return [("vague", node.lineno, name)]
        case ast.FunctionDef() | ast.ClassDef() | ast.Module():
            docstring = ast.get_docstring(node) or ""
            if UNCLEAR.match(docstring):
                line = getattr(node, "lineno", 1)
                return [("unclear", line, docstring.splitlines()[0])]
    return []


def unowned_in(tree: ast.Module, file: Path) -> Iterator[tuple[str, int, str]]:
    """Yield (column, line, text) for each place of a file where a concept lacks an owner."""
    for node in ast.walk(tree):
        if not isinstance(node, FUNCTIONS):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        types = [ast.unparse(each.annotation) for each in arguments if each.annotation]
        if "TrainConfig" in types and file.parts[0] != "config":
            yield "whole", node.lineno, node.name
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_LINES:
            yield "tall", node.lineno, f"{node.name}: {lines} lines"
        if file.name != TORCH_PRIVATE:  # what it sets are torch's own objects
            yield from foreign_in(node)


def foreign_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, int, str]]:
    """Yield (column, line, text) for each attribute that a function sets on another object.

    An object that the function itself has constructed does not count.
    """
    constructed = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
        and ast.unparse(node.value.func).rpartition(".")[2][:1].isupper()
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in OWN | constructed):
                yield "foreign", node.lineno, ast.unparse(node)


def of_folders(folder: Path) -> Counter:
    """Return the most files directly in one folder."""
    files = [path for path in folder.rglob("*.py") if path.name != "__init__.py"]
    return Counter({"files in a folder": max(Counter(path.parent for path in files).values())})


def pairs_of_folders(imports: dict[str, set[str]]) -> list[str]:
    """Return the pairs of folders whose files import each other, but for the package itself.

    imports: as Figures has them. A folder's own `__init__` lies in it.
    """
    inner = {name.rpartition(".")[0] for name in imports}
    folder = {name: name if name in inner else name.rpartition(".")[0] for name in imports}
    arrows = {(folder[name], folder[used]) for name, known in imports.items() for used in known}
    return sorted(
        f"{one} and {other}"
        for one, other in arrows
        if one < other and (other, one) in arrows
        if PACKAGE not in (one, other)
    )


def imported(tree: ast.Module) -> set[str]:
    """Return the names of modules that a file may import; some are names within a module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def allowed(file: Path) -> dict[str, str]:
    """Return the reasons why functions may be long, by FILE:NAME."""
    lines = file.read_text().splitlines()
    entries = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return dict(entries)


def broken_limits(figures: Figures, reasons: dict[str, str]) -> list[str]:
    """Return a sentence for each broken limit. reasons: as `allowed` returns them."""
    problems = []
    try:
        TopologicalSorter(figures.imports).prepare()
    except CycleError as error:
        problems.append("files import each other in a circle: " + " → ".join(error.args[1]))
    for name, files in figures.classes.items():
        if len(files) > 1:
            problems.append(f"class {name} exists {len(files)} times: {', '.join(files)}")
    for name in figures.long.keys() - reasons.keys():
        problems.append(
            f"{name} has {figures.long[name]} branches, of {MAX_BRANCHES} allowed: split it, or"
            f" give the reason in {ALLOWED}"
        )
    for name in reasons.keys() - figures.long.keys():
        problems.append(f"{name} is long no more: remove it from {ALLOWED}")
    return sorted(problems)


def exceeded(rooms: dict[str, Counter], limits: dict[tuple[str, str], int] = LIMITS) -> list[str]:
    """Return a sentence for each room and column above its limit."""
    return [
        f"{column} of {room} is {rooms[room][column]}, of {limit} allowed"
        for (room, column), limit in limits.items()
        if rooms[room][column] > limit
    ]


def show(rooms: dict[str, Counter]) -> None:
    """Print a line of figures for each room."""
    print(f"{'room':<11}" + "".join(f"{name:>9}" for name in COLUMNS) + f"{'tokens/line':>12}")
    for name, room in rooms.items():
        numbers = "".join(f"{room[column]:>9,}" for column in COLUMNS)
        print(f"{name:<11}{numbers}{room['tokens'] / max(1, room['lines']):>12.1f}")


def main() -> int:
    package = measure(ROOT / PACKAGE)
    others = [measure(ROOT / name, name) for name in BESIDE]
    rooms = dict(sorted(package.rooms.items()))
    rooms["all"] = sum(rooms.values(), of_folders(ROOT / PACKAGE))
    pairs = pairs_of_folders(package.imports)
    rooms["all"]["pairs of folders"] = len(pairs)
    for figures in others:
        rooms |= figures.rooms
    show(rooms)
    tests, share = rooms["tests"], "tokens per 1,000"
    tests[share] = round(1000 * tests["tokens"] / rooms["all"]["tokens"])
    print(f"files in a folder: {rooms['all']['files in a folder']}")
    print(f"pairs of folders that import each other: {len(pairs)}: {'; '.join(pairs)}")
    print(f"{share} of the package in tests: {tests[share]}")
    if "--where" in sys.argv[1:]:
        for name, figures in zip([PACKAGE, *BESIDE], [package, *others], strict=True):
            for column, places in sorted(figures.places.items()):
                print(f"\n{column} in {name}:", *places, sep="\n  ")
    problems = broken_limits(package, allowed(ROOT / ALLOWED)) + exceeded(rooms)
    if problems:
        print("\ntools/measure.py:", *problems, sep="\n  ", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
