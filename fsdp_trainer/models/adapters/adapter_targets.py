"""The layers that adapters are for: names and patterns of the configuration, and their messages."""

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.parts.families import is_stacked
from fsdp_trainer.config.paths import checkpoint_frozen, find_checkpoint
from fsdp_trainer.config.schema import Adapter
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import ALL_TARGETS, NF4, AdapterSpec, matrix_name
from fsdp_trainer.models.adapters.expert_adapters import expert_matrices
from fsdp_trainer.models.adapters.peft_config import read_folder
from fsdp_trainer.models.adapters.peft_experts import STACKED_PARTS, Stack
from fsdp_trainer.models.adapters.peft_names import ModelNames, Part, resolve
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.hf.read_architecture import read_architecture

TARGET_NAMES = {"experts": "*.mlp.experts.*"}
"""Words for adapter.targets, in addition to ALL_TARGETS, names and patterns."""
MODULE_NAMES = {"head": "lm_head", "embedding": "embed_tokens", "norms": "*norm"}
"""Words for adapter.also, in addition to names and patterns of modules."""
GLOB = set("*?[")
"""Characters that make a name a pattern."""
WIDTH = 90  # columns of a line of names in a message


def resolve_adapters(cfg: Adapter, config: ModelConfig) -> AdapterSpec | None:
    """Return the adapters of the configuration; None: all weights are trained.

    Raises UserError for unknown targets and for ranks larger than a side of the matrix.
    """
    if cfg.init_from:
        return continued_adapters(Path(cfg.init_from), config, cfg.base)
    if cfg.name == "none":
        return None
    model = meta_decoder(config)
    problems: list[Problem] = []
    targets = chosen_layers(cfg.targets, model, problems)
    ranks = by_pattern("rank_pattern", cfg.rank_pattern, targets, config, problems)
    alphas = by_pattern("alpha_pattern", cfg.alpha_pattern, targets, config, problems)
    # as PEFT does for classifiers
    head = sorted({name.rpartition(".")[0] for name in model.head_names})
    also = fully_trained(dict.fromkeys([*cfg.also, *head]), model, targets, problems)
    shapes = {name: list(model.get_parameter(matrix_name(name)).shape) for name in targets}
    problems += too_high_ranks(cfg, ranks, shapes) + dora_on_experts(cfg, targets)
    if problems:
        raise UserError("the adapters do not fit the model", problems)
    layers = {name: (ranks.get(name, cfg.rank), alphas.get(name, cfg.alpha)) for name in targets}
    return AdapterSpec(cfg.name, cfg.scaling, cfg.base, layers, also)


def continued_adapters(source: Path, config: ModelConfig, base: str) -> AdapterSpec:
    """Return the adapters of a PEFT folder or of a run. base: as in AdapterSpec.

    Raises UserError that lists everything that does not fit the model.
    """
    layout = model_layout(config)
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        return resolve(read_folder(source), layout, base).spec
    spec = AdapterSpec.from_json(checkpoint_frozen(checkpoint)["adapters"])
    before = model_layout(read_architecture(checkpoint / "hf"))
    problems = []
    shapes = {name: shape for name, (shape, _) in layout.linears.items()}
    shapes |= {name: stack.shape for name, stack in layout.stacks.items()}
    adapted = {
        module: shape
        for module, (shape, parts) in before.linears.items()
        if any(part.layer in spec.layers for part in parts)
    }
    adapted |= {name: s.shape for name, s in before.stacks.items() if name in spec.layers}
    for module, shape in adapted.items():
        now = shapes.get(module)
        if now != shape:
            has = f"the model's is {list(now)}" if now else "the model has none"
            problems.append(Problem(module, f"is {list(shape)} in the adapter; {has}"))
    if problems:
        raise UserError(f"the adapter of {checkpoint} does not fit the model", problems)
    return replace(spec, base=base)


