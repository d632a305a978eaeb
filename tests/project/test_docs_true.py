"""Names, settings, files and figures on a page are those of the program and of its results."""

import ast
import contextlib
import importlib
import inspect
import json
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from folders import REPO, table
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from world import read_json

from benchmarks.plan_published import groups, stored
from fsdp_trainer import errors
from fsdp_trainer.cli import VERBS
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import options
from fsdp_trainer.config.composing.overrides import owner_of, takes
from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.config.verbs import PRIMARY
from fsdp_trainer.observe.metric_groups import EVENTS, GENERAL, TITLES, WITHOUT_CURVE

GENERATED = {"CHANGELOG.md", "mistakes.md", "configuration.md"}
"""Pages that are history, are run by a test of their own, or are written by the program."""
PAGES = [p for p in (*REPO.glob("*.md"), *REPO.glob("docs/*.md")) if p.name not in GENERATED]
TRACKED = [
    REPO / line
    for line in subprocess.check_output(["git", "ls-files"], cwd=REPO, text=True).splitlines()
    if (REPO / line).is_file()
]
BLOCK = re.compile(r"(?ms)^ *```[^\n]*\n(.*?)^ *```$")
WORD = re.compile(r"(?<![\w\\])[A-Za-z_]\w*(?![\w…*])")
"""A name, without one that is the beginning or the end of several."""
OTHERS = (Path(__file__).parent / "other_names.txt").read_text().split()
"""Names of other programs, of files that an example invents, and of files that have a number."""


def sentences(page):
    """Return a page without its blocks."""
    return BLOCK.sub("", page.read_text())


def code(page):
    """Return the code in a page's sentences and tables."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"https?://[^ `\"']+", "", sentences(page)))


def names_in(file):
    """Yield the names and texts of a file of Python, without its docstrings and comments."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant):
            yield node.value if isinstance(node.value, str) and node not in docstrings else ""
        for field in {"id", "attr", "arg", "name"}.intersection(node._fields):
            yield str(getattr(node, field) or "")


@cache
def program():
    """Return all names and texts of the program and its tools, and the names of all files."""
    texts = [str(file.relative_to(REPO)) for file in TRACKED]
    for file in TRACKED:
        room = file.relative_to(REPO).parts[0]
        if file.suffix == ".py" and (room != "tests" or "tests/inputs" in str(file)):
            texts += names_in(file)
        elif file.suffix == ".py":
            texts += re.findall(r"(?:def|class) (\w+)", file.read_text())
        elif file.suffix in (".json", ".yaml", ".toml", ".txt", ".sh", ".c", "") and room != "docs":
            texts.append(file.read_text(errors="ignore"))
    return "\n".join(dict.fromkeys(texts))


METRICS = {
    name.rstrip("/") for names in (*GENERAL.values(), TITLES, WITHOUT_CURVE) for name in names
}
METRICS |= {f"validation_{name}" for name in TITLES} | {"validation_"}


def columns(page, *heads):
    """Return the names in the columns of a page's tables that have one of these heads."""
    names, at = set(), None
    for line in sentences(page).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if not cells or {*cells} & {*heads}:
            at = next((i for i, cell in enumerate(cells) if cell in heads), None)
        elif at is not None:
            names |= {*re.findall(r"`([a-z_0-9]+)`|^(\d+)$", cells[at])}
    return {"".join(one) for one in names}


