"""An encoder, such as BERT, whose computation is transformers' own, with its own head.

Each document is computed in a row of its own, since its tokens see all of the row.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp_trainer.models.attention import Cache, PackedAttention
from fsdp_trainer.models.decoder import Auxiliary, MediaInputs
from fsdp_trainer.models.document_calls import Lengths
from fsdp_trainer.models.head import Head, StatesHead
from fsdp_trainer.models.hf.hf_decoder import TransformersDecoder
from fsdp_trainer.models.hf.unpack import OneDocumentRows


class OneToken(NamedTuple):
    """The layout of a rank without data, which computes a token for the others' sake."""

    lengths: Lengths


class TransformersEncoder(TransformersDecoder):
    """An encoder of transformers, called like a `Decoder`. Its results take the states' place.

    They are numbers for each label; those of a text are the same for all of its tokens.
    """

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
        rows: Any = layout
        if not any(layout.lengths):
            rows = OneToken([[1], *[[]] * (len(tokens) - 1)])
        alone = OneDocumentRows(tokens, rows)
        return alone.packed(self.results(alone)), {}

    def results(self, alone: OneDocumentRows) -> Tensor:
        output = self.hf(**self.of_documents(alone))
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
