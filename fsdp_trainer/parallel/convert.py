"""Linear layers whose matrix products are computed in float8 (Micikevicius et al. 2022), by torchao; their weights stay what they were."""

from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_trainer.config.schema import Precision
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.decoder import Decoder

CAPABILITY = (8, 9)  # Ada; the first GPUs with float8 matrix products
EMULATED = False  # compute what float8 would give in wider products, on any device: for tests


def require_float8(precision: Precision, device: torch.device) -> None:
    """Raise UserError if the device has no float8 matrix products and the configuration asks for them."""
    if precision.float8 is None or EMULATED:
        return
    have = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if have is None or have < CAPABILITY:
        told = (
            f"{torch.cuda.get_device_name(device)} has capability {have[0]}.{have[1]}"
            if have
            else "this run is on the CPU"
        )
        why = f"needs a GPU of compute capability 8.9 or higher (H100, L40S, RTX 4090); {told}.\nUse  precision=bf16"
        raise UserError(
            "there is no float8 on this device",
            [Problem(f"precision.float8={precision.float8}", why)],
        )


def convert_linears(model: Decoder, precision: Precision) -> None:
    """Replace the blocks' linear layers that gain by it; embedding, norms and head stay. Raises UserError if none does.

    With one scale for a whole matrix (`tensorwise`) the weights are gathered in float8 too: half the bytes of bfloat16.
    """
    if precision.float8 is None:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(precision.float8)
    config = replace(
        config, emulate=EMULATED, enable_fsdp_float8_all_gather=precision.float8 == "tensorwise"
    )
    recipe = precision.float8
    convert_to_float8_training(
        model.model.layers,
        config=config,
        module_filter_fn=lambda module, name: gains(module, recipe),
    )
    if not float8_layers(model):
        why = "no matrix of this model is large enough to gain by float8, or divisible by 16.\nUse  precision=bf16"
        raise UserError(
            "there is nothing for float8 to do", [Problem(f"precision.float8={recipe}", why)]
        )


def gains(module: nn.Module, recipe: str) -> bool:
    """Whether a linear layer's products are divisible as the hardware wants, and faster than in bfloat16, casts included.

    As measured on H100 by torchao's authors (float8/README.md, and the thresholds of its own filter).
    """
    if not isinstance(module, nn.Linear):
        return False
    rows, columns = module.weight.shape
    if rows % 16 or columns % 16:
        return False
    if recipe == "tensorwise":
        return columns > 4096 or rows > 1024
    return rows > 2048 and columns > 1024 and (rows > 4096 or columns > 2048)


def float8_layers(model: nn.Module) -> int:
    """How many linear layers compute in float8."""
    return sum(type(module).__name__ == "Float8Linear" for module in model.modules())


def scale_after_each_step(model: Decoder, optimizer: Optimizer, precision: Precision) -> None:
    """Find all the weights' scales for their next all-gather together, with one small all-reduce, instead of one for each weight."""
    if precision.float8 == "tensorwise":
        optimizer.register_step_post_hook(lambda *_: scale(model, precision))


def scale(model: Decoder, precision: Precision) -> None:
    """Find those scales now: the weights have changed."""
    if precision.float8 == "tensorwise":
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)
