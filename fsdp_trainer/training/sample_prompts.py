"""Answers of the model in training to a few fixed prompts (train.sample_prompts)."""

from collections.abc import Callable
from typing import Any

import torch

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.files.sources import RowError
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.generation.continuations import generate_tokens
from fsdp_trainer.generation.prompt_ranks import SamePrompts
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.parallel.compile import without_compiling
from fsdp_trainer.parallel.parallelize import stay_gathered


class Samples:
    """Greedy answers to train.sample_prompts, by all ranks together, without effect on training."""

    def __init__(
        self,
        cfg: TrainConfig,
        tokenizer: TextTokenizer,
        template: Template,
        device: torch.device,
        context: int,
    ):
        """Tokenise the prompts. context: maximum number of tokens that the model can read.

        Raises UserError for a prompt that cannot be rendered or leaves no room for an answer.
        """
        self.tokenizer, self.device = tokenizer, device
        self.sampling = Sampling(max_tokens=cfg.train.sample_tokens)
        self.cfg = cfg
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
    def generate(
        self, model: Decoder, check: Callable[[], None], decoder: Any = None
    ) -> list[tuple[str, str]]:
        """Return each prompt with its answer. Collective.

        check: called before each batch of prompts; may raise, on all ranks together. decoder: the
        object that computes the logits; None: the model.
        """
        gathered = stay_gathered(model, self.cfg, self.device)
        with without_compiling(self.cfg.compile.enabled), gathered:
            answers = generate_tokens(
                decoder or model,
                [tokens for _, tokens in self.prompts],
                self.tokenizer.stop_ids,
                self.sampling,
                device=self.device,
                ranks=SamePrompts(),
                check=check,
            )
        texts = [self.tokenizer.decode(tokens) for [tokens] in answers]
        return [(prompt, text) for (prompt, _), text in zip(self.prompts, texts, strict=True)]
