"""Comparison of tokenizers by their bytes per token on the same text."""

from dataclasses import dataclass
from typing import Any

from fsdp_trainer.data.tokens.tokenizer import TextTokenizer

AT_ONCE = 256  # texts in one call of a tokenizer


@dataclass(frozen=True)
class Measured:
    """A tokenizer's figures on held-out text.

    by_source: bytes per token of each source, by name. lossless: decoding returns the same text.
    """

    name: str
    vocab_size: int
    tokens: int
    bytes_per_token: float
    by_source: dict[str, float]
    lossless: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "tokenizer": self.name,
            "vocab_size": self.vocab_size,
            "tokens": self.tokens,
            "bytes_per_token": round(self.bytes_per_token, 4),
            "by_source": {name: round(value, 4) for name, value in self.by_source.items()},
            "lossless": self.lossless,
        }


def measure(name: str, tokenizer: TextTokenizer, texts: dict[str, list[str]]) -> Measured:
    """Return a tokenizer's figures. texts: the texts of each source, by name; not empty."""
    sizes: dict[str, int] = {}
    tokens: dict[str, int] = {}
    lossless = True
    for source, of_source in texts.items():
        sizes[source] = sum(len(text.encode()) for text in of_source)
        tokens[source] = 0
        for start in range(0, len(of_source), AT_ONCE):
            some = of_source[start : start + AT_ONCE]
            encoded = tokenizer.encode_plain(some)
            tokens[source] += sum(len(ids) for ids in encoded)
            decoded = tokenizer.backend.decode_batch(
                [ids.tolist() for ids in encoded], skip_special_tokens=False
            )
            lossless = lossless and decoded == some
    by_source = {source: size / max(1, tokens[source]) for source, size in sizes.items()}
    whole = sum(tokens.values())
    ratio = sum(sizes.values()) / max(1, whole)
    return Measured(name, tokenizer.vocab_size, whole, ratio, by_source, lossless)


def table(measured: list[Measured]) -> list[str]:
    """Return the lines of a table with a row for each tokenizer.

    With more than one source there is a column for each.
    """
    sources = list(measured[0].by_source) if len(measured[0].by_source) > 1 else []
    head = ["tokenizer", "vocabulary", "tokens", "bytes/token", *sources, "lossless"]
    rows = [head]
    for one in measured:
        row = [one.name, f"{one.vocab_size:,}", f"{one.tokens:,}", f"{one.bytes_per_token:.3f}"]
        row += [f"{one.by_source[source]:.3f}" for source in sources]
        rows.append([*row, "yes" if one.lossless else "no"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        cells = [f"{first[0]:{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]
        lines.append("  ".join(cells))
    return lines
