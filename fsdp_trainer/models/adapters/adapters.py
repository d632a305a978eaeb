"""Low-rank adapters: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).

An adapter is a child module of its linear layer W and adds scale · B(A x) to W's output. A has
`rank` rows. A is random and B is zero at the start, so an adapted model starts equal to its base.
Names are PEFT's names without the prefix `base_model.model.`.
"""

import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.paths import checkpoint_frozen, find_checkpoint
from fsdp_trainer.config.schema import Adapter, Precision
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import (
    ALL_TARGETS,
    MAGNITUDE,
    A,
    AdapterSpec,
    matrix_name,
)
from fsdp_trainer.models.adapters.expert_adapters import (
    adapt_experts,
    adapted_experts,
    expert_matrices,
)
from fsdp_trainer.models.adapters.peft_config import read_folder
from fsdp_trainer.models.adapters.peft_experts import STACKED_PARTS, Stack
from fsdp_trainer.models.adapters.peft_names import ModelNames, Part, resolve
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.decoder import VOCABULARY, Decoder, meta_decoder
from fsdp_trainer.models.families import is_stacked
from fsdp_trainer.models.four_bit import Linear4

TARGET_NAMES = {"experts": "*.mlp.experts.*"}
"""Words for adapter.targets, in addition to ALL_TARGETS, names and patterns."""
NF4 = "nf4"
BASE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Number format of frozen weights by adapter.base; precision.param_dtype for other values."""
MODULE_NAMES = {"head": "lm_head", "embedding": "embed_tokens", "norms": "*norm"}
"""Words for adapter.also, in addition to names and patterns of modules."""
WIDTH = 90  # columns of a line of names in a message


def frozen_dtype(precision: Precision, adapters: AdapterSpec | Adapter | None) -> str:
    """Return the torch name of the number format of frozen weights that are not in 4 bits."""
    base = adapters.base if adapters else "auto"
    return BASE_DTYPES.get(base, precision.param_dtype)


# --- which layers ---------------------------------------------------------------------------------


@dataclass
class FittedAdapter(Adapter):
    """Adapter settings with the spec resolved for the whole model.

    A part of the model with narrower matrices must get the same adapters.
    """

    spec: AdapterSpec | None = field(default=None, repr=False)


def fitted_adapter(cfg: Adapter, config: ModelConfig) -> Adapter:
    """Return the settings with adapters resolved for this model, to be used for its parts.

    Raises UserError as `resolve_adapters` does.
    """
    values = {one.name: getattr(cfg, one.name) for one in fields(Adapter)}
    return FittedAdapter(**values, spec=resolve_adapters(cfg, config))


def resolve_adapters(cfg: Adapter, config: ModelConfig) -> AdapterSpec | None:
    """Return the adapters of the configuration; None: all weights are trained.

    Raises UserError for targets that the model does not have, and for ranks larger than a side of
    the matrix.
    """
    if isinstance(cfg, FittedAdapter):
        return cfg.spec
    if cfg.init_from:
        return continued_adapters(Path(cfg.init_from), config, cfg.base)
    if cfg.name == "none":
        return None
    model = meta_decoder(config)
    problems: list[Problem] = []
    targets = chosen_layers(cfg.targets, model, problems)
    ranks = by_pattern("rank_pattern", cfg.rank_pattern, targets, config, problems)
    alphas = by_pattern("alpha_pattern", cfg.alpha_pattern, targets, config, problems)
    also = fully_trained(cfg.also, model, targets, problems)
    shapes = {name: list(model.get_parameter(matrix_name(name)).shape) for name in targets}
    problems += too_high_ranks(cfg, ranks, shapes) + dora_on_experts(cfg, targets)
    if problems:
        raise UserError("the adapters do not fit the model", problems)
    layers = {name: (ranks.get(name, cfg.rank), alphas.get(name, cfg.alpha)) for name in targets}
    return AdapterSpec(cfg.name, cfg.scaling, cfg.base, layers, also)


def as_configured(spec: AdapterSpec | None, cfg: Adapter) -> Adapter:
    """Return the settings that choose the same adapters without `init_from`, except for ranks.

    spec: resolved adapters of `cfg`.
    """
    if spec is None or not cfg.init_from:
        return cfg
    also = [name.removesuffix(".weight") for name in spec.also]
    return Adapter(name=spec.kind, targets=[*spec.layers], also=also, base=cfg.base)


def continued_adapters(source: Path, config: ModelConfig, base: str) -> AdapterSpec:
    """Return the adapters of a PEFT folder or of a run. base: as in AdapterSpec.

    Raises UserError that lists everything that does not fit the model.
    """
    layout = model_layout(config)
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        return resolve(read_folder(source), layout, base).spec
    spec = AdapterSpec.from_json(checkpoint_frozen(checkpoint)["adapters"])
    before = model_layout(ModelConfig.from_hf(checkpoint / "hf"))
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
        rows = config.vocab_size if name in VOCABULARY else len(parameter)
        first = shapes[stored][0] if stored in shapes else 0
        shapes[stored] = (first + rows, *parameter.shape[1:])
        parts.setdefault(stored, []).append(Part(name.rpartition(".")[0], first, rows))
    parameters = {name: (shapes[name], parts[name]) for name in shapes}
    adaptable = dict.fromkeys(stored_name(f"{name}.weight") for name in block_linears(model))
    matrices = {name.removesuffix(".weight"): parameters[name] for name in adaptable}
    stacks = {
        name: Stack(name, shape, tuple(expert_modules(name, shape[0], config)))
        for name, shape in expert_matrices(model).items()
    }
    return ModelNames(matrices, parameters, config.tie_word_embeddings, stacks)


def expert_modules(name: str, count: int, config: ModelConfig) -> list[str]:
    """Return the module name of each expert's matrix in a Hugging Face folder.

    name: name of the stacked matrices. Empty if the folder has one tensor for all experts.
    """
    if config.family_spec.clamped_experts:
        return []
    stored = config.family_spec.stored_expert
    return [stored(name, expert).removesuffix(".weight") for expert in range(count)]


def adaptable_layers(model: Decoder) -> list[str]:
    """Return the names of the blocks' linear layers, then of their experts' stacked matrices."""
    return [*block_linears(model), *expert_matrices(model)]


def block_linears(model: Decoder) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks, by name."""
    prefix = "model.layers."
    modules = model.named_modules()
    return {n: m for n, m in modules if n.startswith(prefix) and isinstance(m, nn.Linear)}


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
    names = adaptable_layers(model)
    patterns = [targets] if isinstance(targets, str) else list(targets)
    if not patterns:
        problems.append(Problem("adapter.targets=[]", "names no layer.\nUse  adapter.targets=all"))
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern in ALL_TARGETS:
            matched = [name for name in names if not is_stacked(name)]
        else:
            matched = matching(TARGET_NAMES.get(pattern, pattern), names, model.config)
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
    return [name for name in names if name in chosen]


