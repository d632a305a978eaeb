"""Values of numbers as people and models write them: 1 1/2, 3.5\\times10^{-3}, 12\\text{ cm}^2.

A text has the value of the complete number that it states, or none. A part of one, such as an
exponent, a unit's, or one end of a range, is never its value. Values are exact, so that roots that
are no fractions, \\pi and variables have none.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 400
"""Characters of a number or an expression; a longer one has no value."""
NEAR = 1000
"""Characters before and after the last digit of a line that are read."""
MOST_TOKENS = 80
MOST_BITS = 10_000
"""Bits of a power's numerator or denominator, at most."""

# --- words


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SINGLE_UNITS = words("m g s h L l W V J N C F Ω Å")
SHORT_UNITS = words(
    "cm mm km nm dm ft in yd mi kg mg lb lbs oz sec ms min hr hrs ml mL cl dl gal kW kWh kJ cal Pa "
    "kPa MPa psi atm mV mA Hz kHz MHz GHz MW GW mol bit MB GB KB TB mph kph rpm deg st nd rd th am "
    "pm eV keV MeV GeV dB pt tsp Nm kN μm μs μg μL μF μC nF nC pF USD EUR GBP"
)
"""Units that may follow a number without a space; so may any word of four letters."""
HARMLESS = words("a A I K")
"""Words of one letter that are no variables; the K of kelvin has a space before it."""
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Powers of ten of words that multiply the number before them."""
NEGATIVE = words("minus negative")
CHANGING = words(
    "pi π sqrt log ln exp sin cos tan mod choose dozen dozens half halves third thirds quarter "
    "quarters fourth fourths fifths sixths eighths tenths hundredths squared cubed factorial"
)
"""Words beside a number that make another value of it."""
JOINING = words(
    "or and to through plus minus times divided multiplied by over out of point hours hour hrs hr "
    "minutes min feet foot ft days day weeks week years year months month pounds pound lbs lb "
    "dollars dollar meters m km degrees gallons gallon cents"
)
"""Words that make one statement of the numbers before and after them: 3 or 4, 5 feet 6 inches."""

# --- spelling

SAME = "≟"
"""Between a number and the same one in brackets: 0.5 (1/2). Without a space it is a product."""
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
SYMBOLS = str.maketrans({
    "\u2212": "-", "\u2011": "-", "\u2012": "-", "×": "*", "⋅": "*", "·": "*", "∙": "*", "÷": "/",
    "⁄": "/", "≈": "=", "→": "=", "⇒": "=", "⟹": "=", "\u200b": None,
})  # fmt: skip
SPELLINGS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    ("[\u2600-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff]", " "),  # emojis
    (r"√\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
    ("√", r"\\sqrt "),
    (r"-\s*\\?[$£€¥₹₽₩₺](?=\s*[\d.\\])", "-"),
    (r"\\?[$£€¥₹₽₩₺¢]|\\(?:cents?|pounds|euro)(?![A-Za-z])", " "),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])|\\!", ""),
    (r"\{,\}|(?<=\d)(?:\\[,;: ]|~|['’_])(?=\d{3}(?!\d))", ","),
    (r"(?<![\d.,])(\d{1,3})(?: \d{3})+(?!\d|\s*/)", lambda m: m[0].replace(" ", ",")),
    (r"\\[,;: ]|~|&|\\q?quad(?![A-Za-z])|\\[()]|(?<!\\)\\[\[\]]", " "),
    (r"\\%", "%"),
    (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degrees?(?![A-Za-z])|°", " "),
    (r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
    (r"\\div(?![A-Za-z])", "/"),
    (r"\\(?:approx|to|implies|equiv|(?:long|Long)?[Rr]ightarrow)(?![A-Za-z])|[-=]>|:=|==", "="),
    (r"\\(?:[dtc]|s|nice)frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*(\d)", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"\\sqrt\s*(\d)(?!\d)", r"\\sqrt{\1}"),
    (r"\\frac\s*\{\s*([^\W\d_]+)\s*\}\s*\{\s*([^\W\d_][^{}]*(?:\{[^{}]*\})?)\s*\}", r"\1/\2"),
    (r"\\mu\s*(?=[A-Za-z])", "μ"),
    (r"\\Omega(?![A-Za-z])", "Ω"),
    (r"\\color\s*\{[^{}]*\}|\\(?:bf|rm|it|em)(?![A-Za-z])", " "),
    (r"(?<!\w)\([A-J]\)", " "),  # the letter of a choice
    (r"(?<=[\d}%])\s+\((?=[^()]*\d)", f" {SAME}("),
    (r"(?<=\d)\s*[xX]\s*(?=\d)(?<!\b0x)", "*"),
    (r"(?<=\d)-(?=[^\W\d_]{2})", " "),  # 5-year
    (r"<<[^<>\n]{0,200}>>", ""),  # GSM8K's computations
    (r"(?<=\d)\s+:\s*(?=\d)", ":"),
    (r"(?<=[\d)}%])\s*[\u2013\u2014]\s*(?=[\d.(\\])", " to "),
    (r"\u2013(?=\s?[\d.\\])", "-"),
    (r"\u2014", " ; "),
    (r"</?[A-Za-z|][^<>]{0,99}>", " ; "),
]  # fmt: skip
"""Patterns and what replaces them, one after the other."""
WRAPPER = re.compile(
    r"\\(?:text\w*|math(?:rm|bf|sf|it)|mbox|operatorname|boldsymbol|emph|underline)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}(\s*[\^_]\s*(?:\{[^{}]*\}|-?\w))?"
)
NUMERIC = re.compile(r"[\d¼-¾⅐-⅞]")
BULLET = re.compile(r"^\s*(?:[-*+•>]\s+)+")

WHOLE = r"(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)"
TOKEN = re.compile(
    rf"(?P<number>(?:{WHOLE}(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{{1,3}}(?!\w|\.\d))?)"
    r"|(?P<word>[^\W\d_](?:[^\W_]|_(?!\{))*(?:[-'’.]\w+)*(?:[_^]\{[^{}]*\}|\^-?\w+)*)"
    r"|(?P<end>[.?;:…](?=\s|$|[)\]*\"'”]))"
    r"|(?P<mark>\\(?:[A-Za-z]+|.)|\*\*|\S)"
)
OPERATORS = {"+", "-", "*", "/", "^", "**"}
LOOSE = [*",:'\"`“”‘’′″(){}", "\\\\"]
"""Marks that may stand around a number; of brackets one without a pair."""
LOOSE_IN_TEXT = [*LOOSE, *".;#~_|?@…[]", "\\{", "\\}"]


@dataclass(frozen=True)
class Token:
    """A part of a text. kind: number, word, end (of a statement) or mark. begin, end: its place."""

    kind: str
    text: str
    begin: int
    end: int


def last_value(text: str) -> Fraction | None:
    """Return the value of the last number in a running text; None if it has none."""
    for line in reversed(text.splitlines()):
        place = max((match.end() for match in NUMERIC.finditer(line)), default=0)
        if not place:
            continue
        line = line[max(0, place - NEAR) : place + NEAR]
        tokens = tokens_of(spelled(BULLET.sub("", line)).replace("!", " ; "))
        runs = [run for run in runs_of(tokens) if has_number(tokens[run])]
        if runs:
            if len(runs) > 1 and is_joined(tokens, runs[-2], runs[-1]):
                return None
            return value_of_run(tokens, runs[-1], True)
    return None


def only_value(text: str) -> Fraction | None:
    """Return the value of a text that states one number, with a unit or other words; else None."""
    if len(text) > NEAR:
        return None
    tokens = tokens_of(spelled(text))
    runs = [run for run in runs_of(tokens) if has_number(tokens[run])]
    if len(runs) != 1 or is_equation(tokens):
        return None
    return value_of_run(tokens, runs[0], False)


def spelled(text: str) -> str:
    """Return a text in one spelling: its spaces, separators, signs and commands."""
    text = re.sub("[⁰¹²³⁴-⁹⁺⁻]+", lambda m: f"^{{{m[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub("[¼-¾⅐-⅞]", lambda m: fraction_of(m[0]), text)
    text = unicodedata.normalize("NFKC", text).translate(SYMBOLS)
    for _ in range(3):
        text = WRAPPER.sub(unwrapped, text)
    for pattern, replacement in SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text


def fraction_of(character: str) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", character).partition("⁄")
    return rf" \frac{{{numerator}}}{{{denominator}}}"


def unwrapped(match: re.Match[str]) -> str:
    """Return the text of a command, with its exponent unless this is a unit's."""
    text = re.sub(r"(?<!\\)\$", "", match[1])
    return f" {text} {match[2] or ''}" if re.search(r"\d", text) else f" {text} "


