"""Training of a byte-level BPE or SentencePiece tokenizer with the tokens of a chat template."""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers

from fsdp_trainer.data.files.built_in_templates import TEMPLATES, DescribedTemplate
from fsdp_trainer.data.tokens.byte_level_files import cut_as
from fsdp_trainer.data.tokens.encoding import LLAMA_3
from fsdp_trainer.data.tokens.sentencepiece_model import read_sentencepiece
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError

BYTES = 256
PLAIN_TOKENS = {
    "qwen3": (
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
    )
}  # fmt: skip
"""Tokens of a template that are part of the visible text, and therefore not special."""
BEGIN = {"llama2": "<s>", "mistral": "<s>", "gemma": "<bos>", "llama3": "<|begin_of_text|>"}
END = {"llama2": "</s>", "mistral": "</s>", "gemma": "<eos>", "llama3": "<|end_of_text|>"}
"""Tokens around a document, by template, if they have other names than usual."""
USUAL_END, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<unk>"
TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


@dataclass(frozen=True)
class AddedTokens:
    """The tokens that are added to those learned from text.

    named: bos_token (if any), eos_token and pad_token. markers: turn markers and further special
    tokens. plain: tokens that are not special.
    """

    named: dict[str, str]
    markers: tuple[str, ...]
    plain: tuple[str, ...]

    @property
    def special(self) -> list[str]:
        return list(dict.fromkeys([*self.named.values(), *self.markers]))

    @property
    def count(self) -> int:
        return len(self.special) + len(self.plain)


def added_tokens(template: str, further: list[str]) -> AddedTokens:
    """Return the tokens that a built-in template needs. further: additional special tokens."""
    needs = TEMPLATES.get(template) or DescribedTemplate("")
    named = {"eos_token": END.get(template, USUAL_END), "pad_token": PAD}
    if "bos_token" in needs.special:
        named = {"bos_token": BEGIN[template], **named}
    return AddedTokens(named, (*needs.markers, *further), PLAIN_TOKENS.get(template, ()))


def smallest_vocabulary(kind: str, added: AddedTokens) -> int:
    """Return the smallest vocabulary: bytes, added tokens, and one token learned from text."""
    return BYTES + added.count + 1 + (kind == "sentencepiece")


def train_byte_pairs(texts: Iterable[str], size: int, added: AddedTokens) -> TextTokenizer:
    """Return a byte-level BPE with at most `size` tokens, which splits text as Llama 3's does."""
    backend = Tokenizer(models.BPE())
    cut_as(backend, LLAMA_3)
    trainer = trainers.BpeTrainer(
        vocab_size=size - added.count,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([special(text) for text in added.special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in added.plain])
    begin = added.named.get("bos_token")
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            f"{begin} $A", f"{begin} $A {begin} $B", [(begin, backend.token_to_id(begin))]
        )
    return TextTokenizer(backend, added.named, set(), None)


def train_sentencepiece(
    texts: Iterable[str], size: int, added: AddedTokens, folder: Path
) -> TextTokenizer:
    """Return a BPE tokenizer of SentencePiece with byte fallback, like Llama 2's.

    Text is not normalised, spaces included. tokenizer.model is written to `folder`. The trainer
    keeps all text in memory. Raises UserError if `size` is too small for the text's characters.
    """
    # imported late: no other kind of tokenizer needs it
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    named = {"bos_id": -1, **numbered(added.named)}
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            hard_vocab_limit=False,
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=1 << 17,  # bytes; longer ones would be left out
            control_symbols=[text for text in added.markers if text not in added.named.values()],
            user_defined_symbols=list(added.plain),
            minloglevel=2,
            **named,
        )
    except RuntimeError as error:
        raise refused(size, str(error)) from None
    file = folder / "tokenizer.model"
    file.write_bytes(model.getvalue())
    backend, names = read_sentencepiece(file)
    return TextTokenizer(backend, names, set(), None)


def numbered(named: dict[str, str]) -> dict[str, Any]:
    """Return SentencePiece's options that give these tokens ids from 1 on, and 0 to unknown."""
    options: dict[str, Any] = {"unk_id": 0, "unk_piece": UNKNOWN}
    for id, (name, text) in enumerate(named.items(), start=1):
        short = name.removesuffix("_token")
        options[f"{short}_id"] = id
        options[f"{short}_piece"] = text
    return options


def lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of texts: SentencePiece is trained on single lines."""
    for text in texts:
        for line in text.split("\n"):
            if line and "\0" not in line:  # SentencePiece ends a text at \0
                yield line


def refused(size: int, message: str) -> UserError:
    needed = TOO_SMALL.search(message)
    reason = message
    if needed:
        reason = (
            f"the text has so many characters that {needed[1]} tokens are needed at least.\n"
            f"Use  vocab_size={needed[1]}  or more, or  kind=bpe , which begins with bytes"
        )
    return UserError("the tokenizer cannot be trained", f"vocab_size={size}", reason)


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)
