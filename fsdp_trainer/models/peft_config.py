"""PEFT's folders: what adapter_config.json says and which tensors there are. No torch."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.config.paths import ADAPTER_CONFIG
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapter_spec import MAGNITUDE, A, AdapterSpec, B

Shape = tuple[int, ...]
WEIGHTS_FILE = "adapter_model.safetensors"
OTHER_WEIGHTS = "adapter_model.bin"
PREFIX = "base_model.model."
"""Before the model's own names in PEFT's files."""
FUSED_RANKS = "fused_ranks"
"""In the metadata of our own files: the rank of each part of a fused matrix, by layer, as JSON."""
LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")
"""Before the blocks' names in a model for text and images."""
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
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None, {}),
    "use_bdlora": (None, {}, False),
    "arrow_config": (None, {}),
    "kasa_config": (None, {}),
    "monteclora_config": (None, {}),
}
"""Keys that change what an adapter computes, and their values that are computed here."""
READ = (
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "target_modules",
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
"""Keys that only say how an adapter was begun or trained."""
MERGE_WITH_PEFT = (
    "\npeft can merge it into its base model, which is a model like any other then:"
    "\nPeftModel.from_pretrained(…).merge_and_unload().save_pretrained(DIR)"
)
MAX_MISFITS = 20
"""Tensors that a message names."""


@dataclass
class PeftFolder:
    """An adapter as PEFT stores it.

    config: adapter_config.json. shapes: of the tensors, by name without PREFIX. fused_ranks: see
    FUSED_RANKS; empty in files that are not ours.
    """

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, Shape]
    fused_ranks: dict[str, int]

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of B·A."""
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def pattern(self, key: str, default: str, module: str) -> Any:
        """Return the value of a module in rank_pattern or alpha_pattern, as PEFT finds it."""
        for pattern, value in (self.config.get(key) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return self.config.get(default, 8)  # PEFT's own default

    def targets(self, module: str) -> bool:
        """Return True if PEFT adapts a linear layer of the blocks, by its name in the folder."""
        if _names(self.config.get("exclude_modules"), module):
            return False
        saved = self.config.get("modules_to_save") or []
        if any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in saved):
            return False
        targets = self.config.get("target_modules")
        if isinstance(targets, str):
            return targets == "all-linear" or bool(re.fullmatch(targets, module))
        return _names(targets, module) and self._is_transformed(module)

    def _is_transformed(self, module: str) -> bool:
        """Return True if layers_to_transform has the module's block, or is not given."""
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


def _names(patterns: str | Sequence[str] | None, module: str) -> bool:
    """Return True if a module is one of a list, by its end, or fits a regular expression."""
    if isinstance(patterns, str):
        return bool(re.fullmatch(patterns, module))
    return any(module == name or module.endswith(f".{name}") for name in patterns or [])


# --- reading --------------------------------------------------------------------------------------


def read_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json.

    Raises UserError that names everything in it that is not computed here.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("is not a JSON object")
    except (OSError, ValueError) as error:
        problem = Problem(str(path), str(error))
        raise UserError("cannot read the adapter's configuration", [problem]) from None
    problems = unsupported(config)
    if problems:
        raise UserError(f"{path} describes an adapter that is not supported", problems)
    return config