def tokens_of(text: str) -> list[Token]:
    return [Token(str(m.lastgroup), m[0], *m.span()) for m in TOKEN.finditer(text)]


def runs_of(tokens: list[Token]) -> Iterator[slice]:
    begin = 0
    for i, token in enumerate([*tokens, Token("end", "", 0, 0)]):
        if token.kind in ("word", "end"):
            if i > begin:
                yield slice(begin, i)
            begin = i + 1


def has_number(tokens: list[Token]) -> bool:
    return any(token.kind == "number" for token in tokens)


def is_joined(tokens: list[Token], earlier: slice, later: slice) -> bool:
    """Return True if the words between two runs make one statement of them: a list, a range."""
    between = tokens[earlier.stop : later.start]
    names = [token.text.lower() for token in between if token.kind != "mark"]
    if any(token.text == "=" for token in tokens[later]):  # 2 hours + 3 hours = 5
        joining = [word for word in names if word in ("or", "and")]
    else:
        joining = [word for word in names if word in JOINING]
    return bool(joining) and all(word in JOINING or len(word) == 1 for word in names)


def is_equation(tokens: list[Token]) -> bool:
    """Return True for an equation that is not solved, such as 2x + y = 5 and x^2 = 4."""
    texts = [token.text for token in tokens]
    side = tokens[: texts.index("=")] if "=" in texts else []
    depth = 0
    has_factor = False
    for token in side:
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        has_factor |= token.kind == "number" and depth == 0  # not f(2) = 5
    names = [token.text for token in side if token.kind == "word"]
    return any(
        re.search(r"\^|^\w-\d", name) or (has_factor and is_variable(name)) for name in names
    )


