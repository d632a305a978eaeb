"""Tokens from a model, one by one, with a cache of keys and values."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.models.decoder import Decoder


def continue_tokens(
    model: Decoder,
    prompt: list[int],
    stop_ids: set[int],
    cfg: GenerateConfig,
    device: torch.device | None = None,
    agree: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Iterator[int]:
    """Yield up to cfg.max_tokens token ids that follow `prompt`; end before a stop id.

    device: where the model computes, if not where its weights are.
    agree: makes the logits [vocabulary] the same on all ranks.
    """
    device = device or model.lm_head.weight.device
    caches = model.new_caches()
    generator = torch.Generator().manual_seed(cfg.seed)
    new = torch.tensor([prompt], device=device)
    room = model.config.max_position_embeddings - len(prompt)
    for _ in range(min(cfg.max_tokens, room)):
        logits = agree(model.next_logits(new, caches)[0])
        token = sample(logits, cfg.temperature, cfg.top_p, generator)
        if token in stop_ids:
            return
        yield token
        new = torch.tensor([[token]], device=device)


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draw a token id by logits [vocabulary]. top_p: nucleus sampling (Holtzman et al. 2020)."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float().cpu() / temperature, -1)
    likely, tokens = probabilities.sort(descending=True)
    # the token that crosses top_p stays
    before = likely.cumsum(0) - likely
    likely[before >= top_p] = 0
    return int(tokens[torch.multinomial(likely, 1, generator=generator)])
