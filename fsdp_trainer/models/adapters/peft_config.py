"""PEFT's folders: adapter_config.json and the tensors' names and shapes. Does not import torch."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fsdp_trainer.base.json_files import Json, read_object
from fsdp_trainer.base.time_limit import TooSlow, search_limit
from fsdp_trainer.config.paths import ADAPTER_CONFIG
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE, A, B, scale_divisor

Shape = tuple[int, ...]
WEIGHTS_FILE = "adapter_model.safetensors"
OTHER_WEIGHTS = "adapter_model.bin"
PREFIX = "base_model.model."
BARE_PREFIX, BARE = "model.", ("layers.", "embed_tokens.", "norm.")
"""Beginnings of names that a model without a head lacks, and that its names have."""
"""Prefix of the base model's names in PEFT's files."""
FUSED_RANKS = "fused_ranks"
"""Metadata key in our files: JSON with the ranks of a fused matrix's parts by layer."""
LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")
"""Prefix of the blocks' names in a model for text and images."""
BLOCK_INDEX = r".*?\.[^.]*\.(?P<index>\d+)\."
TENSORS = {
    f"{A}.weight": A,
    f"{B}.weight": B,
    MAGNITUDE: MAGNITUDE,
    f"{MAGNITUDE}.weight": MAGNITUDE,
}
KEYS = table_beside(__file__)
COMPUTED = KEYS["computed"]
MERGE_WITH_PEFT = (
    "\npeft can merge it into its base model, which is a model like any other then:"
    "\nPeftModel.from_pretrained(…).merge_and_unload().save_pretrained(DIR)"
)
DEFAULT_VALUE = 8
"""PEFT's own default of `r` and `lora_alpha`."""
PLAIN_PATTERN = re.compile(r"[\w.-]*")
"""A pattern without characters of regular expressions but dots."""
LISTS_OF_NAMES = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save",
                  "layers_pattern")  # fmt: skip
MOST_ALPHA = 2.0**50
SEARCH_SECONDS = 10.0
"""Time that one search with an expression of an adapter may take. They may come from anyone."""
MAX_MISFITS = 20


@dataclass
class PeftFolder:
    """An adapter in PEFT's format.

    config: adapter_config.json. shapes: by name without PREFIX. fused_ranks: see FUSED_RANKS; empty
    for files that are not ours.
    """

    folder: Path
    config: Json
    shapes: dict[str, Shape]
    fused_ranks: dict[str, int]

    def scale(self, rank: int, alpha: float) -> float:
        return alpha / scale_divisor(rank, self.is_rslora)

    @property
    def is_rslora(self) -> bool:
        return bool(self.config.get("use_rslora"))

    def pattern(self, key: str, default: str, module: str) -> Any:
        """Return a module's value in rank_pattern or alpha_pattern, by PEFT's rules.

        default: the key for modules without a match.
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
        if any(matched(rf"(^|.*\.){name}($|\..*)", module) for name in saved):
            return False
        targets = self.config.get("target_modules")
        if isinstance(targets, str):
            return targets == "all-linear" or bool(matched(targets, module, whole=True))
        return self._names("target_modules", module) and self._is_transformed(module)

    def targets_parameter(self, name: str) -> bool:
        return self._names("target_parameters", name)

    def _names(self, key: str, module: str) -> bool:
        value = self.config.get(key)
        if isinstance(value, str):
            return bool(matched(value, module, whole=True))
        names = self._ends.get(key, frozenset())
        return bool(names) and any(end in names for end in ends_of(module))

    def _is_transformed(self, module: str) -> bool:
        layers = self.config.get("layers_to_transform")
        if layers is None or layers == []:
            return True
        patterns = self.config.get("layers_pattern") or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        index = [BLOCK_INDEX] if not patterns else []
        index += [rf"(?:^|.*?\.){name}\.(?P<index>\d+)\." for name in patterns]
        matches = [match for each in index if (match := matched(each, module))]
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
                self._searched.append((number, expression(rf"(.*\.)?({pattern})$")))

    def value(self, name: str, default: Any) -> Any:
        first = min(self._looked_up(name), default=len(self._values))
        if self._searched:
            with searches("rank_pattern, alpha_pattern", name):
                first = self._found(name, first)
        return self._values[first] if first < len(self._values) else default

    def _found(self, name: str, before: int) -> int:
        for number, pattern in self._searched:
            if number > before:
                break
            if pattern.match(name):
                return number
        return before

    def _looked_up(self, name: str) -> Iterator[int]:
        for end in ends_of(name):
            for dots, patterns in self._plain.get(len(end), {}).items():
                characters = list(end)
                for place in dots:
                    characters[place] = "."
                number = patterns.get("".join(characters))
                if number is not None:
                    yield number


def expression(text: str) -> re.Pattern[str]:
    """Return an adapter's regular expression. Raises UserError for a text that is none."""
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise _unusable(text, f"is no regular expression: {error}") from None


@contextmanager
def searches(text: str, name: str) -> Iterator[None]:
    """Raise UserError if searches of expressions in a name do not come to an end.

    text: the expressions, for messages. They may come from anyone.
    """
    try:
        with search_limit(SEARCH_SECONDS):
            yield
    except TooSlow:
        reason = f"takes more than {SEARCH_SECONDS:g} seconds to search {name}"
        raise _unusable(text, reason) from None


