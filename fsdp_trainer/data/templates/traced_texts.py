"""Strings that record what a chat template does with them, and the resulting trace."""

from collections.abc import Callable, Iterable, Sequence
from operator import truth
from typing import Any

Part = str | int
"""A piece of a text: a constant, or the index of a value."""


class NotTraced(Exception):
    """Raised if a template does something with a text that a trace cannot record."""


class Trace:
    """One path through a template for one shape of conversation."""

    def __init__(self) -> None:
        self.steps: list[tuple[Callable, int | tuple[Part, ...], tuple, Any]] = []
        """Steps: function, the text it is called with, further arguments, expected result: True or
        False, a number of texts, or None for one text. Resulting texts become values."""
        self.pieces: tuple[Part, ...] = ()
        """The pieces of the rendered text."""
        self.uses = 0
        """Number of times that its text was compared with the template's own."""
        self._known: dict[tuple, bool] = {}
        self._values = 0

    def source(self, content: str) -> "Traced":
        self._values += 1
        return Traced(content, self, (self._values - 1,))

    def holds(self, function: Callable, text: "Traced", *args: Any) -> bool:
        """Return a condition's result, which other conversations must share to use the trace."""
        key = function, text.parts, args
        if key not in self._known:
            self._known[key] = bool(function(text.plain, *args))
            self.steps.append((function, _base(text.parts), args, self._known[key]))
        return self._known[key]

    def value(self, function: Callable, text: "Traced", *args: Any) -> "Traced":
        self.steps.append((function, _base(text.parts), args, None))
        return self.source(function(text.plain, *args))

    def values(self, function: Callable, text: "Traced", *args: Any) -> Sequence["Traced"]:
        """Return texts made from another one; other conversations must give the same number."""
        texts = function(text.plain, *args)
        self.steps.append((function, _base(text.parts), args, len(texts)))
        return type(texts)(self.source(one) for one in texts)

    def end(self, rendered: str) -> None:
        self.pieces = rendered.parts if isinstance(rendered, Traced) else (rendered,)
        self._known.clear()

    def text(self, contents: list[str]) -> str | None:
        """Return the rendered text of a conversation with these contents.

        None if it does not meet the conditions.
        """
        values = contents.copy()
        for function, base, args, outcome in self.steps:
            text = values[base] if isinstance(base, int) else _join(base, values)
            result = function(text, *args)
            if outcome is None:
                values.append(result)
            elif type(outcome) is bool:
                if result is not outcome:
                    return None
            elif len(result) == outcome:
                values += result
            else:
                return None
        return _join(self.pieces, values)


def _base(parts: tuple[Part, ...]) -> int | tuple[Part, ...]:
    return parts[0] if len(parts) == 1 and type(parts[0]) is int else parts


def _join(parts: Iterable[Part], values: list[str]) -> str:
    return "".join([part if isinstance(part, str) else values[part] for part in parts])


class Traced(str):
    """A text of a conversation during the tracing of its template.

    It has the text's value, and records every operation on it in its trace. Methods that are not
    defined below raise NotTraced.
    """

    trace: Trace
    plain: str
    parts: tuple[Part, ...]

    def __new__(cls, value: str, trace: Trace, parts: tuple[Part, ...]) -> "Traced":
        traced = super().__new__(cls, value)
        traced.trace, traced.plain, traced.parts = trace, value, parts
        return traced

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> str:
        return joined((self, _text(other)))

    def __radd__(self, other: Any) -> str:
        return joined((_text(other), self))

    def __bool__(self) -> bool:
        return self.trace.holds(truth, self)

    def __contains__(self, part: Any) -> bool:
        return self.trace.holds(str.__contains__, self, *_constants(part))

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, str):
            return False
        return self.trace.holds(str.__eq__, self, *_constants(other))

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __getitem__(self, place: Any) -> str:
        if not isinstance(place, slice):  # an index may be out of range in other texts
            raise NotTraced("a letter")
        _constants(place.start, place.stop, place.step)
        return self.trace.value(lambda text: text[place], self)


def _text(value: Any) -> str:
    if type(value) not in (str, Traced):
        raise NotTraced("adds what is no text")
    return value


def _constants(*args: Any) -> tuple:
    """Return a method's arguments if they are constants of the template; NotTraced otherwise."""
    for arg in args:
        if type(arg) is tuple:
            _constants(*arg)
        elif type(arg) not in (str, int, bool, type(None)):
            raise NotTraced("an argument that is no constant")
    return args


def _method(name: str, note: Callable) -> Callable:
    function = getattr(str, name)

    def method(self: Traced, *args: Any) -> Any:
        return note(self.trace, function, self, *_constants(*args))

    return method


def _refusal(name: str) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotTraced(name)

    return refuse


METHODS: dict[str, Callable] = {
    "startswith": Trace.holds, "endswith": Trace.holds, "isspace": Trace.holds,
    "isdigit": Trace.holds, "isalpha": Trace.holds, "isalnum": Trace.holds,
    "strip": Trace.value, "lstrip": Trace.value, "rstrip": Trace.value,
    "removeprefix": Trace.value, "removesuffix": Trace.value, "replace": Trace.value,
    "lower": Trace.value, "upper": Trace.value, "capitalize": Trace.value, "title": Trace.value,
    "split": Trace.values, "rsplit": Trace.values, "splitlines": Trace.values,
    "partition": Trace.values, "rpartition": Trace.values,
}  # fmt: skip
"""The methods of a text that a template may call, and how a trace records each of them."""
REFUSED = {
    "__hash__", "__repr__", "__format__", "__lt__", "__le__", "__gt__", "__ge__", "__rmod__",
}  # fmt: skip
"""Methods that object has too, and one that Python looks up although str does not define it."""
for _name in REFUSED | set(dir(str)) - set(dir(object)) - set(vars(Traced)):
    _note = METHODS.get(_name)
    setattr(Traced, _name, _method(_name, _note) if _note else _refusal(_name))


def joined(pieces: Iterable[Any]) -> str:
    texts = [piece if isinstance(piece, str) else str(piece) for piece in pieces]
    first = next((text for text in texts if isinstance(text, Traced)), None)
    if first is None:
        return "".join(texts)
    parts: list[Part] = []
    for text in texts:
        for part in text.parts if isinstance(text, Traced) else (str(text),):
            if type(part) is str and parts and type(parts[-1]) is str:
                parts[-1] += part
            else:
                parts.append(part)
    plain = "".join([text.plain if isinstance(text, Traced) else text for text in texts])
    return Traced(plain, first.trace, tuple(parts))
