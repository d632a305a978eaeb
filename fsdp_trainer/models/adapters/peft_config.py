"""PEFT's folders: adapter_config.json and the tensors' names and shapes. Does not import torch."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp_trainer.config.paths import ADAPTER_CONFIG
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE, A, B, scale_divisor

Shape = tuple[int, ...]
WEIGHTS_FILE = "adapter_model.safetensors"
OTHER_WEIGHTS = "adapter_model.bin"
PREFIX = "base_model.model."
"""Prefix of the base model's names in PEFT's files."""
FUSED_RANKS = "fused_ranks"
"""Metadata key in our files: JSON with the ranks of a fused matrix's parts by layer."""
LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")
"""Prefix of the blocks' names in a model for text and images."""
BLOCK_INDEX = re.compile(r".*?\.[^.]*\.(?P<index>\d+)\.")
TENSORS = {
    f"{A}.weight": A,
    f"{B}.weight": B,
    MAGNITUDE: MAGNITUDE,
    f"{MAGNITUDE}.weight": MAGNITUDE,
}
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
COMPUTED: dict[str, tuple] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None, {}),
    "use_bdlora": (None, {}, False),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
}
"""Keys that change the computation of an adapter, with the values that are supported here."""
READ = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "base_model_name_or_path",
)
WITHOUT_EFFECT = (
    "auto_mapping",
    "peft_version",
    "inference_mode",
    "init_lora_weights",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "velora_config",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
)
"""Keys that only describe how an adapter was initialised or trained."""
MERGE_WITH_PEFT = (
    "\npeft can merge it into its base model, which is a model like any other then:"
    "\nPeftModel.from_pretrained(…).merge_and_unload().save_pretrained(DIR)"
)
DEFAULT_VALUE = 8
"""PEFT's own default of `r` and `lora_alpha`."""
PLAIN_PATTERN = re.compile(r"[\w.-]*")
"""A pattern without characters of regular expressions but dots."""
MAX_MISFITS = 20
"""Largest number of tensors in a message."""


@dataclass
class PeftFolder:
    """An adapter in PEFT's format.

    config: content of adapter_config.json. shapes: shapes of the tensors by name without PREFIX.
    fused_ranks: see FUSED_RANKS; empty for files that are not ours.
    """

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, Shape]
    fused_ranks: dict[str, int]

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of B·A for this rank and alpha."""
        return alpha / scale_divisor(rank, self.is_rslora)

    @property
    def is_rslora(self) -> bool:
        """True if the folder was trained with rsLoRA."""
        return bool(self.config.get("use_rslora"))

    def pattern(self, key: str, default: str, module: str) -> Any:
        """Return a module's value in rank_pattern or alpha_pattern, by PEFT's rules.

        key: name of the pattern; default: name of the key for modules without a match.
        """
        if self.targets_parameter(f"{module}.weight"):
            module = f"{module}.weight"
        if key not in self._patterns:
            self._patterns[key] = NamePatterns(self.config.get(key) or {})
        return self._patterns[key].value(module, self.config.get(default, DEFAULT_VALUE))

    @cached_property
    def _patterns(self) -> dict[str, "NamePatterns"]:
        """rank_pattern and alpha_pattern, as soon as they are asked for."""
        return {}

    @cached_property
    def _ends(self) -> dict[str, frozenset[str]]:
        """The names in the lists of the configuration, by key."""
        lists = ("target_modules", "target_parameters", "exclude_modules")
        values = {key: self.config.get(key) for key in lists}
        return {key: frozenset(v) for key, v in values.items() if v and not isinstance(v, str)}

    def targets(self, module: str) -> bool:
        """Return True if PEFT adapts this linear layer. module: its name in the folder."""
        if self.targets_parameter(f"{module}.weight"):
            return True
        if self._names("exclude_modules", module):
            return False
        saved = self.config.get("modules_to_save") or []
        if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in saved):
            return False
        targets = self.config.get("target_modules")
        if isinstance(targets, str):
            return targets == "all-linear" or bool(re.fullmatch(targets, module))
        return self._names("target_modules", module) and self._is_transformed(module)

    def targets_parameter(self, name: str) -> bool:
        """Return True if target_parameters has this parameter, such as one of experts."""
        return self._names("target_parameters", name)

    def _names(self, key: str, module: str) -> bool:
        """Return True if a module's name ends in a name of the list or matches the expression."""
        value = self.config.get(key)
        if isinstance(value, str):
            return bool(re.fullmatch(value, module))
        names = self._ends.get(key, frozenset())
        return bool(names) and any(end in names for end in ends_of(module))

    def _is_transformed(self, module: str) -> bool:
        """Return True if layers_to_transform contains the module's block or is not set."""
        layers = self.config.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self.config.get("layers_pattern") or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        index = [BLOCK_INDEX] if not patterns else []
        index += [re.compile(rf"(?:^|.*?\.){name}\.(?P<index>\d+)\.") for name in patterns]
        matches = [match for each in index if (match := each.match(module))]
        layers = [layers] if isinstance(layers, int) else layers
        return bool(matches) and int(matches[0]["index"]) in layers


