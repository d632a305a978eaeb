"""The head for a further token of a model that transformers' classes compute.

Its block is of the same class as the model's last one with full attention.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_trainer.models.config import FULL, ModelConfig
from fsdp_trainer.models.hf.document_layers import put_before
from fsdp_trainer.models.hf.further_blocks import HEADS, MTP
from fsdp_trainer.models.mtp import MtpBlock


class MtpModule(nn.Module):
    """A head under the names of the folders of Qwen3-Next and Qwen3.5."""

    def __init__(self, block: nn.Module, width: int, norms: list[nn.Module]):
        """norms: of embeddings, of the model's states, and after the block."""
        super().__init__()
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([block])

    def forward(self, embedded: Tensor, states: Tensor, **named: Any) -> Tensor:
        """Return the states for the output head. See MtpBlock."""
        parts = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states))
        return self.norm(self.layers[0](self.fc(torch.cat(parts, -1)), **named))


def add_mtp_head(hf: Any, config: ModelConfig, name: str, blocks: Mapping[str, nn.Module]) -> None:
    """Add a model's head, under the names of folders. name: of the list of its blocks."""
    text = hf.get_decoder().config
    types = getattr(text, "layer_types", None) or [FULL] * len(blocks)
    number = max(i for i, kind in enumerate(types) if kind == FULL)
    like: Any = blocks[str(number)]
    block = type(like)(text, number)

    def new_norm() -> nn.Module:
        return type(like.input_layernorm)(text.hidden_size, eps=text.rms_norm_eps)

    if HEADS[config.family] == MTP:
        hf.add_module("mtp", MtpModule(block, text.hidden_size, [new_norm() for _ in range(3)]))
        return
    put_before(MtpBlock, block)
    head: Any = block
    head.add_parts(text.hidden_size, new_norm)
    hf.get_submodule(name).append(head)


def head_of(hf: Any, name: str) -> nn.Module:
    return hf.mtp if hasattr(hf, "mtp") else hf.get_submodule(name)[-1]


class RecordedRotations:
    """Recorder of what the module of a model's rotations gets and returns in a forward.

    embedded: of all tokens, those of images included, [rows, length, hidden]. rotations: cosines
    and sines, as blocks take them.
    """

    def __init__(self, module: nn.Module):
        self.embedded: Tensor | None = None
        self.rotations: Any = None
        self.is_recording = False
        module.register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, inputs: Any, output: Any) -> None:
        if self.is_recording:
            self.embedded, self.rotations = inputs[0], output

    @contextmanager
    def recorded(self) -> Iterator[None]:
        self.is_recording = True
        try:
            yield
        finally:
            self.is_recording = False

    def taken(self) -> tuple[Tensor, Any]:
        embedded, rotations = self.embedded, self.rotations
        assert embedded is not None
        self.embedded = self.rotations = None
        return embedded, rotations
