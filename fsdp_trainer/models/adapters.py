"""Low-rank adapters: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).

An adapter of a linear layer W is a child of it: W's output gains scale · B(A x). A's rows are the
rank; A is drawn, B begins at zero, so that an adapted model begins as its base. Names are PEFT's
behind `base_model.model.`.
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

from fsdp_trainer.config.check import show
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.paths import checkpoint_frozen, find_checkpoint
from fsdp_trainer.config.schema import Adapter, Precision
from fsdp_trainer.distributed import local_part
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapter_spec import (
    ALL_TARGETS,
    MAGNITUDE,
    A,
    AdapterSpec,
    matrix_name,
)
from fsdp_trainer.models.config import EXPERTS, ModelConfig
from fsdp_trainer.models.decoder import VOCABULARY, Decoder, meta_decoder
from fsdp_trainer.models.expert_adapters import adapt_experts, adapted_experts, expert_matrices
from fsdp_trainer.models.families import is_stacked
from fsdp_trainer.models.four_bit import Linear4
from fsdp_trainer.models.peft_config import read_folder
from fsdp_trainer.models.peft_experts import STACKED_PARTS, Stack
from fsdp_trainer.models.peft_names import Layout, Part, resolve

TARGET_NAMES = {"experts": "*.mlp.experts.*"}
"""Words that adapter.targets takes besides these, names and patterns."""
NF4 = "nf4"
BASE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""The number format of frozen weights by adapter.base; all others: precision.param_dtype."""
MODULE_NAMES = {"head": "lm_head", "embedding": "embed_tokens", "norms": "*norm"}
"""Words that adapter.also takes besides names and patterns of modules."""
WIDTH = 90  # of a line of names in a message


def frozen_dtype(precision: Precision, adapters: AdapterSpec | Adapter | None) -> str:
    """Return the number format in which frozen weights are kept, by torch's name.

    Those in 4 bits aside.
    """
    base = adapters.base if adapters else "auto"
    return BASE_DTYPES.get(base, precision.param_dtype)


# --- which layers ---------------------------------------------------------------------------------


@dataclass
class FittedAdapter(Adapter):
    """Adapters that were resolved for a whole model: a part of it, with narrower matrices, has the
    same."""

    spec: AdapterSpec | None = field(default=None, repr=False)


def fitted_adapter(cfg: Adapter, config: ModelConfig) -> Adapter:
    """Return the adapters for parts of a model. Raises UserError as `resolve_adapters` does."""
    values = {one.name: getattr(cfg, one.name) for one in fields(Adapter)}
    return FittedAdapter(**values, spec=resolve_adapters(cfg, config))


def resolve_adapters(cfg: Adapter, config: ModelConfig) -> AdapterSpec | None:
    """Return the adapters that the configuration asks for; None: all weights are trained.

    Raises UserError for targets that the model does not have, and ranks that its matrices are too
    small for.
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
    problems += too_high_ranks(cfg, ranks, shapes) + without_lengths(cfg, targets)
    if problems:
        raise UserError("the adapters do not fit the model", problems)
    layers = {name: (ranks.get(name, cfg.rank), alphas.get(name, cfg.alpha)) for name in targets}
    return AdapterSpec(cfg.name, cfg.scaling, cfg.base, layers, also)


def as_configured(spec: AdapterSpec | None, cfg: Adapter) -> Adapter:
    """Return adapters that a folder decides, as they would be typed without it.

    Ranks aside. spec: what `cfg` resolves to.
    """
    if spec is None or not cfg.init_from:
        return cfg
    also = [name.removesuffix(".weight") for name in spec.also]
    return Adapter(name=spec.kind, targets=[*spec.layers], also=also, base=cfg.base)


def continued_adapters(source: Path, config: ModelConfig, base: str) -> AdapterSpec:
    """Return the adapters of a PEFT folder, or of a run. base: as in AdapterSpec.

    Raises UserError with everything that does not fit the model.
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
            problems.append(Problem(module, f"is {list(shape)} beside the adapter; {has}"))
    if problems:
        raise UserError(f"the adapter of {checkpoint} does not fit the model", problems)
    return replace(spec, base=base)


def model_layout(config: ModelConfig) -> Layout:
    """Return the matrices of a model as its Hugging Face folder has them."""
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
    return Layout(matrices, parameters, config.tie_word_embeddings, stacks)


def expert_modules(name: str, count: int, config: ModelConfig) -> list[str]:
    """Return the module of each expert's matrix in a Hugging Face folder. name: of all stacked.

    None where one tensor holds all experts.
    """
    if config.family_spec.clamped_experts:
        return []
    stored = config.family_spec.stored_expert
    return [stored(name, expert).removesuffix(".weight") for expert in range(count)]


