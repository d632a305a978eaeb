"""Faster rendering of chat templates, by joining texts along a recorded path of the template.

Conversations of one shape (the same roles and keys, in the same order) differ only in their texts.
When a shape occurs again, the template is rendered once with texts that record what is done with
them. The result is then known as pieces of the template and of these texts, together with every
condition that the template tested (`'</think>' in content`). The text of another conversation of
that shape that meets the same conditions is made by joining its own pieces, in a small part of the
time. Other uses of a text (its length, a loop over it, an unknown filter) cannot be recorded; such
conversations are rendered by the template itself.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from functools import wraps
from typing import Any

import jinja2
from jinja2.compiler import CodeGenerator
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import Namespace

from fsdp_trainer.data.records.messages import Message
from fsdp_trainer.data.templates.template_language import (
    ChatEnvironment,
    compile_template,
    environment,
)
from fsdp_trainer.data.templates.traced_texts import METHODS, NotTraced, Trace, Traced, joined

SHAPES = 2000
"""Maximum number of shapes that are remembered; a trace of 12 turns takes about 10 kB."""
TRACES = 8
"""Maximum number of traces per shape, each a different path through the template."""
CHECKS = 2
"""Number of first uses of a trace that are compared with the template's own text."""
FAILURES = 20
"""Tracing of a template ends when failures exceed successes by this many."""
ALTERATIONS: tuple[Callable[[str], str], ...] = (
    lambda text: text and text + "q7",
    lambda text: text and "q7" + text,
    lambda text: text[: len(text) // 2] + "q7" * bool(text) + text[len(text) // 2 :],
)
"""Changes to the texts with which each trace is tested; empty texts stay empty."""
CONSTANT = frozenset({"role", "type"})
"""Keys whose text is part of the shape, since templates branch on it."""
SCALARS = (str, int, float, bool, type(None))


def holds_traced(value: Any) -> bool:
    if value is None or type(value) in (str, int, float, bool):
        return False
    if isinstance(value, list | tuple):
        return any(map(holds_traced, value))
    if isinstance(value, dict):
        return any(map(holds_traced, value)) or any(map(holds_traced, value.values()))
    nothing = (Undefined, Context, EvalContext, Macro, jinja2.Environment)
    return not isinstance(value, nothing)


def _check(name: str, *values: Any) -> None:
    if any(map(holds_traced, values)):
        raise NotTraced(name)


def _guarded(name: str, function: Any) -> Any:
    """Return a filter or test that raises NotTraced if it receives a traced text."""

    @wraps(function)  # keeps the marks of Jinja on functions that need a context
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _check(name, *args, *kwargs.values())
        return function(*args, **kwargs)

    return guarded


def _true_of_texts(test: Any) -> Any:
    def of_texts(value: Any) -> bool:
        return isinstance(value, Traced) or test(value)

    return of_texts


def _join_filter(value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None or type(d) is not str:
        raise NotTraced("join")
    pieces: list[Any] = []
    for piece in value:
        pieces += [d, piece] if pieces else [piece]
    return joined(pieces)


def contains(value: Any, container: Any) -> bool:
    if holds_traced(value) and not isinstance(container, list | tuple):
        raise NotTraced("in")  # the container would search for the traced text unrecorded
    return value in container


SCOPES = ("_loop_vars", "_block_vars")
"""Arguments that Jinja adds to calls, for functions that read its context."""
FILTERS = {
    "default", "d", "first", "last", "list", "length", "count", "items", "selectattr", "rejectattr",
    "select", "reject", "map", "string", "trim", "lower", "upper", "reverse",
}  # fmt: skip
"""Filters that access a text only through its own methods."""
TESTS = {
    "defined", "undefined", "none", "string", "mapping", "number", "integer", "float", "boolean",
    "true", "false", "eq", "equalto", "==", "ne", "!=",
}  # fmt: skip
"""Tests that access a text only through its own methods."""


class TracingCode(CodeGenerator):
    """Compiles operations that would read texts unrecorded into calls of the environment."""

    def visit_Concat(self, node: Any, frame: Any) -> None:
        self.write("environment.concat((")
        for inner in node.nodes:
            self.visit(inner, frame)
            self.write(", ")
        self.write("))")

    def visit_ScopedEvalContextModifier(self, node: Any, frame: Any) -> None:
        """Refuse `{% autoescape %}`, since texts would be escaped unrecorded."""
        raise NotTraced("autoescape")

    def visit_Compare(self, node: Any, frame: Any) -> None:
        """Compile a comparison; `in` becomes a call."""
        if not any(operand.op in ("in", "notin") for operand in node.ops):
            return super().visit_Compare(node, frame)
        operand = node.ops[0]
        if len(node.ops) > 1:
            raise NotTraced("a chain of comparisons")
        self.write("(not " if operand.op == "notin" else "(")
        self.write("environment.contains(")
        self.visit(node.expr, frame)
        self.write(", ")
        self.visit(operand.expr, frame)
        self.write("))")


class TracingEnvironment(ChatEnvironment):
    """Environment of chat templates for rendering with traced texts."""

    code_generator_class = TracingCode
    concat = staticmethod(joined)
    contains = staticmethod(contains)
    intercepted_binops = frozenset(ChatEnvironment.default_binop_table) - {"+"}

    def from_string(self, *args: Any, **kwargs: Any) -> jinja2.Template:
        """Compile a template whose filters and tests use traced texts only in known ways."""
        self._guard()
        return super().from_string(*args, **kwargs)

    def _guard(self) -> None:
        self.filters = {
            name: function if name in FILTERS else _guarded(name, function)
            for name, function in self.filters.items()
        }
        self.filters["join"] = _join_filter
        of_texts = {name: self.tests[name] for name in ("iterable", "sequence")}
        self.tests = {
            name: function if name in TESTS else _guarded(name, function)
            for name, function in self.tests.items()
        }
        self.tests["in"] = contains
        for name, test in of_texts.items():
            self.tests[name] = _true_of_texts(test)

    def call_binop(self, context: Context, operator: str, first: Any, second: Any) -> Any:
        _check(operator, first, second)
        return super().call_binop(context, operator, first, second)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return the sandbox's result, or for a traced text a method that records its use."""
        if isinstance(obj, Traced):
            if attribute not in METHODS:
                raise NotTraced(attribute)
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _check("item", argument)
        return super().getitem(obj, argument)

    def call(
        __self,  # a template may use any argument names
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call a function; raises NotTraced if it could use a traced text unrecorded."""
        is_known = isinstance(__obj, Macro | LoopContext) or __obj is Namespace
        owner = getattr(__obj, "__self__", None)
        if not is_known and not isinstance(owner, Traced | LoopContext):
            given = (value for name, value in kwargs.items() if name not in SCOPES)
            _check("call", *args, *given)
        return super().call(__context, __obj, *args, **kwargs)


class Renderer:
    """Renders conversations with one template, by traces where possible.

    values: further variables of the template.
    """

    def __init__(self, source: str, today: date, values: Mapping[str, Any]):
        self._source, self._today, self._values = source, today, values
        self._compiled = compile_template(source, environment(today))
        self._tracing: jinja2.Template | None = None
        self._traces: dict[tuple, list[Trace]] = {}
        """Traces by shape."""
        self._missed: Counter[tuple] = Counter()
        """Number of times that the template itself rendered each shape."""
        self._tries = FAILURES

    def render(self, messages: list[Message], tools: list[dict] | None, is_prompt: bool) -> str:
        """Return the text of turns in the template's forms. May raise any exception."""
        contents: list[str] = []
        shape = None
        if tools is None and (self._tries or self._traces):
            shape = shape_of(messages, is_prompt, contents)
        if shape is None:
            return self._plain(self._compiled, messages, tools, is_prompt)
        for trace in self._traces.get(shape, ()):
            text = trace.text(contents)
            if text is not None:
                if trace.uses >= CHECKS:
                    return text
                return self._checked(trace, text, messages, is_prompt)
        text = self._plain(self._compiled, messages, tools, is_prompt)
        self._note_miss(shape, text, messages, contents, is_prompt)
        return text

    def _note_miss(
        self, shape: Any, text: str, messages: list[Message], contents: list[str], is_prompt: bool
    ) -> None:
        """Trace the template for a shape that occurred before and has no matching trace."""
        if self._tries and (shape in self._missed or len(self._missed) < SHAPES):
            self._missed[shape] += 1
            if 1 < self._missed[shape] <= 1 + TRACES:
                self._follow(shape, text, messages, contents, is_prompt)

    def _checked(self, trace: Trace, text: str, messages: list[Message], is_prompt: bool) -> str:
        """Return the template's own text; drop all traces if the trace's text differs."""
        plain = self._plain(self._compiled, messages, None, is_prompt)
        trace.uses += 1
        if plain != text:
            self._traces, self._tries = {}, 0
        return plain

    def _follow(
        self, shape: tuple, text: str, messages: list[Message], contents: list[str], is_prompt: bool
    ) -> None:
        """Add a trace of this rendering to those of its shape, if tracing succeeds."""
        try:
            if self._tracing is None:
                tracing = environment(self._today, TracingEnvironment)
                self._tracing = compile_template(self._source, tracing)
            trace = Trace()
            traced = [_with_texts(message, "", trace.source) for message in messages]
            trace.end(self._plain(self._tracing, traced, None, is_prompt))
            holds = trace.text(contents) == text and self._holds_for_others(
                trace, messages, is_prompt
            )
        except Exception:  # NotTraced, or any error of a template that gets unusual texts
            holds = False
        if holds:
            self._traces.setdefault(shape, []).append(trace)
        self._tries += 1 if holds else -1

    def _holds_for_others(self, trace: Trace, messages: list[Message], is_prompt: bool) -> bool:
        """Return whether a trace gives the template's own text for altered contents.

        False if no alteration meets the conditions of the trace.
        """
        outcomes = []
        for alter in ALTERATIONS:
            altered = [_with_texts(message, "", alter) for message in messages]
            contents: list[str] = []
            shape_of(altered, is_prompt, contents)
            text = trace.text(contents)
            if text is not None:
                outcomes.append(text == self._plain(self._compiled, altered, None, is_prompt))
        return bool(outcomes) and all(outcomes)

    def _plain(
        self,
        compiled: jinja2.Template,
        messages: list[Message],
        tools: list[dict] | None,
        is_prompt: bool,
    ) -> str:
        return compiled.render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=is_prompt,
            **self._values,
        )


def shape_of(messages: list[Message], is_prompt: bool, contents: list[str]) -> tuple | None:
    """Return everything of a conversation except its texts, which are appended to `contents`.

    None if it holds a type of value that cannot be traced.
    """
    shape: list[Any] = [is_prompt]
    try:
        for message in messages:
            shape.append(len(message))
            for name, value in message.items():  # same as _add_shape, but without a call per text
                shape.append(name)
                if type(value) is str:
                    (shape if name in CONSTANT else contents).append(value)
                else:
                    _add_shape(value, name, shape, contents)
    except NotTraced:
        return None
    return tuple(shape)


def _add_shape(value: Any, name: str, shape: list[Any], contents: list[str]) -> None:
    kind = type(value)
    if kind is str and name not in CONSTANT:
        contents.append(value)
    elif kind is dict:
        shape.append((dict, len(value)))
        for key, inner in value.items():
            shape.append(key)
            _add_shape(inner, key, shape, contents)
    elif kind is list:
        shape.append((list, len(value)))
        for inner in value:
            _add_shape(inner, name, shape, contents)
    elif kind in SCALARS:
        shape.append((kind, value))
    else:
        raise NotTraced(kind.__name__)


def _with_texts(value: Any, name: str, make: Callable[[str], str]) -> Any:
    """Return a value with each of its texts replaced by `make`, in the order of `shape_of`."""
    if type(value) is dict:
        return {key: _with_texts(inner, key, make) for key, inner in value.items()}
    if type(value) is list:
        return [_with_texts(inner, name, make) for inner in value]
    return make(value) if type(value) is str and name not in CONSTANT else value
