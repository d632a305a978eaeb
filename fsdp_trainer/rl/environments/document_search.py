"""The environment `search`: a tool that finds passages in the files of a folder."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.rl.environments.environment import Start, ToolEnvironment, tool

WORDS = re.compile(r"\w+")
PASSAGE = 600
"""Characters of a passage at most; longer paragraphs are cut."""
MOST_BYTES = 64 * 2**20
"""Size of the files in a folder at most: they are kept in memory."""
K1, B = 1.5, 0.75
"""Constants of BM25 (Robertson and Zaragoza 2009)."""


@dataclass
class DocumentSearch(ToolEnvironment):
    """A tool that finds passages in .txt and .md files, by BM25."""

    name: ClassVar[str] = "search"
    tools: ClassVar[tuple[dict[str, Any], ...]] = (
        tool("search", "Finds passages of documents.", query="words to look for"),
    )
    folder: str | None = key(None, "the folder with the .txt and .md files to look in")
    results: int = key(3, "passages that a search returns at most", minimum=1)

    def reset(self, row: dict[str, Any]) -> Start:
        read_passages(str(self.folder))
        return super().reset(row)

    def call(self, /, query: Any = None, **others: Any) -> str:
        """Return the best passages, each with the name of its file."""
        if others or query is None:
            return "error: search takes one argument, query"
        passages = best(read_passages(str(self.folder)), str(query), self.results)
        return "\n\n".join(f"{name}: {text}" for name, text in passages) or "nothing was found"

    def wrong_settings(self) -> str | None:
        if self.folder is None:
            return "folder is required, as in  {name: search, folder: documents}"
        if not Path(self.folder).is_dir():
            return f"folder: {self.folder} is no folder"
        return None


@dataclass(frozen=True)
class Passages:
    """Passages of files, with the words of each. rarity: a weight for each word."""

    texts: list[tuple[str, str]]
    words: list[Counter[str]]
    lengths: list[int]
    rarity: dict[str, float]


@lru_cache(maxsize=4)
def read_passages(folder: str) -> Passages:
    files = sorted(p for p in Path(folder).rglob("*") if p.suffix in (".txt", ".md"))
    size = sum(file.stat().st_size for file in files)
    if size > MOST_BYTES:
        raise ValueError(f"{folder} has {size / 2**20:.0f} MiB of text, of at most 64")
    texts = [
        (str(file.relative_to(folder)), part[:PASSAGE].strip())
        for file in files
        for part in re.split(r"\n\s*\n", file.read_text(encoding="utf-8", errors="replace"))
        if part.strip()
    ]
    words = [Counter(words_of(text)) for _, text in texts]
    counts = Counter(word for each in words for word in each)
    rarity = {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in counts.items()}
    return Passages(texts, words, [each.total() for each in words], rarity)


def best(passages: Passages, query: str, count: int) -> list[tuple[str, str]]:
    """Return the passages with the highest scores above 0; the earlier of equal ones first."""
    mean = sum(passages.lengths) / max(1, len(passages.lengths)) or 1.0
    wanted = set(words_of(query))

    def score(i: int) -> float:
        words, length = passages.words[i], passages.lengths[i]
        norm = K1 * (1 - B + B * length / mean)
        return sum(
            passages.rarity[w] * words[w] * (K1 + 1) / (words[w] + norm)
            for w in wanted
            if w in words
        )

    scores = [(score(i), -i) for i in range(len(passages.texts))]
    ordered = sorted((each for each in scores if each[0] > 0), reverse=True)
    return [passages.texts[-i] for _, i in ordered[:count]]


def words_of(text: str) -> list[str]:
    return WORDS.findall(text.lower())