def adaptable_layers(model: Decoder) -> list[str]:
    """Return the linear layers of the blocks, then the matrices of their experts."""
    return [*block_linears(model), *expert_matrices(model)]


def block_linears(model: Decoder) -> dict[str, nn.Linear]:
    """Return the linear layers of the blocks, by name."""
    prefix = "model.layers."
    modules = model.named_modules()
    return {n: m for n, m in modules if n.startswith(prefix) and isinstance(m, nn.Linear)}


def four_bit_weights(model: Decoder, adapters: AdapterSpec | None) -> list[str]:
    """Return the names of the matrices that are kept in 4 bits: the blocks' frozen ones.

    model: with the blocks' linear layers as torch's, as `meta_decoder` makes them.
    """
    if adapters is None or adapters.base != NF4:
        return []
    names = [matrix_name(layer) for layer in adaptable_layers(model)]
    return [name for name in names if name not in adapters.also]


def chosen_layers(
    targets: str | Sequence[str], model: Decoder, problems: list[Problem]
) -> list[str]:
    """Return the layers that adapter.targets names, in the model's order."""
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
            problem.why = (
                f"{pattern} is no linear layer of the blocks, which adapters are for."
                f"\nIt can be trained in full:  adapter.also=[{pattern}]"
            )
        problems.append(problem)
    return [name for name in names if name in chosen]


def matching(pattern: str, names: Iterable[str], config: ModelConfig) -> list[str]:
    """Return the names that a pattern fits (fnmatch), or that end in it, as PEFT reads names.

    The name of a matrix that Hugging Face stores fused, `qkv_proj`, means its parts; so do names
    that it has for the matrices of experts.
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
    """Return the value of each target that a pattern fits; the first to fit counts, as in PEFT."""
    values: dict[str, Any] = {}
    for pattern, value in patterns.items():
        matched = matching(TARGET_NAMES.get(pattern, pattern), targets, config)
        values = dict.fromkeys(matched, value) | values
        if not matched and targets:
            problems.append(without_match(key, patterns, pattern, targets, "adapted layer"))
        if value <= 0:
            text = f"{pattern}: {show(value)} must be above 0"
            problems.append(Problem(f"adapter.{key}={show(patterns)}", text))
    return values


def fully_trained(
    patterns: Sequence[str], model: Decoder, targets: list[str], problems: list[Problem]
) -> tuple[str, ...]:
    """Return the parameters of the modules that adapter.also names, each by its first name."""
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
                f"\nUse  adapter.also={show(others)}  or leave it out of adapter.targets"
            )
            problems.append(Problem(f"adapter.also={show(list(patterns))}", text))
    first_names = {id(p): name for name, p in model.named_parameters()}  # a tied head has two
    parameters = [parameter for name in chosen for parameter in modules[name].parameters(False)]
    return tuple(dict.fromkeys(first_names[id(parameter)] for parameter in parameters))


def modules_with_parameters(model: Decoder) -> dict[str, nn.Module]:
    """Return the modules that have parameters of their own, by name."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if any(True for _ in module.parameters(False))}


def _experts(layer: str) -> str:
    """Return the module of the experts that have these matrices, "" for another layer."""
    return layer.rpartition(".")[0] if is_stacked(layer) else ""


def without_lengths(cfg: Adapter, targets: list[str]) -> list[Problem]:
    """Return the problem of experts whose rows would have lengths, if there is one."""
    stacked = [name for name in targets if is_stacked(name)]
    if cfg.name != "dora" or not stacked:
        return []
    text = (
        f"fits {stacked[0]}: experts have no DoRA, here as in PEFT."
        "\nUse  adapter=lora  or name other layers"
    )
    return [Problem(f"adapter.targets={show(cfg.targets)}", text)]


def too_high_ranks(
    cfg: Adapter, ranks: dict[str, int], shapes: dict[str, list[int]]
) -> list[Problem]:
    """Return the problem of ranks that are larger than a side of their matrix, if there are any.

    ranks: of the layers that adapter.rank_pattern has. shapes: of the adapted layers' matrices.
    """
    shapes = {name: shape[-2:] for name, shape in shapes.items()}  # of one expert
    high = [n for n, shape in shapes.items() if ranks.get(n, cfg.rank) > min(shape)]
    if not high:
        return []
    name = min(high, key=lambda name: min(shapes[name]))
    side = min(shapes[name])
    patterns = {n.rpartition(".")[2]: min(shapes[n]) for n in high}
    by_leaf = shlex.quote(f"adapter.rank_pattern={show(patterns | cfg.rank_pattern)}")
    what, instead = f"adapter.rank={cfg.rank}", f"Use  adapter.rank={side}  or  {by_leaf}"
    if name in ranks:
        what = f"adapter.rank_pattern={show(cfg.rank_pattern)}"
        instead = f"{side} is the highest there"
    rank = ranks.get(name, cfg.rank)
    text = f"no matrix of {name}'s shape, {shapes[name]}, has rank {rank}.\n{instead}"
    return [Problem(what, text)]


