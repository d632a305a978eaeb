"""Text that may be shown and recorded: no control characters, no secrets of addresses."""

import re

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that a terminal obeys or hides, but for tab and line feed, and half characters."""
USER = re.compile(r"(https?://|://[^\s/@:]*:)[^\s/]*@", re.I)
"""User and password of an address: of the web both, because a name alone may be a token."""
QUERY = re.compile(
    r"""(https?://(?:(?!://)[^\s?#"'<>])*[?#]|\w://(?:(?!://)[^\s?"'<>])*\?(?=[\w.-]+=))"""
    r"""([^\s"'<>]+)""",
    re.I,
)
"""An address with a query or fragment. Of the web each is taken; elsewhere `?` may be of a glob."""
SHORT = re.compile(r"(?!\w*(sig|key|token|pass|secret|auth))[\w.-]+=\w{0,3}", re.I)
"""A part of a query such as dl=1: no secret has three characters."""
PASSWORD = re.compile(r"\s*(https?://|[\w.+-]+://[^\s/@:]*:)[^\s/]*@\S*\s*", re.I)
"""An address with a password, and nothing else."""
STORE = r"x-(amz|goog)-[\w-]+|awsaccesskeyid|googleaccessid|signature|expires|key-pair-id|policy"
AZURE = r"sig|s[etpvr]|spr|sk[a-z]{1,4}"
SIGNATURES = {
    "signature=": re.compile(rf"(?<=[?&])({STORE})=[^&\s\"']*&?", re.I),
    "sig=": re.compile(rf"(?<=[?&])({AZURE})=[^&\s\"']*&?", re.I),
}
"""By a part of a query, all parts of its kind: they say who may read, and not what is there."""


def identity(text: str) -> str:
    text = USER.sub(r"\1@", text)
    for name, parts in SIGNATURES.items():
        if name in text.lower():
            text = parts.sub("", text).rstrip("?&")
    return text


def visible(text: str) -> str:
    r"""Return a text with its control characters as escapes, such as \u001b, also within JSON."""
    return CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def without_secrets(text: str) -> str:
    """Return a text whose addresses have … in place of a password and of a query."""
    return QUERY.sub(_without_query, USER.sub(r"\1…@", text))


def _without_query(address: re.Match[str]) -> str:
    parts = address[2].rstrip("])},.").split("&")
    is_short = all(SHORT.fullmatch(part) for part in parts if part)
    return address[0] if is_short else f"{address[1]}…"


def safe(text: str) -> str:
    return visible(without_secrets(text))


def has_password(value: object) -> bool:
    return isinstance(value, str) and PASSWORD.fullmatch(value) is not None
