"""Findings about a data set before it is trained on.

They are counted under short keys and printed as sentences with advice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_trainer.data.tokens.samples import (
    FITS,
    LAST_TOKENS,
    LOST,
    REWRITTEN_SAMPLES,
    REWRITTEN_TOKENS,
)

DROPPED = ("unsupervised", "too_long", "empty", "same_answers")
"""Keys of rows that are dropped, so the store does not count them."""


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
    "no_end": Kind(
        "{n} assistant turn{s} whose end is not supervised: the model does not learn to stop",
        "the template must close a turn with a special token of the tokenizer: "
        "data.template=chatml, with tokenizer.add_tokens if it lacks them",
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
        "{n} sample{s} dropped: longer than batch.seq_len={seq_len}",
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
        warns_from=None,
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
) -> list[Finding]:
    """Return the counts as sentences with advice.

    samples, tokens: numbers of samples and tokens in the training data.
    """
    samples += sum(counts.get(key, 0) for key in DROPPED)
    fixes = dict.fromkeys(("too_long", "truncated"), _longer_rows(counts, samples, tokens, seq_len))
    return [
        Finding(
            kind.text.format(
                n=f"{n:,}", s="s" * (n != 1), seq_len=seq_len, **_of_rewritten(counts)
            ),
            fixes.get(key, kind.fix),
            kind.warns_from is not None and n > kind.warns_from * samples,
            list(examples.get(key, ())),
        )
        for key, kind in KINDS.items()
        if (n := counts.get(key, 0))
    ]


def _of_rewritten(counts: Mapping[str, int]) -> dict[str, str]:
    """Return values for the sentence on conversations whose template rewrites earlier turns."""
    times = counts.get(REWRITTEN_TOKENS, 0) / max(1, counts.get(LAST_TOKENS, 0))
    return {"samples": f"{counts.get(REWRITTEN_SAMPLES, 0):,}", "times": f"{times:.1f}"}


def percent(share: float) -> str:
    """Return a share in percent; a tiny one as "less than 0.1%", never as 0.0%."""
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def _longer_rows(counts: Mapping[str, int], samples: int, tokens: int, seq_len: int) -> str:
    """Return the cost of samples that are too long, and a batch.seq_len that fits 99% of all."""
    longer_samples = sum(n for key, n in counts.items() if key.startswith(FITS))
    keeps = seq_len
    for longer in sorted(int(key.removeprefix(FITS)) for key in counts if key.startswith(FITS)):
        if longer_samples <= 0.01 * samples:
            break
        keeps, longer_samples = longer, longer_samples - counts[f"{FITS}{longer}"]
    lost = counts.get(LOST, 0) / max(1, tokens + counts.get(LOST, 0))
    advice = (
        f"batch.seq_len={keeps} would hold 99% of the samples"
        if keeps > seq_len
        else "more than 99% of the samples fit"
    )
    cut = "; data.too_long=truncate keeps their start, of documents  data.too_long=split  keeps all"
    if counts.get("truncated"):
        cut = ""
    return f"{percent(lost)} of the tokens are lost; {advice}{cut}"
