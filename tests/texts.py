"""Small stores of texts, tokenizers and chats."""

from dataclasses import dataclass

import numpy as np
from folders import REPO
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fsdp_trainer.config.schema import Data
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.samples import SampleBuilder

SHARED = REPO.parent / "shared" / "data"
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
    samples_with_images = 0

    def __init__(self, lengths):
        self.lengths, self.fingerprint, self.source_names = np.array(lengths), "f", [""]
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.tokens = np.arange(sum(lengths), dtype=np.int32)
        self.weights = np.ones(sum(lengths), np.float32)
        self.weights[self.offsets] = 0

    @property
    def weight_sums(self):
        return self.lengths - 1


def turn(role, content, **others):
    return {"role": role, "content": content, **others}


CHAT = [
    turn("system", "Be brief."),
    turn("user", "Hi"),
    turn("assistant", "Hello!"),
    turn("user", "2+2?"),
    turn("assistant", "4"),
]


def make_tokenizer(special=("<|begin_of_text|>", "<|eot_id|>")):
    """Return a small byte-level BPE tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [str(CHAT)] * 3,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    backend.add_special_tokens(
        [AddedToken(s, special=True, normalized=False) for s in dict.fromkeys(special)]
    )
    return backend


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
