"""Sizes of FSDP units: parameters that `fully_shard` gathers and reduces together.

Computed from the model to train, with its adapters and 4-bit matrices, on the meta device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.schema import Adapter, Precision, Sharding
from fsdp_trainer.models.adapters.adapter_spec import frozen_dtype
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit import is_encoded
from fsdp_trainer.models.from_config.setup import ModelSetup
from fsdp_trainer.observe.flops import TrainedWork, trained_work
from fsdp_trainer.optim.footprint import is_matrix
from fsdp_trainer.optim.muon_owners import stack_shape
from fsdp_trainer.parallel.memory_check import CountedModel
from fsdp_trainer.planning.plan.expert_exchange import (
    own_numbers,
    separate_parameters,
)

T = TypeVar("T")


class Sizes(NamedTuple):
    """Bytes of a number in a trained weight (master), a frozen weight, and a gathered weight."""

    master: int
    frozen: int
    compute: int

    @classmethod
    def of(cls, precision: Precision, adapter: Adapter) -> "Sizes":
        frozen = frozen_dtype(precision, adapter if adapter.name != "none" else None)
        names = precision.master_dtype, frozen, precision.param_dtype
        return cls(*(getattr(torch, name).itemsize for name in names))


class FsdpUnit(NamedTuple):
    """Parameters that are gathered and reduced together.

    trained: how many numbers are trained; trained_padded: the same with the shards of all ranks
    padded to equal size; gathered: bytes of the gathered weights, padded; own: how many trained
    numbers the largest shard has; frozen: bytes of its frozen weights; experts, trained_experts:
    the part of `gathered` and `trained_padded` that is sharded on the separate mesh of experts.
    """

    trained: int = 0
    trained_padded: float = 0
    gathered: float = 0
    own: float = 0
    frozen: float = 0
    experts: float = 0
    trained_experts: float = 0

    @classmethod
    def of(cls, parameters: Iterable[Tensor], sizes: Sizes, group: int) -> "FsdpUnit":
        units = []
        for parameter in parameters:
            padded = round_up(len(parameter), group) * parameter[0].numel()
            units.append(_of_one(parameter, (parameter.numel(), padded), sizes, group))
        return sum_of(units)

    @classmethod
    def of_block(cls, block: nn.Module, sizes: Sizes, sharding: Sharding, group: int) -> "FsdpUnit":
        """Return the unit of a block.

        group: number of ranks over which parameters are sharded, except experts on a separate mesh.
        """
        separate = separate_parameters(block, sharding)
        unit = cls.of([p for p in block.parameters() if p not in separate], sizes, group)
        if not separate:
            return unit
        shards = max(1, group * sharding.tensor // sharding.expert)
        each = [_of_one(p, own_numbers(p, sharding, shards), sizes, shards) for p in separate]
        experts = sum_of(each)
        return sum_of(
            [
                unit,
                experts._replace(experts=experts.gathered, trained_experts=experts.trained_padded),
            ]
        )


def _of_one(parameter: Tensor, numbers: tuple[int, int], sizes: Sizes, shards: int) -> FsdpUnit:
    own, padded = numbers
    encoded = is_encoded(parameter)
    gathered = padded * (1 if encoded else sizes.compute)
    if not parameter.requires_grad:
        frozen = padded * (1 if encoded else sizes.frozen) / shards
        return FsdpUnit(gathered=gathered, frozen=frozen)
    return FsdpUnit(own, padded, gathered, padded / shards)


def sum_of(units: Sequence[FsdpUnit]) -> FsdpUnit:
    return FsdpUnit(*map(sum, zip(*units, strict=True))) if units else FsdpUnit()


@dataclass(frozen=True)
class BlockKind:
    """A kind of block: blocks with the same parameters.

    block: one of them; signature: the same for equal kinds, even in different models.
    """

    block: nn.Module
    signature: str

    @cached_property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.block.parameters())


class ModelParts:
    """A model on the meta device, divided into the parts that `fully_shard` shards.

    kinds: the kinds of blocks; kind_of: for each block the index of its kind; backward_from: index
    of the first block that backward reaches, before which nothing is trained.
    """

    def __init__(self, model: Decoder):
        self.model = model
        self.tied = model.config.tie_word_embeddings
        self.tower = image_units(model)
        self.embedding: Tensor = model.embedding.weight
        none = torch.empty(0, device="meta")  # states are results, or an encoder has its own head
        own = getattr(model.lm_head, "weight", none)
        self.head: Tensor = self.embedding if self.tied else own
        self.norm: nn.Module = model.final_norm
        heads = [p for head in model.mtp_heads() for p in head.parameters()]
        last = self.head, *self.norm.parameters(), *heads
        self.last = [one for one in last if one.numel()]
        self.first = self.last if self.tied else [self.embedding]
        self.kinds: list[BlockKind] = []
        self.kind_of: list[int] = []
        known: dict[str, int] = {}
        for block in model.blocks().values():
            signature = signature_of(block)
            if signature not in known:
                known[signature] = len(self.kinds)
                self.kinds.append(BlockKind(block, signature))
            self.kind_of.append(known[signature])
        self.backward_from = self._first_with_gradient()
        self._known: dict[str, Any] = {}

    @cached_property
    def trains_images(self) -> bool:
        return any(parameter.requires_grad for unit in self.tower for parameter in unit)

    @property
    def has_gradient_before(self) -> bool:
        """True if anything before the blocks is trained."""
        return self.embedding.requires_grad or self.trains_images

    def _first_with_gradient(self) -> int:
        """Return the index of the first block whose output has a gradient, where backward ends."""
        if self.has_gradient_before:
            return 0
        trained = (i for i, kind in enumerate(self.kind_of) if self.kinds[kind].is_trained)
        return next(trained, len(self.kind_of))

    @property
    def backward_share(self) -> float:
        """Share of the blocks that backward reaches."""
        return 1 - self.backward_from / len(self.kind_of)

    def matrices(self, kinds: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (matrices, rows, columns) of each trained stack of matrices in some blocks.

        kinds: index of the kind of each block.
        """
        return [shape for kind in kinds for shape in self._matrices_by_kind[kind]]

    @cached_property
    def _matrices_by_kind(self) -> list[list[tuple[int, int, int]]]:
        return [trained_matrices(kind.block) for kind in self.kinds]

    @cached_property
    def work(self) -> TrainedWork:
        return trained_work(self.model)

    def input_has_gradient(self, block: int) -> bool:
        return self.has_gradient_before or block > self.backward_from

    @cached_property
    def counted(self) -> CountedModel:
        return CountedModel.of(self.model)

    def remembered(self, key: str, compute: Callable[[], T]) -> T:
        """Return compute(), called only once for each key."""
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def units(self, sizes: Sizes, sharding: Sharding, group: int) -> "ModelUnits":
        """Return the units if each parameter is sharded over `group` ranks."""

        def compute() -> ModelUnits:
            kinds = [FsdpUnit.of_block(kind.block, sizes, sharding, group) for kind in self.kinds]
            blocks = tuple(kinds[kind] for kind in self.kind_of)
            last = FsdpUnit.of(self.last, sizes, group)
            first = last if self.tied else FsdpUnit.of(self.first, sizes, group)
            tower = tuple(FsdpUnit.of(unit, sizes, group) for unit in self.tower)
            return ModelUnits(first, blocks, last, self.tied, tower)

        key = f"units {group} {sharding.tensor} {sharding.expert} {sizes}"
        return self.remembered(key, compute)


