"""The verb `generate`: an answer, or a chat at the terminal."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.paths import tokenizer_folder
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
        """Load from a run, a checkpoint or a Hugging Face folder. Raises UserError."""
        model = load_model(source, device, dtype)
        tokenizer = load_tokenizer(str(tokenizer_folder(source)))
        return cls(model, tokenizer, load_template(None, tokenizer))

    def answer(self, messages: list[dict], cfg: GenerateConfig) -> Iterator[str]:
        """Yield the next assistant turn, in pieces of text."""
        try:
            text = self.template.ask(messages)
        except RowError as error:
            problem = Problem(messages[-1]["content"][:60], str(error))
            raise UserError("the conversation cannot be rendered", [problem]) from None
        return self.say(text, cfg)

    def say(self, text: str, cfg: GenerateConfig) -> Iterator[str]:
        """Yield the continuation of `text`, in pieces; a piece never ends within a character."""
        tokens = []
        length = 0
        prompt = self.tokenizer.encode(text)
        stop_ids = self.tokenizer.stop_ids
        for token in continue_tokens(self.model, prompt, stop_ids, cfg):
            tokens.append(token)
            whole = self.tokenizer.decode(tokens)
            if not whole.endswith("\ufffd"):
                yield whole[length:]
                length = len(whole)


def generate(cfg: GenerateConfig) -> int:
    """Run the verb: answer `prompt=`, or chat at the terminal."""
    device = cfg.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    speaker = Speaker.load(str(cfg.source), device, getattr(torch, cfg.dtype))
    if cfg.prompt is None:
        return chat(speaker, cfg)
    if cfg.raw:
        show(speaker.say(cfg.prompt, cfg))
    else:
        show(speaker.answer([*system_turn(cfg), {"role": "user", "content": cfg.prompt}], cfg))
    return 0


def chat(speaker: Speaker, cfg: GenerateConfig) -> int:
    """Answer turn by turn until the input ends; `/new` starts a new conversation."""
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
    """Return the messages that a conversation begins with."""
    return [{"role": "system", "content": cfg.system}] if cfg.system else []


def show(pieces: Iterator[str]) -> str:
    """Print the pieces as they come; return the whole text."""
    text = ""
    for piece in pieces:
        print(piece, end="", flush=True)
        text += piece
    print()
    return text
