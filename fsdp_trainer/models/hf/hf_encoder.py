"""An encoder, such as BERT, whose computation is transformers' own, with its own head.

Blocks compute packed rows, in which attention stays within documents, if a trial gives the same
results. What follows them, such as a pooler, gets each document in a row of its own; so do blocks
of other encoders.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp_trainer.models.attention import Cache, PackedAttention
from fsdp_trainer.models.balance import Balance
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Auxiliary, MediaInputs
from fsdp_trainer.models.document_calls import Lengths
from fsdp_trainer.models.head import Head, StatesHead
from fsdp_trainer.models.hf.document_attention import NAME, Documents, NotComputed
from fsdp_trainer.models.hf.hf_config import block_list, unused_positions
from fsdp_trainer.models.hf.hf_decoder import TransformersDecoder
from fsdp_trainer.models.hf.unpack import OneDocumentRows


class Alone(NamedTuple):
    """The layout of rows with one document at most."""

    lengths: Lengths


class TransformersEncoder(TransformersDecoder):
    """An encoder of transformers, called like a `Decoder`. Its results take the states' place.

    They are numbers for each label; those of a text are the same for all of its tokens.
    """

    unpacking: OneDocumentRows | None = None
    """The documents of the packed rows that the blocks compute."""

    def __init__(self, config: ModelConfig, balance: Balance | None = None):
        super().__init__(config, balance)
        self.first_position = unused_positions(self.hf)
        self.stack = block_list(self.hf)[0].rpartition(".")[0]
        self.hf.get_submodule(self.stack).register_forward_hook(self.after_blocks)

    def after_blocks(self, module: nn.Module, given: Any, output: Any) -> Any:
        if self.unpacking is None:
            return output
        states = self.unpacking.unpacked(output.last_hidden_state)
        return type(output)(**{**output, "last_hidden_state": states})

    def own_head(self, hf: PreTrainedModel) -> Head:
        return super().own_head(hf) if self.config.pooling else StatesHead(self.config)

    @property
    def head_names(self) -> set[str]:
        """Names of the weights that a folder may lack: outside of the base, and its pooler."""
        base = self.config.names.base
        names = self.named_weights() if self.config.scores else ()
        return {n for n in names if not n.startswith(base) or n.startswith(f"{base}pooler.")}

    def ends(self) -> list[nn.Module]:
        return []

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedAttention,
        caches: Mapping[str, Cache] = MappingProxyType({}),
        token_share: Tensor | None = None,
        media: MediaInputs | None = None,
    ) -> tuple[Tensor, Auxiliary]:
        """Return the results of packed rows, [rows, length, numbers]. See Decoder."""
        if any(layout.lengths):
            return self.states(tokens, positions, layout, self.config.packs), {}
        # a rank without data computes a token for the others' sake
        rows: Any = Alone([[1], *[[]] * (len(tokens) - 1)])
        return self.of_padded(OneDocumentRows(tokens, rows)), {}

    def of_padded(self, alone: OneDocumentRows) -> Tensor:
        """Return the results of packed rows, of whose documents each has a row of its own."""
        self.use_attention(self.plain_attention)
        return alone.packed(self.results(alone, self.of_documents(alone)))

    def states(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: PackedAttention | None,
        ours: bool | None = None,
        media: MediaInputs | None = None,
    ) -> Tensor:
        """Return the results. ours: False: the blocks get each document in a row of its own."""
        rows: Any = Alone([[tokens.shape[1]]] * len(tokens)) if layout is None else layout
        alone = OneDocumentRows(tokens, rows)
        if layout is None or ours is False:
            return self.of_padded(alone)
        if not self.stack:
            raise NotComputed(f"{type(self.hf).__name__} has no module that holds its blocks alone")
        self.use_attention(NAME)
        packed = {
            "input_ids": tokens,
            "position_ids": self.own_positions(alone, positions),
            "documents": Documents(layout.in_both_directions(), set()),
        }
        types = self.of_documents(alone).get("token_type_ids")
        if types is not None:
            packed["token_type_ids"] = alone.packed(types[..., None])[..., 0]
        self.unpacking = alone
        try:
            return alone.packed(self.results(alone, packed))
        finally:
            self.unpacking = None

    def own_positions(self, alone: OneDocumentRows, positions: Tensor) -> Tensor:
        """Return the positions of packed rows: RoBERTa's follow its padding's and leave it out."""
        if not self.first_position:
            return positions
        padding = self.first_position - 1
        counts = (alone.tokens != padding).long()
        own = counts.cumsum(1) * counts + padding
        return alone.packed(own[..., None])[..., 0]

    def results(self, alone: OneDocumentRows, given: Mapping[str, Any]) -> Tensor:
        """Return the results of documents. given: arguments of transformers' class."""
        with self.autocast(alone.tokens.device.type):
            output = self.hf(**given)
        if not self.config.scores:
            return output.last_hidden_state
        if self.config.tags:
            return output.logits
        return output.logits[:, None].expand(-1, alone.tokens.shape[1], -1)

    def of_documents(self, alone: OneDocumentRows) -> dict[str, Tensor]:
        """Return the arguments of transformers' class, which finds positions by itself."""
        given = {"input_ids": alone.tokens, "attention_mask": alone.is_token.long()}
        if self.config.second_after < 0:
            return given
        is_end = (alone.tokens == self.config.second_after).long()
        return given | {"token_type_ids": (is_end.cumsum(1) - is_end).clamp_max(1)}

    def passed_over(self, names: Iterable[str]) -> set[str]:
        names = [*names]
        base = self.config.names.base
        own = {name.removeprefix(base).partition(".")[0] for name in self.named_weights()}
        own -= {"pooler", *(name.partition(".")[0] for name in self.head_names)}
        others = {n for n in names if n.removeprefix(base).partition(".")[0] not in own}
        return others | super().passed_over(names)

    def repeats_head(self, name: str) -> bool:
        return False

    def unread(self, stored: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return no names: an export has its own head alone."""
        return []