def matching(pattern: str, names: Iterable[str], config: ModelConfig) -> list[str]:
    """Return the names that match a pattern (fnmatch) in full or after a dot, as in PEFT.

    Hugging Face's name of a fused matrix, such as `qkv_proj`, stands for its parts. Its names for
    the matrices of experts are translated too.
    """
    family = config.family_spec
    fused = {whole.rpartition(".")[2]: parts for whole, parts in family.fused}
    if EXPERTS in config.feed_forwards and not family.clamped_experts:
        fused |= STACKED_PARTS | {theirs: (our,) for our, theirs in family.expert_matrices.items()}
    prefix, _, leaf = pattern.rpartition(".")
    ends = [f"{prefix}.{part}" if prefix else part for part in fused.get(leaf, (leaf,))]
    forms = [form for end in ends for form in (end, f"*.{end}")]
    return [name for name in names if any(fnmatchcase(name, form) for form in forms)]


def by_pattern(
    key: str,
    patterns: dict[str, Any],
    targets: list[str],
    config: ModelConfig,
    problems: list[Problem],
) -> dict[str, Any]:
    """Return the value of each target that matches a pattern; the first match wins, as in PEFT.

    key: rank_pattern or alpha_pattern, for the messages added to `problems`.
    """
    values: dict[str, Any] = {}
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
    patterns: Sequence[str], model: Decoder, targets: list[str], problems: list[Problem]
) -> tuple[str, ...]:
    """Return the parameters of the modules in adapter.also, each under its first name."""
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
    """Return the modules that directly hold parameters, by name."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if any(True for _ in module.parameters(False))}


def _experts(layer: str) -> str:
    """Return the experts' module of a stacked matrix, "" for other layers."""
    return layer.rpartition(".")[0] if is_stacked(layer) else ""


