"""The mask, by words: what of which role is learnt, and that ends are."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fsdp_trainer.apps.prove.proof.certificate import Checked, counted_wrong
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.apps.prove.proof.written_rows import WrittenRow, written_rows
from fsdp_trainer.data.records.conversations import Conversation, Document
from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.records.preference_records import Preference
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer

NAME = "the mask"
LEAST = 12
"""Characters of a question that are looked for among what is learnt: shorter ones may be there by
chance."""
ADVICE = (
    "look at it with  fsdp-trainer preview … ; another template ( data.template ), loss_on or"
    " weights of turns change it"
)


@dataclass
class LearntWords:
    """Words of each role, and how many of them are learnt; rows that are learnt wrongly.

    answers, ends: number of samples, and of those of which an end is learnt.
    """

    tokenizer: TextTokenizer
    loss_on: str
    words: Counter[str] = field(default_factory=Counter)
    learnt: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    ends: int = 0

    def __str__(self) -> str:
        words = self.words.items()
        roles = [f"{self.learnt[role]:,} of {n:,} words of {role}" for role, n in words]
        ends = f"; {self.ends:,} of {self.answers:,} ends" if self.answers else ""
        return f"learnt: {', '.join(roles)}{ends}"

    def add(self, row: WrittenRow) -> None:
        """Count the words of a row's turns that are learnt, and note what is learnt wrongly."""
        runs = [run for tokens, weights in row.samples for run in learnt_runs(tokens, weights)]
        learnt = "\n".join(self.tokenizer.decode(run) for run in runs)
        stops = {*self.tokenizer.stop_ids}
        self.answers += len(row.samples)
        self.ends += sum(
            any(stops & {*run} for run in learnt_runs(tokens, weights))
            for tokens, weights in row.samples
        )
        turns = turns_with_expectation(row.written, self.loss_on)
        expected = " ".join(str(turn["content"]) for turn, is_expected in turns if is_expected)
        for turn, is_expected in turns:
            self.count(turn, is_expected, learnt, expected, "{}:{}".format(*row.written.where))

    def count(
        self, turn: Message, is_expected: bool | None, learnt: str, expected: str, where: str
    ) -> None:
        text, role = str(turn["content"] or "").strip(), turn["role"]
        words, is_learnt = text.split(), text in learnt
        # the first token of a text is never learnt, and a long one may be cut
        known = [*filter(learnt.__contains__, words)] if is_learnt or is_expected else []
        self.words[role] += len(words)
        self.learnt[role] += len(known)
        if is_expected and words and not known:
            self.wrong.append(f"{where}: no word of the {role} is learnt")
        by_chance = len(text) < LEAST or text in expected
        if is_expected is False and is_learnt and not by_chance:
            self.wrong.append(f"{where}: what the {role} says is learnt")


def check(evidence: Evidence) -> Iterator[Checked]:
    """Compare what is learnt with what the roles said."""
    cfg, tokenizer = evidence.small.plain, evidence.data[0]
    if cfg.objective.method.samples or cfg.objective.method.scores:
        return  # the model's own answers, or labels
    total = LearntWords(tokenizer, cfg.data.loss_on)
    for row in written_rows(evidence):
        total.add(row)
    is_cut = cfg.data.packing == "stream" or cfg.data.too_long != "drop"
    stores = evidence.data[2].train
    learnt = [store.supervised for store in stores] or [
        row.weights for row in evidence.streamed_rows
    ]
    if not any(numbers.any() for numbers in learnt):
        total.wrong.append("nothing is learnt")
    elif total.answers and not total.ends and not is_cut and tokenizer.stop_ids:
        total.wrong.append("no end is learnt: the model would never stop")
    yield counted_wrong(NAME, total.wrong, str(total), ADVICE)


def learnt_runs(tokens: np.ndarray, weights: np.ndarray) -> list[list[int]]:
    learnt = np.diff(np.concatenate([[0], np.asarray(weights) > 0, [0]]).astype(int))
    ends = zip(np.flatnonzero(learnt > 0), np.flatnonzero(learnt < 0), strict=True)
    return [np.asarray(tokens)[first:last].tolist() for first, last in ends]


def turns_with_expectation(written: object, loss_on: str) -> list[tuple[Message, bool | None]]:
    """Return the turns of a row, each with whether it is to be learnt; None: either way."""
    if isinstance(written, Preference):
        answers = [*written.chosen, *written.rejected]
        return [(turn, None) for turn in written.prompt] + [(turn, True) for turn in answers]
    if isinstance(written, Document):
        return [({"role": "text", "content": written.text}, True)]
    if not isinstance(written, Conversation):
        return []
    last = len(written.messages) - 1

    def expected(place: int, turn: Message) -> bool | None:
        if turn.get("weight") is not None or turn.get("tool_calls"):
            return None
        if loss_on == "all":  # a template may leave a system's text out
            return True if turn["role"] in ("user", "assistant") else None
        return turn["role"] == "assistant" and (loss_on == "assistant" or place == last)

    return [(turn, expected(place, turn)) for place, turn in enumerate(written.messages)]
