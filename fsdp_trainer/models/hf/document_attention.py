"""Attention over packed documents inside transformers' modules, by our own layouts.

transformers looks attention functions up by name. Ours gets the micro-batch's layout as an
argument of the model's forward, so that no mask of row × row is made.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from fsdp_trainer.models.attention import PackedAttention
from fsdp_trainer.models.sdpa import Scoring, same_width

NAME = "fsdp_trainer_documents"
"""The name of our function. transformers makes no mask for a name that it has no mask for."""
KNOWN = {
    *("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "position_embeddings", "past_key_values"),
}
"""Arguments that do not change what is computed here."""


class Documents:
    """The layouts of a micro-batch, by window."""

    def __init__(self, layout: PackedAttention, windows: set[int | None]):
        self.causal = layout.causal
        self.layouts = {window: layout.with_window(window) for window in windows | {None}}


class NotComputed(Exception):
    """A model asks for attention that the layouts do not compute."""


def attend_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    documents: Documents | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention within each document, [batch, length, heads, head_dim].

    query, key, value: [batch, heads, length, channels]; scaling: factor of the scores, None: by
    the size of a head; s_aux: sinks. Raises NotComputed for anything else that a model asks for.
    """
    unknown = [n for n, v in others.items() if n not in KNOWN and isinstance(v, Tensor)]
    is_causal = others.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if documents is None or unknown or attention_mask is not None or is_causal != documents.causal:
        raise NotComputed(f"{type(module).__name__} asks for {unknown or 'another mask'}")
    if sliding_window not in documents.layouts:
        raise NotComputed(f"{type(module).__name__} has a window of {sliding_window} tokens")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    width = v.shape[-1]
    if width > q.shape[-1]:
        raise NotComputed(f"{type(module).__name__} has values wider than queries")
    q, k, v = same_width(q, k, v)
    scoring = Scoring(scaling, softcap, s_aux)
    mixed = documents.layouts[sliding_window].attend(q, k, v, scoring)
    return mixed[..., :width], None


AttentionInterface.register(NAME, attend_documents)
