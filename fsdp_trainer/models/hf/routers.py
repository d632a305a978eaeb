"""The routers of a model of transformers, watched so that experts can be kept evenly loaded."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp_trainer.models.balance import Balance, auxiliary_values
from fsdp_trainer.models.decoder import combine_auxiliary

RECORDED = "router_logits"
"""transformers' name for what it records of routers."""


def routers(hf: PreTrainedModel, blocks: Mapping[str, nn.Module]) -> dict[int, nn.Module]:
    """Return the routers whose logits transformers can record, by number of their block."""
    for module in (hf, hf.base_model):
        recorder = (getattr(module, "_can_record_outputs", None) or {}).get(RECORDED)
        kind = getattr(recorder, "target_class", recorder)
        if isinstance(kind, type) and getattr(recorder, "index", 0) == 0:
            break
    else:
        return {}
    by_block = {
        int(name): [module for module in block.modules() if isinstance(module, kind)]
        for name, block in blocks.items()
    }
    return {number: modules[0] for number, modules in by_block.items() if len(modules) == 1}


class RouterWatch:
    """Recorder of what the routers return in a forward, and of the auxiliary values from it.

    values: [experts, logits] of each block: [tokens, k] int64 and [tokens, experts].
    """

    def __init__(self, modules: Mapping[int, nn.Module]):
        self.values: dict[int, tuple[Tensor, Tensor]] = {}
        self.is_watching = False
        for number, module in modules.items():
            module.register_forward_hook(partial(self._keep, number))

    def _keep(self, number: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self.is_watching:
            chosen = next(t for t in output[1:] if not t.is_floating_point())
            self.values[number] = (chosen, output[0])

    @contextmanager
    def watching(self, wanted: bool) -> Iterator[None]:
        """Watch within the context if `wanted`. A recomputation in backward is not watched."""
        self.values, self.is_watching = {}, wanted
        try:
            yield
        finally:
            self.is_watching = False

    def auxiliary(self, balance: Balance, token_share: Tensor) -> dict[str, Tensor]:
        """Return the values of all blocks, combined. See auxiliary_values."""
        of_blocks = []
        for number, (experts, logits) in sorted(self.values.items()):
            given = balance.of_block(number, token_share)
            assert given is not None
            of_blocks.append(auxiliary_values(experts, logits, probabilities, given))
        self.values = {}
        return combine_auxiliary(of_blocks)


def probabilities(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.float32)
