"""Findings about a data set before it is trained on.

They are counted under short keys and printed as sentences with advice.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.data.media.kinds import KINDS as MEDIA_KINDS
from fsdp_trainer.data.records.messages import BAD_KEY, UNREAD_KEY
from fsdp_trainer.data.records.unread_columns import CLASS_COLUMN, UNREAD_COLUMN
from fsdp_trainer.data.tokens.samples import (
    CUT_HELPS,
    FITS,
    LABELLED,
    LAST_TOKENS,
    LOST,
    REWRITTEN_SAMPLES,
    REWRITTEN_TOKENS,
    SPLIT_HELPS,
)

DROPPED = ("unsupervised", "too_long", "empty", "same_answers", "no_other_prompt")
"""Keys of rows that are dropped, so the store does not count them."""

IN_TRAINING = "in_training"
FEW_CLASSES = 10
"""A label is one of good and bad if it is something else in fewer rows than one in so many."""


@dataclass(frozen=True)
class Kind:
    """The sentence for a key of the counts.

    text: `{n}` is the count, `{s}` the plural s, `{seq_len}` batch.seq_len. warns_from: share of
    the samples above which it is a warning instead of a note; None for always a note.
    """

    text: str
    fix: str = ""
    warns_from: float | None = 0.0


KINDS = {
    "unsupervised": Kind(
        "{n} sample{s} dropped: without a supervised token",
        "a conversation needs an answer of the assistant with a weight above 0 before "
        "batch.seq_len ends; data.loss_on=all supervises everything",
    ),
    "same_answers": Kind(
        "{n} pair{s} dropped: the template renders both answers to the same text",
        "remove them from the data, or use a template that renders their difference",
    ),
    "no_other_prompt": Kind(
        "{n} answer{s} dropped: only one prompt was read with them, and KTO compares with answers "
        "to other prompts",
        "mix the prompts of each file",
    ),
    IN_TRAINING: Kind(
        "{n} sample{s} of data.validation {are} in the training data too: the validation loss, "
        "train.early_stop and checkpoint.best do not tell how well the model generalizes",
        "take them out of the training data, or hold rows out of it:  data.validation=0.02",
    ),
    "no_end": Kind(
        "{n} assistant turn{s} whose end is not supervised: the model does not learn to stop",
        "the template must close a turn with a special token of the tokenizer: "
        "data.template=chatml, with tokenizer.add_tokens if it lacks them",
    ),
    "no_end_token": Kind(
        "{n} document{s} without an end: the tokenizer has no end token",
        "name one that it has as eos_token in its tokenizer_config.json",
    ),
    "no_first_token": Kind(
        "{n} chat{s} without the first token that the tokenizer adds to texts: the template writes "
        "none. Here and in vLLM a chat begins as the template says; transformers' processors "
        "add the token",
        "nothing to do for vLLM; in transformers, call the processor with add_special_tokens=False",
        warns_from=None,
    ),
    "two_bos": Kind(
        "{n} sample{s} with two bos tokens at the beginning",
        "remove the bos from the data: the template adds one",
    ),
    "special_in_text": Kind(
        "{n} conversation{s} or document{s} with special tokens in their own text, which become "
        "control tokens",
        "remove them from the data; if a template was already applied to it, undo that: give "
        "turns, not rendered text",
    ),
    "two_answers": Kind(
        "{n} conversation{s} with two turns of the assistant in a row: each is learnt as an answer "
        "of its own, with its end",
        "if they are one answer, write them as one turn",
    ),
    "marked_prompt": Kind(
        "{n} conversation{s} with turns of the user, the system or a tool that are marked to be "
        "learnt, and are not: only answers of the assistant are",
        "data.loss_on=all  learns all turns but those of weight 0",
    ),
    "worse_chosen": Kind(
        "{n} pair{s} whose rejected answer has a higher score than the chosen one",
        "exchange the answers of such rows, or remove them",
    ),
    "empty_think": Kind(
        "{n} supervised assistant turn{s} with an empty <think> block: the model learns not to "
        "think",
        "if this is not intended: give the turns reasoning_content, or use a template that writes "
        "no empty block, such as  data.template=chatml",
    ),
    "shared_token": Kind(
        "{n} answer{s} whose first word shares a token with the prompt: that word is "
        "not supervised, and generation begins after a token that training never saw",
        "use a template whose generation prompt ends without a space, or in a special token:  "
        "data.template=FILE.jinja",
    ),
    "prompt_differs": Kind(
        "{n} assistant turn{s} that do not begin as the generation prompt of inference does (an "
        "opened <think>?)",
        "a template of your own, whose finished turns begin with its generation prompt:  "
        "data.template=FILE.jinja",
    ),
    "too_long": Kind(
        "{n} {what}{s} dropped: longer than {room}",
        warns_from=0.01,
    ),
    "truncated": Kind(
        "{n} sample{s} cut at the end: longer than batch.seq_len={seq_len}",
        warns_from=0.01,
    ),
    "duplicate": Kind(
        "{n} duplicate{s} of other samples",
        "remove them, unless they are intended: each copy is trained on",
        warns_from=0.01,
    ),
    "unreadable": Kind(
        "{n} row{s} skipped that cannot be read",
        "data.on_error=fail  stops at them and says why",
        warns_from=0.01,
    ),
    "empty": Kind(
        "{n} empty document{s} dropped",
        warns_from=0.01,
    ),
    "reasoning_left_out": Kind(
        "{n} conversation{s} with reasoning, which the template leaves out",
        "a template that shows it, such as  data.template=qwen3",
    ),
    "calls_left_out": Kind(
        "{n} conversation{s} with a tool call that the template leaves out of its text",
        "a template that shows every call, also next to text or another call, such as  "
        "data.template=qwen3",
    ),
    "text_left_out": Kind(
        "{n} conversation{s} with the text of a turn that the template leaves out",
        "a template that shows it, also next to a tool call, such as  data.template=chatml",
    ),
    **{key: Kind(*texts) for kind in MEDIA_KINDS.values() for key, texts in kind.findings.items()},
    "split": Kind(
        "{n} document{s} longer than batch.seq_len={seq_len}, cut into pieces: no token is lost",
        warns_from=None,
    ),
    "rewritten": Kind(
        "{n} conversation{s} made into {samples} samples with {times} times the tokens: the "
        "template rewrites earlier turns",
        warns_from=None,
    ),
    "tools_not_shown": Kind(
        "{n} conversation{s} with tools, which the template does not show: the model does not "
        "see their descriptions",
        "a template that shows them, such as  data.template=qwen3  , or one of your own  "
        "data.template=FILE.jinja. Or remove them, or write them into the system turn",
    ),
    "calls_as_text": Kind(
        "{n} conversation{s} with tool calls, which the template does not support: they are "
        "written as JSON text",
        warns_from=None,
    ),
    "results_as_user": Kind(
        "{n} conversation{s} with tool results, which the template does not support: they become "
        "user turns",
        warns_from=None,
    ),
    "system_in_user": Kind(
        "{n} conversation{s} with system turns, which the template does not support: they are put "
        "before the user's",
        warns_from=None,
    ),
    "reasoning_as_text": Kind(
        "{n} conversation{s} with reasoning, which the template does not support: it is put in "
        "<think> … </think> before the answer",
        warns_from=None,
    ),
}
"""Kinds of findings, in the order in which they are shown."""
UNREAD: dict[str, tuple[str, str, float | None]] = {
    UNREAD_COLUMN: (
        "{n} row{s} whose column %s may say that less is to be learnt of them (a mask, a weight or "
        "a label), and is not used",
        "write it into the turns as train, masked or weight, or remove such rows; of good and bad "
        "answers  objective=kto  learns",
        0.0,
    ),
    BAD_KEY: (
        "{n} conversation{s} whose turns have a key %s that may say that they are bad, and is not "
        "used",
        "such turns are not learnt with  train: false",
        0.0,
    ),
    UNREAD_KEY: (
        "{n} conversation{s} whose turns have a key %s, which neither the trainer nor the template "
        "reads",
        "",
        None,
    ),
}
"""Text, fix and warns_from of kinds that name a column or a key, by the prefix of their keys."""


@dataclass
class Finding:
    """A finding, ready to be shown."""

    text: str
    fix: str = ""
    is_warning: bool = True
    places: list[str] = field(default_factory=list)
    """FILE:LINE of its first few occurrences."""

    def __str__(self) -> str:
        places = f" ({', '.join(self.places)})" if self.places else ""
        return f"{'warning' if self.is_warning else 'note'}: {self.text}{places}" + (
            f"\n    {self.fix}" if self.fix else ""
        )


def list_findings(
    counts: Mapping[str, int],
    examples: Mapping[str, list[str]],
    samples: int,
    tokens: int,
    seq_len: int,
    answer: int = 0,
) -> list[Finding]:
    """Return the counts as sentences with advice.

    samples, tokens: numbers of samples and tokens in the training data; a pair counts once.
    answer: objective.max_new_tokens, if the samples are prompts.
    """
    samples += sum(counts.get(key, 0) for key in DROPPED)
    fixes = dict.fromkeys(("too_long", "truncated"), _longer_rows(counts, samples, tokens, answer))
    room = f"batch.seq_len={seq_len}"
    if answer:
        room = f"the {seq_len - answer} tokens of {room} less objective.max_new_tokens={answer}"
    return [
        Finding(
            kind.text.format(
                n=f"{n:,}",
                s="s" * (n != 1),
                are="are" if n != 1 else "is",
                seq_len=seq_len,
                what="prompt" if answer else "sample",
                room=room,
                **_of_rewritten(counts),
            ),
            fixes.get(key, kind.fix),
            kind.warns_from is not None and n > kind.warns_from * samples,
            list(examples.get(key, ())),
        )
        for key, kind in (KINDS | _unread(counts)).items()
        if (n := counts.get(key, 0))
    ]


def label_findings(counts: Mapping[str, int]) -> list[Finding]:
    good, bad = (counts.get(key, 0) for key in LABELLED)
    if bool(good) == bool(bad):
        return []
    label, other, effect = ("good", "bad", "more") if good else ("bad", "good", "less")
    text = f"all {good or bad:,} answers are labelled {label}: each is only made {effect} likely"
    fix = f"add answers labelled {other}, for KTO learns from the difference"
    return [Finding(text, fix + (", or use  objective=sft" if good else ""))]


def _unread(counts: Mapping[str, int]) -> dict[str, Kind]:
    kinds = {}
    for key in sorted(counts):
        for prefix, (text, fix, warns_from) in UNREAD.items():
            name = key.removeprefix(prefix)
            others = counts.get(CLASS_COLUMN + name, 0)  # a class, not good or bad
            if key.startswith(prefix) and counts[key] > FEW_CLASSES * others:
                shown = repr(name).replace("{", "{{").replace("}", "}}")
                kinds[key] = Kind(text % shown, fix, warns_from)
    return kinds


class MediaWarnings:
    """Prints what media outside the training data have lost: each kind once, by one rank."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, key: str, name: str) -> None:
        """Print the warning of a key, for the first image that it is called with."""
        if key not in self._said and os.environ.get("RANK", "0") == "0":
            [finding] = list_findings({key: 1}, {key: [name]}, 1, 0, 0)
            print(visible(str(finding)), file=sys.stderr)
        self._said.add(key)