def model_layout(config: ModelConfig) -> ModelNames:
    """Return the matrices of a model under their names in its Hugging Face folder."""
    model = meta_decoder(config)
    stored_name = config.family_spec.stored_name
    parts: dict[str, list[Part]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        stored = stored_name(name)
        rows = config.vocab_size if name in config.names.vocabulary else len(parameter)
        first = shapes[stored][0] if stored in shapes else 0
        shapes[stored] = (first + rows, *parameter.shape[1:])
        parts.setdefault(stored, []).append(Part(name.rpartition(".")[0], first, rows))
    parameters = {name: (shapes[name], parts[name]) for name in shapes}
    linears = [*block_linears(model), *tower_linears(model)]
    adaptable = dict.fromkeys(stored_name(f"{name}.weight") for name in linears)
    matrices = {name.removesuffix(".weight"): parameters[name] for name in adaptable}
    stacks = {
        name: Stack(name, shape, tuple(expert_modules(name, shape[0], config)))
        for name, shape in expert_matrices(model).items()
    }
    return ModelNames(matrices, parameters, config.tie_word_embeddings, stacks)


def expert_modules(name: str, count: int, config: ModelConfig) -> list[str]:
    """Return the module names of the experts in a Hugging Face folder.

    name: of the stacked matrices. Empty if the folder has one tensor for all experts.
    """
    if config.family_spec.clamped_experts:
        return []
    stored = config.family_spec.stored_expert
    return [stored(name, expert).removesuffix(".weight") for expert in range(count)]


OF_IMAGES = ("vision", "projector")
"""Parts of a model for images beside the language model, as words for adapter.targets."""


def adaptable_layers(model: Decoder) -> list[str]:
    return [*block_linears(model), *expert_matrices(model)]


def block_linears(model: Decoder) -> dict[str, nn.Linear]:
    prefix = model.config.names.blocks
    of_heads = {module for head in model.mtp_heads() for module in head.modules()}
    modules = [(n, m) for n, m in model.named_modules() if m not in of_heads]
    return {n: m for n, m in modules if n.startswith(prefix) and isinstance(m, nn.Linear)}


def tower_linears(model: Decoder) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and model.part_of(name) in OF_IMAGES
    ]


def four_bit_weights(model: Decoder, adapters: AdapterSpec | None) -> list[str]:
    """Return the names of the matrices to keep in 4 bits: the frozen matrices of the blocks.

    model: made by `meta_decoder`, with torch's linear layers.
    """
    if adapters is None or adapters.base != NF4:
        return []
    names = [matrix_name(layer) for layer in adaptable_layers(model)]
    return [name for name in names if name not in adapters.also]


def chosen_layers(
    targets: str | Sequence[str], model: Decoder, problems: list[Problem]
) -> list[str]:
    """Return the layers chosen by adapter.targets, in the model's order; add to `problems`."""
    names, of_images = adaptable_layers(model), tower_linears(model)
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        problems.append(Problem("adapter.targets=[]", "names no layer.\nUse  adapter.targets=all"))
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern in ALL_TARGETS:
            matched = [name for name in names if not is_stacked(name)]
        else:
            matched = matching(TARGET_NAMES.get(pattern, pattern), names, model.config)
            # a name that both have means the language model's layers
            matched = matched or matching_images(pattern, of_images, model)
        chosen.update(matched)
        if matched:
            continue
        problem = without_match("targets", targets, pattern, names, "linear layer of the blocks")
        if matching(pattern, modules_with_parameters(model), model.config):
            problem.reason = (
                f"{pattern} is no linear layer of the blocks, which adapters are for."
                f"\nIt can be trained in full:  adapter.also=[{pattern}]"
            )
        problems.append(problem)
    return [name for name in [*names, *of_images] if name in chosen]


def matching_images(pattern: str, names: list[str], model: Decoder) -> list[str]:
    if pattern in OF_IMAGES:
        return [name for name in names if model.part_of(name) == pattern]
    return matching(pattern, names, model.config)


def matching(pattern: str, names: Iterable[str], config: ModelConfig) -> list[str]:
    """Return the names that match a pattern (fnmatch) in full or after a dot, as in PEFT.

    Hugging Face's name of a fused matrix, such as `qkv_proj`, stands for its parts. Its names for
    the matrices of experts are translated too.
    """
    family = config.family_spec
    fused = {whole.rpartition(".")[2]: parts for whole, parts in family.fused}
    stacks = EXPERTS in config.feed_forwards and not config.by_transformers
    if stacks and not family.clamped_experts:
        fused |= STACKED_PARTS | {theirs: (our,) for our, theirs in family.expert_matrices.items()}
    prefix, _, leaf = pattern.rpartition(".")
    ends = [f"{prefix}.{part}" if prefix else part for part in fused.get(leaf, (leaf,))]
    if not any(GLOB & set(end) for end in ends):  # rank_pattern may have thousands of them
        dotted = tuple(f".{end}" for end in ends)
        return [name for name in names if name in ends or name.endswith(dotted)]
    forms = [form for end in ends for form in (end, f"*.{end}")]
    return [name for name in names if any(fnmatchcase(name, form) for form in forms)]


