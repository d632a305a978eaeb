"""The tower of transformers' models for media: its modules, and the states that it makes."""

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from fsdp_trainer.errors import UserError
from fsdp_trainer.models.decoder import MediaInputs

PROJECTORS = (
    *("multi_modal_projector", "connector", "merger", "deepstack_merger_list", "mm_projector"),
    *("aligner", "embed_vision", "vision_projection"),
)
"""transformers' names of the modules between a tower and the language model."""
MERGED_SIDES = ("spatial_merge_size", "scale_factor", "downsample_factor")
"""transformers' names for the side of a square of patches that become one token."""
SHRUNK_SIDES = ("downsample_ratio", "pixel_shuffle_ratio")
"""transformers' names for the inverse of that side."""
TOKEN_TYPES = "token_type_ids"
"""Argument of models whose tokens of one image see each other in both directions."""


class TowerSizes(NamedTuple):
    """Sizes of a tower.

    width: of its states; numbers: of a patch's pixels; patches: of an image, None if media may
    have any size; per_token: patches for each token of the language model.
    """

    width: int
    numbers: int
    patches: int | None
    per_token: float


class ImageTower:
    """The tower of a model, and the projector between it and the language model."""

    def __init__(self, hf: PreTrainedModel):
        self.base = base = cast(Any, hf.base_model)
        tower = base.get_encoder(modality="image")
        forward = inspect.signature(base.forward).parameters
        features = getattr(base, "get_image_features", None)
        if tower is base or features is None or "mm_encoder_outputs" not in forward:
            reason = (
                f"the images of {type(hf).__name__} are computed in a way that is not known.\n"
                f"transformers is {transformers.__version__}; images need 5.23 or newer"
            )
            raise UserError(
                "the model's images are not computed here",
                f"model_type={hf.config.model_type}",
                reason,
            )
        self.tower: nn.Module = tower
        self.takes = set(inspect.signature(features).parameters)
        self.both_ways = TOKEN_TYPES in forward
        """True if the tokens of one image see each other in both directions."""
        self.token: int = hf.config.image_token_id
        self.name = next(name for name, m in hf.named_modules() if m is tower)
        self.is_registered = False
        self.sizes = sizes_of(hf.config, self.blocks)
        # of a projector that ends in a linear layer; nothing updates its result in place
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        self.projectors = [
            name for name, _ in hf.named_modules() if name.rpartition(".")[2] in PROJECTORS
        ]

    def is_inside(self, name: str) -> bool:
        return any(within(name, part) for part in (self.name, *self.projectors))

    def part_of(self, name: str) -> str:
        if any(within(name, part) for part in self.projectors):
            return "projector"
        return "vision" if within(name, self.name) else "language"

    @property
    def blocks(self) -> list[nn.Module]:
        lists = [[*m] for m in self.tower.modules() if isinstance(m, nn.ModuleList)]
        return max(lists, key=len, default=[])

    def units(self, hf: nn.Module) -> Iterator[nn.Module]:
        """Yield the modules that are sharded one by one: blocks, projector, and the tower."""
        yield from self.blocks
        for projector in map(hf.get_submodule, self.projectors):
            yield from projector if isinstance(projector, nn.ModuleList) else [projector]
        yield self.tower

    def positions(self, tokens: Tensor, arrays: dict[str, np.ndarray]) -> Tensor:
        """Return the positions of a document with media, [axes, length].

        tokens: [length] int64; arrays: of its media alone.
        """
        find = self.base.get_rope_index
        takes = inspect.signature(find).parameters
        given = {name: torch.from_numpy(v) for name, v in arrays.items() if name in takes}
        types = (tokens == self.token).int()[None]
        return find(tokens[None], mm_token_type_ids=types, **given)[0][:, 0]

    def taken(self, media: MediaInputs) -> dict[str, Tensor]:
        if not self.is_registered:
            register_classes(self.tower)
            self.is_registered = True
        return {name: value for name, value in media.arrays.items() if name in self.takes}

    def own_inputs(self, hf: Any, media: MediaInputs, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments by which transformers' forward computes media by itself."""
        takes = inspect.signature(hf.forward).parameters
        types = (tokens == self.token).int()
        named = {name: types for name in (TOKEN_TYPES, "mm_token_type_ids") if name in takes}
        return {**self.taken(media), **named}

    def inputs(self, media: MediaInputs, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments of the model's forward for the media of a micro-batch."""
        arrays = self.taken(media)
        outputs = self.base.get_image_features(**arrays, return_dict=True)
        states = {"pooler_output": first_rows(outputs.pooler_output, media.tokens)}
        if of_layers := getattr(outputs, "deepstack_features", None):
            states["deepstack_features"] = [first_rows(each, media.tokens) for each in of_layers]
        outputs = replace(outputs, **states)
        types = {TOKEN_TYPES: (tokens == self.token).int()} if self.both_ways else {}
        return {"mm_encoder_outputs": {"image": outputs}, **types}


def sizes_of(config: Any, blocks: list[nn.Module]) -> TowerSizes:
    vision = config.vision_config

    def first(default: Any, *names: str) -> Any:
        values = [getattr(each, name, None) for each in (vision, config) for name in names]
        values = [value[0] if isinstance(value, tuple | list) else value for value in values]
        return next((value for value in values if value is not None), default)

    linears = [m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)]
    width = min((layer.in_features for layer in linears), default=1)
    patch, side = first(16, "patch_size"), first(0, "image_size")
    patches = (side // patch) ** 2 or None
    per_token = first(1, *MERGED_SIDES) ** 2 / first(1, *SHRUNK_SIDES) ** 2
    if patches and (tokens := first(0, "mm_tokens_per_image")):
        per_token = patches / tokens
    numbers = first(3, "in_channels") * patch**2 * first(1, "temporal_patch_size")
    return TowerSizes(width, numbers, patches, per_token)


def register_classes(tower: nn.Module) -> None:
    """Let transformers find what the modules of a sharded tower can record.

    It looks for that by the name of the class, which fully_shard changes. Some projectors read the
    states of a block that is not the last.
    """
    for module in tower.modules():
        if isinstance(module, PreTrainedModel) and module._can_record_outputs:
            output_capturing._CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def first_rows(states: Any, count: int) -> Any:
    """Return the first `count` states of media, as transformers' forward takes them.

    The rest are of a black image, in a micro-batch without any: it is computed like the others,
    and has no effect.
    """
    if isinstance(states, Tensor):
        return states.flatten(0, -2)[None, :count]
    return [torch.cat([each.flatten(0, -2) for each in states])[:count]]


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")
