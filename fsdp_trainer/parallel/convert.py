"""Linear layers that compute matrix products in float8 (Micikevicius et al. 2022), by torchao.

Their weights stay what they were.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_trainer.config.schema import Precision
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.decoder import Decoder

CAPABILITY = (8, 9)  # Ada; the first GPUs with float8 matrix products
EMULATED = False  # compute what float8 would give in wider products, on any device: for tests
INSTEAD = "Use  precision=bf16"


def require_float8(precision: Precision, device: torch.device) -> None:
    """Raise UserError if the configuration asks for float8 products and the device has none."""
    if precision.float8 is None or EMULATED:
        return
    this = "this run is on the CPU"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= CAPABILITY:
            return
        this = f"{torch.cuda.get_device_name(device)} has capability {major}.{minor}"
    needs = "needs a GPU of compute capability 8.9 or higher (H100, L40S, RTX 4090)"
    problem = Problem(f"precision.float8={precision.float8}", f"{needs}; {this}.\n{INSTEAD}")
    raise UserError("there is no float8 on this device", [problem])


def convert_linears(model: Decoder, precision: Precision) -> None:
    """Replace the blocks' linear layers that are faster in float8; embedding, norms and head stay.

    With one scale for a whole matrix (`tensorwise`) the weights are gathered in float8 too: half
    the bytes of bfloat16. Raises UserError if no layer is faster.
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
        model.model.layers,
        config=config,
        module_filter_fn=lambda module, name: worth_float8(module, recipe),
    )
    if not float8_layers(model):
        reason = "no matrix of this model is large enough to gain by float8, or divisible by 16"
        problem = Problem(f"precision.float8={recipe}", f"{reason}.\n{INSTEAD}")
        raise UserError("there is nothing for float8 to do", [problem])


def worth_float8(module: nn.Module, recipe: str) -> bool:
    """Return whether a linear layer is faster than in bfloat16, casts included.

    As measured on H100 by torchao's authors (float8/README.md, and the thresholds of its own
    filter). The hardware wants sizes that 16 divides.
    """
    if not isinstance(module, nn.Linear) or any(size % 16 for size in module.weight.shape):
        return False
    rows, columns = module.weight.shape
    if recipe == "tensorwise":
        return columns > 4096 or rows > 1024
    return rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)


def float8_layers(model: nn.Module) -> int:
    """Return how many linear layers compute in float8."""
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())


def scale_after_each_step(model: Decoder, optimizer: Optimizer, precision: Precision) -> None:
    """Have the weights' scales computed after each optimizer step."""
    optimizer.register_step_post_hook(lambda *_: precompute_float8_scales(model, precision))


def precompute_float8_scales(model: Decoder, precision: Precision) -> None:
    """Compute all weights' scales for their next all-gather, with one small all-reduce for all.

    Otherwise each weight would have its own. Collective; for `tensorwise` only. The weights must
    not change before that all-gather.
    """
    if precision.float8 == "tensorwise":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