def unsupported(config: dict[str, Any]) -> list[Problem]:
    """Return everything in adapter_config.json that is not computed here."""
    problems = [
        Problem(f"{key}={json.dumps(config[key])}", _why_not(key, values))
        for key, values in COMPUTED.items()
        if key in config and config[key] not in values
    ]
    adapts_matrices = isinstance(config.get("target_modules"), str | list)
    same_task = config.get("task_type") in COMPUTED["task_type"]
    if problems and adapts_matrices and same_task and not config.get("alora_invocation_tokens"):
        problems[-1].why += MERGE_WITH_PEFT
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
    """Return a line on each setting of adapter_config.json that a training here does not follow."""
    lines = []
    if config.get("lora_dropout"):
        lines.append(
            f"lora_dropout={config['lora_dropout']:g} is not applied: training here has no dropout"
        )
    known = {*COMPUTED, *READ, *WITHOUT_EFFECT, "lora_dropout"}
    lines += [
        f"{key}={json.dumps(value)} is not known here and has no effect"
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
    """Return what is in a PEFT folder.

    Raises UserError for a kind of adapter that is not computed here, and for broken files.
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
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
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
    """Return the name of a tensor in PEFT's file as the base model's folder would have it."""
    return LANGUAGE_MODEL.sub(r"\1", name.removeprefix(PREFIX))


# --- from PEFT's names to ours --------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A parameter's rows in a matrix of a Hugging Face folder: all of it, or a part of a fused one.

    layer: the parameter's module.
    """

    layer: str
    first: int
    rows: int


@dataclass
class Layout:
    """The matrices and other parameters of a model, by their names in a Hugging Face folder.

    linears: the blocks' linear layers, with their shape. parameters: all, with their shape and the
    parameters of ours that are its rows. tied: the head is the embedding.
    """

    linears: dict[str, tuple[Shape, list[Part]]]
    parameters: dict[str, tuple[Shape, list[Part]]]
    tied: bool


@dataclass(frozen=True)
class PeftRows:
    """Rows and columns of a tensor in PEFT's file that are a parameter of ours.

    columns: None: all of them.
    """

    tensor: str
    first: int
    rows: int
    columns: tuple[int, int] | None = None


@dataclass
class Resolved:
    """A PEFT folder as adapters of a model: where each parameter is.

    same: pairs of tensors that must hold the same numbers.
    """

    spec: AdapterSpec
    sources: dict[str, PeftRows]
    same: list[tuple[str, str]]


HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def resolve(peft: PeftFolder, layout: Layout, base: str) -> Resolved:
    """Return the adapters of a model that a PEFT folder holds. base: as in AdapterSpec.

    Raises UserError that names everything that does not fit.
    """
    modules: dict[str, dict[str, Shape]] = {}
    others: dict[str, Shape] = {}
    for name, shape in peft.shapes.items():
        module, tensor = split_name(name)
        if tensor:
            modules.setdefault(module, {})[tensor] = shape
        else:
            others[name] = shape
    problems: list[Problem] = []
    layers: dict[str, tuple[int, float]] = {}
    sources: dict[str, PeftRows] = {}
    for module, tensors in modules.items():
        misfits = misfits_of(peft, module, tensors, layout)
        problems += misfits
        if not misfits:
            adopt(peft, module, tensors, layout.linears[module][1], layers, sources)
    problems += missing(peft, modules, layout)
    wrapped = {f"{module}.base_layer.weight" for module in modules}  # an adapted embedding's own
    others = {name: shape for name, shape in others.items() if name not in wrapped}
    also, same = fully_trained(others, layout, sources, problems)
    more = len(problems) - MAX_MISFITS
    if more > 0:
        more_text = f"… and {more:,} more tensors do not fit: is this the adapter's base model?"
        problems[MAX_MISFITS - 1].why += f"\n{more_text}"
    if problems:
        title = f"the adapter in {peft.folder} does not fit the model"
        raise UserError(title, problems[:MAX_MISFITS])
    kind = "dora" if peft.config.get("use_dora") else "lora"
    scaling = "rslora" if peft.config.get("use_rslora") else "standard"
    ordered = [part.layer for _, parts in layout.linears.values() for part in parts]
    layers = {name: layers[name] for name in ordered if name in layers}
    return Resolved(AdapterSpec(kind, scaling, base, layers, tuple(also)), sources, same)


def split_name(name: str) -> tuple[str, str]:
    """Return module and tensor of an adapter, ("", "") for another parameter."""
    for end, tensor in TENSORS.items():
        if name.endswith(f".{end}"):
            return name.removesuffix(f".{end}"), tensor
    return ("", "") if ".lora_" not in name else (name.rpartition(".lora_")[0], name)


def misfits_of(
    peft: PeftFolder, module: str, tensors: dict[str, Shape], layout: Layout
) -> list[Problem]:
    """Return why a module's adapter is none of this model's."""
    if module not in layout.linears:
        if f"{module}.weight" in layout.parameters:
            text = (
                "has an adapter, which only linear layers of the blocks can have here"
                f" (adapter.also trains it in full).{MERGE_WITH_PEFT}"
            )
            return [Problem(module, text)]
        return [Problem(module, "is not part of this model")]
    (rows, columns), _ = layout.linears[module]
    rank = peft.pattern("rank_pattern", "r", module)
    expected: dict[str, Shape] = {A: (rank, columns), B: (rows, rank)}
    if peft.config.get("use_dora"):
        expected[MAGNITUDE] = (rows,)
    problems = []
    for tensor in {**expected, **tensors}:
        name = f"{module}.{tensor}"
        if tensor not in tensors:
            text = f"is missing; it would have shape {list(expected[tensor])}"
            problems.append(Problem(name, text))
        elif tensor not in expected:
            problems.append(Problem(name, f"is not what {ADAPTER_CONFIG} describes"))
        elif tensors[tensor] != expected[tensor]:
            text = f"has shape {list(tensors[tensor])}; with this model it would be"
            problems.append(Problem(name, f"{text} {list(expected[tensor])}"))
    return problems


def adopt(
    peft: PeftFolder,
    module: str,
    tensors: dict[str, Shape],
    parts: list[Part],
    layers: dict[str, tuple[int, float]],
    sources: dict[str, PeftRows],
) -> None:
    """Add the adapters of a matrix's parts, and where their numbers are.

    A fused matrix's adapter is one of the whole rank for each part, or, in our own files, those of
    which it was made.
    """
    whole = tensors[A][0]
    scale = peft.scale(whole, peft.pattern("alpha_pattern", "lora_alpha", module))
    own = {part.layer: peft.fused_ranks.get(part.layer, 0) for part in parts}
    if len(parts) == 1 or sum(own.values()) != whole:
        own = {}
    column = 0
    a, b = (f"{module}.{tensor}" for tensor in (A, B))
    for part in parts:
        rank = own[part.layer] if own else whole
        if not rank:
            continue
        divisor = math.sqrt(rank) if peft.config.get("use_rslora") else rank
        layers[part.layer] = (rank, scale * divisor)
        columns = (column, column + rank) if own else None
        sources[f"{part.layer}.{A}.weight"] = PeftRows(a, column, rank)
        sources[f"{part.layer}.{B}.weight"] = PeftRows(b, part.first, part.rows, columns)
        if MAGNITUDE in tensors:
            magnitude = PeftRows(f"{module}.{MAGNITUDE}", part.first, part.rows)
            sources[f"{part.layer}.{MAGNITUDE}"] = magnitude
        column += rank if own else 0


def missing(peft: PeftFolder, modules: Iterable[str], layout: Layout) -> list[Problem]:
    """Return the layers that target_modules means and the file does not have."""
    there = set(modules)
    text = f"is missing, though target_modules in {ADAPTER_CONFIG} means it"
    lacking = [name for name in layout.linears if name not in there and peft.targets(name)]
    return [Problem(name, text) for name in lacking]


def fully_trained(
    tensors: dict[str, Shape],
    layout: Layout,
    sources: dict[str, PeftRows],
    problems: list[Problem],
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the parameters that modules_to_save trains, and tensors that must be equal."""
    also: list[str] = []
    tied = {EMBEDDING, HEAD} & tensors.keys() if layout.tied else set()
    for name, shape in tensors.items():
        if name == HEAD and tied:  # the same parameter as the embedding
            continue
        if name not in layout.parameters:
            problems.append(Problem(name, "is not part of this model"))
            continue
        expected, parts = layout.parameters[name]
        if shape != expected:
            text = f"has shape {list(shape)}; the model has {list(expected)}"
            problems.append(Problem(name, text))
        kind = name.rpartition(".")[2]
        for part in parts:
            also.append(f"{part.layer}.{kind}")
            sources[also[-1]] = PeftRows(name, part.first, part.rows)
    if len(tied) == 1:
        problems.append(_trained_apart(*tied))
    return also, [(EMBEDDING, HEAD)] if len(tied) == 2 else []


def _trained_apart(name: str) -> Problem:
    """Return the problem of an adapter that has one of two tied matrices."""
    other = "head" if name == EMBEDDING else "embedding"
    text = (
        f"was trained apart from the {other}, which this model has tied to it"
        " (tie_word_embeddings).\nSave both in the adapter, or untie them in the base model"
    )
    return Problem(name, text)