def test_metrics_events_and_exit_codes_of_pages_are_the_ones_of_runs():
    methods = [REPO / f"fsdp_trainer/{room}" for room in ("methods", "rl")]
    texts = "".join(f.read_text() for room in methods for f in room.rglob("*.py"))
    keys = re.findall(r"(?m)^    keys(?:: .*)? = \((.*)\)$", texts)
    assert {*re.findall(r'"(\w+)"', "".join(keys))} <= METRICS
    package = "".join(f.read_text() for f in (REPO / "fsdp_trainer").rglob("*.py"))
    written = {*re.findall(r'(?:\.|_)(?:event|record)\(\s*"(\w+)"', package)}
    assert written <= EVENTS.keys()
    assert [name for name in EVENTS if f'"{name}"' not in package] == []
    codes = {getattr(one, "exit_code", 0) for one in vars(errors).values() if inspect.isclass(one)}
    wrong = []
    for page in PAGES:
        text, wide = page.read_text(), page.name == "seeing.md"
        metrics = columns(page, "metric", *["field"] * wide)
        metrics |= {*re.findall(r"\bvalidation_\w+", "\n".join(code(page)))}
        events = {*re.findall(r'"event": "(\w+)"|events? `(\w+)`|`(\w+)` in `events', text)}
        events = {"".join(one) for one in events} | columns(page, "event")
        exits = re.findall(r"\bexit(?:s|_code)?(?: code)?(?: with)?\b\D{0,2} (\d+)\b", text)
        exits += columns(page, "exit code")
        wrong += [(page.name, name) for name in metrics - METRICS]
        wrong += [(page.name, name) for name in events - EVENTS.keys()]
        wrong += [(page.name, one) for one in exits if int(one) not in codes | {3}]
    assert wrong == []


SCRIPT = re.compile(r"\b(benchmarks|tools)[./](\w+)")
MAKEFILE = (REPO / "Makefile").read_text()
PROGRAM = {"--help", "--version", "--cfg", "--import", "--config-dir"}


@cache
def options_of(room, name):
    """Return the options of a script."""
    path = REPO / room / name
    files = [one for one in (path.with_suffix(".py"), path / "__main__.py") if one.exists()]
    text = "".join(one.read_text() for one in files)
    options = {*re.findall(r'(?:add_argument\(|if )"(--[\w-]+)"', text)}
    for call in re.findall(r"\barguments\(\s*__doc__,(.*?)\)\n", text, re.S):
        options |= {f"--{word.replace('_', '-')}" for word in re.findall(r"(\w+)=", call)} | {
            "--check"
        }
    return options


def test_an_option_on_a_page_is_one_of_its_program():
    """Options of a script that its line, or else its section, names; else ours or OTHERS'."""
    targets = dict(re.findall(r"(?m)^([\w-]+):.*\n((?:\t.*\n)+)", MAKEFILE))
    targets["bench"] = targets["bench"].replace("$$name", "train_step")
    wrong, count = [], 0
    for page, text in ((p, t) for p in PAGES for t in re.split(r"(?m)^(?=#+ )", p.read_text())):
        blocks = [line for block in BLOCK.findall(text) for line in block.splitlines()]
        for line in (*blocks, *re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))):
            for room, name in re.findall(r"-m (benchmarks|tools)\.(\w+)", line):
                wrong += [] if [*(REPO / room).glob(f"{name}*")] else [(page.name, name)]
            own = re.sub(r" +#.*|'[^']*'", "", line)
            options = re.findall(r"(?<![\w-])--[a-z][\w-]*", own)
            if not options:
                continue
            called = {
                n for n in targets if re.search(rf"\bmake {n}\b", line if " " in line else text)
            }
            scripts = SCRIPT.findall(line + "".join(targets[name] for name in called))
            scripts = scripts or [*{*SCRIPT.findall(text)}]
            known = {one for script in scripts for one in options_of(*script)} | PROGRAM | {*OTHERS}
            is_ours = SCRIPT.search(line) or re.match(r"(make|fsdp-trainer|--|ARGS)", line)
            wrong += [(page.name, line, o) for o in options if is_ours and o not in known]
            count += len(options) if is_ours else 0
    assert count > 20
    assert wrong == []


def test_a_name_in_a_sentence_is_one_of_the_program():
    known = {*WORD.findall(program()), *OTHERS, *METRICS}
    used = {(p.name, w) for p in PAGES for one in code(p) for w in WORD.findall(one)}
    ours = {(page, w) for page, w in used if page != "comparison.md" and not w.isupper()}
    wrong = {(page, w) for page, w in ours if w not in known}
    assert not wrong, sorted(wrong)
    text = "\n".join(one for page in PAGES for one in code(page))
    assert [name for name in OTHERS if name not in text] == []


