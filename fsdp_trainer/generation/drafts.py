"""Count of the tokens of greedy answers that a model's MTP head drafts and a server accepts."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from fsdp_trainer.models.attention import DocumentAttention
from fsdp_trainer.models.decoder import Decoder, MicroBatch


class Drafts(NamedTuple):
    """Numbers of drafted tokens, and of those that are the model's own choice."""

    drafted: int
    accepted: int

    def __str__(self) -> str:
        share = self.accepted / max(1, self.drafted)
        return f"{self.accepted:,} of {self.drafted:,} drafted tokens accepted ({share:.1%})"


@torch.no_grad()
def drafts_of(model: Decoder, prompt: list[int], answer: list[int]) -> Drafts:
    """Return the drafts of a greedy answer: of each of its tokens after the first.

    A server drafts a token when it knows the one before, from the states of the token before that.
    """
    device = model.embedding.weight.device
    tokens = torch.tensor([prompt + answer], device=device)
    length = tokens.shape[1]
    positions = torch.arange(length, device=device)[None]
    layout = DocumentAttention([[length]], length, device)
    drafted = torch.arange(len(prompt) + 1, length, device=device)
    chosen = tokens[0, drafted]
    batch = MicroBatch(tokens, positions, layout, drafted - 2, chosen, torch.ones_like(chosen))
    with model.inference():
        _, states, _ = model.states_with_mtp(batch, None)
        right = model.lm_head(states[0, drafted - 2]).argmax(-1) == chosen
    return Drafts(len(drafted), int(right.sum()))


def sum_of_drafts(each: Iterable[Drafts]) -> Drafts:
    return Drafts(*map(sum, zip(*each, strict=True)))
