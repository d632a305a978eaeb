"""README.md of an export: the model card that the Hugging Face hub shows."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jinja2
from omegaconf import OmegaConf

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.checkpoint.atomic_files import read_manifest
from fsdp_trainer.checkpoint.frozen_weights import Base, read_base
from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import CONF
from fsdp_trainer.config.keys import default_of
from fsdp_trainer.config.methods import method_in
from fsdp_trainer.config.paths import checkpoint_configuration, is_hub_id
from fsdp_trainer.config.schema import SELECTORS, TrainConfig
from fsdp_trainer.config.yaml_text import dump_yaml
from fsdp_trainer.models.config import CLASSIFIER, TAGGER, has_tower, is_embedding
from fsdp_trainer.observe.records import parse

CARD = "README.md"
GROUPS = (
    *("batch", "train", "loss", "adapter", "objective", "data"),
    *("precision", "optim", "schedule"),
)
"""Groups whose keys decide what a run trains."""
ALWAYS = ("batch.seq_len", "batch.rows", "optim.name", "optim.lr", "schedule.name")
NOT_SHOWN = (
    *("data.path", "data.validation", "data.cache", "data.workers", "data.prefetch"),
    "objective.server_folder",
)
FORMATS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Options of the group precision, by their number format."""
SHOWN = ("loss", "objective", "validation_loss", "validation_bits_per_byte", "reward")
"""Metrics in the table, beside those of tasks."""
LAST_BYTES = 2**20
"""Of metrics.jsonl, whose last lines are read."""


class Task(NamedTuple):
    """The use of a model: the hub's tag, and the classes that load it."""

    tag: str
    auto: str
    reader: str = "AutoTokenizer"
    variable: str = "tokenizer"
    is_served: bool = True


TASKS = {
    "ForCausalLM": Task("text-generation", "AutoModelForCausalLM"),
    "ForSequenceClassification": Task(
        "text-classification",
        "AutoModelForSequenceClassification",
        is_served=False,
    ),
    "ForTokenClassification": Task(
        "token-classification",
        "AutoModelForTokenClassification",
        is_served=False,
    ),
    "ForConditionalGeneration": Task(
        "image-text-to-text",
        "AutoModelForImageTextToText",
        "AutoProcessor",
        "processor",
    ),
}
"""By the ending of the architecture's name."""


OF_EMBEDDINGS = Task("feature-extraction", "AutoModel", is_served=False)


class MadeClass(NamedTuple):
    """A class of transformers' generic one, by the name that vLLM knows it by."""

    name: str
    generic: str
    parent: str

    @classmethod
    def of(cls, config: Json) -> "MadeClass | None":
        """Return the class of a model with a tower; None if transformers has one."""
        name = str((config.get("architectures") or [""])[0])
        ending = next((end for end in (CLASSIFIER, TAGGER) if name.endswith(end)), None)
        if ending is None or not has_tower(config):
            return None
        import transformers  # heavy, and there already: it computes such a model

        parent = f"{name.removesuffix(ending)}PreTrainedModel"
        return None if hasattr(transformers, name) else cls(name, f"Generic{ending}", parent)


def write_model_card(folder: Path, checkpoint: Path, *, is_adapter: bool) -> None:
    """Write README.md into an export of a checkpoint, unless its configuration is missing.

    It has no path of this machine and no password; the licence is left open.
    """
    if not (checkpoint / "config.yaml").is_file():
        return
    text = template().render(card=ModelCard(checkpoint, is_adapter))
    (folder / CARD).write_text(safe_lines(text), encoding="utf-8", errors="replace")


@cache
def template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: " ".join(text.split()).replace("|", "\\|")
    return environment.get_template("model_card.md.jinja")


def safe_lines(text: str) -> str:
    """Return a text of several lines without control characters and passwords."""
    return "\n".join(safe(line) for line in text.split("\n"))


