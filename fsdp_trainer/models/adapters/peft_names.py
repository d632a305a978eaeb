"""Translation of PEFT's names to ours: the adapters of a PEFT folder. Does not import torch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from fsdp_trainer.config.paths import ADAPTER_CONFIG
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import (
    MAGNITUDE,
    A,
    AdapterSpec,
    B,
    adapter_name,
    scale_divisor,
)
from fsdp_trainer.models.adapters.peft_config import (
    MAX_MISFITS,
    MERGE_WITH_PEFT,
    TENSORS,
    PeftFolder,
    Shape,
)
from fsdp_trainer.models.adapters.peft_experts import (
    STACKED_PARTS,
    SeparateTensors,
    Stack,
    StackedParameter,
    StackedRows,
    StackedTensor,
    by_experts,
    stacked_parameters,
    whole_parameters,
)


@dataclass(frozen=True)
class Part:
    """Rows of a matrix in a Hugging Face folder that are one parameter: all, or a part if fused.

    layer: the parameter's module. first, rows: first row and number of rows.
    """

    layer: str
    first: int
    rows: int


@dataclass
class ModelNames:
    """The matrices and other parameters of a model, by their names in a Hugging Face folder.

    linears, parameters: shape and the parts that make up the rows. tied: the head is the embedding.
    stacks: the matrices of experts, by our name.
    """

    linears: dict[str, tuple[Shape, list[Part]]]
    parameters: dict[str, tuple[Shape, list[Part]]]
    tied: bool
    stacks: dict[str, Stack] = field(default_factory=dict)


@dataclass(frozen=True)
class PeftRows:
    """Source of a parameter: rows and columns of a tensor in PEFT's file.

    first, rows: first row and number of rows. columns: start and end; None: all.
    """

    tensor: str
    first: int
    rows: int
    columns: tuple[int, int] | None = None


Source = PeftRows | SeparateTensors | StackedTensor | StackedRows


@dataclass
class Resolved:
    """The adapters of a model in a PEFT folder, and the source of each parameter.

    same: pairs of tensors that must be equal.
    """

    spec: AdapterSpec
    sources: dict[str, Source]
    same: list[tuple[str, str]]


HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def resolve(peft: PeftFolder, layout: ModelNames, base: str) -> Resolved:
    """Return the adapters in a PEFT folder, matched to a model. base: as in AdapterSpec.

    Raises UserError with everything that does not fit.
    """
    modules, others = by_module(peft.shapes)
    problems: list[Problem] = []
    layers: dict[str, tuple[int, float]] = {}
    sources: dict[str, Source] = {}
    for stacks in by_experts(layout.stacks.values()).values():
        problems += adopt_experts(peft, modules, stacks, layers, sources)
    for module, tensors in modules.items():
        misfits = misfits_of(peft, module, tensors, layout)
        problems += misfits
        if not misfits:
            adopt(peft, module, tensors, layout.linears[module][1], layers, sources)
    problems += missing(peft, modules, layout)
    # an adapted embedding's own weight
    wrapped = {f"{module}.base_layer.weight" for module in modules}
    others = {name: shape for name, shape in others.items() if name not in wrapped}
    also, same = fully_trained(others, layout, sources, problems)
    more = len(problems) - MAX_MISFITS
    if more > 0:
        more_text = f"… and {more:,} more tensors do not fit: is this the adapter's base model?"
        problems[MAX_MISFITS - 1].reason += f"\n{more_text}"
    if problems:
        title = f"the adapter in {peft.folder} does not fit the model"
        raise UserError(title, problems[:MAX_MISFITS])
    kind = "dora" if peft.config.get("use_dora") else "lora"
    scaling = "rslora" if peft.is_rslora else "standard"
    ordered = [part.layer for _, parts in layout.linears.values() for part in parts]
    ordered += layout.stacks
    layers = {name: layers[name] for name in ordered if name in layers}
    return Resolved(AdapterSpec(kind, scaling, base, layers, tuple(also)), sources, same)


def by_module(shapes: dict[str, Shape]) -> tuple[dict[str, dict[str, Shape]], dict[str, Shape]]:
    modules: dict[str, dict[str, Shape]] = {}
    others: dict[str, Shape] = {}
    for name, shape in shapes.items():
        module, tensor = split_name(name)
        if tensor:
            modules.setdefault(module, {})[tensor] = shape
        else:
            others[name] = shape
    return modules, others


def split_name(name: str) -> tuple[str, str]:
    """Return module and tensor of an adapter's parameter, ("", "") for other parameters."""
    for end, tensor in TENSORS.items():
        if name.endswith(f".{end}"):
            return name.removesuffix(f".{end}"), tensor
    return ("", "") if ".lora_" not in name else (name.rpartition(".lora_")[0], name)


