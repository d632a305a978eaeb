"""Which of a GPU's attention kernels torch tries first: a setting of the process, since backward may compute a block again."""

from contextlib import ExitStack
from importlib import import_module

import torch
import torch.nn.attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.attention import kernel as attention
from fsdp_trainer.models.attention_choice import FLASH, Choice, Situation
from fsdp_trainer.models.config import ModelConfig

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute.interface"}
_preferred = ExitStack()


def describe_device(device: torch.device) -> Situation:
    """The part of a situation that the machine decides."""
    if device.type != "cuda":
        return Situation(device=device.type)
    return Situation(
        "cuda",
        torch.cuda.get_device_capability(device),
        installed=frozenset(filter(_is_installed, MODULES)),
    )


def _is_installed(name: str) -> bool:
    """Whether FlashAttention 3 or 4 can be imported and torch knows it. One that was built for another torch fails in many ways."""
    try:
        return name.upper() in torch.nn.attention.list_flash_attention_impls() and bool(
            import_module(MODULES[name])
        )
    except Exception:
        return False


def prefer(
    choice: Choice, config: ModelConfig, dtype: torch.dtype, device: torch.device, asked: bool
) -> None:
    """Have torch try the choice's kernel first, the others where it cannot. asked: raise UserError where it can compute nothing here."""
    _preferred.close()  # what an earlier run in this process preferred
    if choice.kernel is None:
        return
    first = BACKENDS[choice.kernel if choice.kernel in BACKENDS else "flash"]
    if choice.kernel in FLASH:
        torch.nn.attention.activate_flash_attention_impl(choice.kernel.upper())
        if hasattr(torch.nn.attention, "restore_flash_attention_impl"):  # torch 2.12
            _preferred.callback(torch.nn.attention.restore_flash_attention_impl)
    _preferred.enter_context(
        sdpa_kernel(
            [first, *(kernel for kernel in BACKENDS.values() if kernel != first)], set_priority=True
        )
    )
    if asked and choice.layout != "varlen":
        _try(choice, first, config, dtype, device)


def _try(
    choice: Choice,
    backend: SDPBackend,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """One small call, forward and backward, by that kernel alone. Raises UserError."""
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    q, k, v = (
        torch.zeros(1, 128, n, config.head_dim, dtype=dtype, device=device, requires_grad=True)
        for n in heads
    )
    mask = (
        torch.ones(1, 1, 128, 128, dtype=torch.bool, device=device).tril()
        if choice.layout == "mask"
        else None
    )
    try:
        with sdpa_kernel(backend):
            attention(q, k, v, mask).sum().backward()
    except RuntimeError as error:
        why = f"does not compute this model's attention in {dtype} here: {str(error).splitlines()[0]}\nUse  model.attention_kernel=auto"
        raise UserError(
            "attention cannot be computed like this",
            [Problem(f"model.attention_kernel={choice.kernel}", why)],
        ) from None
