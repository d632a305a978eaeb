"""A certificate for people: a line for each comparison, and what is left to prove."""

import textwrap
from collections.abc import Iterator

from fsdp_trainer.apps.prove.proof.certificate import Certificate, Checked

WIDTH = 100
INDENT = " " * 4


def certificate_lines(certificate: Certificate) -> Iterator[str]:
    for sentence in certificate.about:
        yield from wrapped(sentence, "")
    if certificate.about:
        yield ""
    width = max((len(check.name) for check in certificate.checks), default=0)
    for check in certificate.checks:
        mark = "ok    " if check.ok else "DIFFERS"
        yield f"{mark:8}{check.name:{width}}  {amount(check)}".rstrip()
        yield from wrapped(check.detail, INDENT * 2)
        if not check.ok:
            yield from wrapped(check.advice, INDENT * 2 + "→ ")
    if certificate.not_proved:
        yield from ("", "not proved on this machine")
    for one in certificate.not_proved:
        yield from wrapped(one.name, INDENT)
        yield f"{INDENT * 2}{one.command}"
    yield ""
    wrong = sum(not check.ok for check in certificate.checks)
    equal = f"{len(certificate.checks)} checks, all equal"
    yield f"{len(certificate.checks)} checks, {wrong} DIFFER" if wrong else equal


def amount(check: Checked) -> str:
    if check.limit == 0:
        return f"{check.difference:g} wrong" if check.difference else ""
    return f"{check.difference:.1e} of at most {check.limit:.0e}"


def wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=" " * len(indent),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
