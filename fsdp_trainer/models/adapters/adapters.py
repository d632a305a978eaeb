"""Low-rank adapters: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024).

An adapter is a child module of its linear layer W and adds scale · B(A x) to W's output. A has
`rank` rows. A is random and B is zero at the start, so an adapted model starts equal to its base.
Names are PEFT's names without the prefix `base_model.model.`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.config.parts.families import is_stacked
from fsdp_trainer.models.adapters.adapter_spec import A, AdapterSpec
from fsdp_trainer.models.adapters.expert_adapters import adapt_experts, adapted_experts
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit import Linear4


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
    modules = model.named_modules()
    return {name: module for name, module in modules if hasattr(getattr(module, A, None), "weight")}


def is_adapted(model: nn.Module) -> bool:
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
    return {n: p for n, p in model.named_parameters() if ".lora_" in n}