FILE = re.compile(
    r"(?<![\w./-])[\w./-]*?([\w-]+\.(?:py|jsonl?|md|html|yaml|pickle|npy|bin|pt|svg|log|txt))\b"
)


PATH = re.compile(
    r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]+\.py\b|(?<![\w./-])(?:benchmarks|conf|examples|tests|tools)/[\w./-]+"
)
FOLDER = re.compile(r"(?<![\w./-])(?:[a-z_]+/)+(?=[\s:,;)`])")


def test_a_file_in_a_sentence_is_in_the_repository_or_written_by_the_program():
    places = "".join(f"/{file.relative_to(REPO)}/\n" for file in TRACKED)
    wrong = set()
    for page in PAGES:
        codes = code(page) if page.name != "comparison.md" else []
        named = {one for text in codes for one in FILE.findall(text) if one not in program()}
        paths = {one for text in codes for one in PATH.findall(text)}
        if page.name == "architecture.md":
            paths |= {*FOLDER.findall(page.read_text())}
        named |= {one for one in paths if f"/{one.rstrip('/')}/" not in places}
        wrong |= {(page.name, one) for one in named if one not in OTHERS}
    assert not wrong, sorted(wrong)


def settings(text):
    """Return the (key, value) pairs in code, without those whose value only stands for one."""
    is_one = re.fullmatch(r"[\w.]+=[\[{][^=]*", text)
    with contextlib.suppress(ValueError):
        words = [text] if is_one else shlex.split(text)
        pairs = [word.lstrip("+").partition("=")[::2] for word in words if "=" in word]
        pairs += re.findall(r"^(\w+\.\w+): (\S+)$", text)
        return [(k, v) for k, v in pairs if v and not re.search(r"…|\$|^[A-Z]+$|^[a-z]$", v)]
    return []


def is_accepted(key, value):
    """Return whether a verb has a key or group that accepts a value; several are separate."""
    groups, fields = options("train"), [flatten(PRIMARY[verb]).get(key) for verb in VERBS]
    known = [field for field in fields if field]
    try:
        is_sweep = OverridesParser.create().parse_override(f"k={value}").is_sweep_override()
    except HydraException:
        is_sweep = False  # a text that would be refused is refused below, too
    values = [value]
    if is_sweep:
        values = [] if re.search(r"[(\[]", value) else value.split(",")
    if key in groups:
        chosen = [name for one in values for name in one.strip("[]").split(",")]
        own = key == "recipe" and ("my" in value or "NAME" in value)
        return own or {*chosen} <= {*groups[key], "recipe.yaml"}
    owner = owner_of(key, flatten(PRIMARY["train"]))
    is_inner = owner not in (None, key)  # launch.env.NAME
    return is_inner or all(any(takes(field, one) for field in known) for one in values)


@pytest.mark.parametrize(
    "word", ["precision=float8", "optim.lr=fast", "optim=adam", "data.pack=on"]
)
def test_a_wrong_setting_would_be_refused(word):
    assert not is_accepted(*settings(word)[0])


def test_a_setting_in_a_sentence_is_accepted():
    groups = options("train")
    keys = {key for verb in VERBS for key in flatten(PRIMARY[verb])}
    rooms = {key.partition(".")[0] for key in keys if "." in key}
    used = {
        (p.name, *pair) for p in PAGES if p.name != "comparison.md" for c in code(p)
        for pair in settings(c)
    }  # fmt: skip
    ours = {u for u in used if u[1] in keys | groups.keys() or u[1].partition(".")[0] in rooms}
    assert len(ours) > 200
    wrong = {one for one in ours if not is_accepted(one[1], one[2])}
    assert not wrong, sorted(wrong)


def test_no_message_leaves_a_user_with_a_version_alone():
    """A refusal says what to type instead, or has WHAT_GOES_TOGETHER."""
    alone = re.compile(r"in this version|supported yet|implemented yet")
    assert [line for line in program().splitlines() if alone.search(line)] == []