class NamePatterns:
    """Values by patterns of modules' names, of which the first that matches counts, as in PEFT.

    A pattern is a regular expression for a name or for its end after a dot. An adapter of experts
    may have tens of thousands of patterns and of names. So those of letters and dots are looked up,
    and only the others are searched.
    """

    def __init__(self, values: Mapping[str, Any]):
        self._values = list(values.values())
        self._searched: list[tuple[int, re.Pattern[str]]] = []
        self._plain: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        """By length, and by the places of the dots, which stand for any character."""
        for number, pattern in enumerate(values):
            if PLAIN_PATTERN.fullmatch(pattern):
                dots = tuple(i for i, character in enumerate(pattern) if character == ".")
                same_form = self._plain.setdefault(len(pattern), {}).setdefault(dots, {})
                same_form.setdefault(pattern, number)
            else:
                self._searched.append((number, re.compile(rf"(.*\.)?({pattern})$")))

    def value(self, name: str, default: Any) -> Any:
        """Return the value of the first pattern that matches a name."""
        first = min(self._looked_up(name), default=len(self._values))
        for number, pattern in self._searched:
            if number > first:
                break
            if pattern.match(name):
                first = number
        return self._values[first] if first < len(self._values) else default

    def _looked_up(self, name: str) -> Iterator[int]:
        for end in ends_of(name):
            for dots, patterns in self._plain.get(len(end), {}).items():
                characters = list(end)
                for place in dots:
                    characters[place] = "."
                number = patterns.get("".join(characters))
                if number is not None:
                    yield number


def ends_of(name: str) -> list[str]:
    """Return a name, and its ends after each dot."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Raises UserError that lists everything in it that is not supported here.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        problem = Problem(str(path), str(error))
        raise UserError("cannot read the adapter's configuration", [problem]) from None
    problems = unsupported(config)
    if problems:
        raise UserError(f"{path} describes an adapter that is not supported", problems)
    return config


def unsupported(config: dict[str, Any]) -> list[Problem]:
    """Return a problem for everything in adapter_config.json that is not supported here."""
    problems = [
        Problem(f"{key}={json.dumps(config[key])}", _why_not(key, values))
        for key, values in COMPUTED.items()
        if key in config and config[key] not in values
    ]
    adapts_matrices = isinstance(config.get("target_modules"), str | list)
    adapts_matrices |= bool(config.get("target_parameters"))
    same_task = config.get("task_type") in COMPUTED["task_type"]
    if problems and adapts_matrices and same_task and not config.get("alora_invocation_tokens"):
        problems[-1].reason += MERGE_WITH_PEFT
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        text = (
            "changes the base model's weights when the adapter is made: with others it is useless."
            "\nSave it anew with peft's  path_initial_model_for_weight_conversion"
        )
        problems.append(Problem(f"init_lora_weights={start}", text))
    is_lora = config.get("peft_type", "LORA") == "LORA"
    if is_lora and not adapts_matrices:
        problems.append(Problem("target_modules", "must be a list or a text"))
    return problems


def without_effect(config: dict[str, Any]) -> list[str]:
    """Return a line for each setting of adapter_config.json that has no effect here."""
    lines = []
    if config.get("lora_dropout"):
        lines.append(
            f"lora_dropout={config['lora_dropout']:g} is not applied: training here has no dropout"
        )
    known = {*COMPUTED, *READ, *WITHOUT_EFFECT, "lora_dropout"}
    lines += [
        f"{key}={json.dumps(value)} is unknown and has no effect"
        for key, value in config.items()
        if value and key not in known
    ]
    return lines


def _why_not(key: str, values: tuple) -> str:
    if key == "peft_type":
        return "is not computed here: only LORA is, with DoRA and rsLoRA"
    if key == "bias":
        return "trains the base model's biases, which is not computed here: only bias=none is"
    allowed = json.dumps(values[0])
    return f"is not computed here: only {key}={allowed} is"


def read_folder(folder: Path) -> PeftFolder:
    """Read a PEFT folder: its configuration and the shapes of its tensors.

    Raises UserError for an adapter that is not supported here, and for broken files.
    """
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        header = _read_header(path)
    except FileNotFoundError:
        text = "is not there: copy or download it again"
        if (folder / OTHER_WEIGHTS).is_file():
            text = (
                f"is not there, only {OTHER_WEIGHTS}, which may run code. Load and save it once:"
                "\nPeftModel.from_pretrained(…).save_pretrained(DIR)"
            )
        raise UserError("there are no weights", [Problem(str(path), text)]) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        text = f"is no safetensors file, or was copied in part: do it again ({error})"
        raise UserError("the adapter cannot be read", [Problem(str(path), text)]) from None
    metadata = header.pop("__metadata__", {})
    shapes = {plain_name(name): tuple(entry["shape"]) for name, entry in header.items()}
    ranks = json.loads(metadata.get(FUSED_RANKS, "{}"))
    return PeftFolder(folder, config, shapes, ranks)


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        header = json.loads(file.read(min(length, size)))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    end = 8 + length + max(ends, default=0)
    if end != size:
        raise ValueError(f"it has {size:,} bytes; its header says {end:,}")
    return header


def plain_name(name: str) -> str:
    """Return the name of a tensor in PEFT's file without the prefixes of PEFT and image models."""
    return LANGUAGE_MODEL.sub(r"\1", name.removeprefix(PREFIX))
