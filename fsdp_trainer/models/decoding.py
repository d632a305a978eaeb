"""Tokens from a model, one by one, with a cache of keys and values."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.models.attention import Cache
from fsdp_trainer.models.decoder import Decoder


def continue_tokens(
    model: Decoder,
    prompt: list[int],
    stop_ids: set[int],
    cfg: GenerateConfig,
    device: torch.device | None = None,
    agree: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Iterator[int]:
    """Up to cfg.max_tokens token ids after `prompt`, a stop id and what follows it left out.

    device: where the model computes, if that is not where its weights are; agree: makes the logits [vocabulary] those of all ranks.
    """
    device = device or model.lm_head.weight.device
    caches = [Cache() for _ in model.model.layers]
    generator = torch.Generator().manual_seed(cfg.seed)
    new = torch.tensor([prompt], device=device)
    room = model.config.max_position_embeddings - len(prompt)
    for _ in range(min(cfg.max_tokens, room)):
        token = sample(
            agree(model.next_logits(new, caches)[0]), cfg.temperature, cfg.top_p, generator
        )
        if token in stop_ids:
            return
        yield token
        new = torch.tensor([[token]], device=device)


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id from logits [vocabulary]. top_p: nucleus sampling (Holtzman et al. 2020)."""
    if temperature == 0:
        return int(logits.argmax())
    likely, tokens = torch.softmax(logits.float().cpu() / temperature, -1).sort(descending=True)
    likely[likely.cumsum(0) - likely >= top_p] = 0  # the token that crosses top_p stays
    return int(tokens[torch.multinomial(likely, 1, generator=generator)])
