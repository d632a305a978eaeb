"""Answers of the model in training to a few fixed prompts (train.sample_prompts)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from fsdp_trainer.config.schema import Train, TrainConfig
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.generation.continuations import generate_tokens
from fsdp_trainer.generation.prompt_ranks import SamePrompts
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.parallel.compile import without_compiling
from fsdp_trainer.parallel.parallelize import stay_gathered
from fsdp_trainer.training.after_step.stoppable import StoppableWork
from fsdp_trainer.training.progress import SAMPLE, Progress


@dataclass
class Samples(StoppableWork[list[tuple[str, str]]]):
    """Greedy answers to train.sample_prompts, by all ranks together."""

    name: ClassVar[str] = SAMPLE
    phase: ClassVar[str] = "samples"
    cfg: TrainConfig
    tokenizer: TextTokenizer
    prompts: list[list[int]]
    """The tokens of each prompt."""
    device: torch.device

    def compute(self, check: Callable[[], None]) -> list[tuple[str, str]]:
        forward_backward, cfg = self.forward_backward, self.cfg
        gathered = stay_gathered(forward_backward.model, cfg.sharding, cfg.precision, self.device)
        with without_compiling(self.cfg.compile.enabled), gathered:
            answers = generate_tokens(
                forward_backward.decoder,
                self.prompts,
                self.tokenizer.stop_ids,
                Sampling(max_tokens=self.cfg.train.sample_tokens),
                device=self.device,
                ranks=SamePrompts(),
                check=check,
            )
        texts = [self.tokenizer.decode(tokens) for [tokens] in answers]
        return list(zip(self.cfg.train.sample_prompts, texts, strict=True))

    def record(
        self, computed: list[tuple[str, str]], progress: Progress, seconds: Callable[[], float]
    ) -> None:
        """Write the answers to samples.jsonl, and print the first one."""
        self.log.observer.sampled(progress.step, computed)


def encode_prompts(
    cfg: Train, tokenizer: TextTokenizer, template: Template, context: int
) -> list[list[int]]:
    """Return the tokens of train.sample_prompts.

    context: maximum number of tokens that the model can read. Raises UserError for a prompt that
    cannot be rendered or leaves no room for an answer.
    """
    chat = None if cfg.sample_raw else template
    return [encode_prompt(prompt, tokenizer, chat, context) for prompt in cfg.sample_prompts]


def encode_prompt(
    prompt: str, tokenizer: TextTokenizer, template: Template | None, context: int
) -> list[int]:
    name = f"train.sample_prompts: {prompt[:60]}"
    try:
        text = template.ask([{"role": "user", "content": prompt}]) if template else prompt
    except RecordError as error:
        reason = f"{error}\nUse  train.sample_raw=true  to continue plain text"
        raise UserError("a sample prompt cannot be rendered", name, reason) from None
    tokens = tokenizer.encode(text)
    if len(tokens) >= context:
        reason = (
            f"has {len(tokens):,} tokens, the model's context {context:,}: "
            "there is no room for an answer. Use a shorter one"
        )
        raise UserError("a sample prompt is too long", name, reason)
    return tokens
