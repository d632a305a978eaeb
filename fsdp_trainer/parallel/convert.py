"""Conversion of linear layers to float8 matrix products (Micikevicius et al. 2022), with torchao.

The weights keep their number format.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.config.schema import Precision
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.decoder import Decoder

CAPABILITY = (8, 9)  # Ada; the first GPUs with float8 matrix products
EMULATED = False  # for tests: emulate float8 products in a wider format, on any device
INSTEAD = "Use  precision=bf16"


def require_float8(precision: Precision, device: torch.device) -> None:
    if precision.float8 is None or EMULATED:
        return
    this = "this run is on the CPU"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= CAPABILITY:
            return
        this = f"{torch.cuda.get_device_name(device)} has capability {major}.{minor}"
    needs = "needs a GPU of compute capability 8.9 or higher (H100, L40S, RTX 4090)"
    raise UserError(
        "there is no float8 on this device",
        f"precision.float8={precision.float8}",
        f"{needs}; {this}.\n{INSTEAD}",
    )


def convert_linears(
    model: Decoder, precision: Precision, parts: Callable[[str], tuple[int, int]]
) -> None:
    """Replace the blocks' linear layers that are faster in float8; embedding, norms and head stay.

    parts: returns into how many parts ranks divide the outputs and inputs of a matrix, by its name.

    With one scale per matrix (`tensorwise`) the weights are also gathered in float8, half the
    bytes of bfloat16. Raises UserError if no layer is faster.
    """
    recipe = precision.float8
    if recipe is None:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=EMULATED,
        enable_fsdp_float8_all_gather=recipe == "tensorwise",
    )
    convert_to_float8_training(
        nn.ModuleDict(model.blocks()),
        config=config,
        module_filter_fn=lambda module, name: worth_float8(
            module, recipe, *parts(name.rpartition(".")[2])
        ),
    )
    if not float8_layers(model):
        reason = "no matrix of this model is large enough to gain by float8, or divisible by 16"
        raise UserError(
            "no layer gains from float8", f"precision.float8={recipe}", f"{reason}.\n{INSTEAD}"
        )


def worth_float8(module: nn.Module, recipe: str, by_rows: int = 1, by_columns: int = 1) -> bool:
    """Return True if a linear layer is faster in float8 than in bfloat16, including casts.

    by_rows, by_columns: number of parts into which ranks divide the matrix.
    Thresholds were measured on H100 by torchao's authors (float8/README.md, and the thresholds of
    its own filter). The hardware requires sizes divisible by 16.
    """
    if not isinstance(module, nn.Linear):
        return False
    rows, columns = module.out_features // by_rows, module.in_features // by_columns
    if rows % 16 or columns % 16:
        return False
    if recipe == "tensorwise":
        return columns > 4096 or rows > 1024
    return rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)


def float8_layers(model: nn.Module) -> int:
    return sum(map(is_float8, model.modules()))


def is_float8(module: nn.Module) -> bool:
    """Return True if a module is torchao's linear layer, without importing torchao."""
    return any(cls.__name__ == "Float8Linear" for cls in type(module).__mro__)


def float8_product(linear: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ computed by torchao in float8.

    weight: this rank's part of the layer's weight, possibly already in float8.
    """
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    return matmul_with_hp_or_float8_args.apply(
        x, weight.t(), linear.linear_mm_config, linear.config
    )


def scale_after_each_step(model: Decoder, optimizer: Optimizer, precision: Precision) -> None:
    optimizer.register_step_post_hook(lambda *_: precompute_float8_scales(model, precision))


def precompute_float8_scales(model: Decoder, precision: Precision) -> None:
    """Compute the scales of all weights for their next all-gather, with one small all-reduce.

    Without this there would be one all-reduce per weight. For `tensorwise` only. The weights must
    not change before that all-gather. Collective.
    """
    if precision.float8 == "tensorwise":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        if hasattr(model, "tensor_ranks"):
            all_reduce_scales(model)
        else:
            precompute_float8_dynamic_scale_for_fsdp(model)


@torch.no_grad()
def all_reduce_scales(model: Decoder) -> None:
    """Set the scale of the complete matrix on every part, for its next all-gather. Collective.

    torchao's own function needs one all-reduce for each dimension of the mesh, and warns about it.
    """
    from torchao.float8.float8_utils import EPS

    layers: list[Any] = [module for module in model.modules() if is_float8(module)]
    weights: list[Any] = [local_part(layer.weight) for layer in layers]
    largest = torch.stack([largest_of(weight._tensor) for weight in weights])
    dist.all_reduce(largest, dist.ReduceOp.MAX)  # over all ranks: replicas have equal values
    dtype = layers[0].config.cast_config_weight.target_dtype
    scales = torch.finfo(dtype).max / largest.clamp_min(EPS).double()
    for weight, scale in zip(weights, scales.float(), strict=True):
        weight._precomputed_scale = scale


def largest_of(part: Tensor) -> Tensor:
    """Return the largest absolute value as float32; 0 for an empty part."""
    return part.abs().amax().float() if part.numel() else part.new_zeros((), dtype=torch.float32)
