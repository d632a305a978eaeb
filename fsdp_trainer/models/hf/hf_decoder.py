"""A decoder whose computation is transformers' own; head, loss and all around it are ours.

The modules of transformers' model become children of this one, so that parameters have the names
that they have there. Only the output head is replaced, and matrices that are stored transposed.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fsdp_trainer.errors import UserError
from fsdp_trainer.models.attention import Cache, PackedAttention
from fsdp_trainer.models.balance import Balance
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import SCORES, Auxiliary, Decoder, MediaInputs, MicroBatch
from fsdp_trainer.models.head import Head, ScoreHead, StatesHead
from fsdp_trainer.models.hf.document_attention import NAME, Documents
from fsdp_trainer.models.hf.document_layers import DocumentRows, keep_apart
from fsdp_trainer.models.hf.further_blocks import copies_in_head, is_further
from fsdp_trainer.models.hf.hf_config import (
    block_list,
    build_classifier,
    build_hf_model,
    mark_experts,
)
from fsdp_trainer.models.hf.hf_head import BiasedHead, TransformersHead
from fsdp_trainer.models.hf.hf_mtp import RecordedRotations, head_of
from fsdp_trainer.models.hf.image_tower import TOKEN_TYPES, ImageTower
from fsdp_trainer.models.hf.own_cache import CACHES, OwnCache
from fsdp_trainer.models.hf.routers import RouterWatch, routers
from fsdp_trainer.models.hf.stored_names import Place, may_be_unused, places, stored_shapes
from fsdp_trainer.models.hf.unpack import OneDocumentRows
from fsdp_trainer.models.mtp import of_next_tokens


class TransformersDecoder(Decoder):
    """A causal language model of transformers, called like a `Decoder`.

    Dropout is never applied: the module is always in evaluation mode.
    """

    inference_methods = ("next_logits", "both_logits", "both_image_logits", "all_states")
    hf: PreTrainedModel
    """transformers' model. It shares its modules with this one."""
    own_blocks: dict[str, nn.Module]
    own_mtp_heads: list[nn.Module]
    tower: ImageTower | None
    """Of a model that reads media."""

    def __init__(self, config: ModelConfig, balance: Balance | None = None):
        nn.Module.__init__(self)
        self.config, self.balance = config, balance
        self.ropes = {}
        self.cut_from = ()
        if not config.predicts:
            require_classifier(config)
        hf = build_hf_model(config)
        mark_experts(hf)
        transposed = make_linear(hf)
        self.single_numbers = frozenset(with_one_row(hf))
        """Names of weights that a folder holds without a dimension."""
        # what does not become a child must not be found by nn.Module
        self.__dict__["hf"] = hf
        self.transposed_weights = frozenset(f"{name}.weight" for name in transposed)
        """Names of the matrices that a folder holds transposed."""
        self.computed_buffers = dict(computed_buffers(hf))
        """Buffers that no file holds, such as the frequencies of rotations, by name."""
        head = self.own_head(hf)
        for name, child in hf.named_children():
            self.add_module(name, child)
        if isinstance(head, ScoreHead) and head not in self.children():
            self.add_module("score", head)
        self.__dict__["lm_head"] = head
        list_name, self.__dict__["own_blocks"] = block_list(hf)
        self.__dict__["own_mtp_heads"] = [head_of(hf, list_name)] if config.mtp_heads else []
        rotations = [hf.get_decoder().rotary_emb] if config.mtp_heads else []
        self.recorded_rotations = [RecordedRotations(module) for module in rotations]
        tower = ImageTower(hf) if config.reads_images else None
        self.__dict__["tower"] = tower
        self.document_rows = DocumentRows()
        self.keep_apart(config.document_layers)
        self.watch = RouterWatch(routers(hf, self.blocks()))
        self.tie_weights()
        self.train(False)
        arguments = inspect.signature(self.base.forward).parameters
        self.takes_positions = "position_ids" in arguments
        self.cache_name = next((name for name in CACHES if name in arguments), CACHES[0])
        self.plain_attention = hf.config.get_text_config(decoder=True)._attn_implementation

    def own_head(self, hf: PreTrainedModel) -> Head:
        if self.config.pooling:
            pooler: Any = getattr(hf, "pooler", None)
            if pooler is not None:  # no text is embedded by it
                replace_module(hf, pooler, None)
            return StatesHead(self.config)
        of_tokens = self.config.tags and not self.config.reads_images
        heads = [getattr(hf, name) for name in SCORES if hasattr(hf, name)]
        before = heads[0] if of_tokens else hf.get_output_embeddings()
        head = new_head(self.config, before)
        replace_module(hf, before, head if of_tokens or not self.config.scores else None)
        return head

    @property
    def base(self) -> Any:
        return self.hf.base_model

    @property
    def embedding(self) -> Any:
        return self.hf.get_input_embeddings()

    @property
    def final_norm(self) -> Any:
        """All modules that are neither in a block nor embedding or head."""
        inside = {
            id(module)
            for part in (
                *self.blocks().values(),
                *self.own_mtp_heads,
                *self.image_parts(),
                self.embedding,
                self.lm_head,
            )
            for module in part.modules()
        }
        rest = [m for m in self.modules() if id(m) not in inside and [*m.parameters(recurse=False)]]
        return nn.ModuleList(rest)

    def blocks(self) -> dict[str, nn.Module]:
        return dict(self.own_blocks)

    def mtp_heads(self) -> list[nn.Module]:
        return self.own_mtp_heads

    def ends(self) -> list[nn.Module]:
        """Return the head. Norms, and a head tied to the embedding, are sharded with the root."""
        return [] if self.config.tie_word_embeddings else [self.lm_head]

    def part_of(self, name: str) -> str | None:
        """Return the part of a model for media that a weight belongs to; None for others."""
        return None if self.tower is None else self.tower.part_of(name)

    @property
    def media_positions(self) -> Any:
        """Return the function that gives a document with media its positions, or None."""
        if self.tower is None or not hasattr(self.tower.base, "get_rope_index"):
            return None
        return self.tower.positions

    def image_parts(self) -> list[nn.Module]:
        return [] if self.tower is None else [*self.tower.units(self.hf)]

    def image_blocks(self) -> list[nn.Module]:
        return [] if self.tower is None else self.tower.blocks

    def keep_apart(self, kinds: Sequence[str]) -> None:
        keep_apart([*self.own_blocks.values()], kinds, self.document_rows)

    def use_boundaries(self, arguments: Sequence[str]) -> None:
        self.document_rows.use(arguments)

    def train(self, mode: bool = True) -> "TransformersDecoder":
        """Stay in evaluation mode: dropout would make a step depend on more than its rows."""
        super().train(False)
        return self

    def fill_buffers(self) -> None:
        """Set the buffers that no file holds to their values, in their own number format."""
        for name, value in self.computed_buffers.items():
            owner, _, own = name.rpartition(".")
            buffers = self.get_submodule(owner)._buffers
            before = buffers[own]
            assert before is not None
            buffers[own] = value.to(before.device, copy=True)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return the head's input: the states, by the factor that the model has for its logits.

        Some classes add up their blocks' results in float32.
        """
        factor = self.config.logit_factor
        hidden = hidden.to(self.gathered_dtype or hidden.dtype)
        return hidden if factor == 1 else hidden * factor

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedAttention,
        caches: Mapping[str, Cache] = MappingProxyType({}),
        token_share: Tensor | None = None,
        media: MediaInputs | None = None,
    ) -> tuple[Tensor, Auxiliary]:
        """Return the states after the last norm, and routers' auxiliary values. See Decoder."""
        alone = self.unpacked(tokens, layout, media)
        with self.watch.watching(self.balance is not None and token_share is not None):
            if alone is None:
                states = self.states(tokens, positions, layout, media=media)
            else:
                states = alone.packed(self.states_alone(alone, media))
        if self.balance is None or token_share is None:
            return states, {}
        share = token_share if alone is None else alone.spread(token_share)
        return states, self.watch.auxiliary(self.balance, share)

    def states_with_mtp(
        self, batch: MicroBatch, token_share: Tensor | None
    ) -> tuple[Tensor, Tensor, Auxiliary]:
        """Return the output head's input of the model and of its MTP head. See Decoder."""
        layout, media = batch.layout, batch.media
        (recorded,), (head,) = self.recorded_rotations, self.own_mtp_heads
        with recorded.recorded():
            states, auxiliary = self.hidden(
                batch.tokens, batch.positions, layout, token_share=token_share, media=media
            )
        embedded, rotations = recorded.taken()
        drafted = head(
            of_next_tokens(embedded),
            states,
            position_embeddings=rotations,
            attention_mask=None,
            documents=Documents(layout, set(self.config.windows)),
        )
        return self.normed(states), self.normed(drafted), auxiliary

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedAttention | None,
        ours: bool | None = None,
        media: MediaInputs | None = None,
    ) -> Tensor:
        """Return the states after the last norm, [rows, length, hidden].

        layout: None: attention by transformers, with documents where positions restart. ours:
        whether `models.attention` computes it; None: as the architecture allows.
        """
        inputs = self.inputs(tokens, positions, media)
        ours = self.config.documents_attention if ours is None else ours
        ours = ours and layout is not None and TOKEN_TYPES not in inputs
        self.use_attention(NAME if ours else self.plain_attention)
        if ours and layout is not None:
            inputs["documents"] = Documents(layout, set(self.config.windows))
        with self.document_rows.handed_on(layout), self.autocast(tokens.device.type):
            return self.base(**inputs, attention_mask=None, use_cache=False)[0]

    def autocast(self, device: str) -> AbstractContextManager[Any]:
        """Return a context for a class that multiplies float32 numbers with weights of 16 bits."""
        dtype = self.gathered_dtype
        if dtype in (None, torch.float32) or not self.config.autocast:
            return nullcontext()
        return torch.autocast(device, dtype=dtype)

    def unpacked(
        self, tokens: Tensor, layout: PackedAttention, media: MediaInputs | None
    ) -> OneDocumentRows | None:
        """Return rows with one document each; None if packed rows are computed as they are.

        Tokens of an image that see each other need transformers' own mask of one document.
        """
        both_ways = media is not None and self.tower is not None and self.tower.both_ways
        if self.config.packs and not both_ways:
            return None
        in_one_row = max(map(len, layout.lengths))
        return OneDocumentRows(tokens, layout) if in_one_row > (0 if both_ways else 1) else None

    def states_alone(self, alone: OneDocumentRows, media: MediaInputs | None) -> Tensor:
        if media is not None and media.positions is not None:
            media = replace(media, positions=alone.gathered(media.positions))
        return self.states(alone.tokens, alone.positions, None, media=media)

    def inputs(
        self, tokens: Tensor, positions: Tensor, media: MediaInputs | None = None
    ) -> dict[str, Any]:
        """Return the arguments for tokens and their media, by transformers' names."""
        of_media: dict[str, Any] = {}
        if media is not None and self.tower is not None:
            of_media = self.tower.inputs(media, tokens)
            positions = positions if media.positions is None else media.positions
        positioned = {"position_ids": positions} if self.takes_positions else {}
        return {"input_ids": tokens, **positioned, **of_media}

    def transformers_shapes(self, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights as transformers has them, by name.

        vocab_size: rows of embedding and head.
        """
        shapes = {name: tuple(weight.shape) for name, weight in self.named_weights().items()}
        for name in self.transposed_weights:
            shapes[name] = shapes[name][::-1]
        shapes |= dict.fromkeys(self.single_numbers, ())
        for name in {*self.config.names.vocabulary} & shapes.keys():
            shapes[name] = (vocab_size, *shapes[name][1:])
        return shapes

    def stored_shapes(self, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that an export holds, as transformers would save it."""
        is_made = self.tower is not None and self.config.scores
        whole = build_classifier(self.config) if is_made else self.hf
        return stored_shapes(whole, self.transformers_shapes(vocab_size))

    def places(self, stored: Mapping[str, tuple[int, ...]]) -> tuple[list[Place], list[str]]:
        placed, unused = self.all_places(stored)
        passed_over = {*self.passed_over(unused), *copies_in_head(self.config)}
        return placed, [n for n in unused if n not in passed_over and not self.repeats_head(n)]

    def all_places(self, stored: Mapping[str, tuple[int, ...]]) -> tuple[list[Place], list[str]]:
        """Return where a folder's tensors belong, and all others. See stored_names.places."""
        names = self.named_weights()
        if self.tower is None or self.config.predicts:
            return places(self.hf, stored, names)
        # only the class of the language model knows the older names of a folder
        base = self.config.names.base if self.config.pooling else ""
        own = {f"{base}{name}": name for name in names}
        placed, unused = places(self.as_language_model, stored, own)
        return [one._replace(parameter=own[one.parameter]) for one in placed], unused

    @cached_property
    def as_language_model(self) -> PreTrainedModel:
        """transformers' model of the same configuration that writes text."""
        return build_hf_model(replace(self.config, labels=(), problem="", pooling=""))

    def passed_over(self, names: Iterable[str]) -> set[str]:
        """Return those of a folder's tensors that it may hold although nothing reads them."""
        further = {name for name in names if is_further(name, self.config)}
        return further | may_be_unused(self.hf, names)

    def repeats_head(self, name: str) -> bool:
        """Return True for a stored head that is the embedding, or in whose place a score is."""
        names, whole = self.config.names, self.hf
        own = [names.head] if self.config.tie_word_embeddings else []
        if not self.config.predicts:
            own = [each for each in (names.head, names.head_bias) if each]
            # only the class with a head knows how folders name it
            whole = self.as_language_model
        return name.endswith((*own, *stored_shapes(whole, dict.fromkeys(own, (1,)))))

    def unread(self, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the names of the tensors of a folder, by their shapes, that nothing here reads."""
        passed_over = {name: stored[name] for name in self.passed_over(stored)}
        _, unused = self.all_places(passed_over)
        copies = copies_in_head(self.config)
        return [name for name in unused if not self.repeats_head(name) and name not in copies]

    def use_attention(self, name: str) -> None:
        config = self.hf.config.get_text_config(decoder=True)
        if config._attn_implementation != name:
            config.update({"_attn_implementation": name})

    def own_logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits of transformers' own forward, [rows, length, vocabulary]."""
        self.use_attention(self.plain_attention)
        with torch.no_grad(), self.autocast(tokens.device.type):
            return self.hf(**self.inputs(tokens, positions), use_cache=False).logits

    def logits_of(self, states: Tensor) -> Tensor:
        product = self.lm_head(self.normed(states))
        return product if self.config.scores else self.lm_head.capped(product)

    @torch.no_grad()
    def both_logits(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        states = self.states(tokens, positions, None)
        return self.logits_of(states), self.own_logits(tokens, positions)

    @torch.no_grad()
    def both_image_logits(
        self, tokens: Tensor, positions: Tensor, media: MediaInputs
    ) -> tuple[Tensor, Tensor]:
        """Return logits of a document with media by our path, and transformers' own.

        Of a model that writes no text, they are the last states.
        """
        assert self.tower is not None
        predicts = self.config.predicts
        own = self.states(tokens, positions, None, media=media)
        whole = self.hf if predicts else self.base
        given = self.tower.own_inputs(whole, media, tokens)
        self.use_attention(self.plain_attention)
        theirs = whole(input_ids=tokens, **given, use_cache=False)[0]
        return (self.logits_of(own) if predicts else own), theirs

    @torch.no_grad()
    def all_states(
        self, tokens: Tensor, positions: Tensor, layout: PackedAttention | None
    ) -> Tensor:
        """Return the states as in training. layout: None: each row is one document."""
        return self.states(tokens, positions, layout)

    def logits(self, tokens: Tensor, media: MediaInputs | None = None) -> Tensor:
        """Return logits [batch, length, vocabulary]; each row is one document."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with self.inference():
            return self.logits_of(self.states(tokens, positions, None, media=media))

    @torch.no_grad()
    def next_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Any,
        index: Tensor,
        caches: Any = MappingProxyType({}),
        media: MediaInputs | None = None,
    ) -> Tensor:
        """Return the next-token logits at some positions: [index, vocabulary].

        caches: an OwnCache, or empty. media: of these tokens. See Decoder.
        """
        if isinstance(caches, OwnCache):
            self.use_attention(self.plain_attention)
            inputs = self.inputs(tokens, positions, media)
            hidden = caches.forward(self.base, inputs, self.cache_name)
        else:
            hidden, _ = self.hidden(tokens, positions, layout, media=media)
        return self.logits_of(hidden.flatten(0, 1).index_select(0, index))


def new_head(config: ModelConfig, before: Any) -> Head:
    config = replace(config, hidden_size=before.weight.shape[1])
    if config.scores:
        return ScoreHead(config)
    return TransformersHead(config) if before.bias is None else BiasedHead(config)


def require_classifier(config: ModelConfig) -> None:
    # of a model with a tower, transformers' generic class makes one: see the export's README.md
    if not hasattr(transformers, config.architecture) and not config.reads_images:
        reason = f"transformers has no {config.architecture}, which would read the model"
        raise UserError("there is no such model of scores", f"model_type={config.family}", reason)


def replace_module(root: nn.Module, before: nn.Module, after: nn.Module | None) -> None:
    """Put a module in the place of another one; None: leave the place empty."""
    name = next(name for name, module in root.named_modules() if module is before)
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, after)


def make_linear(hf: nn.Module) -> list[str]:
    """Replace layers that hold their matrix transposed (GPT-2); return their names."""
    names = [name for name, module in hf.named_modules() if isinstance(module, Conv1D)]
    for name in names:
        before: Any = hf.get_submodule(name)
        inputs, outputs = before.weight.shape
        replace_module(hf, before, nn.Linear(inputs, outputs, device="meta"))
    return names


def with_one_row(hf: nn.Module) -> Iterator[str]:
    """Give single numbers, which cannot be sharded, one dimension; yield their names."""
    for prefix, module in hf.named_modules():
        tensors: dict[str, Any] = {**module._parameters, **module._buffers}
        for name, tensor in tensors.items():
            if tensor is None or tensor.ndim or name in module._non_persistent_buffers_set:
                continue
            yield f"{prefix}.{name}" if prefix else name
            if name in module._parameters:
                row = nn.Parameter(tensor.detach()[None], tensor.requires_grad)
                module._parameters[name] = row
            else:
                module._buffers[name] = tensor[None]


def computed_buffers(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and a copy of each buffer that files do not hold."""
    for prefix, module in hf.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, buffer.clone()
