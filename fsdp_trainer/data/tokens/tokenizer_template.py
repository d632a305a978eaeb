"""The chat template of a run: built in, from a file, or the tokenizer's own."""

from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import jinja2

from fsdp_trainer.base.time_limit import TooSlow, time_limit
from fsdp_trainer.config.parts.own_parts import own_names, usable_part
from fsdp_trainer.data.files.built_in_templates import TEMPLATES, DescribedTemplate, described
from fsdp_trainer.data.templates.chat_template import SECONDS, Template, unusable
from fsdp_trainer.data.templates.template_language import (
    DEFAULT_DATE,
    RESERVED,
    mentions,
    variables,
)
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import UserError

NOTHING = "none"
"""The template that writes no text but the tokenizer's first token, contents, and end tokens."""
CHATML = ("<|im_start|>", "<|im_end|>")
LONGEST = 1 << 18
"""Characters of a template at most; published ones have up to 30,000."""


def load_template(
    name_or_path: str | None,
    tokenizer: TextTokenizer,
    args: Mapping[str, Any] | None = None,
    today: str | None = None,
) -> Template:
    """Return a built-in template, one from a file, or (for None) the tokenizer's own, else `plain`.

    args, today: as data.template_args and data.template_date. Raises UserError for a template that
    does not match the tokenizer, an argument that the template does not have, or an invalid date.
    """
    name = name_or_path or ("tokenizer's own" if tokenizer.chat_templates else "plain")
    source: str | dict[str, str] = tokenizer.chat_templates
    unfit: UserError | None = None
    if name_or_path or name in TEMPLATES:
        source, unfit = _chosen(name, tokenizer)
    if unfit and name_or_path:
        raise unfit
    _check_length(name, [source] if isinstance(source, str) else [*source.values()])
    try:
        with time_limit(SECONDS):
            template = Template(name, source, tokenizer.special, args, _date(today))
            _check_args(template, args or {})
    except jinja2.TemplateSyntaxError as e:
        raise unusable(name, f"line {e.lineno}: {e.message}") from None
    except (RecursionError, TooSlow):
        raise unusable(name, "is nested too deeply, or too much to compile") from None
    template.unfit = unfit
    return template


def _chosen(name: str, tokenizer: TextTokenizer) -> tuple[str, UserError | None]:
    """Return a template's text, and the error if it does not fit the tokenizer."""
    template = TEMPLATES.get(name) or described(_read(name))
    text = _first_tokens(name, tokenizer) + template.text
    return text, _misfit(name, template, tokenizer)


def _first_tokens(name: str, tokenizer: TextTokenizer) -> str:
    """Return the beginning of `none`, which writes the tokenizer's first tokens; else ""."""
    first = tokenizer.first_added() if name == NOTHING else []
    texts = [tokenizer.backend.id_to_token(id) for id in first]
    return "".join(f"{{{{- {text!r} }}}}" for text in texts)


def _check_length(name: str, texts: list[str]) -> None:
    longest = max(map(len, texts), default=0)
    if longest > LONGEST:
        reason = f"has {longest:,} characters, where templates have some thousand"
        raise unusable(name, f"{reason}. At most {LONGEST:,} are compiled")


def _misfit(name: str, template: DescribedTemplate, tokenizer: TextTokenizer) -> UserError | None:
    """Return the error if the tokenizer lacks what a template says that it needs."""
    backend = tokenizer.backend
    missing = [marker for marker in template.markers if backend.token_to_id(marker) is None]
    if missing:
        pieces = len(tokenizer.encode(missing[0]))
        use = "plain  (needs no special tokens)"
        if tokenizer.chat_templates:
            use = "null  (the tokenizer's own)"
        add = ",".join(f"'{marker}'" for marker in missing)
        return unusable(
            name,
            f"the tokenizer has no special token {' '.join(missing)}: "
            f"it would be {pieces} pieces of text.\n"
            f'Use  data.template={use}  or add what is missing:  "tokenizer.add_tokens=[{add}]"',
        )
    missing = [role for role in template.special if role not in tokenizer.special]
    if missing:
        own = "" if tokenizer.chat_templates else ", and no chat template of its own"
        add = ",".join(f"'{marker}'" for marker in CHATML)
        return unusable(
            name,
            f"the tokenizer has no {' and no '.join(missing)}, which frames its turns{own}.\n"
            f"Name one in its tokenizer_config.json, or use  data.template=chatml "
            f'"tokenizer.add_tokens=[{add}]"',
        )
    return None


def _check_args(template: Template, args: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that no text of the template reads."""
    texts = template.sources.values()
    for name, value in args.items():
        shown = f"data.template_args={{{name}: {value}}}"
        if name in RESERVED:
            reason = "the program itself gives this to the template. Leave it out"
        elif any(mentions(text, name) for text in texts):
            continue
        else:
            known = sorted({known for text in texts for known in variables(text)})
            has = f"it has:  {'  '.join(known)}" if known else "it has none"
            reason = f"the chat template ({template.name}) has no such variable; {has}"
        raise UserError("the chat template cannot be used", shown, reason)


def _date(today: str | None) -> date:
    try:
        return date.fromisoformat(today) if today else DEFAULT_DATE
    except ValueError:
        raise UserError(
            "the chat template cannot be used",
            f"data.template_date={today}",
            "is no date. Use  data.template_date=2024-07-26",
        ) from None


def _read(path: str) -> str:
    own = own_names("template")
    if path in own:
        text: str = usable_part("template", path, str)
        return text
    if not Path(path).expanduser().is_file():
        raise unusable(
            path,
            "there is no such file, and no template of this name; there is  "
            + "  ".join([*TEMPLATES, *own]),
        )
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unusable(path, f"cannot be read: {error}") from None
