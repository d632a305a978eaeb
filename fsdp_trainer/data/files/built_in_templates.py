"""The built-in chat templates, each a file that says in its first line what it needs."""

import re
from pathlib import Path
from typing import NamedTuple

NEEDS = re.compile(r"\{#- needs (.*?) #\}\n")


class DescribedTemplate(NamedTuple):
    """A chat template's text, and what it needs of a tokenizer.

    markers: texts that must each be a single token. special: tokens such as `eos_token`.
    """

    text: str
    markers: tuple[str, ...] = ()
    special: tuple[str, ...] = ()


def described(text: str) -> DescribedTemplate:
    """Return a template without its first line, if that is  {#- needs eos_token <|end|> #}"""
    head = NEEDS.match(text)
    if head is None:
        return DescribedTemplate(text)
    needs = head[1].split()
    special = tuple(name for name in needs if name.endswith("_token"))
    markers = tuple(name for name in needs if name not in special)
    return DescribedTemplate(text[head.end() :], markers, special)


TEMPLATES = {
    file.stem: described(file.read_text(encoding="utf-8"))
    for file in sorted((Path(__file__).parents[1] / "templates/chat_templates").glob("*.jinja"))
}
