"""A tower for images in a plan: its states in a micro-batch, their memory and arithmetic."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import ActivationCheckpoint
from fsdp_trainer.parallel.activation_checkpoint import checkpoint_activations
from fsdp_trainer.planning.plan.blocks import TracedPart, trace
from fsdp_trainer.planning.plan.fsdp_units import ModelParts
from fsdp_trainer.planning.plan.work import BACKWARD, FORWARD, PRODUCTS, Work, added

if TYPE_CHECKING:  # imports transformers
    from fsdp_trainer.models.hf.image_tower import TowerSizes

PATCHES = 4096
"""Patches of an image whose size the model does not fix, such as 1,024 × 1,024 pixels by 16."""
HEAD_WIDTH = 64
"""Width of an attention head in a traced block: it hardly changes the memory."""
PIXEL = 4
"""Bytes of a number of a patch's pixels, which are float32 until the tower casts them."""


WRITTEN_OUT = 3
"""States of a block that transformers' keep in addition to torch's encoder block, measured.

They are of activation functions and rotations of several operators.
"""


@dataclass(frozen=True)
class PlannedTower:
    """The tower of a model whose rows hold images.

    sizes: of its states; block: one of its blocks, of `depth`; projectors: their number; rest:
    numbers of all weights outside of the blocks, and of the trained ones. tokens: of images in a
    micro-batch; hidden: width of the language model; dtype: of the computation; recompute: its
    activation checkpointing.
    """

    sizes: "TowerSizes"
    block: nn.Module
    depth: int
    projectors: int
    rest: tuple[int, int]
    trains_anything: bool
    tokens: float
    hidden: int
    dtype: torch.dtype
    recompute: ActivationCheckpoint

    @classmethod
    def of(
        cls,
        parts: ModelParts,
        share: float,
        layout: Layout,
        dtype: str,
        recompute: ActivationCheckpoint,
    ) -> "PlannedTower | None":
        """Return the tower of a model, None without. share: of a row's tokens, those of images."""
        model: Any = parts.model
        if not parts.tower:
            return None
        blocks = model.image_blocks()
        others = parts.tower[len(blocks) :]
        return cls(
            model.tower.sizes,
            blocks[0],
            len(blocks),
            len(others) - 1,
            numbers_of(p for unit in others for p in unit),
            parts.trains_images,
            share * layout.tokens,
            model.config.hidden_size,
            getattr(torch, dtype),
            recompute,
        )

    @property
    def patches(self) -> int:
        return max(1, round(self.tokens * self.sizes.per_token))

    @property
    def is_reached(self) -> bool:
        return any(parameter.requires_grad for parameter in self.block.parameters())

    @property
    def inner_width(self) -> int:
        """Inner channels of a feed-forward with two matrices and as many weights as a block's."""
        rest = numbers_of(self.block.parameters())[0] - 4 * self.sizes.width**2
        return max(1, round(rest / (2 * self.sizes.width)))

    @property
    def stream(self) -> float:
        """Bytes of the states between two blocks."""
        return self.patches * self.sizes.width * self.dtype.itemsize

    @property
    def pixels(self) -> float:
        """Bytes of the pixels, which stay until the end of the micro-batch."""
        cast = self.dtype.itemsize * (self.is_reached and self.dtype.itemsize < PIXEL)
        return self.patches * self.sizes.numbers * (PIXEL + cast)

    @property
    def kept_by_projectors(self) -> float:
        """Bytes that the projectors keep for backward: of each, three states and the result."""
        projected = self.tokens * self.hidden * self.dtype.itemsize
        return self.projectors * (3 * self.stream + projected) * self.trains_anything

    @property
    def kept(self) -> float:
        """Bytes that pixels, blocks and projectors keep from forward to backward."""
        mode, every = self.recompute.mode, self.recompute.every
        again = math.ceil(self.depth / every) if mode in ("full", "selective") else 0
        bytes_kept = (
            again * self._traced(replace(self.recompute, every=1), self.patches).saved
            if again
            else 0.0
        )
        if again < self.depth:
            block = self._traced(ActivationCheckpoint(mode="none"), self.patches).saved
            bytes_kept += (self.depth - again) * (
                block + WRITTEN_OUT * self.stream * self.is_reached
            )
        return bytes_kept + self.pixels + self.kept_by_projectors

    def _traced(self, recompute: ActivationCheckpoint, patches: int) -> TracedPart:
        """Trace an encoder block that is as wide and has as many weights as the tower's."""
        width = self.sizes.width
        block = nn.TransformerEncoderLayer(
            width,
            max(n for n in range(1, max(2, width // HEAD_WIDTH + 1)) if width % n == 0),
            self.inner_width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
            device="meta",
            dtype=self.dtype,
        )
        whole, trained = numbers_of(self.block.parameters())
        block.requires_grad_(trained > whole / 2)  # else only adapters are trained
        decoder: Any = SimpleNamespace(
            blocks=lambda: {"0": block}, mtp_heads=list, image_blocks=list
        )
        checkpoint_activations(decoder, recompute)
        shape = (1, patches, width)
        return trace(lambda: (block, ()), shape, self.dtype, self.is_reached)

    @cached_property
    def work(self) -> Work:
        """The work of a micro-batch. Images have the model's own size, else PATCHES."""
        of_image = min(self.patches, self.sizes.patches or PATCHES)
        blocks = added({}, self._traced(self.recompute, of_image).work, self.depth)
        work = added({}, blocks, self.patches / of_image)
        if not self.is_reached:
            work = {name: size for name, size in work.items() if BACKWARD not in name}
        whole, trained = (2.0 * self.tokens * numbers for numbers in self.rest)
        rest = {f"{FORWARD} {PRODUCTS}": whole, f"{BACKWARD} {PRODUCTS}": trained}
        return added(work, rest)


def numbers_of(weights: Iterable[Tensor]) -> tuple[int, int]:
    sizes = [(weight.numel(), weight.numel() * weight.requires_grad) for weight in weights]
    return sum(size for size, _ in sizes), sum(trained for _, trained in sizes)
