"""AdamW whose weights or moments take fewer bits than its arithmetic, which is in float32."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from fsdp_trainer.optim.eight_bit import block_of, decode, encode
from fsdp_trainer.optim.rounding import key_of, random_bits, round_to_bfloat16

CHUNKS = {
    "cpu": 1 << 18,
    "cuda": 1 << 24,
}  # elements updated at a time: few for the caches, many for few launches
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # and whether they have a sign


class CompactAdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with any of float32, bfloat16 and 8-bit moments, over float32 or bfloat16 weights.

    What is stored in bfloat16 is rounded stochastically or to nearest (the mean always to nearest: its steps are large enough), with bits that
    depend on seed, step, parameter and element, so that neither the number of ranks nor a restart changes them. All parameters share one count
    of steps, and are expected to have a gradient in each. `found_inf` works as in torch's fused AdamW: no update, and no wait for the host.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        names: dict[nn.Parameter, str],
        state_dtype: str,
        stochastic: bool,
        seed: int,
        **defaults: Any,
    ):
        """names: of every parameter; state_dtype: `float32`, `bfloat16` or `8bit`; defaults: lr, betas, eps."""
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.state_dtype, self.stochastic = state_dtype, stochastic
        self.keys = {parameter: key_of(seed, name) for parameter, name in names.items()}
        self.count = torch.zeros((), device=next(iter(names)).device)
        self.found_inf: Tensor | None = None

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Zero moments, sharded as the parameter is; blocks of 8-bit moments have a column of scales each."""
        state, block = {"step": self.count}, block_of(parameter.shape)
        for name in MOMENTS:
            if self.state_dtype == "8bit" and block:
                shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // block))
                state[f"{name}_codes"] = zeros_sharded_like(parameter, parameter.shape, torch.uint8)
                state[f"{name}_scale"] = zeros_sharded_like(
                    parameter, shape, torch.float32
                )  # 0 × any code is 0
            else:
                dtype = torch.bfloat16 if self.state_dtype == "bfloat16" else torch.float32
                state[name] = zeros_sharded_like(parameter, parameter.shape, dtype)
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter, or none where `found_inf` is not 0."""
        device = self.count.device
        skip = (
            torch.zeros((), dtype=torch.bool, device=device)
            if self.found_inf is None
            else self.found_inf.to(device) != 0
        )
        count = self.count + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = self.empty_state(parameter)
                self._update(parameter, group, count, skip)
        keep(self.count, count, skip)

    def _update(
        self, parameter: nn.Parameter, group: dict[str, Any], count: Tensor, skip: Tensor
    ) -> None:
        """One parameter, chunk by chunk. Each number's update is its own (a block's, in 8 bits): chunks change nothing."""
        weights, gradients = flat(parameter), flat(parameter.grad)
        state = {
            name: flat(tensor) for name, tensor in self.state[parameter].items() if name != "step"
        }
        first = first_element(parameter)
        size = CHUNKS[weights.device.type]
        for start in range(0, len(weights), size):
            end = min(start + size, len(weights))
            part = {
                name: tensor[
                    start * len(tensor) // len(weights) : end * len(tensor) // len(weights)
                ]
                for name, tensor in state.items()
            }
            weight = weights[start:end]
            bits = (
                random_bits(self.keys[parameter], count, first + start, end - start)
                if self.stochastic
                else None
            )
            new, mean, square = adamw(
                weight.float(),
                gradients[start:end].float(),
                load(part, "exp_avg"),
                load(part, "exp_avg_sq"),
                group,
                count,
            )
            store(part, "exp_avg", mean, None, skip)
            store(part, "exp_avg_sq", square, None if bits is None else bits >> 16, skip)
            keep(weight, rounded(new, weight.dtype, bits), skip)


def adamw(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    group: dict[str, Any],
    count: Tensor,
) -> tuple[Tensor, ...]:
    """The new weight, mean and mean square: [n] float32. count: of this step, 1 is the first; a scalar on the device."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    bias1, bias2 = (
        1 - beta ** count.double() for beta in (beta1, beta2)
    )  # in float32 only four digits would be left at first
    mean = torch.lerp(mean, gradient, 1 - beta1)
    square = (square * beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (square / bias2).sqrt_().add_(group["eps"])
    step = (mean / root).mul_(lr / bias1)
    return (weight * (1 - lr * group["weight_decay"])).sub_(step), mean, square


def load(state: dict[str, Tensor], name: str) -> Tensor:
    """A moment in float32."""
    if name in state:
        return state[name].float()
    return decode(state[f"{name}_codes"], state[f"{name}_scale"], MOMENTS[name])


def store(
    state: dict[str, Tensor], name: str, moment: Tensor, bits: Tensor | None, skip: Tensor
) -> None:
    """Write a moment as it is stored, unless `skip`."""
    if name in state:
        keep(state[name], rounded(moment, state[name].dtype, bits), skip)
        return
    codes, scale = state[f"{name}_codes"], state[f"{name}_scale"]
    new_codes, new_scale = encode(moment, len(codes) // len(scale), MOMENTS[name])
    keep(codes, new_codes, skip)
    keep(scale, new_scale, skip)


def rounded(numbers: Tensor, dtype: torch.dtype, bits: Tensor | None) -> Tensor:
    """float32 in the dtype it is stored in; overwrites `numbers` and `bits`, without which it is to nearest."""
    return (
        round_to_bfloat16(numbers, bits)
        if dtype == torch.bfloat16 and bits is not None
        else numbers.to(dtype)
    )


def keep(old: Tensor, new: Tensor, skip: Tensor) -> None:
    """Overwrite `old`, or leave every bit of it where `skip`."""
    torch.where(skip, old, new, out=old)


def local(tensor: Tensor | None) -> Tensor:
    """This rank's part."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def flat(tensor: Tensor | None) -> Tensor:
    """This rank's part in one dimension, sharing its memory."""
    return local(tensor).view(-1)


def first_element(parameter: Tensor) -> int:
    """Where in the whole parameter, counted row by row, this rank's part begins."""
    if not isinstance(parameter, DTensor):
        return 0
    row = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )[1][0]
    return row * parameter.shape[1:].numel()


def zeros_sharded_like(parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Zeros of another shape and dtype, whose rows are on the ranks that have the parameter's."""
    mine = local(parameter)
    zeros = torch.zeros(
        mine.shape[:-1] + shape[-1:] if len(shape) > 1 else mine.shape,
        dtype=dtype,
        device=mine.device,
    )
    if not isinstance(parameter, DTensor):
        return zeros
    whole = TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
    # not DTensor.from_local, which would move what sharding.cpu_offload keeps on the host
    return DTensor(
        zeros, DTensorSpec(parameter.device_mesh, parameter.placements, whole), requires_grad=False
    )
