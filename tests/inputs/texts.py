"""Small stores of texts, tokenizers and chats."""

import io
from dataclasses import dataclass

import numpy as np
import pytest
from folders import REPO
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from world import read_json, write_json

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.files.sources import Record
from fsdp_trainer.data.records.conversations import make_reader
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.tokens.samples import SampleBuilder
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template

BYTES = load_tokenizer("demo:bytes")
"""The smallest tokenizer."""
SHARED = REPO.parent / "shared/data"
"""Real tokenizers and chats, which are not shipped."""


@dataclass
class Lengths:
    """A store that has only lengths, and tokens of 0."""

    lengths: np.ndarray
    fingerprint: str = "f"
    group_starts = None
    links = None
    gather, token_count = TokenStore.gather, TokenStore.token_count

    @property
    def tokens(self):
        return np.zeros(self.lengths.sum(), np.int32)

    @property
    def weight_sums(self):
        return self.lengths * 0.5

    @property
    def supervised(self):
        return self.lengths - 1


class Texts(Lengths):
    """A store of texts in which all tokens are different numbers.

    All tokens of a text but the first are supervised.
    """

    tokens = kinds = None
    samples_with_media = 0

    def __init__(self, lengths):
        self.lengths, self.fingerprint, self.source_names = np.array(lengths), "f", [""]
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.arange(sum(lengths), dtype=np.int32)
        self.weights = np.ones(sum(lengths), np.float32)
        self.weights[self.offsets] = 0

    @property
    def weight_sums(self):
        return self.lengths - 1


def arguments_of(root, *paths, seq_len=512, template=None, **options):
    """Return the arguments of `prepare` for files that BYTES tokenizes into a cache.

    A path may be an entry of a mixture. options: `say` and `progress` of a Reporter, keys of data.
    """
    receivers = {name: options.pop(name) for name in ("say", "progress") if name in options}
    options["path"] = [path if isinstance(path, dict) else str(path) for path in paths]
    loaded, reporter = load_template(template, BYTES), Reporter(**receivers)
    return Data(**options), Batch(seq_len=seq_len), BYTES, loaded, root, reporter


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


def function(name, **more):
    """Return a tool, or a call of one, as OpenAI writes it."""
    return {"type": "function", "function": {"name": name, **more}}


def talk(*texts):
    """Return turns of a user and an assistant in turn."""
    return [turn(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]


CHAT = [turn("system", "Be brief."), *talk("Hi", "Hello!", "2+2?", "4")]


def make_tokenizer(
    special=("<|begin_of_text|>", "<|eot_id|>"), texts=(str(CHAT),), size=300, cut=None, **how
):
    """Return a small byte-level BPE tokenizer, trained on texts that `cut` cuts, else as GPT-2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = cut or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*texts] * 3, trainer)
    backend.add_special_tokens(
        [AddedToken(s, special=True, normalized=False, **how) for s in dict.fromkeys(special)]
    )
    return backend


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def write_tokenizer(folder, special=()):
    """Write a tokenizer with SPECIAL and more special tokens; return it."""
    make_tokenizer([*SPECIAL.values(), *special]).save(f"{folder}/tokenizer.json")
    write_json(folder / "tokenizer_config.json", SPECIAL)
    return load_tokenizer(str(folder))


def in_transformers(tokenizer, chat_template):
    """Return a tokenizer as that of transformers, with a chat template."""
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, **SPECIAL, chat_template=chat_template
    )


def learnt_in_transformers(theirs, messages, tools=None):
    """Return the tokens of a conversation, and which of them the assistant writes."""
    rendered = theirs.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return rendered["input_ids"], rendered["assistant_masks"]


def assert_learnt_alike(sample, theirs, messages, tools=None):
    ids, mask = learnt_in_transformers(theirs, messages, tools)
    assert sample.tokens.tolist() == ids
    assert (sample.weights > 0).astype(int).tolist() == mask


def write_sentencepiece(path, model_type="bpe", **options):
    """Write a small model of SentencePiece with byte fallback; return its file."""
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentences = [
        f"the {a} {b} of {c}s\n"
        for a in ("small", "large", "Hello")
        for b in ("world", "range", "theory")
        for c in ("cell", "print", "number")
    ]
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences * 5), model_writer=model, vocab_size=330,
        model_type=model_type, byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        user_defined_symbols=["<|tool|>"], **options,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    return path


def read_row(columns, format="auto", fields=None, kind=None):
    """Return what the only row of a file says. kind: of data, as make_reader has it."""
    return make_reader(columns, format, fields, "f", kind).read(Record(columns, ("f", 1)))


def samples_of(tokenizer, row, template=None, seq_len=1000, **options):
    """Return all samples of a row, and the builder with its counts."""
    template = template or load_template("chatml", tokenizer)
    builder = SampleBuilder(Data(**options), seq_len, tokenizer, template)
    return [
        sample for document in builder.tokenize(builder.render(row)) for sample in document
    ], builder


def supervised_texts(tokenizer, sample):
    """Return the supervised spans of a sample as texts."""
    texts, previous = [], 0.0
    for token, weight in zip(sample.tokens.tolist(), sample.weights.tolist(), strict=True):
        if weight:
            texts = texts if previous else [*texts, []]
            texts[-1].append(token)
        previous = weight
    return [tokenizer.decode(t, skip_special=False) for t in texts]


def exchange_tokens(file):
    """Exchange the ids 70 and 71 in a tokenizer.json; return the texts that had them."""
    stored = read_json(file)
    vocabulary = stored["model"]["vocab"]
    a, b = (next(text for text, id in vocabulary.items() if id == n) for n in (70, 71))
    vocabulary[a], vocabulary[b] = 71, 70
    write_json(file, stored)
    return a, b
