"""The verb `generate`: answers to prompts, or a chat at the terminal."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.base.text_files import text_lines
from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.paths import tokenizer_folder
from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.media.media import MediaReader, joined
from fsdp_trainer.data.records.images import IMAGES
from fsdp_trainer.data.records.media import media_in
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.text_stream import TextStream
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import UserError
from fsdp_trainer.generation.continuations import generate_tokens, stream_tokens
from fsdp_trainer.generation.decoding import Decoding
from fsdp_trainer.generation.drafts import Drafts, drafts_of, sum_of_drafts
from fsdp_trainer.generation.prompt_media import PromptMedia, reader_of_media
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.models.config import AUTO, ONLY_TEXT
from fsdp_trainer.models.decoder import Decoder

TextOf = Callable[[list[dict], str], str]
"""Returns the text of turns, with a mark in the place of each image."""


@dataclass(frozen=True)
class Asked:
    """A text up to where the answer begins. media: those in it."""

    text: str
    media: PromptMedia | None = None


@dataclass
class Speaker:
    """A model with its tokenizer and template. media: reads media, if the model does."""

    model: Decoder
    tokenizer: TextTokenizer
    template: Template
    media: MediaReader | None = None

    def __post_init__(self) -> None:
        self.decoding = Decoding(self.model)

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        implementation: str = AUTO,
        mtp: bool = False,
    ) -> "Speaker":
        """Load from a run, a checkpoint or a Hugging Face folder. Raises UserError.

        mtp: with the MTP head.
        """
        model = load_model(source, device, dtype, implementation=implementation, mtp=mtp)
        tokenizer = load_tokenizer(str(tokenizer_folder(source)))
        media = reader_of_media(model.config, source)
        return cls(model, tokenizer, load_template(None, tokenizer), media)

    def answer(self, messages: list[dict], cfg: GenerateConfig) -> Iterator[str]:
        """Yield the next assistant turn, in pieces of text."""
        return self.say(self.ask(messages), cfg)

    def ask(self, messages: list[dict], text_of: TextOf | None = None) -> Asked:
        """Render a conversation as text that ends where the answer begins. Raises UserError.

        text_of: renders it with another template, or up to another place.
        """
        text_of = text_of or self.template.ask
        try:
            if any(media_in(messages)):
                return self._ask_with_media(messages, text_of)
            return Asked(text_of(messages, ""))
        except RecordError as error:
            raise UserError(
                "the conversation cannot be rendered", messages[-1]["content"][:60], str(error)
            ) from None

    def _ask_with_media(self, messages: list[dict], text_of: TextOf) -> Asked:
        if self.media is None:
            raise RecordError(f"holds an image, {ONLY_TEXT}")
        processor = self.media.processor
        opened = [self.media.files.opened(one) for one in media_in(messages)]
        self.media.say_lost([file for file, _ in opened])
        token = str(self.tokenizer.backend.id_to_token(processor.token))
        text = text_of(messages, processor.mark)
        whole = self.media.expand(text, [file for file, _ in opened], token, is_whole=True)
        arrays = joined([processor.numbers_of(picture, file.name) for file, picture in opened])
        tokens = sum(one.tokens for one in whole.media)
        return Asked(whole.text, PromptMedia(lambda: arrays, tokens))

    def say(self, text: Asked, cfg: GenerateConfig) -> Iterator[str]:
        """Yield the continuation of a text, in pieces; a piece never ends within a character."""
        stream = TextStream(self.tokenizer)
        prompt = self.encode(text.text)
        stop_ids = self.tokenizer.stop_ids
        for token in stream_tokens(
            self.model, prompt, stop_ids, sampling_of(cfg), self.decoding, text.media
        ):
            if piece := stream.add([token]):
                yield piece
        if rest := stream.finish():
            yield rest

    def say_all(self, asked: list[Asked], cfg: GenerateConfig) -> list[list[str]]:
        return [[self.tokenizer.decode(each) for each in own] for own in self.tokens(asked, cfg)]

    def tokens(self, asked: list[Asked], cfg: GenerateConfig) -> list[list[list[int]]]:
        prompts = [self.encode(each.text) for each in asked]
        media = [each.media for each in asked]
        stop_ids, sampling = self.tokenizer.stop_ids, sampling_of(cfg)
        return generate_tokens(self.model, prompts, stop_ids, sampling, rows=cfg.rows, media=media)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt. Raises UserError if there are none, or too many."""
        tokens = self.tokenizer.encode(text)
        context = self.model.config.max_position_embeddings
        if not tokens:
            raise UserError(
                "the prompt is empty",
                f"prompt={text!r}",
                "has no tokens: there is nothing to continue",
            )
        if len(tokens) >= context:
            reason = f"has {len(tokens):,} tokens, the model's context {context:,}: use a shorter"
            raise UserError("the prompt is too long", f"prompt={text[:60]}…", reason)
        return tokens