def dora_on_experts(cfg: Adapter, targets: list[str]) -> list[Problem]:
    """Return the problem of experts chosen for DoRA, if there are any."""
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
    """Return the problem of ranks larger than a side of their matrix, if there are any.

    ranks: ranks from adapter.rank_pattern by layer. shapes: matrix shapes of all adapted layers.
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
    """Return the problem of a pattern in adapter.`key` that matches none of the names."""
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
    """Return a key's value (a name, list or mapping) with one name replaced by another."""
    if isinstance(value, dict):
        return {new if name == old else name: item for name, item in value.items()}
    return new if isinstance(value, str) else [new if name == old else name for name in value]


# --- in the model ---------------------------------------------------------------------------------


def add_adapters(model: Decoder, spec: AdapterSpec, dtype: torch.dtype) -> None:
    """Freeze the model except for `spec.also`, and add adapters of `dtype` to the layers.

    Must be called before activation checkpointing, compile and fully_shard.
    """
    model.requires_grad_(False)
    for name in spec.also:
        model.get_parameter(name).requires_grad_(True)
    for name, (rank, _) in spec.layers.items():
        if is_stacked(name):
            module, _, matrix = name.rpartition(".")
            adapt_experts(model.get_submodule(module), matrix, rank, spec.scale(name), dtype)
        else:
            _adapt(model.get_submodule(name), rank, spec.scale(name), spec.kind, dtype)


def _adapt(linear: Any, rank: int, scale: float, kind: str, dtype: torch.dtype) -> None:
    """Add an adapter to one linear layer of any class."""
    device = next(linear.parameters()).device
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
    linear.lora_A = nn.Linear(linear.in_features, rank, **options)
    linear.lora_B = nn.Linear(rank, linear.out_features, **options)
    linear.lora_scale = scale
    if kind == "dora":
        magnitude = torch.empty(linear.out_features, device=device, dtype=dtype)
        linear.lora_magnitude_vector = nn.Parameter(magnitude)
    # a method of the instance: the class may be torch's, float8's or the one for 4-bit weights
    linear.forward = MethodType(_lora_forward if kind == "lora" else _dora_forward, linear)


def _lora_forward(self: Any, x: Tensor) -> Tensor:
    """Return W x + scale · B(A x) plus the bias."""
    rows = x.flatten(0, -2)
    return _add_adapter(self, rows, type(self).forward(self, rows)).view(*x.shape[:-1], -1)


def _add_adapter(self: Any, rows: Tensor, out: Tensor) -> Tensor:
    """Return out + scale · B(A x): [rows, out].

    Scales A x and adds inside the matrix product, so that no other tensor of the output's size is
    made.
    """
    return torch.addmm(out, self.lora_A(rows) * self.lora_scale, self.lora_B.weight.t())