def value_of_run(tokens: list[Token], run: slice, is_running: bool) -> Fraction | None:
    """Return the value of a run of numbers and marks, given the words beside it; None if none.

    is_running: the run is a part of a running text.
    """
    side, before, after = last_side(tokens, run)
    if is_changed_before(side, before) or is_changed_after(side, after):
        return None
    parts = stripped([token.text for token in side], LOOSE_IN_TEXT if is_running else LOOSE)
    is_dash = before is not None and parts[:1] == ["-"] and is_between(side, before)
    if is_range(side) if is_running else is_dash:
        return None
    value = value_of(parts[is_dash:])
    return None if value is None else scaled(value, before, after)


def last_side(tokens: list[Token], run: slice) -> tuple[list[Token], Token | None, list[Token]]:
    """Return the last side of an equation that has a number, the word before and those after it."""
    parts = tokens[run]
    last = max(i for i, token in enumerate(parts) if token.kind == "number")
    signs = [i for i, token in enumerate(parts) if token.text == "="]
    begin = max((i + 1 for i in signs if i < last), default=0)
    end = min((i for i in signs if i > last), default=len(parts))
    after = words_after(tokens, run.stop) if end == len(parts) else []
    before = tokens[run.start - 1] if begin == 0 and run.start else None
    is_word = before is not None and before.kind == "word"
    return parts[begin:end], before if is_word else None, after


def scaled(value: Fraction, before: Token | None, after: list[Token]) -> Fraction:
    """Return a value times what the words beside it say, such as million and minus."""
    for word in after:
        if word.text not in SCALES:
            break
        value *= 10 ** SCALES[word.text]
    return -value if before and before.text.lower() in NEGATIVE else value


def words_after(tokens: list[Token], place: int) -> list[Token]:
    """Return the words from a place on, up to anything else."""
    end = place
    while end < len(tokens) and tokens[end].kind == "word":
        end += 1
    return tokens[place:end]


def is_changed_after(side: list[Token], after: list[Token]) -> bool:
    """Return True if the words after an expression belong to it, as the x of 5x."""
    if not after:
        return False
    text, last = after[0].text, side[-1]
    is_attached = after[0].begin == last.end and last.kind == "number"
    halves = [word.text for word in after[:3]]
    return (
        (is_attached and not is_unit(text))
        or text in CHANGING
        or is_variable(text)
        or last.text in OPERATORS - {"/", "**"}
        or (halves[0] == "and" and halves[-1] in CHANGING)
    )


def is_changed_before(side: list[Token], before: Token | None) -> bool:
    """Return True if the word before an expression belongs to it, as the x of x + 5."""
    if before is None:
        return False
    text, first = before.text, side[0].text
    is_operator = first in ("+", "*", "/") and is_between(side, before)
    return text in CHANGING or is_variable(text) or first == "^" or is_operator


def is_range(side: list[Token]) -> bool:
    """Return True for numbers with hyphens and no spaces between them: 10-12, 2024-01-15."""
    return any(
        sign.text == "-" and before.end == sign.begin and sign.end == after.begin
        for before, sign, after in zip(side, side[1:], side[2:], strict=False)
        if before.kind == after.kind == "number"
    )


def is_unit(word: str) -> bool:
    name = re.sub(r"[\^_].*|[23]$", "", word)
    return name in SINGLE_UNITS or name in SHORT_UNITS or len(name) > 3 or name in SCALES


def is_variable(word: str) -> bool:
    name = re.sub(r"[\^_].*|\d+$", "", word)
    return len(name) == 1 and name not in SINGLE_UNITS and name not in HARMLESS


def is_between(side: list[Token], before: Token) -> bool:
    """Return True if the first mark has spaces on both sides, or on none: it is no sign."""
    spaces = [side[0].begin > before.end, side[1].begin > side[0].end]
    return spaces[0] == spaces[1]


