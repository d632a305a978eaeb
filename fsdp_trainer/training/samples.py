"""Answers of the model in training to a few fixed prompts."""

from collections.abc import Callable
from contextlib import nullcontext

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
    """Greedy answers to train.sample_prompts, by all ranks together. Training does not notice."""

    def __init__(
        self,
        cfg: TrainConfig,
        tokenizer: TextTokenizer,
        template: Template,
        device: torch.device,
        context: int,
    ):
        """context: how many tokens the model can attend to.

        Raises UserError for a prompt that cannot be rendered or leaves no room for an answer.
        """
        self.tokenizer, self.device = tokenizer, device
        self.generation = GenerateConfig(max_tokens=cfg.train.sample_tokens)
        self.compiled = cfg.compile.enabled
        raw = cfg.train.sample_raw
        self.prompts = [
            (prompt, self._encode(prompt, None if raw else template, context))
            for prompt in cfg.train.sample_prompts
        ]

    def _encode(self, prompt: str, template: Template | None, context: int) -> list[int]:
        name = f"train.sample_prompts: {prompt[:60]}"
        try:
            text = template.ask([{"role": "user", "content": prompt}]) if template else prompt
        except RowError as error:
            reason = f"{error}\nUse  train.sample_raw=true  to continue plain text"
            raise UserError("a sample prompt cannot be rendered", [Problem(name, reason)]) from None
        tokens = self.tokenizer.encode(text)
        if len(tokens) >= context:
            reason = (
                f"has {len(tokens):,} tokens, the model's context {context:,}: "
                "there is no room for an answer. Use a shorter one"
            )
            raise UserError("a sample prompt is too long", [Problem(name, reason)])
        return tokens

    @torch.no_grad()
    def generate(self, model: Decoder, check: Callable[[], None]) -> list[tuple[str, str]]:
        """Return each prompt with its answer. Collective.

        check: called before each prompt; may raise, on all ranks alike.
        """
        # a compiled model would be compiled again for every length
        eager = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        answers = []
        with eager:
            for prompt, tokens in self.prompts:
                check()
                answer = continue_tokens(
                    model,
                    tokens,
                    self.tokenizer.stop_ids,
                    self.generation,
                    self.device,
                    logits_of_rank_0,
                )
                answers.append((prompt, self.tokenizer.decode(list(answer))))
        return answers


def logits_of_rank_0(logits: Tensor) -> Tensor:
    """Return rank 0's logits on every rank.

    Ranks that chose different tokens would stop at different times, and wait for each other.
    """
    logits = logits.contiguous()
    dist.broadcast(logits, 0)
    return logits