@dataclass
class ModelCard:
    """The content of a model card. Facts that are not recorded are left out."""

    checkpoint: Path
    is_adapter: bool

    @cached_property
    def configuration(self) -> Json:
        tree = checkpoint_configuration(self.checkpoint)
        return {key: reduce(part_of, key.split("."), tree) for key in flatten(TrainConfig)}

    @property
    def run(self) -> Path:
        return self.checkpoint.resolve().parents[1]

    @property
    def name(self) -> str:
        return str(self.configuration.get("run.name") or self.run.name)

    @cached_property
    def base(self) -> Base:
        return read_base(self.checkpoint)

    @property
    def base_name(self) -> str:
        """The base model's id on the hub, else the name of its folder; "" for random weights."""
        init_from = str(self.base.hub_id or self.configuration.get("model.init_from") or "")
        return init_from if is_hub_id(init_from) else PurePosixPath(init_from).name

    @property
    def base_id(self) -> str:
        return self.base_name if "/" in self.base_name else ""

    @property
    def rank(self) -> int:
        return int(self.configuration.get("adapter.rank") or 0)

    @cached_property
    def manifest(self) -> Json:
        return read_manifest(self.checkpoint)

    @property
    def versions(self) -> dict[str, str]:
        return self.manifest.get("versions") or {}

    @cached_property
    def config(self) -> Json:
        text = (self.checkpoint / "hf" / "config.json").read_text(encoding="utf-8")
        read: Json = json.loads(text)
        return read

    @property
    def made_class(self) -> MadeClass | None:
        return MadeClass.of(self.config)

    @property
    def class_name(self) -> str:
        return self.made_class.name if self.made_class else self.task.auto

    @property
    def labels(self) -> int:
        """The numbers of the model's head; 0 if it has none."""
        return len(self.config.get("id2label") or ())

    @cached_property
    def task(self) -> Task:
        architecture = str((self.config.get("architectures") or [""])[0])
        endings = (task for end, task in TASKS.items() if architecture.endswith(end))
        usual = OF_EMBEDDINGS if is_embedding(self.config) else TASKS["ForCausalLM"]
        task = next(endings, usual)
        of_media = TASKS["ForConditionalGeneration"]
        if not has_tower(self.config):
            return task
        return task._replace(reader=of_media.reader, variable=of_media.variable)

    @property
    def tags(self) -> list[str]:
        names = [method_in(self.configuration), self.configuration.get("adapter.name")]
        return ["fsdp_trainer", *(str(name) for name in names if name not in (None, "none"))]

    @property
    def method(self) -> str:
        return ", ".join(self.tags[1:])

    @property
    def summary(self) -> str:
        if not self.base_name:
            return f"A model trained from random weights ({self.method})."
        kind = "An adapter of" if self.is_adapter else "A model fine-tuned from"
        return f"{kind} {self.base_name} ({self.method})."

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        yield "data", ", ".join(data_names(self.configuration.get("data.path")))
        yield from (("", line) for line in self.data_lines)
        rows, length = (self.configuration.get(f"batch.{k}") for k in ("rows", "seq_len"))
        yield "steps", f"{self.step:,}, each of {rows} rows of {length} tokens"
        results = self.results
        if "tokens" in results:
            yield "tokens", f"{results['tokens']:,.0f}"
        for name, value in results.items():
            if name in SHOWN or name.startswith("tasks/"):
                yield name.replace("_", " "), f"{value:.4f}"

    @property
    def step(self) -> int:
        return int(self.manifest.get("step") or 0)

    @property
    def data_lines(self) -> list[str]:
        """The sizes of the data, as the run's last start printed them."""
        starts = [line["about"] for line in lines_of(self.run / "events.jsonl") if "about" in line]
        about = starts[-1] if starts else []
        return [line.removeprefix("data").strip() for line in about if line.startswith("data ")]

    @property
    def results(self) -> dict[str, float]:
        results: dict[str, float] = {}
        for line in lines_of(self.run / "metrics.jsonl", LAST_BYTES):
            if line.get("step", math.inf) <= self.step:
                results |= {k: v for k, v in line.items() if isinstance(v, int | float)}
        return results

    @property
    def keys(self) -> str:
        chosen: list[dict[str, str]] = []
        tree: Json = {"defaults": chosen}
        options = {group: self.option(group) for group in GROUPS}
        for key, f in flatten(TrainConfig).items():
            group, _, name = key.partition(".")
            value = self.configuration.get(key)
            if group not in GROUPS or key in NOT_SHOWN or value is None:
                continue
            option, values = options[group]
            differs = key in ALWAYS or value != default_of(f)
            if option and name == SELECTORS[group]:
                chosen += [{f"override /{group}": option}] if differs else []
            elif value != values[name] if name in values else differs:
                tree.setdefault(group, {})[name] = without_folders(value)
        return dump_yaml(tree, width=100).rstrip()

    def option(self, group: str) -> tuple[str, Json]:
        name = str(self.configuration.get(f"{group}.{SELECTORS.get(group)}"))
        name = FORMATS.get(name, name)
        file = CONF / group / f"{name}.yaml"
        return (name, values_in(file)) if file.is_file() else ("", {})


@cache
def values_in(file: Path) -> Json:
    """Return the values of an option's file, which takes longer to read than to write a card."""
    return dict(OmegaConf.load(file))


def part_of(tree: Any, name: str) -> Any:
    return tree.get(name) if isinstance(tree, dict) else None


def lines_of(path: Path, last_bytes: int | None = None) -> Iterator[Json]:
    """Yield the objects of a run's file; of a longer file those in its last bytes."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if last_bytes:
            file.seek(max(0, file.seek(0, os.SEEK_END) - last_bytes))
        for text in file:
            # the first may begin in its middle, the last be incomplete
            if line := parse(text.decode(errors="replace")):
                yield line


def data_names(path: Any) -> list[str]:
    entries = path if isinstance(path, list) else [path]
    names = []
    for entry in entries:
        about = entry if isinstance(entry, dict) else {"path": entry}
        name = without_folders(str(about.get("path")).rstrip("/"))
        weight = about.get("weight")
        names.append(f"{name} (weight {weight})" if weight is not None else str(name))
    return names


def without_folders(value: Any) -> Any:
    """Return a value with the last part in place of each path of this machine in it."""
    if isinstance(value, dict):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    if isinstance(value, str) and "://" not in value and value.startswith(("/", "~", "./", "../")):
        return PurePosixPath(value).name
    return value
