"""AdamW whose weights or moments take fewer bits than its arithmetic, which is in float32."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_trainer.distributed import local_part, local_slice
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.optim.base import TrainerOptimizer
from fsdp_trainer.optim.eight_bit import decode, encode
from fsdp_trainer.optim.footprint import CHUNKS, block_size
from fsdp_trainer.optim.rounding import element_numbers, key_of, random_bits, round_to_bfloat16
from fsdp_trainer.torch_private import dtensor_like

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether they have a sign


class CompactAdamW(TrainerOptimizer):
    """AdamW (Loshchilov & Hutter 2019) over float32 or bfloat16 weights.

    Its moments are in float32, bfloat16 or 8 bits.

    What is stored in bfloat16 is rounded stochastically or to nearest (the mean always to nearest:
    its steps are large enough), with bits that depend on seed, step, parameter and element, so that
    neither the layout nor a restart changes them. All parameters share one count of steps, and are
    expected to have a gradient in each.
    """

    skips_on_device = True

    def __init__(
        self,
        groups: list[dict[str, Any]],
        moments: str,
        stochastic: bool,
        seed: int,
        **defaults: Any,
    ):
        """groups: with names; moments: float32, bfloat16 or 8bit; defaults: lr, betas, eps."""
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.moments = moments
        self.stochastic = stochastic
        self.keys = {
            parameter: key_of(seed, name)
            for group in self.param_groups
            for parameter, name in zip(group["params"], group["param_names"], strict=True)
        }
        self.count = torch.zeros((), device=next(iter(self.keys)).device)
        for parameter in self.keys:
            require_whole_blocks(parameter, self.block(parameter))

    def block(self, parameter: nn.Parameter) -> int:
        """Return how many numbers of a moment share a scale; 1: it is stored without."""
        return block_size(parameter.shape) if self.moments == "8bit" else 1

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return zero moments, placed as the parameter is; in 8 bits, codes and their scales."""
        block = self.block(parameter)
        dtype = torch.bfloat16 if self.moments == "bfloat16" else torch.float32
        formats = {"": (dtype, 1)}
        if block > 1:
            formats = {"_codes": (torch.uint8, 1), "_scale": (torch.float32, block)}
        return {"step": self.count} | {
            name + suffix: zeros_like_part(parameter, *format_)
            for name in MOMENTS
            for suffix, format_ in formats.items()
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter, or none where `found_inf` is not 0."""
        found_inf = torch.zeros(()) if self.found_inf is None else self.found_inf
        skip = found_inf.to(self.count.device) != 0
        count = self.count + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group, count, skip)
        write_unless(skip, self.count, count)

    def _update(
        self,
        parameter: nn.Parameter,
        gradient: Tensor,
        group: dict[str, Any],
        count: Tensor,
        skip: Tensor,
    ) -> None:
        """Update one parameter chunk by chunk: a number, in 8 bits a block, needs no other."""
        if not self.state[parameter]:
            self.state[parameter] = self.empty_state(parameter)
        block = self.block(parameter)
        part = local_slice(parameter)
        weights = local_part(parameter).view(-1, block)
        gradients = local_part(gradient).reshape(-1, block)
        state = {
            name: local_part(tensor).view(-1, 1 if name.endswith("_scale") else block)
            for name, tensor in self.state[parameter].items()
            if name != "step"
        }
        size = CHUNKS[weights.device.type] // block
        for start in range(0, len(weights), size):
            chunk = slice(start, start + size)
            weight = weights[chunk]
            moments = {name: t[chunk] for name, t in state.items()}
            bits = None
            if self.stochastic:
                first = start * block
                numbers = element_numbers(
                    part, parameter.shape, first, weight.numel(), weight.device
                )
                bits = random_bits(self.keys[parameter], count, numbers.view_as(weight))
            mean = load(moments, "exp_avg")
            square = load(moments, "exp_avg_sq")
            new, mean, square = adamw(
                weight.float(),
                gradients[chunk].float(),
                mean,
                square,
                group,
                count,
            )
            store(moments, "exp_avg", mean, None, skip)
            store(moments, "exp_avg_sq", square, None if bits is None else bits >> 16, skip)
            write_unless(skip, weight, rounded(new, weight.dtype, bits))


def adamw(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    group: dict[str, Any],
    count: Tensor,
) -> tuple[Tensor, ...]:
    """Return the new weight, mean and mean square, float32, of any shape.

    count: of this step, 1 is the first; a scalar on the device.
    """
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    # in float32 only four digits of the corrections would be left at first
    bias1, bias2 = (1 - beta ** count.double() for beta in (beta1, beta2))
    mean = torch.lerp(mean, gradient, 1 - beta1)
    square = (square * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / bias2).sqrt_().add_(group["eps"])
    step = (mean / root).mul_(lr / bias1)
    return (weight * (1 - lr * group["weight_decay"])).sub_(step), mean, square


def load(state: dict[str, Tensor], name: str) -> Tensor:
    """Return a moment: [blocks, block] float32."""
    if name in state:
        return state[name].float()
    return decode(state[f"{name}_codes"], state[f"{name}_scale"], MOMENTS[name])


def store(
    state: dict[str, Tensor], name: str, moment: Tensor, bits: Tensor | None, skip: Tensor
) -> None:
    """Write a moment in the format it is stored in, unless `skip`."""
    if name in state:
        write_unless(skip, state[name], rounded(moment, state[name].dtype, bits))
        return
    codes, scale = encode(moment, MOMENTS[name])
    write_unless(skip, state[f"{name}_codes"], codes)
    write_unless(skip, state[f"{name}_scale"], scale)


def rounded(numbers: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    """Return numbers in `dtype`, to nearest without `bits`. Overwrites both arguments."""
    if dtype == torch.bfloat16 and bits is not None:
        return round_to_bfloat16(numbers, bits)
    return numbers.to(dtype)


def write_unless(skip: Tensor, old: Tensor, new: Tensor) -> None:
    """Overwrite `old`, or leave every bit of it where `skip`."""
    torch.where(skip, old, new, out=old)


def require_whole_blocks(parameter: Tensor, block: int) -> None:
    """Raise UserError if this rank's columns hold a part of a block."""
    columns = local_part(parameter).shape[-1]
    if columns % block:
        cut = f"column shards of {columns} numbers would cut blocks of {block}"
        problem = Problem("optim.state_dtype=8bit", f"{cut}.\nUse  optim.state_dtype=bfloat16")
        raise UserError("8-bit moments do not fit this sharding", [problem])


def zeros_like_part(parameter: Tensor, dtype: torch.dtype, block: int = 1) -> Tensor:
    """Return zeros placed as the parameter is, one for each `block` numbers of a row."""
    require_whole_blocks(parameter, block)
    local = local_part(parameter)
    *rows, columns = local.shape
    zeros = torch.zeros(*rows, columns // block, dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    *rows, columns = parameter.shape
    return dtensor_like(parameter, zeros, torch.Size((*rows, columns // block)))
