"""Generated training texts for a demo chain: animals that each have a colour, a home and a food.

The facts are invented, so the model can only know them from these texts. Some facts occur in the
texts but in no conversation; the questions at the end ask for those.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_trainer.config.yaml_text import table_beside

DEMO = table_beside(__file__, "demo.yaml")
ANIMALS: list[str] = DEMO["animals"]
TEXTS, GOOD_TEXTS, CHATS = 3000, 1200, 800
HELD_OUT = 5
"""Every HELD_OUT-th fact occurs in no conversation."""


class Fact(NamedTuple):
    """The colour, home or food of an animal; kind: which of the three."""

    animal: str
    kind: str
    value: str

    def say(self, pattern: str) -> str:
        return pattern.format(animal=self.animal, value=self.value)


def all_facts(animals: Sequence[str] = ANIMALS) -> list[Fact]:
    """Return all facts, drawn with a fixed seed: the same on every machine."""
    draw = random.Random(0)
    return [
        Fact(animal, kind, draw.choice(values))
        for animal in animals
        for kind, values in DEMO["values"].items()
    ]


def write_demo(
    folder: Path, animals: Sequence[str] = ANIMALS, fraction: float = 1.0
) -> dict[str, Path]:
    """Write text, good text, conversations and questions; return their files by name.

    fraction: number of rows to write, as a fraction of TEXTS, GOOD_TEXTS and CHATS.
    """
    facts = all_facts(animals)
    draw = random.Random(1)
    draw.shuffle(facts)
    asked_later = facts[::HELD_OUT]
    in_chats = [fact for fact in facts if fact not in asked_later]
    texts, good_texts, chats = (int(fraction * rows) for rows in (TEXTS, GOOD_TEXTS, CHATS))
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": text(draw, facts, 2)} for _ in range(texts)],
        "good": [{"text": good_text(draw, facts, in_chats)} for _ in range(good_texts)],
        "chats": [chat(draw, draw.choices(in_chats, k=2)) for _ in range(chats)],
        "questions": [
            {"messages": exchange(fact, fact.say(DEMO["questions"][fact.kind][0]))}
            for fact in asked_later
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.jsonl" for name in rows}
    for name, file in files.items():
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return files


def text(draw: random.Random, facts: list[Fact], fewest: int) -> str:
    """Return statements about `fewest` animals or one more, grouped by animal.

    From consecutive statements about one animal a model learns early to repeat the animal that a
    text is about. Answers need this, and with questions alone half of the seeds learned it too
    late.
    """
    animals = sorted({fact.animal for fact in facts})
    sentences = []
    for animal in draw.sample(animals, k=draw.randrange(fewest, fewest + 2)):
        known = [fact for fact in facts if fact.animal == animal]
        for fact in draw.sample(known, k=draw.randrange(2, 4)):
            sentences.append(fact.say(draw.choice(DEMO["statements"][fact.kind])))
    return " ".join(sentences)


def good_text(draw: random.Random, facts: list[Fact], in_chats: list[Fact]) -> str:
    lines = [text(draw, facts, 1)]
    for fact in draw.choices(in_chats, k=3):
        question = fact.say(draw.choice(DEMO["questions"][fact.kind]))
        lines.append(f"{question} {fact.say(DEMO['answers'][fact.kind])}")
    return "\n".join(lines)


def chat(draw: random.Random, facts: list[Fact]) -> dict[str, list[dict[str, str]]]:
    turns = []
    for fact in facts:
        turns += exchange(fact, fact.say(draw.choice(DEMO["questions"][fact.kind])))
    return {"messages": turns}


def exchange(fact: Fact, question: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": fact.say(DEMO["answers"][fact.kind])},
    ]
