"""The order in which torch tries a GPU's attention kernels.

This is set for the whole process, since backward may recompute a block outside of any context.
"""

from contextlib import ExitStack
from importlib import import_module

import torch
import torch.nn.attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_trainer.errors import UserError
from fsdp_trainer.models.attention_choice import FLASH, SDPA_ONLY, AttentionChoice, AttentionContext
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.sdpa import sdpa

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}
MERGING = ("cudnn", "flash", *FLASH)
_priority = ExitStack()
_chosen: list[str] = []
"""The kernel of this process's run, if there are several."""


def order_without_masks() -> list[SDPBackend]:
    """Return the order for calls of training without a mask; empty: that of the process."""
    return [*BACKENDS.values()] if "cudnn" in _chosen else []


def merging_kernel() -> str | None:
    """Return cudnn or flash, by which calls without a mask return their logsumexps for a ring.

    None: it is another.
    """
    return next(("flash" if name in FLASH else name for name in _chosen if name in MERGING), None)


def describe_device(device: torch.device) -> AttentionContext:
    if device.type != "cuda":
        return AttentionContext(device=device.type)
    installed = frozenset(filter(_is_installed, MODULES))
    capability = torch.cuda.get_device_capability(device)
    return AttentionContext("cuda", capability, installed=installed)


def _is_installed(name: str) -> bool:
    """Return True if FlashAttention 3 or 4 can be imported and torch supports it."""
    try:
        known = torch.nn.attention.list_flash_attention_impls()
        return name.upper() in known and bool(import_module(MODULES[name]))
    except Exception:  # a build for another torch version can raise anything
        return False


def set_kernel_priority(
    choice: AttentionChoice,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    required: bool,
) -> None:
    """Make torch try the chosen kernel first, then the others for inputs that it cannot compute.

    With a mask, cuDNN is used only on request: its backward can return NaN (pytorch#196678).
    Without, training's calls set an order of their own (`order_without_masks`): cuDNN plans each
    new shape, of which generation and images have many.
    required: raise UserError if the chosen kernel cannot compute this model at all.
    """
    _priority.close()  # the priority of an earlier run in this process
    _chosen.clear()
    if choice.kernel is None:
        return
    _chosen.append(choice.kernel)
    if choice.kernel in FLASH:
        torch.nn.attention.activate_flash_attention_impl(choice.kernel.upper())
        if hasattr(torch.nn.attention, "restore_flash_attention_impl"):  # torch 2.12
            _priority.callback(torch.nn.attention.restore_flash_attention_impl)
    first = BACKENDS.get(choice.kernel, SDPBackend.FLASH_ATTENTION)
    others = [backend for name, backend in BACKENDS.items() if name != "cudnn"]
    order = list(dict.fromkeys([first, *others]))
    if choice.kernel == "cudnn" and not (required and choice.layout == "mask"):
        order = others
    if required and (choice.layout != "varlen" or choice.kernel == "cudnn"):
        # before the order is set: the first call on Hopper makes torch put cuDNN, then flash first
        _try(choice, first, config, dtype, device)
    _priority.enter_context(sdpa_kernel(order, set_priority=True))


def _try(
    choice: AttentionChoice,
    backend: SDPBackend,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    q, k, v = (
        torch.zeros(1, 128, n, config.head_dim, dtype=dtype, device=device, requires_grad=True)
        for n in heads
    )
    mask = torch.ones(1, 1, 128, 128, dtype=torch.bool, device=device).tril()
    try:
        with sdpa_kernel(backend):
            masked = choice.layout == "mask" and choice.kernel in SDPA_ONLY
            sdpa(q, k, v, mask if masked else None).sum().backward()
    except RuntimeError as error:
        reason = (
            f"does not compute this model's attention in {dtype} here: "
            f"{str(error).splitlines()[0]}\nUse  model.attention_kernel=auto"
        )
        raise UserError(
            "attention cannot be computed like this",
            f"model.attention_kernel={choice.kernel}",
            reason,
        ) from None