def matched(text: str, name: str, whole: bool = False) -> re.Match[str] | None:
    """Return the match of an adapter's expression at the beginning of a name. Raises UserError.

    whole: the expression has to match the whole name.
    """
    pattern = expression(text)
    with searches(text, name):
        return pattern.fullmatch(name) if whole else pattern.match(name)


def _unusable(text: str, reason: str) -> UserError:
    title = "the adapter's configuration cannot be used"
    return UserError(title, text[:200], reason)


def ends_of(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def read_config(folder: Path) -> Json:
    """Return the content of adapter_config.json.

    Raises UserError with everything that is not supported here.
    """
    path = folder / ADAPTER_CONFIG
    config = read_object(path, "cannot read the adapter's configuration")
    problems = list(_form_problems(config)) or unsupported(config)
    if problems:
        raise UserError(f"{path} describes an adapter that is not supported", problems)
    return config


def _form_problems(config: Json) -> Iterator[Problem]:
    for key in LISTS_OF_NAMES:
        value = config.get(key)
        if not isinstance(value, str | None) and not _are_all(
            value, lambda name: type(name) is str
        ):
            yield Problem(f"{key}={str(value)[:80]}", "is no name, and no list of names")
    layers = config.get("layers_to_transform")
    if type(layers) not in (int, type(None)) and not _are_all(layers, lambda at: type(at) is int):
        yield Problem(f"layers_to_transform={str(layers)[:80]}", "is no list of numbers of blocks")
    yield from _number_problems(config, "r", "rank_pattern", _is_rank)
    yield from _number_problems(config, "lora_alpha", "alpha_pattern", _is_alpha)
    if not _is_alpha(config.get("lora_dropout", 0)):
        yield Problem(f"lora_dropout={str(config['lora_dropout'])[:80]}", "is no number")


def _number_problems(
    config: Json, default: str, pattern: str, is_one: Callable[[Any], bool]
) -> Iterator[Problem]:
    by_name = config.get(pattern) or {}
    if not isinstance(by_name, dict):
        yield Problem(f"{pattern}={str(by_name)[:80]}", "is not an object")
        return
    values = {default: config.get(default, DEFAULT_VALUE)}
    values |= {f"{pattern}: {name}": value for name, value in by_name.items()}
    for name, value in values.items():
        if not is_one(value):
            yield Problem(f"{name[:80]}={str(value)[:80]}", f"is no value of {default}")


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST_ALPHA


def _are_all(values: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(is_one, values))


def unsupported(config: Json) -> list[Problem]:
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
    if isinstance(start, str) and start.lower().startswith(tuple(KEYS["changes base"])):
        text = (
            "changes the base model's weights when the adapter is made: with others it is useless."
            "\nSave it anew with peft's  path_initial_model_for_weight_conversion"
        )
        problems.append(Problem(f"init_lora_weights={start}", text))
    is_lora = config.get("peft_type", "LORA") == "LORA"
    if is_lora and not adapts_matrices:
        problems.append(Problem("target_modules", "must be a list or a text"))
    return problems


def without_effect(config: Json) -> list[str]:
    lines = []
    if config.get("lora_dropout"):
        lines.append(
            f"lora_dropout={config['lora_dropout']:g} is not applied: training here has no dropout"
        )
    known = {*COMPUTED, *KEYS["read"], *KEYS["without effect"], "lora_dropout"}
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
    """Read a PEFT folder: its configuration and the shapes of its tensors. Raises UserError."""
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    try:
        return PeftFolder(folder, config, *_read_header(path))
    except FileNotFoundError:
        raise without_weights(folder) from None
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        text = f"is no safetensors file, or was copied in part: do it again ({error})"
        raise UserError("the adapter cannot be read", str(path), text) from None


def without_weights(folder: Path) -> UserError:
    """Return the error of a PEFT folder that lacks its file of weights."""
    text = "is not there: copy or download it again"
    if (folder / OTHER_WEIGHTS).is_file():
        text = (
            f"is not there, only {OTHER_WEIGHTS}, which may run code. Load and save it once:"
            "\nPeftModel.from_pretrained(…).save_pretrained(DIR)"
        )
    return UserError("there are no weights", str(folder / WEIGHTS_FILE), text)


def _read_header(path: Path) -> tuple[dict[str, Shape], dict[str, int]]:
    """Return the shapes of the tensors by name, and the ranks in FUSED_RANKS."""
    path.open("rb").close()  # so that a missing file is one for safe_open's other errors
    with safe_open(path, "np") as file:
        names = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        ranks = json.loads((file.metadata() or {}).get(FUSED_RANKS, "{}"))
    if not isinstance(ranks, dict) or not _are_all([*ranks.values()], lambda one: type(one) is int):
        raise ValueError(f"{FUSED_RANKS} in it is no object with numbers")
    return {plain_name(name): shape for name, shape in names.items()}, ranks


def plain_name(name: str) -> str:
    """Return the name of a tensor in PEFT's file without the prefixes of PEFT and image models.

    A model without a head has names without what theirs begin with in one with a head.
    """
    own = LANGUAGE_MODEL.sub(r"\1", name.removeprefix(PREFIX))
    return BARE_PREFIX + own if own.startswith(BARE) else own
