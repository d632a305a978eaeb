"""Jinja with the same set-up as in `transformers`, so that templates give the same text."""

import json
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of chat templates: for rows in general, and (optionally) for rows with tools."""
SPECIAL = {"bos_token", "eos_token", "pad_token", "unk_token"}

RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that the program gives to every template."""
DICT_ATTRIBUTES = frozenset(dir(dict))
TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
"""Methods of str that the sandbox returns unchanged; it inspects the arguments of `format`."""
DEFAULT_DATE = date(2024, 7, 26)
"""The fallback date of Llama 3's own template; tokens must not depend on the current date."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a fast path for common lookups: keys of turns, loops, methods of str.

    The sandbox itself raises an exception for each key of a turn and checks all rules for each
    method of a str, which takes two thirds of the rendering time.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute` like the sandbox: the attribute, else the item, else undefined."""
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in TEXT_METHODS:
            return getattr(obj, attribute)
        if (
            type(obj) in (LoopContext, Namespace)
            and attribute[0] != "_"
            and hasattr(obj, attribute)
        ):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`, ignored: the mask is found by rendering."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Return the statements in the block, as if the tag were absent."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def environment(today: date = DEFAULT_DATE) -> ChatEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    strftime_now: Callable[[str], str] = datetime(today.year, today.month, today.day).strftime
    jinja_environment = ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    jinja_environment.filters["tojson"] = tojson
    jinja_environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return jinja_environment


def compile_template(source: str, today: date = DEFAULT_DATE) -> jinja2.Template:
    compiled = environment(today).from_string(source)
    # lookups in a chain of dictionaries would take half of the rendering time
    compiled.globals = dict(compiled.globals)
    return compiled


def variables(source: str) -> list[str]:
    given = {*RESERVED, *SPECIAL}
    names = meta.find_undeclared_variables(environment().parse(source))
    return sorted(name for name in names - given if not name.startswith("_"))


def mentions(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None


def with_defaults(source: str, values: Mapping[str, Any]) -> str:
    """Return a template that uses these values as defaults for its variables.

    So the exported template, rendered without arguments, gives the text that was trained on.
    """
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif -%}}\n"
        for name, value in values.items()
    ]
    return "".join(lines) + source