def _of_rewritten(counts: Mapping[str, int]) -> dict[str, str]:
    """Return values for the sentence on conversations whose template rewrites earlier turns."""
    times = counts.get(REWRITTEN_TOKENS, 0) / max(1, counts.get(LAST_TOKENS, 0))
    return {"samples": f"{counts.get(REWRITTEN_SAMPLES, 0):,}", "times": f"{times:.1f}"}


def percent(share: float) -> str:
    """Return a share in percent; a tiny one as "less than 0.1%", never as 0.0%."""
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def fitting_length(counts: Mapping[str, int], samples: int) -> int:
    """Return the length of rows that hold 99% of the samples; 0 if the present one does.

    samples: number of all, those that are left out too.
    """
    lengths = {int(key.removeprefix(FITS)): n for key, n in counts.items() if key.startswith(FITS)}
    longer, fits = sum(lengths.values()), 0
    for length in sorted(lengths):
        if longer <= 0.01 * samples:
            break
        fits, longer = length, longer - lengths[length]
    return fits


def _longer_rows(counts: Mapping[str, int], samples: int, tokens: int, answer: int) -> str:
    """Return the cost of samples that are too long, and what loses fewer of them."""
    what = f"prompts, with answers of {answer} tokens" if answer else "samples"
    fits = fitting_length(counts, samples)
    advice = [
        f"batch.seq_len={fits + answer} would hold 99% of the {what}"
        if fits
        else f"more than 99% of the {'prompts' if answer else 'samples'} fit"
    ]
    if counts.get(CUT_HELPS) and not counts.get("truncated"):
        advice.append("data.too_long=truncate  keeps their start")
    if counts.get(SPLIT_HELPS):
        advice.append("data.too_long=split  keeps all of documents")
    lost = counts.get(LOST, 0) / max(1, tokens + counts.get(LOST, 0))
    return f"{percent(lost)} of the tokens are lost; {'; '.join(advice)}"