SPEED = r"(?:tokens|pairs|steps|answers) a second|(?:tokens|pairs|steps)/s|TFLOP/s|GB/s"
FIGURE = re.compile(
    r"(?<![\w.,#§=^/-])(?:\d+\.\d+ (?:times|of|×)|[×x] \d+\.\d+|\d+ times (?:as|the|its)"
    r"|\d[\d,]*(?:\.\d+)? ?%|(?:\d[\d,]*(?:\.\d+)?|half an?|two|three|four|five|ten) "
    rf"(?:[KMGT]i?B|bytes a|[mµ]?s|seconds?|minutes?|hours?|{SPEED}))(?![\w/])"
)
"""What may have been measured: times, ratios, shares, sizes and speeds."""
SOURCES = table("project/figures.yaml")
RESULTS = [file for file in TRACKED if file.suffix == ".json" and "benchmarks" in file.parts]
NUMBER = re.compile(r"(?<![\w.,^/-])\d+(?:,\d{3})*(?:\.\d+)?(?![\d\w.-]*\w)")
UNIT = re.compile(r"(?<![\w.,^/-])(\d[\d,]*)(?: ?%| (?:m?s|[GMT]i?B|times|tokens|TFLOP/s)\b)")


def sections(page):
    return re.split(r"(?m)^(?=#+ )", sentences(page))


def figures(text):
    """Return the figures of a section."""
    return FIGURE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)|https?:\S+", "", text))


def named_results(text):
    """Return the files of results, and the benchmarks, that a section names."""
    files = {file for file in RESULTS if re.search(rf"[/`]{re.escape(file.name)}", text)}
    scripts = [name for room, name in SCRIPT.findall(text) if room == "benchmarks"]
    files |= {file for name in scripts for file in REPO.glob(f"benchmarks/{name}.py")}
    return files | {file for file in RESULTS if file.stem in scripts}


def test_a_figure_names_the_result_it_comes_from():
    """Or tests/project/figures.yaml does."""
    quoted = {
        (page.name, figure) for page in PAGES for text in sections(page) for figure in figures(text)
        if "zh-CN" not in page.name and not named_results(text)
    }  # fmt: skip
    listed = {(page, one) for page, each in SOURCES.items() for one in each}
    assert quoted == listed, "a page names the file of its result, or figures.yaml has the source"
    said = "1.4 times as fast, within 2%, in 3.5 s or five minutes, 7 GiB, 1,200 tokens a second"
    assert len(figures(said)) == 6


def values(source):
    """Return the numbers that a source gives: a constant, a key's default or arithmetic."""
    if source.startswith("key "):
        fields = [flatten(PRIMARY[verb]).get(source[4:]) for verb in VERBS]
        return [*leaves([str(one.default).rstrip("s") for one in fields if one])]
    if ":" in source:
        module, _, name = source.partition(":")
        return [*leaves(getattr(importlib.import_module(f"fsdp_trainer.{module}"), name))]
    return [eval(source, {"__builtins__": {}})]


def test_a_figure_without_a_result_is_what_its_source_gives():
    wrong = []
    for page, figure, source in ((p, f, s) for p, each in SOURCES.items() for f, s in each.items()):
        file, is_text, text = source.partition(": ")
        if is_text:
            wrong += [] if text in (REPO / file).read_text() else [(page, figure, source)]
        elif not source.startswith("said, "):
            (number,) = NUMBER.findall(figure.replace("%", ""))
            wrong += [] if is_in(number, values(source)) else [(page, figure, source)]
    assert not wrong


def leaves(tree):
    """Yield the numbers in a result, also in its names and descriptions."""
    if isinstance(tree, dict | list | tuple):
        for item in [*tree, *tree.values()] if isinstance(tree, dict) else tree:
            yield from leaves(item)
    elif isinstance(tree, int | float):
        yield tree
    elif isinstance(tree, str):
        yield from (float(number.replace(",", "")) for number in NUMBER.findall(tree))