def misfits_of(
    peft: PeftFolder, module: str, tensors: dict[str, Shape], layout: ModelNames
) -> list[Problem]:
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
    return shape_misfits(module, tensors, expected)


def shape_misfits(
    module: str, tensors: dict[str, Shape], expected: dict[str, Shape]
) -> list[Problem]:
    """Return a problem for each tensor of an adapter that is missing, unexpected or misshapen."""
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
    sources: dict[str, Source],
) -> None:
    """Add the adapters of a matrix's parts to `layers`, and their sources to `sources`.

    A fused matrix's adapter becomes one of the same rank for each part; in our own files it is
    split again.
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
        divisor = scale_divisor(rank, peft.is_rslora)
        layers[part.layer] = (rank, scale * divisor)
        columns = (column, column + rank) if own else None
        sources[f"{part.layer}.{A}.weight"] = PeftRows(a, column, rank)
        sources[f"{part.layer}.{B}.weight"] = PeftRows(b, part.first, part.rows, columns)
        if MAGNITUDE in tensors:
            magnitude = PeftRows(f"{module}.{MAGNITUDE}", part.first, part.rows)
            sources[f"{part.layer}.{MAGNITUDE}"] = magnitude
        column += rank if own else 0


def adopt_experts(
    peft: PeftFolder,
    modules: dict[str, dict[str, Shape]],
    stacks: list[Stack],
    layers: dict[str, tuple[int, float]],
    sources: dict[str, Source],
) -> list[Problem]:
    """Add the adapters of a block's experts to `layers` and `sources`, and return problems.

    Removes their modules from `modules`.
    """
    problems: list[Problem] = []
    for stack in stacks:
        problems += adopt_separate(peft, modules, stack, layers, sources)
    adapted = {
        name for name in STACKED_PARTS if peft.targets_parameter(f"{stacks[0].experts}.{name}")
    }
    if any(stack.layer in layers for stack in stacks):
        return problems
    for parameter in stacked_parameters(stacks, adapted):
        problems += adopt_stacked(peft, modules, parameter, layers, sources)
    return problems


def adopt_separate(
    peft: PeftFolder,
    modules: dict[str, dict[str, Shape]],
    stack: Stack,
    layers: dict[str, tuple[int, float]],
    sources: dict[str, Source],
) -> list[Problem]:
    """Add adapters in the separate form, if there are any. See adopt_experts."""
    own = {name: modules.pop(name) for name in stack.names if name in modules}
    if not own:
        return []
    _, outputs, inputs = stack.shape
    values = {}
    problems = []
    for name in stack.names:
        rank = peft.pattern("rank_pattern", "r", name)
        values[name] = (rank, peft.pattern("alpha_pattern", "lora_alpha", name))
        expected: dict[str, Shape] = {A: (rank, inputs), B: (outputs, rank)}
        problems += shape_misfits(name, own.get(name, {}), expected)
    if len(set(values.values())) > 1:
        text = "has other ranks or alphas for some of the experts: here they are the same for all"
        problems.append(Problem(stack.layer, text))
    layers[stack.layer] = values[stack.names[0]]
    for tensor in (A, B):
        names = tuple(f"{name}.{tensor}" for name in stack.names)
        sources[adapter_name(stack.layer, tensor)] = SeparateTensors(names)
    return problems


def adopt_stacked(
    peft: PeftFolder,
    modules: dict[str, dict[str, Shape]],
    parameter: StackedParameter,
    layers: dict[str, tuple[int, float]],
    sources: dict[str, Source],
) -> list[Problem]:
    """Add adapters in the stacked form, for one parameter of transformers. See adopt_experts."""
    count, rows, columns = parameter.shape
    whole = peft.pattern("rank_pattern", "r", parameter.name)
    expected: dict[str, Shape] = {A: (count * whole, columns), B: (rows, count * whole)}
    problems = shape_misfits(parameter.module, modules.pop(parameter.module, {}), expected)
    scale = peft.scale(whole, peft.pattern("alpha_pattern", "lora_alpha", parameter.name))
    own = {part.layer: peft.fused_ranks.get(part.layer, 0) for part in parameter.parts}
    if sum(own.values()) != whole:
        own = dict.fromkeys(own, 0)
    a, b = (f"{parameter.module}.{tensor}" for tensor in (A, B))
    first = 0
    for part in parameter.parts:
        rank = own[part.layer] if any(own.values()) else whole
        if not rank:
            continue
        divisor = scale_divisor(rank, peft.is_rslora)
        layers[part.layer] = (rank, scale * divisor)
        span = (count, whole, first, rank)
        sources[adapter_name(part.layer, A)] = StackedTensor(a, False, *span)
        place = (parameter.first_row(part.layer), part.shape[1])
        sources[adapter_name(part.layer, B)] = StackedTensor(b, True, *span, *place)
        first += rank if any(own.values()) else 0
    return problems


def missing(peft: PeftFolder, modules: Iterable[str], layout: ModelNames) -> list[Problem]:
    """Return the problems of layers that the configuration targets but the file lacks."""
    there = set(modules)
    text = f"is missing, though target_modules in {ADAPTER_CONFIG} includes it"
    lacking = [name for name in layout.linears if name not in there and peft.targets(name)]
    return [Problem(name, text) for name in lacking] + unknown_parameters(peft, layout)


def unknown_parameters(peft: PeftFolder, layout: ModelNames) -> list[Problem]:
    names = [f"{name}.weight" for name in layout.linears]
    names += [f"{s.experts}.{name}" for s in layout.stacks.values() for name in STACKED_PARTS]
    ends = tuple(f".{name}" for name in peft.config.get("target_parameters") or [])
    unknown = [end[1:] for end in ends if not any(f".{name}".endswith(end) for name in names)]
    text = f"in {ADAPTER_CONFIG} names no matrix of this model that can have an adapter here"
    return [Problem(f"target_parameters={name}", text) for name in unknown]


def fully_trained(
    tensors: dict[str, Shape],
    layout: ModelNames,
    sources: dict[str, Source],
    problems: list[Problem],
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the parameters trained by modules_to_save, and pairs of tensors that must be equal.

    Adds to `sources` and `problems`.
    """
    also: list[str] = []
    tied = {EMBEDDING, HEAD} & tensors.keys() if layout.tied else set()
    experts = {
        parameter.name: parameter
        for stacks in by_experts(layout.stacks.values()).values()
        for parameter in whole_parameters(stacks)
    }
    for name, shape in tensors.items():
        if name == HEAD and tied:  # the same parameter as the embedding
            continue
        if name in experts and name not in layout.parameters:
            also += adopt_whole(experts[name], shape, sources, problems)
            continue
        if name not in layout.parameters:
            problems.append(Problem(name, "is not part of this model"))
            continue
        expected, parts = layout.parameters[name]
        problems += other_shape(name, shape, expected)
        kind = name.rpartition(".")[2]
        for part in parts:
            also.append(f"{part.layer}.{kind}")
            sources[also[-1]] = PeftRows(name, part.first, part.rows)
    if len(tied) == 1:
        problems.append(_trained_apart(*tied))
    return also, [(EMBEDDING, HEAD)] if len(tied) == 2 else []


def adopt_whole(
    parameter: StackedParameter, shape: Shape, sources: dict[str, Source], problems: list[Problem]
) -> list[str]:
    """Add the sources of our matrices in a parameter of experts that was trained in full; return
    their names.
    """
    problems += other_shape(parameter.name, shape, parameter.shape)
    for part in parameter.parts:
        row = parameter.first_row(part.layer)
        sources[part.layer] = StackedRows(parameter.name, row, part.shape[1])
    return [part.layer for part in parameter.parts]


def other_shape(name: str, shape: Shape, expected: Shape) -> list[Problem]:
    if shape == expected:
        return []
    text = f"has shape {list(shape)}; the model has {list(expected)}"
    return [Problem(name, text)]


def _trained_apart(name: str) -> Problem:
    """Return the problem of an adapter that has only one of two tied matrices."""
    other = "head" if name == EMBEDDING else "embedding"
    text = (
        f"was trained separately from the {other}, which is tied to it in this model"
        " (tie_word_embeddings).\nSave both in the adapter, or untie them in the base model"
    )
    return Problem(name, text)
