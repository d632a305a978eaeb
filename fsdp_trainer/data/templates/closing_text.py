"""Text that a chat template writes after the last turn: an eos, or the header of the next answer.

Three texts of a template do not tell where a turn ends and the next one's header begins, as with
`A<end><start>user` and `A<end><start>assistant`. A header begins as the whole conversation does.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fsdp_trainer.data.records.messages import Message

HALF_A_HEADER = re.compile(r"(?:[<\[][^<>\[\]]*|(?<=\n)[^\n]*)$")
"""Common beginning of two headers: the `<|` of `<|user|>`, the `### ` of `### Question:`."""
FIRST_TAG = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")


@dataclass(frozen=True)
class Closing:
    """The text after the last turn that is not written between turns; empty if there is none.

    may_end: True if it may be what ends an answer, as an eos is; a header never does.
    """

    text: str = ""
    may_end: bool = True


def find_closing(
    render: Callable[[list[Message]], str],
    messages: list[Message],
    ask: Message,
    contents: tuple[str, str],
    ends: Iterable[str],
) -> Closing:
    """Return what a template writes after the last turn of a conversation.

    messages: turns up to a plain answer. ask: a question that might follow. contents: the texts of
    the question and the answer. ends: tokens that may end an answer. RecordError as `render`.
    """
    question, answered = contents
    whole, longer = render(messages), render([*messages, ask])
    before, _, tail = whole.rpartition(answered)
    after = longer.removeprefix(before + answered)
    if not before or after == longer or question not in after:
        return Closing()
    if known := _known_end(tail, after, ends):
        return Closing(known)
    between = after[: after.index(question)]
    if after.startswith(tail) and tail != between:
        return Closing()
    end = _end_of_turn(between, common_start(tail, after), longer, question)
    closing = tail[end:]
    if tail != between:
        return Closing(closing, closing.strip() in ends or not after.endswith(closing))
    # the header of the next question stands there already
    return Closing(closing if tail[:end].strip() else "", False)


def _known_end(tail: str, after: str, ends: Iterable[str]) -> str:
    """Return the one of the ends that stands behind an answer only if nothing follows, else ""."""
    known = next((end for end in ends if tail.endswith(end)), "")
    is_last = after.startswith(tail.removesuffix(known)) and not after.startswith(tail)
    return known if is_last else ""


def _end_of_turn(between: str, common: int, longer: str, asked: str) -> int:
    """Return where in the text between an answer and a question the question's header begins.

    common: length of what also follows the answer if nobody asks. longer: the whole conversation.
    """
    first = longer[: longer.index(asked)]
    lowest = min(common, len(between) - common_start(first[::-1], between[::-1]))
    tag = FIRST_TAG.match(longer)
    if tag and longer.count(tag[1]) == 1:  # a bos
        first = first[tag.end() :]
    places = range(lowest, common + 1)
    shared = {place: common_start(between[place:], first) for place in places}
    end = max(places, key=lambda place: (shared[place], place))
    half = HALF_A_HEADER.search(between, lowest, common)
    return end if shared[end] or not half else half.start()


def common_start(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
