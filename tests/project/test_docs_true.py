"""Names, settings, files and figures on a page are those of the program and of its results."""

import ast
import contextlib
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest
from folders import REPO
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from world import read_json

from fsdp_trainer.cli import VERBS
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import options
from fsdp_trainer.config.composing.overrides import owner_of, takes
from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.config.verbs import PRIMARY

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
    tree = ast.parse(file.read_text())
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            yield node.value if isinstance(node.value, str) and node not in docstrings else ""
        for field in ("id", "attr", "arg", "name"):
            yield str(getattr(node, field, None) or "")


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
    return "\n".join(texts)


def test_a_name_in_a_sentence_is_one_of_the_program():
    known = {*WORD.findall(program()), *OTHERS}
    used = {(p.name, w) for p in PAGES for one in code(p) for w in WORD.findall(one)}
    ours = {(page, w) for page, w in used if page != "comparison.md" and not w.isupper()}
    wrong = {(page, w) for page, w in ours if w.removeprefix("validation_") not in known | {""}}
    assert not wrong, sorted(wrong)
    text = "\n".join(one for page in PAGES for one in code(page))
    assert [name for name in OTHERS if name not in text] == []


FILE = re.compile(
    r"(?<![\w./-])[\w./-]*?([\w-]+\.(?:py|jsonl?|md|html|yaml|pickle|npy|bin|pt|svg|log|txt))\b"
)


PATH = re.compile(
    r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]+\.py\b|(?<![\w./-])(?:benchmarks|conf|tests)/[\w./-]+"
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
    assert re.findall(r".*(?:in this version|supported yet|implemented yet).*", program()) == []


SPEED = r"(?:tokens|pairs|steps|answers) a second|(?:tokens|pairs|steps)/s|TFLOP/s|GB/s"
FIGURE = re.compile(
    rf"(?<![\w.#§=])\d[\d,]*(?:\.\d+ (?:[GMT]i?B|s|ms|minutes|hours|{SPEED})\b"
    rf"|[\d.]* (?:times (?:as|the time|the tokens)|% (?:faster|slower)|% MFU|{SPEED}))"
)
SOURCE = re.compile(
    r"benchmarks[/.][\w./-]+|[\w-]+\.json\b|performance\.md#|\(plan\.md|[Pp]lanned|[Cc]ounted"
    r"|`plan[`… ]|assumed|tests/[\w/]+\.py|runs/[\w/]+\.md"
)
RESULTS = [file for file in TRACKED if file.suffix == ".json" and "benchmarks" in file.parts]
NUMBER = re.compile(r"(?<![\w.,^/-])\d+(?:,\d{3})*(?:\.\d+)?(?![\d\w.-]*\w)")
SETTINGS = {"8,192", "32,000", "65,536"}
"""Sizes of a measured run, which the name of its result implies."""


def sections(page):
    return re.split(r"(?m)^(?=#+ )", sentences(page))


def test_a_figure_names_the_result_it_comes_from():
    texts = [(p.name, text) for p in PAGES for text in sections(p) if FIGURE.search(text)]
    assert len(texts) > 25
    wrong = [(n, FIGURE.findall(t)) for n, t in texts if not SOURCE.search(t)]
    assert not wrong, wrong


def leaves(tree):
    """Yield the numbers in a result."""
    if isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(item)
    elif isinstance(tree, int | float):
        yield tree


def is_in(number, results):
    """Return whether a number is in results, rounded as it is written, maybe in another unit."""
    value, near = float(number.replace(",", "")), 0.5 * 10 ** -len(number.partition(".")[2])
    units = (1, 100, 1e3, 1e-3, 1e-6, 1e-9, 1e-12, 1 / 2**10, 1 / 2**20, 1 / 2**30)
    return any(abs(abs(one) * unit - value) <= 1.02 * near for one in results for unit in units)


def test_a_measured_figure_is_the_one_in_its_result():
    """Numbers with decimals or thousands, in sections that name files in benchmarks/results."""
    wrong, count = [], 0
    for page, text in ((p, text) for p in PAGES for text in sections(p)):
        named = [file for file in RESULTS if f"/{file.name}" in text or f"`{file.name}`" in text]
        results = [n for file in named for n in leaves(read_json(file))]
        bare = re.sub(r"<!-- table -->[^¤]*<!-- end of table -->|`[^`]*`|\]\([^)]*\)", "", text)
        bare = re.sub(r"(?:torch|trl|DeepSpeed|[Aa]rXiv) [\d.]+|\d+%? of \d+%?", "", bare)
        numbers = [n for n in NUMBER.findall(bare) if re.search(r"[.,]", n)] if results else []
        count += len(numbers)
        wrong += [
            (page.name, *{file.name for file in named}, n)
            for n in numbers
            if n not in SETTINGS and not is_in(n, results)
        ]
    assert not wrong, wrong
    assert count > 100


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
