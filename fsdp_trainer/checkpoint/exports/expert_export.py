"""Adapters of experts as PEFT stores them, in either form. See models.peft_experts."""

from collections.abc import Callable
from dataclasses import dataclass, field

from fsdp_trainer.checkpoint.adapters.expert_tensors import PeftA, PeftB, PlacedStack
from fsdp_trainer.checkpoint.formats.derived import PartCache, Stacked, rows_of, stack_of
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.adapter_spec import A, AdapterSpec, B, adapter_name
from fsdp_trainer.models.adapters.peft_experts import (
    STACKED_PARTS,
    StackedParameter,
    by_experts,
    stacked_parameters,
    whole_parameters,
)
from fsdp_trainer.models.adapters.peft_names import ModelNames

Weights = dict[str, TensorOnDisk]
SEPARATE = "experts=separate"
CACHED_STACKS = 4
"""Stacked B that are kept while rows are made of them: threads may be at two parameters, each of
which has two parts."""


@dataclass
class PeftExperts:
    """The adapters of experts in PEFT's terms.

    ranks: rank and alpha by PEFT's name of each adapted matrix. fused_ranks: see
    peft_config.FUSED_RANKS. all_names: names of all matrices that could be adapted.
    """

    are_separate: bool
    tensors: dict[str, TensorOnDisk] = field(default_factory=dict)
    ranks: dict[str, tuple[int, float]] = field(default_factory=dict)
    fused_ranks: dict[str, int] = field(default_factory=dict)
    all_names: list[str] = field(default_factory=list)


def separate_experts(spec: AdapterSpec, layout: ModelNames, weights: Weights) -> PeftExperts:
    """Return an adapter for each expert's matrix. weights: all weights, by parameter name.

    Raises UserError for a family whose folders hold all experts in one tensor.
    """
    experts = PeftExperts(are_separate=True)
    for layer, stack in layout.stacks.items():
        if layer not in spec.layers:
            continue
        if not stack.names:
            text = "in this family's folders one tensor holds all experts.\nUse  experts=stacked"
            raise UserError("the experts have no form of this name", SEPARATE, text)
        for tensor in (A, B):
            matrix = weights[adapter_name(layer, tensor)].as_matrix()
            rows = matrix.shape[0] // len(stack.names)
            for i, name in enumerate(stack.names):
                experts.tensors[f"{name}.{tensor}.weight"] = rows_of(matrix, i * rows, rows)
        experts.ranks |= dict.fromkeys(stack.names, spec.layers[layer])
    return experts


def stacked_experts(spec: AdapterSpec, layout: ModelNames, weights: Weights) -> PeftExperts:
    """Return an adapter for each parameter that transformers stacks experts in.

    weights: all weights, by parameter name.
    """
    experts = PeftExperts(are_separate=False)
    cache = PartCache(CACHED_STACKS)
    for module, stacks in by_experts(layout.stacks.values()).items():
        experts.all_names += [f"{module}.{name}" for name in STACKED_PARTS]
        adapted = {stack.matrix for stack in stacks if stack.layer in spec.layers}
        for parameter in stacked_parameters(stacks, adapted):
            _add_stacked(experts, parameter, spec, weights, cache)
    return experts


def trained_experts(spec: AdapterSpec, layout: ModelNames, weights: Weights) -> Weights:
    """Return transformers' parameters of the experts that are trained in full, by name.

    weights: merged weights, by parameter name. Parameters that transformers names as we do are left
    out: adapter_export.saved_parameters has them.
    """
    tensors: Weights = {}
    for stacks in by_experts(layout.stacks.values()).values():
        for parameter in whole_parameters(stacks):
            layers = [part.layer for part in parameter.parts]
            if parameter.name in layers or layers[0] not in spec.also:
                continue
            count, rows, columns = parameter.shape
            rows_of_all = [(weights[p.layer].as_matrix(), p.shape[1]) for p in parameter.parts]
            matrices = [
                rows_of(matrix, expert * height, height)
                for expert in range(count)
                for matrix, height in rows_of_all
            ]
            matrix = stack_of(matrices).as_matrix()
            shape = (count, rows, columns)
            tensors[parameter.name] = Stacked(matrix.dtype, shape, matrix.chunks, matrix)
    return tensors


def _add_stacked(
    experts: PeftExperts,
    parameter: StackedParameter,
    spec: AdapterSpec,
    weights: Weights,
    cache: PartCache,
) -> None:
    """Add the adapter of one parameter: the A of its parts concatenated, and B block-diagonal."""
    count, rows, columns = parameter.shape
    layers = [part.layer for part in parameter.parts if part.layer in spec.layers]
    scale = spec.scale(layers[0])
    whole = sum(spec.layers[layer][0] for layer in layers)
    a: list[PlacedStack] = []
    b: list[PlacedStack] = []
    first = 0
    for layer in layers:
        row = parameter.first_row(layer)
        a.append(PlacedStack(weights[adapter_name(layer, A)], first))
        factor = spec.scale(layer) / scale
        b.append(PlacedStack(weights[adapter_name(layer, B)], first, row, factor))
        first += spec.layers[layer][0]
    dtype = a[0].tensor.dtype
    tensors = {
        A: PeftA(dtype, (count * whole, columns), [], whole, a),
        B: PeftB(dtype, (rows, whole * count), [], count, b, cache),
    }
    experts.tensors |= {f"{parameter.module}.{n}.weight": tensor for n, tensor in tensors.items()}
    alpha = spec.layers[layers[0]][1]
    if len(layers) > 1:
        alpha = spec.alpha_for(scale, whole)
        experts.fused_ranks |= {layer: spec.layers[layer][0] for layer in layers}
    experts.ranks[parameter.name] = (whole, alpha)


EXPERT_FORMS: dict[str, Callable[[AdapterSpec, ModelNames, Weights], PeftExperts]] = {
    "stacked": stacked_experts,
    "separate": separate_experts,
}
"""Functions that write the adapters of experts, by the key `experts` of the verb export."""