def _dora_forward(self: Any, x: Tensor) -> Tensor:
    """Return magnitude ÷ |W + scale · B·A| · (W x + scale · B(A x)) per row, plus the bias.

    Backward treats the lengths of the rows as constants (Liu et al. 2024, §4.3).
    """
    with torch.no_grad():
        lengths = row_lengths(self)
    factor = (self.lora_magnitude_vector.float() / lengths).to(x.dtype)
    rows = x.flatten(0, -2)
    out = type(self).forward(self, rows)
    if self.bias is not None:
        out = out - self.bias
    out = factor * _add_adapter(self, rows, out)
    if self.bias is not None:
        out = out + self.bias
    return out.view(*x.shape[:-1], -1)


def row_lengths(linear: Any) -> Tensor:
    """Return the length of each row of W + scale · B·A: [out] float32."""
    squares = row_squares(linear, linear.weight, linear.lora_A.weight, linear.lora_B.weight)
    return squares.clamp_min(0).sqrt()


def row_squares(linear: Any, rows: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the squared length of each row of W + scale · B·A: [out] float32.

    Computed as |W|² + 2 s Σ (W Aᵀ) ∘ B + s² Σ (B A Aᵀ) ∘ B, without a second matrix of W's size.
    These are sums over columns, so results for column slices of W and A can be added.
    rows: rows of the layer's weight; a, b: matrices of its adapter.
    """
    weight = dense_rows(linear, rows)
    projected = F.linear(weight.to(a.dtype), a)
    a, b = a.float(), b.float()
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32) ** 2
    mixed = (projected.float() * b).sum(1)
    own = ((b @ (a @ a.T)) * b).sum(1)
    scale = linear.lora_scale
    return squares + 2 * scale * mixed + scale**2 * own


def dense_rows(linear: Any, rows: Tensor) -> Tensor:
    """Return rows of a linear layer's `weight` in the precision of its forward: [rows, in]."""
    if hasattr(rows, "to_original_precision"):  # torchao's tensor, gathered in float8
        return rows.to_original_precision()
    return linear.decoded(rows) if isinstance(linear, Linear4) else rows


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers that have adapters, by name."""
    modules = model.named_modules()
    return {name: module for name, module in modules if hasattr(getattr(module, A, None), "weight")}


def is_adapted(model: nn.Module) -> bool:
    """Return True if any layer, experts included, has an adapter."""
    return bool(adapted_layers(model) or adapted_experts(model))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Set the scales of LoRA adapters to 0 within the context, so that layers act as their base."""
    layers = list(adapted_layers(model).values())
    experts = {id(module): module for module, _ in adapted_experts(model).values()}
    scales = [layer.lora_scale for layer in layers]
    expert_scales = [dict(module.lora_scales) for module in experts.values()]
    try:
        for layer in layers:
            layer.lora_scale = 0.0
        for module in experts.values():
            module.lora_scales.update(dict.fromkeys(module.lora_scales, 0.0))
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer.lora_scale = scale
        for module, of_matrices in zip(experts.values(), expert_scales, strict=True):
            module.lora_scales.update(of_matrices)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the adapters by name."""
    return {n: p for n, p in model.named_parameters() if ".lora_" in n}


@torch.no_grad()
def initialize_magnitudes(model: nn.Module) -> None:
    """Set DoRA's magnitudes to the row lengths of W, so that the adapted layer starts equal to W.

    Each rank sets those of its rows. The weights must be loaded. Collective.
    """
    for linear in adapted_layers(model).values():
        if hasattr(linear, MAGNITUDE):
            rows = dense_rows(linear, local_part(linear.weight)).float()
            # in float64, so that the float32 result does not depend on the sharding
            lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            for group in groups_of_columns(linear.weight):
                squares = lengths.square()
                dist.all_reduce(squares, group=group)
                lengths = squares.sqrt()
            local_part(linear.lora_magnitude_vector).copy_(lengths)


def groups_of_columns(matrix: Tensor) -> list[dist.ProcessGroup]:
    """Return the process groups over which the columns of a matrix are sharded."""
    if not isinstance(matrix, DTensor):
        return []
    placements = enumerate(matrix.placements)
    return [matrix.device_mesh.get_group(i) for i, place in placements if place.is_shard(1)]