def numbers_in(file):
    """Yield the numbers of a result, and those in the settings of its benchmark."""
    if file.suffix == ".json":
        yield from leaves(read_json(file))
    script = REPO / "benchmarks" / f"{file.stem.replace('published_runs', 'plan_published')}.py"
    for node in ast.parse(script.read_text()).body if script.exists() else ():
        if isinstance(node, ast.Assign | ast.ClassDef):
            yield from leaves([getattr(one, "value", None) for one in ast.walk(node)])


def is_in(number, results):
    """Return whether a number is in results, rounded as it is written, maybe in another unit."""
    value, near = float(number.replace(",", "")), 0.5 * 10 ** -len(number.partition(".")[2])
    units = (1, 100, 1e3, 1e-3, 1e-6, 1e-9, 1e-12, 1 / 2**10, 1 / 2**20, 1 / 2**30)
    return any(abs(abs(one) * unit - value) <= 1.02 * near for one in results for unit in units)


def test_a_measured_figure_is_the_one_in_its_result():
    """Numbers with decimals, thousands or a unit, in sections that name files of results."""
    wrong, count = [], 0
    for page, text in ((p, text) for p in PAGES for text in sections(p)):
        named = named_results(text)
        results = [n for file in named for n in numbers_in(file)]
        bare = re.sub(r"<!-- table -->[^¤]*<!-- end of table -->|`[^`]*`|\]\([^)]*\)", "", text)
        bare = re.sub(r"(?:torch|trl|DeepSpeed|[Aa]rXiv) [\d.]+|\d+%? of \d+%?", "", bare)
        with_unit = {*UNIT.findall(bare)}
        numbers = [n for n in NUMBER.findall(bare) if n in with_unit or re.search(r"[.,]", n)]
        numbers = numbers if results else []
        count += len(numbers)
        wrong += [
            (page.name, *{file.name for file in named}, n) for n in numbers if not is_in(n, results)
        ]
    assert not wrong, wrong
    assert count > 100


def test_the_table_of_planned_runs_is_that_of_the_stored_plans():
    planned = groups(stored(), "GPU", lambda row: row.gpu).splitlines()
    page = (REPO / "docs/plan.md").read_text()
    table = re.findall(r"(?ms)^<!-- table -->\n(.*?)\n<!-- end of table -->", page)[0].splitlines()
    assert len(table) == 6
    assert table == planned[: len(table)], (
        "run  python -m benchmarks.plan_published --plain --write"
    )


COUNTS = {"Fourteen families": len(FAMILIES) == 14}
"""Numbers of things of the program that a page gives, and whether they are right."""
COUNTED = re.compile(
    r"(?i)\b(?:\d+|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty) (?:"
    r"families|recipes|methods|optimizers|verbs|rewards|environments|layouts|faults|kinds of runs"
    r"|keys|formats|runs published)\b"
)


def test_a_number_of_things_is_right():
    said = {one for page in PAGES for one in COUNTED.findall(sentences(page))}
    assert said == COUNTS.keys(), said
    assert all(COUNTS.values())


def test_blocks_of_json_yaml_and_python_are_read_and_name_what_exists():
    keys = {key for verb in VERBS for key in flatten(PRIMARY[verb])}
    count = 0
    for page in PAGES:
        for kind, block in re.findall(r"(?ms)^```(json|yaml|python)\n(.*?)^```", page.read_text()):
            count += 1
            if kind == "json":
                assert all(json.loads(line) for line in block.splitlines()), (page.name, block)
            elif kind == "yaml":
                groups = {k: v for k, v in yaml.safe_load(block).items() if isinstance(v, dict)}
                own = {f"{key}.{name}" for key in groups for name in groups[key]}
                own = {one for one in own if one.partition(".")[0] in options("train")}
                own |= {*re.findall(r"(?m)^ +(\w+\.\w+):", block)}
                assert own <= keys, (page.name, own - keys)
            for module, names in re.findall(r"(?m)^from (fsdp_trainer\S*) import (.*)", block):
                for name in names.split(", "):
                    assert hasattr(importlib.import_module(module), name), (page.name, name)
    assert count > 20