def stripped(parts: list[str], loose: list[str]) -> list[str]:
    """Return the parts of an expression without marks around it that are no part of it."""
    while parts and (parts[0] in ("**", "*") or is_loose(parts, 0, loose)):
        parts = parts[1:]
    while parts and (parts[-1] in ("%", "/", "**", "*", SAME) or is_loose(parts, -1, loose)):
        parts = parts[:-1]
    return parts


CLOSING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
OPENING = {close: opened for opened, close in CLOSING.items()}


def is_loose(parts: list[str], place: int, loose: list[str]) -> bool:
    """Return True for a mark that is no part of the expression; of brackets one without a pair."""
    mark = parts[place]
    pair = CLOSING.get(mark) or OPENING.get(mark)
    return mark in loose and (pair is None or parts.count(pair) != parts.count(mark))


# --- values


class NoValue(ValueError):
    """Raised for what is no number, or too large."""


def value_of(parts: list[str]) -> Fraction | None:
    if not parts or len(parts) > MOST_TOKENS or sum(map(len, parts)) > LONGEST:
        return None
    reader = ExpressionReader(parts)
    try:
        value = reader.sum()
        while reader.take(SAME):
            if reader.sum() != value:
                return None
    except (NoValue, ZeroDivisionError):
        return None
    return None if reader.next() else value


class ExpressionReader:
    """Reads an expression of numbers from left to right."""

    def __init__(self, parts: list[str]):
        self.parts, self.place = parts, 0

    def next(self, ahead: int = 0) -> str:
        place = self.place + ahead
        return self.parts[place] if place < len(self.parts) else ""

    def take(self, *texts: str) -> str:
        """Return the next part and go on if it is one of these texts; else ""."""
        text = self.next()
        if text not in texts:
            return ""
        self.place += 1
        return text

    def sum(self) -> Fraction:
        """Read terms with + and - between them."""
        value = self.product()
        while sign := self.take("+", "-"):
            term = self.product()
            value += term if sign == "+" else -term
        return value

    def product(self) -> Fraction:
        """Read factors with *, / or nothing between them."""
        value = self.factor()
        while True:
            if self.take("*"):
                value *= self.factor()
            elif self.take("/"):
                value /= self.factor()
            elif self.next() in ("(", "\\sqrt"):
                value *= self.power()
            else:
                return value

    def factor(self) -> Fraction:
        """Read a number with its sign."""
        if sign := self.take("-", "+"):
            value = self.factor()
            return -value if sign == "-" else value
        return self.power()

    def power(self) -> Fraction:
        """Read a number and its exponent."""
        base = self.atom()
        if not self.take("^", "**"):
            return base
        sign = -1 if self.take("-") else 1
        return power_of(base, sign * self.power())

    def atom(self) -> Fraction:
        """Read a number, a fraction, a root or something in brackets."""
        opened = self.take("(", "[", "{")
        if opened:
            if "," in self.next() and self.next(1) == CLOSING[opened]:
                raise NoValue  # (1,234) may be two numbers
            value = self.sum()
            if not self.take(CLOSING[opened]):
                raise NoValue
            return value
        if self.take("\\frac"):
            return self.group() / self.group()
        if self.take("\\sqrt"):
            degree = self.group() if self.next() == "[" else Fraction(2)
            return power_of(self.group(), 1 / degree)
        return self.mixed(self.constant())

    def group(self) -> Fraction:
        if self.next() not in CLOSING:
            raise NoValue
        return self.atom()

    def constant(self) -> Fraction:
        text = self.next().replace(",", "")
        if not text or not (text[0].isdigit() or text[0] == "."):
            raise NoValue
        self.place += 1
        return Fraction(text)

    def mixed(self, whole: Fraction) -> Fraction:
        """Return a whole number with the fraction behind it, as in 1 1/2 and 1\\frac{1}{2}."""
        if self.next() == "\\frac":
            part = self.atom()
        elif self.next()[:1].isdigit() and self.next(1) == "/":
            part = self.constant()
            self.place += 1
            part /= self.constant()
        else:
            return whole
        if whole.denominator != 1 or not 0 < part < 1:
            raise NoValue
        return whole + part


def power_of(base: Fraction, exponent: Fraction) -> Fraction:
    """Return a power. Raises NoValue unless it is a fraction of moderate size."""
    if exponent.denominator > 64 or abs(exponent.numerator) > MOST_BITS:
        raise NoValue
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > MOST_BITS:
        raise NoValue
    power = base**exponent.numerator
    root = exponent.denominator
    if root == 1:
        return Fraction(power)
    if power < 0:
        raise NoValue
    return Fraction(whole_root(power.numerator, root), whole_root(power.denominator, root))


def whole_root(number: int, degree: int) -> int:
    """Return the whole root of a whole number. Raises NoValue if it has none."""
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    if degree == 2:
        low = high = math.isqrt(number)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if middle**degree < number else (low, middle)
    if low**degree != number:
        raise NoValue
    return low