def without_match(key: str, value: Any, pattern: str, names: Iterable[str], kind: str) -> Problem:
    """Return the problem of a pattern in adapter.`key` that fits none of the names."""
    ends = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    prefix, dot, end = pattern.rpartition(".")
    closest = nearest(end, ends)
    text = f"{pattern} fits no {kind}."
    if closest and closest != end:
        meant = f"adapter.{key}={show(renamed(value, pattern, prefix + dot + closest))}"
        text += f" Did you mean  {shlex.quote(meant) if ' ' in meant else meant} ?"
    listed = textwrap.fill(" ".join(["there are:", *ends]), WIDTH, break_on_hyphens=False)
    shown = value if isinstance(value, str | dict) else list(value)
    return Problem(f"adapter.{key}={show(shown)}", f"{text}\n{listed}")


def renamed(value: Any, old: str, new: str) -> Any:
    """Return a key's value, a name, a list or a mapping, with one name in place of another."""
    if isinstance(value, dict):
        return {new if name == old else name: item for name, item in value.items()}
    return new if isinstance(value, str) else [new if name == old else name for name in value]


# --- in the model ---------------------------------------------------------------------------------


def add_adapters(model: Decoder, spec: AdapterSpec, dtype: torch.dtype) -> None:
    """Freeze the model but for `spec.also`, and give the layers adapters of `dtype`.

    Before activation checkpointing, compile and fully_shard.
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
    """Give one linear layer, of whatever class, an adapter."""
    device = next(linear.parameters()).device
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
    linear.lora_A = nn.Linear(linear.in_features, rank, **options)
    linear.lora_B = nn.Linear(rank, linear.out_features, **options)
    linear.lora_scale = scale
    if kind == "dora":
        magnitude = torch.empty(linear.out_features, device=device, dtype=dtype)
        linear.lora_magnitude_vector = nn.Parameter(magnitude)
    # a method of the instance: the class may be torch's, float8's or that of 4-bit weights
    linear.forward = MethodType(_lora_forward if kind == "lora" else _dora_forward, linear)


def _lora_forward(self: Any, x: Tensor) -> Tensor:
    """Return W x + scale · B(A x), and the bias."""
    rows = x.flatten(0, -2)
    return _add_adapter(self, rows, type(self).forward(self, rows)).view(*x.shape[:-1], -1)


def _add_adapter(self: Any, rows: Tensor, out: Tensor) -> Tensor:
    """Return out + scale · B(A x): [rows, out].

    A x is scaled and the product added as it is made: nothing else of the output's size.
    """
    return torch.addmm(out, self.lora_A(rows) * self.lora_scale, self.lora_B.weight.t())


def _dora_forward(self: Any, x: Tensor) -> Tensor:
    """Return magnitude ÷ |W + scale · B·A| · (W x + scale · B(A x)), row by row, and the bias.

    The lengths of the rows are constants to backward (Liu et al. 2024, §4.3).
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

    |W|² + 2 s Σ (W Aᵀ) ∘ B + s² Σ (B A Aᵀ) ∘ B: no second matrix of W's size is made. Sums over
    columns: of parts of them, each with its part of A, their sum is that of the whole.
    rows: of the layer's weight; a, b: matrices of its adapter.
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
    """Return rows of a linear layer's `weight` as it computes with them: [rows, in]."""
    if hasattr(rows, "to_original_precision"):  # torchao's, gathered in float8
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
    """Have LoRA's layers compute as their base does, within the block: with scales of 0."""
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
    """Return the adapters' parameters by name."""
    return {n: p for n, p in model.named_parameters() if ".lora_" in n}


@torch.no_grad()
def initialize_magnitudes(model: nn.Module) -> None:
    """Set DoRA's magnitudes to the lengths of the rows of W: the adapted model is W at first.

    Each rank for the rows that it holds; the weights must be there. Collective.
    """
    for linear in adapted_layers(model).values():
        if hasattr(linear, MAGNITUDE):
            rows = dense_rows(linear, local_part(linear.weight)).float()
            # in float64 every layout rounds to the same float32
            lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            for group in groups_of_columns(linear.weight):
                squares = lengths.square()
                dist.all_reduce(squares, group=group)
                lengths = squares.sqrt()
            local_part(linear.lora_magnitude_vector).copy_(lengths)


def groups_of_columns(matrix: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that hold other columns of the same rows."""
    if not isinstance(matrix, DTensor):
        return []
    placements = enumerate(matrix.placements)
    return [matrix.device_mesh.get_group(i) for i, place in placements if place.is_shard(1)]
