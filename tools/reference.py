"""Writes docs/reference/ and docs/llms.txt: what the program's tables and rules say.

python -m tools.reference          # write the pages
python -m tools.reference --check  # exit code 1 if a page differs
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import fields
from inspect import getdoc
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fsdp_trainer.cli import VERBS
from fsdp_trainer.config.check import Report, flatten, value_of
from fsdp_trainer.config.composing.compose import CONF, compose, options
from fsdp_trainer.config.composing.help import first_line, own_keys
from fsdp_trainer.config.composing.recipe_heads import recipe_heads
from fsdp_trainer.config.devices import DEVICES
from fsdp_trainer.config.key_texts import comment, written
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.methods import METHODS
from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.config.rules.rules import check_rules
from fsdp_trainer.config.schema import Optim, TrainConfig
from fsdp_trainer.config.verbs import PRIMARY, ExportConfig
from fsdp_trainer.data.files.built_in_templates import TEMPLATES
from fsdp_trainer.data.records.record_formats import FORMATS
from fsdp_trainer.errors import WHAT_GOES_TOGETHER
from fsdp_trainer.models.hf.further_blocks import HEADS
from fsdp_trainer.observe.metric_groups import EVENTS, GENERAL, TITLES, WITHOUT_CURVE
from fsdp_trainer.rl.environments.known_environments import ENVIRONMENTS
from fsdp_trainer.rl.rewards.table import REWARDS

REPO = Path(__file__).parents[1]
FOLDER = REPO / "docs" / "reference"
WRITTEN = "This page is written by `python -m tools.reference` from the program's own tables.\n"


class Dimension(NamedTuple):
    """One dimension of the support matrix: the overrides of each choice."""

    title: str
    choices: dict[str, list[str]]


BASE = [
    "model=llama3_2_1b", "tokenizer.path=demo:bytes", "data.path=demo:backwards", "train.steps=100",
    "precision=bf16", "compile=disabled",
]  # fmt: skip
NEEDED = {
    "grpo": ["objective.rewards=[exact]"],
    "distil": ["objective.teacher=org/teacher"],
}
"""Keys without which a method is refused."""
OTHERS = [
    Dimension(
        "layout",
        {
            "fsdp": [],
            "hsdp": ["sharding=hsdp", "sharding.replicas=2"],
            "ddp": ["sharding=ddp"],
            "tensor": ["sharding.tensor=2"],
            "context": ["sharding.context=2"],
            "pipeline": ["sharding.pipeline=2"],
            "replica groups": ["replicas.method=sync", "replicas.lighthouse=node:29510"],
        },
    ),
    Dimension("precision", {name: [f"precision={name}"] for name in options("train")["precision"]}),
    Dimension("adapter", {name: [f"adapter={name}"] for name in options("train")["adapter"]}),
    Dimension("optimizer", {name: [f"optim={name}"] for name in options("train")["optim"]}),
    Dimension(
        "recomputation",
        {
            "none": [],
            "full": ["activation_checkpoint=full"],
            "selective": ["activation_checkpoint=selective"],
            "budget": ["activation_checkpoint=budget", "compile=enabled"],
            "offload": ["activation_checkpoint.offload=true"],
        },
    ),
    Dimension(
        "data",
        {
            "best_fit": [],
            "packing none": ["data.packing=none"],
            "packing stream": ["data.packing=stream", "data.too_long=split"],
            "streaming": ["data.streaming=true"],
        },
    ),
    Dimension(
        "memory",
        {
            "weights on the host": ["sharding.cpu_offload=true"],
            "states on the host": ["optim.offload=cpu"],
            "states on a disk": ["optim.offload=disk"],
            "8-bit messages": ["sharding.quantize=both"],
        },
    ),
]


def methods() -> Dimension:
    """Return the methods as a dimension."""
    return Dimension(
        "method", {name: [f"objective={name}", *NEEDED.get(name, [])] for name in METHODS}
    )


# --- the support matrix ---------------------------------------------------------------------------


class Matrix:
    """What the rules of the configuration say about each pair of choices."""

    def __init__(self, dimensions: list[Dimension]):
        self.dimensions = dimensions
        self.base = self._composed([])
        self.changes = {
            (dimension.title, name): self._changes(overrides)
            for dimension in dimensions
            for name, overrides in dimension.choices.items()
        }
        self.notes: dict[str, int] = {}
        """Number of each reason, in the order in which they were met."""

    def _composed(self, overrides: list[str]) -> TrainConfig:
        return compose("train", [*without(BASE, overrides), *overrides], inputs=False)

    def _changes(self, overrides: list[str]) -> dict[str, Any]:
        """Return the values that differ from the base, by key. Raises UserError if refused."""
        changed = self._composed(overrides)
        return {
            key: value_of(changed, key)
            for key in flatten(TrainConfig)
            if value_of(changed, key) != value_of(self.base, key)
        }

    def reasons(self, *chosen: tuple[str, str]) -> list[str]:
        """Return why choices are refused together; empty if they are not."""
        cfg = deepcopy(self.base)
        for choice in chosen:
            for key, value in self.changes[choice].items():
                group, name = key.split(".")
                setattr(getattr(cfg, group), name, value)
        report = Report({}, [], set())
        check_rules(cfg, report)
        texts = [f"`{one.what}`: {one.reason}" for one in report.problems]
        texts = [text.replace(f": {WHAT_GOES_TOGETHER}", "") for text in texts]  # on that page
        return [" ".join(text.replace(f"={cfg.objective.name} ", "=… ").split()) for text in texts]

    def table(self, down: Dimension, across: Dimension) -> str:
        """Return a table of two dimensions: ✓, or the numbers of the reasons against it."""
        rows = []
        for first in down.choices:
            cells = []
            for second in across.choices:
                reasons = self.reasons((down.title, first), (across.title, second))
                numbers = [self.notes.setdefault(one, len(self.notes) + 1) for one in reasons]
                cells.append(" ".join(f"[{number}]" for number in numbers) or "✓")
            rows.append([f"**{first}**", *cells])
        return table([f"{down.title} \\ {across.title}", *across.choices], rows)


def without(base: list[str], overrides: list[str]) -> list[str]:
    """Return the base without the keys that the overrides set."""
    keys = {one.partition("=")[0] for one in overrides}
    return [one for one in base if one.partition("=")[0] not in keys]


def support() -> str:
    """Return the page with the support matrix."""
    dimensions = [methods(), *OTHERS]
    matrix = Matrix(dimensions)
    parts = [
        "# What works with what\n\n"
        "Each table crosses two choices. ✓: the configuration accepts them together; a number: it"
        " refuses them, with the reason below. Each cell is an answer of the program's own rules"
        f" for a dense model. {WRITTEN}"
    ]
    for down, across in combinations(dimensions, 2):
        text = matrix.table(down, across)
        if "[" in text:
            parts.append(f"## {down.title.capitalize()} and {across.title}\n\n{text}")
        else:
            parts.append(f"## {down.title.capitalize()} and {across.title}\n\nAll combinations.\n")
    reasons = "\n".join(f"{number}. {reason}" for reason, number in matrix.notes.items())
    parts.append(f"## Reasons\n\n{reasons}\n")
    return "\n".join(parts)


# --- the other pages ------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return a Markdown table."""
    columns = [*head]
    lines = [columns, ["---"] * len(columns), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def named(values: Iterable[str]) -> str:
    """Return names as code, with commas."""
    return ", ".join(f"`{value}`" for value in values)


def commands() -> str:
    """Return the page of the verbs, exit codes and extras."""
    verbs = [
        [f"`{verb}`", first_line(PRIMARY[verb]), named(own_keys(PRIMARY[verb]))] for verb in VERBS
    ]
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    own = {"test", "bench", "lint", "docs"}
    extras = [
        [f"`{name}`", named(packages) or "nothing more"]
        for name, packages in project["optional-dependencies"].items()
        if name not in own
    ]
    return "\n".join(
        [
            f"# Commands\n\n`fsdp-trainer VERB key=value …`; without a verb it trains. {WRITTEN}",
            "## Verbs\n\nTraining's keys are on [the page of all keys](../configuration.md).\n",
            table(["verb", "what it does", "its own keys"], verbs),
            "## Extras\n\n`pip install 'fsdp_trainer[NAME]'` installs them.\n",
            table(["extra", "packages"], extras),
        ]
    )


def methods_page() -> str:
    """Return the page of training methods, rewards and environments."""
    keys = {f.name: f for f in fields(type(TrainConfig().objective))}
    rows = []
    for name, spec in METHODS.items():
        used = [key for key, f in keys.items() if name in (f.metadata.get("used_by") or ())]
        rows.append([f"`{name}`", spec.reads, spec.second or "", named(used)])
    return "\n".join(
        [
            "# Methods, rewards, environments\n\nMethods of training, and the parts of those that"
            f" learn from rewards. {WRITTEN}",
            "## Methods\n\n`objective=NAME`. What each refuses is in the"
            " [support matrix](support.md).\n",
            table(["method", "rows", "second model", "its keys, `objective.…`"], rows),
            "## Rewards\n\nAn entry of `objective.rewards`: a name, or a mapping as"
            " `{name: length, max: 512}`.\n",
            *(settings_of(name, kind) for name, kind in REWARDS.items()),
            "## Environments\n\n`objective.environment`, in the same form.\n",
            *(settings_of(name, kind) for name, kind in ENVIRONMENTS.items()),
        ]
    )


def settings_of(name: str, kind: Any) -> str:
    """Return the section of a part with settings: its first sentence and a table of them."""
    rows = [
        [f"`{f.name}`", f"`{written(default_of(f))}`", comment(f)]
        for f in fields(kind)
        if "text" in f.metadata
    ]
    about = (getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")
    return f"### {name}\n\n{about}\n\n{table(['setting', 'default', 'meaning'], rows)}"


def models() -> str:
    """Return the page of model families and named sizes."""
    families = [
        [f"`{name}`", f"`{family.architecture}`", named(family.options)]
        for name, family in FAMILIES.items()
    ]
    sizes = []
    for file in sorted((CONF / "model").glob("*.yaml")):
        values = yaml.safe_load(file.read_text()) or {}
        if values.get("hidden_size"):
            shown = ("family", "hidden_size", "num_hidden_layers", "num_attention_heads")
            sizes.append([f"`{file.stem}`", *(values.get(key) or "" for key in shown)])
    return "\n".join(
        [
            "# Models\n\nThe families that our decoder computes, and the sizes that have a name."
            f" {WRITTEN}",
            "## Families of our decoder\n\nEvery other causal model of transformers is computed by"
            " its own class ([any model](../any-model.md)).\n",
            table(["model_type", "class", "optional keys of config.json"], families),
            "## Heads for a further token\n\n`objective.mtp` trains them ([MTP](../mtp.md)).\n",
            table(
                ["model_type", "names of its tensors in a folder"],
                [[f"`{name}`", f"`{start.format(blocks='N')}…`"] for name, start in HEADS.items()],
            ),
            "## Named sizes\n\n`model=NAME`.\n",
            table(["name", "family", "width", "blocks", "heads"], sizes),
        ]
    )


def data() -> str:
    """Return the page of row formats, their columns, and chat templates."""
    parts = [
        "# Rows and templates\n\nThe columns of each format of rows, and the chat templates."
        f" {WRITTEN}",
        "## Rows\n\n`data.format=auto` compares a file's columns with these, from top to bottom."
        " `data.fields={meaning: column}` names others.\n",
    ]
    for name, meanings in FORMATS.items():
        rows = [
            [f"`{key}`", "yes" if meaning.required else "", named(meaning.names)]
            for key, meaning in meanings.items()
        ]
        parts.append(f"### {name}\n\n{table(['meaning', 'required', 'columns'], rows)}")
    templates = [
        [f"`{name}`", named(template.markers), named(template.special)]
        for name, template in TEMPLATES.items()
    ]
    parts.append("## Chat templates\n\n`data.template=NAME`.\n")
    parts.append(table(["template", "texts that must be one token", "special tokens"], templates))
    return "\n".join(parts)


def optimizers() -> str:
    """Return the page of optimizers."""
    names = next(f for f in fields(Optim) if f.name == "name").metadata["choices"]
    rows = []
    for name in names:
        used = [f.name for f in fields(Optim) if name in (f.metadata.get("used_by") or ())]
        chosen = [
            option for option in options("train")["optim"] if of_option("optim", option) == name
        ]
        rows.append([f"`{name}`", named(f"optim={option}" for option in chosen), named(used)])
    return "\n".join(
        [
            f"# Optimizers\n\nAll optimizers, and the keys that only some have. {WRITTEN}",
            table(["optimizer", "options", "keys that only some optimizers have"], rows),
        ]
    )


def of_option(group: str, option: str) -> str | None:
    """Return the `name` that the file of an option sets."""
    tree = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
    return tree.get("name", "adamw")


def hardware() -> str:
    """Return the page of GPUs."""
    rows = [
        [
            f"`{name}`",
            f"{one.memory_gib:g}",
            f"{one.flops / 1e12:g}" if one.flops else "",
            f"{one.memory_rate / 1e9:,.0f}",
            f"{one.link / 1e9:g}",
            f"{one.network * 8 / 1e9:g}",
            one.per_node,
        ]
        for name, one in DEVICES.items()
    ]
    head = [
        "plan.gpu", "memory, GiB", "bfloat16, TFLOP/s", "memory, GB/s", "link, GB/s",
        "network, Gbit/s", "a node",
    ]  # fmt: skip
    return f"# GPUs\n\nThe table of `plan.gpu`. {WRITTEN}\n{table(head, rows)}"


def metrics() -> str:
    """Return the page of the numbers in metrics.jsonl and of the events."""
    parts = [
        "# Metrics and events\n\nThe names in `metrics.jsonl`, with the titles of their charts, and"
        " in `events.jsonl`. A name that ends with / begins several names."
        f" [What they mean](../seeing.md#metrics). {WRITTEN}"
    ]
    for section, titles in GENERAL.items():
        rows = [[f"`{name}`", title.text] for name, title in titles.items()]
        parts.append(f"## {section}\n\n{table(['name', 'title'], rows)}")
    rows = [
        [f"`{name}`", f"{title.text}: {title.line}" if title.line else title.text]
        for name, title in TITLES.items()
    ]
    parts.append(f"## Of methods\n\n{table(['name', 'title'], rows)}")
    for title, texts in (("Without a chart", WITHOUT_CURVE), ("Events", EVENTS)):
        rows = [[f"`{name}`", text] for name, text in texts.items()]
        parts.append(f"## {title}\n\n{table(['name', 'meaning'], rows)}")
    return "\n".join(parts)


def recipes() -> str:
    """Return the page of the packaged recipes."""
    head = ["recipe", "what it does", "hardware", "memory a GPU", "a step", "speed", "start"]
    rows = [
        [f"`{name}`", *(said or "–" for said in one[:-1]), f"`{one.start}`"]
        for name, one in recipe_heads().items()
    ]
    return (
        "# All recipes\n\n`+recipe=NAME`; `fsdp-trainer recipes` prints the same. Memory and speed"
        " are estimates of `plan` ([how recipes work](../recipes.md#where-the-numbers-come-from))."
        f" {WRITTEN}\n{table(head, rows)}"
    )


def exports() -> str:
    """Return the page of export forms."""
    rows = [
        [f"`{f.name}`", f"`{written(default_of(f))}`", comment(f)] for f in fields(ExportConfig)
    ]
    keys = table(["key", "default", "meaning"], rows)
    about = f"The keys of `fsdp-trainer export`, and the forms it writes. {WRITTEN}"
    return f"# Exports\n\n{about}\n{keys}"


def index() -> str:
    """Return the list of all pages for language models, in the order of the site's navigation."""
    lines = (REPO / "mkdocs.yml").read_text().partition("\nnav:\n")[2].splitlines()
    parts = [
        "# fsdp_trainer\n",
        "> Pretrains and fine-tunes language models with PyTorch's FSDP2, on a CPU, a GPU or many"
        " nodes.\n",
    ]
    headings: list[str] = []  # those above the next page that are not written yet
    for line in lines:
        level = 2 + (len(line) - len(line.lstrip()) - 2) // 4
        title, _, file = line.strip().removeprefix("- ").partition(": ")
        if title.endswith(":"):
            headings = [*headings[: level - 2], f"\n{'#' * level} {title.rstrip(':')}\n"]
        elif file and ".zh-CN." not in file:
            parts += [*headings, f"- [{title.strip(chr(34))}]({file}): {first_sentence(file)}"]
            headings = [""] * len(headings)
    return "\n".join(part for part in parts if part).replace("\n\n\n", "\n\n") + "\n"


def first_sentence(file: str) -> str:
    """Return the first sentence of a page below its title, as plain text."""
    blocks = (REPO / "docs" / file).read_text().split("\n\n")
    text = next(one for one in blocks if not one.startswith(("#", "|", "!", "```", "English ·")))
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(text.split()))
    return re.split(r"(?<=[.:]) ", plain)[0].rstrip(":.") + "."


PAGES = {
    "commands": commands,
    "data": data,
    "exports": exports,
    "hardware": hardware,
    "methods": methods_page,
    "metrics": metrics,
    "models": models,
    "optimizers": optimizers,
    "recipes": recipes,
    "support": support,
}


def pages() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each page."""
    for name, make in PAGES.items():
        yield FOLDER / f"{name}.md", make()
    yield REPO / "docs" / "llms.txt", index()


def main() -> int:
    """Write the pages, or compare them. Returns the exit code."""
    is_check, code = "--check" in sys.argv, 0
    for path, text in pages():
        if path.exists() and path.read_text() == text:
            continue
        code = 1
        print(f"{'differs' if is_check else 'written'}: {path.relative_to(REPO)}")
        if not is_check:
            path.write_text(text)
    return code if is_check else 0


if __name__ == "__main__":
    sys.exit(main())