def trained_matrices(block: nn.Module) -> list[tuple[int, int, int]]:
    """Return (matrices, rows, columns) of each trained stack of matrices in a block."""
    named = [(name, p) for name, p in block.named_parameters() if p.ndim <= 3]
    trained = [p for name, p in named if p.requires_grad and is_matrix(name, p.ndim)]
    return [stack_shape(p.shape) for p in trained]


def image_units(model: Decoder) -> list[list[Tensor]]:
    """Return the parameters of each unit of a tower for images, as fully_shard divides them."""
    units: list[list[Tensor]] = []
    known: set[Tensor] = set()
    for part in model.image_parts():
        units.append([p for p in part.parameters() if p not in known])
        known.update(units[-1])
    return units


@dataclass(frozen=True)
class ModelUnits:
    """The units of a model, or of the stages of one rank.

    first: unit of the embedding; last: unit of norm and head. With tied weights they are the same.
    tower: its units: its blocks, projectors, and the rest.
    """

    first: FsdpUnit
    blocks: tuple[FsdpUnit, ...]
    last: FsdpUnit
    tied: bool
    tower: tuple[FsdpUnit, ...] = ()

    @cached_property
    def all_blocks(self) -> FsdpUnit:
        return sum_of(self.blocks)

    @cached_property
    def all(self) -> FsdpUnit:
        ends = [self.last] if self.tied else [self.first, self.last]
        return sum_of([*self.blocks, *self.tower, *ends])

    @cached_property
    def all_images(self) -> FsdpUnit:
        return sum_of(self.tower)


def signature_of(block: nn.Module) -> str:
    """Return a text with name, shape and dtype of each parameter, and a mark if it is trained."""
    return " ".join(
        f"{name}{[*p.shape]}{p.dtype}{'+' if p.requires_grad else ''}"
        for name, p in block.named_parameters()
    )


class KnownModels:
    """The models of some plans, each found once: a search plans hundreds of layouts."""

    def __init__(self) -> None:
        self._setups: dict[str, ModelSetup] = {}
        self._parts: dict[tuple[str, int], ModelParts] = {}

    def parts(
        self, config: ModelConfig, adapter: Adapter, freeze: Sequence[str], ranks: int = 1
    ) -> ModelParts:
        """Return the parts of a model with these adapters, and weights frozen by train.freeze.

        ranks: return those of one of `ranks` ranks of a tensor group. Adapters are resolved for the
        whole model, since a rank's part of a matrix may be too narrow for adapter.rank. Raises
        UserError as `ModelSetup.resolve` and `ModelSetup.model` do.
        """
        key = f"{config} {adapter} {freeze}"
        if key not in self._setups:
            self._setups[key] = ModelSetup.resolve(config, adapter, freeze)
        if (key, ranks) not in self._parts:
            part = replace(self._setups[key], config=config.on_tensor_rank(ranks).shape)
            self._parts[key, ranks] = ModelParts(part.model)
        return self._parts[key, ranks]
