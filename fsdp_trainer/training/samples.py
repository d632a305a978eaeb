"""What the model in training says to a few fixed prompts."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.data.sources import RowError
from fsdp_trainer.data.templates import Template
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.decoding import continue_tokens


class Samples:
    """Answers greedily; all ranks together, since each holds a part of the model. Training does not notice."""

    def __init__(
        self,
        cfg: TrainConfig,
        tokenizer: TextTokenizer,
        template: Template,
        device: torch.device,
        context: int,
    ):
        """context: the model's, in tokens. Raises UserError for a prompt that cannot be rendered or leaves no room for an answer."""
        self.tokenizer, self.device, self.how = (
            tokenizer,
            device,
            GenerateConfig(max_tokens=cfg.train.sample_tokens),
        )
        self.compiled = cfg.compile.enabled
        self.prompts: list[tuple[str, list[int]]] = []
        for prompt in cfg.train.sample_prompts:
            try:
                text = (
                    prompt
                    if cfg.train.sample_raw
                    else template.ask([{"role": "user", "content": prompt}])
                )
            except RowError as error:
                why = f"{error}\nUse  train.sample_raw=true  to continue plain text"
                raise UserError(
                    "a sample prompt cannot be rendered",
                    [Problem(f"train.sample_prompts: {prompt[:60]}", why)],
                ) from None
            tokens = tokenizer.encode(text)
            if len(tokens) >= context:
                why = f"has {len(tokens):,} tokens, the model's context {context:,}: there is no room for an answer. Use a shorter one"
                raise UserError(
                    "a sample prompt is too long",
                    [Problem(f"train.sample_prompts: {prompt[:60]}", why)],
                )
            self.prompts.append((prompt, tokens))

    @torch.no_grad()
    def take(self, model: Decoder, stops: Callable[[], bool]) -> list[tuple[str, str]] | None:
        """Each prompt with its answer; None if `stops` says, on all ranks alike, that there is no time. Collective."""
        eager: Any = (
            torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        )  # every length is another shape
        answers = []
        with eager:
            for prompt, tokens in self.prompts:
                if stops():
                    return None
                answers.append((prompt, self.tokenizer.decode(self._answer(model, tokens))))
        return answers

    def _answer(self, model: Decoder, tokens: list[int]) -> list[int]:
        return list(
            continue_tokens(
                model, tokens, self.tokenizer.stop_ids, self.how, self.device, of_rank_0
            )
        )


def of_rank_0(logits: Tensor) -> Tensor:
    """Rank 0's logits on every rank: ranks that chose different tokens would stop at different times, and wait for each other for ever."""
    logits = logits.contiguous()
    dist.broadcast(logits, 0)
    return logits