def sampling_of(cfg: GenerateConfig) -> Sampling:
    return Sampling(cfg.max_tokens, cfg.temperature, cfg.top_p, cfg.seed, cfg.samples)


def device_of(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def generate(cfg: GenerateConfig) -> int:
    """Run the verb: answer `prompt=` or the prompts of a file, or chat at the terminal."""
    prompts = read_prompts(cfg)
    dtype = getattr(torch, cfg.dtype)
    if cfg.mtp:
        require_measurable(cfg, prompts)
    device = device_of(cfg.device)
    speaker = Speaker.load(str(cfg.source), device, dtype, cfg.implementation, cfg.mtp)
    if not prompts:
        return chat(speaker, cfg)
    if cfg.raw:
        texts = [Asked(prompt) for prompt in prompts]
    else:
        texts = [speaker.ask(conversation(cfg, prompt)) for prompt in prompts]
    if len(texts) == cfg.samples == 1 and cfg.format == "text" and not cfg.mtp:
        show(speaker.say(texts[0], cfg))
        return 0
    total = Drafts(0, 0)
    for prompt, text, tokens in zip(prompts, texts, speaker.tokens(texts, cfg), strict=True):
        answers = [speaker.tokenizer.decode(each) for each in tokens]
        before = speaker.encode(text.text)
        drafts = [drafts_of(speaker.model, before, each) for each in tokens] if cfg.mtp else []
        show_answers(prompt, answers, cfg.format, drafts)
        total = sum_of_drafts([total, *drafts])
    if cfg.mtp and cfg.format == "text":
        print(f"MTP head: {total}")
    return 0


def require_measurable(cfg: GenerateConfig, prompts: list[str]) -> None:
    """Raise UserError unless the answers are those whose drafts are counted."""
    reason = "only counts with  temperature=0" if cfg.temperature else ""
    reason = reason or ("only counts without images" if cfg.image else "")
    reason = reason or ("needs a prompt:  prompt='…'  or  prompts=FILE" if not prompts else "")
    if reason:
        raise UserError("drafts are not counted", "mtp=true", reason)


def read_prompts(cfg: GenerateConfig) -> list[str]:
    given = [cfg.prompt] if isinstance(cfg.prompt, str) else cfg.prompt or []
    if cfg.prompts is None:
        return list(given)
    file = Path(cfg.prompts)
    try:
        lines = text_lines(file)
        as_json = file.suffix in (".jsonl", ".json")
        read = [json.loads(line)["prompt"] if as_json else line for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "there are no prompts", f"prompts={file}", f"cannot be read: {error}"
        ) from None
    except (ValueError, KeyError, TypeError):
        reason = 'a line is no JSON object with a text "prompt".\nUse a .txt file of one a line'
        raise UserError("a prompt cannot be read", f"prompts={file}", reason) from None
    return [*given, *map(str, read)]


def conversation(cfg: GenerateConfig, prompt: str) -> list[dict]:
    turns = [*system_turn(cfg), {"role": "user", "content": prompt}]
    if not cfg.image:
        return turns
    try:
        return IMAGES.placed(turns, IMAGES.read_all(cfg.image))
    except RecordError as error:
        raise UserError("images do not fit", f"prompt={prompt}", str(error)) from None


def show_answers(prompt: str, answers: list[str], form: str, drafts: Sequence[Drafts] = ()) -> None:
    """Print the answers to one prompt, as text or as one JSON object per line.

    drafts: of the MTP head for each answer; empty: not counted.
    """
    if form == "json":
        for sample, text in enumerate(answers):
            line = {"prompt": prompt, "sample": sample, "text": text}
            line |= drafts[sample]._asdict() if drafts else {}
            print(visible(json.dumps(line, ensure_ascii=False)))
        return
    print(visible(f"> {prompt}"))
    for text in answers:
        print(visible(text))
    print()


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
    return [{"role": "system", "content": cfg.system}] if cfg.system else []


def show(pieces: Iterator[str]) -> str:
    text = ""
    for piece in pieces:
        print(visible(piece), end="", flush=True)
        text += piece
    print()
    return text
