"""Single functions that run compiled, whether the model's blocks are compiled or not."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fsdp_trainer.base.torch_private import is_compiler_error, missing_compiler


def compiled_if_possible(
    function: Callable[..., Any], device_type: str, what: str
) -> Callable[..., Any]:
    """Return `function` compiled for tensors of any size; it runs as it is if that fails.

    what: begins the warning that says so. Intermediate results are rounded as without the compiler.
    """
    missing = missing_compiler(device_type)
    if missing:
        warn(what, f"there is {missing}")
        return function
    options: dict[str, Any] = {"emulate_precision_casts": True}
    compiled = torch.compile(function, dynamic=True, fullgraph=True, options=options)
    failed = False

    def call(*arguments: Any) -> Any:
        nonlocal failed
        if not failed:
            try:
                return compiled(*arguments)
            except Exception as error:
                if not is_compiler_error(error):
                    raise
                failed = True
                warn(what, str(error).strip().partition("\n")[0])
        return function(*arguments)

    return call


def warn(what: str, reason: str) -> None:
    warnings.warn(f"{what} runs without the compiler, in more passes: {reason}", stacklevel=3)
