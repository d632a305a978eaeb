"""The verb `generate`: an answer, or a chat at the terminal."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.data.sources import RowError
from fsdp_trainer.data.templates import Template, load_template
from fsdp_trainer.data.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.decoding import continue_tokens


@dataclass
class Speaker:
    """A model with its tokenizer and template."""

    model: Decoder
    tokenizer: TextTokenizer
    template: Template

    @classmethod
    def load(
        cls, source: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> "Speaker":
        """From a run, a checkpoint or a Hugging Face folder. Raises UserError."""
        tokenizer = load_tokenizer(str(model_folder(source)))
        return cls(load_model(source, device, dtype), tokenizer, load_template(None, tokenizer))

    def answer(self, messages: list[dict], cfg: GenerateConfig) -> Iterator[str]:
        """The next assistant turn, in pieces of text."""
        try:
            text = self.template.ask(messages)
        except RowError as error:
            raise UserError(
                "the conversation cannot be rendered",
                [Problem(messages[-1]["content"][:60], str(error))],
            ) from None
        return self.say(text, cfg)

    def say(self, text: str, cfg: GenerateConfig) -> Iterator[str]:
        """What follows `text`, in pieces; a piece never ends within a character."""
        tokens, told = [], ""
        for token in continue_tokens(
            self.model, self.tokenizer.encode(text), self.tokenizer.stop_ids, cfg
        ):
            tokens.append(token)
            whole = self.tokenizer.decode(tokens)
            if not whole.endswith("\ufffd"):
                yield whole[len(told) :]
                told = whole


def generate(cfg: GenerateConfig) -> int:
    """The verb: answer `prompt=`, or chat at the terminal."""
    device = (
        ("cuda" if torch.cuda.is_available() else "cpu") if cfg.device == "auto" else cfg.device
    )
    speaker = Speaker.load(str(cfg.source), device, getattr(torch, cfg.dtype))
    if cfg.prompt is None:
        return chat(speaker, cfg)
    show(
        speaker.say(cfg.prompt, cfg)
        if cfg.raw
        else speaker.answer([*system_turn(cfg), {"role": "user", "content": cfg.prompt}], cfg)
    )
    return 0


def chat(speaker: Speaker, cfg: GenerateConfig) -> int:
    """Turn by turn until the input ends; `/new` forgets what was said."""
    messages = system_turn(cfg)
    while True:
        try:
            text = input("\n> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if text.strip() == "/new":
            messages = system_turn(cfg)
        elif text.strip():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": show(speaker.answer(messages, cfg))})


def system_turn(cfg: GenerateConfig) -> list[dict]:
    """The messages that a conversation begins with."""
    return [{"role": "system", "content": cfg.system}] if cfg.system else []


def show(pieces: Iterator[str]) -> str:
    """Print as it comes; returns the whole."""
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print()
    return text