def by_pattern(
    key: str,
    patterns: Json,
    targets: list[str],
    config: ModelConfig,
    problems: list[Problem],
) -> Json:
    """Return the value of each target that matches a pattern; the first match wins, as in PEFT.

    key: rank_pattern or alpha_pattern.
    """
    values: Json = {}
    for pattern, value in patterns.items():
        matched = matching(TARGET_NAMES.get(pattern, pattern), targets, config)
        values = dict.fromkeys(matched, value) | values
        if not matched and targets:
            problems.append(without_match(key, patterns, pattern, targets, "adapted layer"))
        if value <= 0:
            text = f"{pattern}: {as_text(value)} must be above 0"
            problems.append(Problem(f"adapter.{key}={as_text(patterns)}", text))
    return values


def fully_trained(
    patterns: Iterable[str], model: Decoder, targets: list[str], problems: list[Problem]
) -> tuple[str, ...]:
    modules = modules_with_parameters(model)
    chosen: list[str] = []
    for pattern in patterns:
        matched = matching(MODULE_NAMES.get(pattern, pattern), modules, model.config)
        chosen += matched
        adapted = [name for name in targets if name in matched or _experts(name) in matched]
        if not matched:
            names = [*MODULE_NAMES, *modules]
            problems.append(without_match("also", patterns, pattern, names, "module"))
        elif adapted:
            others = [name for name in patterns if name != pattern]
            text = (
                f"{pattern} fits {adapted[0]}, which has an adapter: train it in one way."
                f"\nUse  adapter.also={as_text(others)}  or leave it out of adapter.targets"
            )
            problems.append(Problem(f"adapter.also={as_text(list(patterns))}", text))
    first_names = {id(p): name for name, p in model.named_parameters()}  # a tied head has two
    parameters = [parameter for name in chosen for parameter in modules[name].parameters(False)]
    return tuple(dict.fromkeys(first_names[id(parameter)] for parameter in parameters))


def modules_with_parameters(model: Decoder) -> dict[str, nn.Module]:
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if any(True for _ in module.parameters(False))}


def _experts(layer: str) -> str:
    return layer.rpartition(".")[0] if is_stacked(layer) else ""


def dora_on_experts(cfg: Adapter, targets: list[str]) -> list[Problem]:
    stacked = [name for name in targets if is_stacked(name)]
    if cfg.name != "dora" or not stacked:
        return []
    text = (
        f"fits {stacked[0]}: experts have no DoRA, here as in PEFT."
        "\nUse  adapter=lora  or name other layers"
    )
    return [Problem(f"adapter.targets={as_text(cfg.targets)}", text)]


def too_high_ranks(
    cfg: Adapter, ranks: dict[str, int], shapes: dict[str, list[int]]
) -> list[Problem]:
    """Return the problem of ranks larger than a side of their matrix.

    ranks: adapter.rank_pattern by layer. shapes: of all adapted layers.
    """
    shapes = {name: shape[-2:] for name, shape in shapes.items()}  # shape for one expert
    high = [n for n, shape in shapes.items() if ranks.get(n, cfg.rank) > min(shape)]
    if not high:
        return []
    name = min(high, key=lambda name: min(shapes[name]))
    side = min(shapes[name])
    patterns = {n.rpartition(".")[2]: min(shapes[n]) for n in high}
    by_leaf = shlex.quote(f"adapter.rank_pattern={as_text(patterns | cfg.rank_pattern)}")
    what, instead = f"adapter.rank={cfg.rank}", f"Use  adapter.rank={side}  or  {by_leaf}"
    if name in ranks:
        what = f"adapter.rank_pattern={as_text(cfg.rank_pattern)}"
        instead = f"{side} is the highest there"
    rank = ranks.get(name, cfg.rank)
    text = f"no matrix of {name}'s shape, {shapes[name]}, has rank {rank}.\n{instead}"
    return [Problem(what, text)]


def without_match(key: str, value: Any, pattern: str, names: Iterable[str], kind: str) -> Problem:
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    prefix, dot, end = pattern.rpartition(".")
    closest = nearest(end, ends)
    text = f"{pattern} fits no {kind}."
    if closest and closest != end:
        meant = f"adapter.{key}={as_text(renamed(value, pattern, prefix + dot + closest))}"
        text += f" Did you mean  {shlex.quote(meant) if ' ' in meant else meant} ?"
    listed = textwrap.fill(" ".join(["there are:", *ends]), WIDTH, break_on_hyphens=False)
    shown = value if isinstance(value, str | dict) else list(value)
    return Problem(f"adapter.{key}={as_text(shown)}", f"{text}\n{listed}")


def renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {new if name == old else name: item for name, item in value.items()}
    return new if isinstance(value, str) else [new if name == old else name for name in value]
