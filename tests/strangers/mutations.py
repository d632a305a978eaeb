"""Seeded changes of a file's bytes: flipped bits, cuts, lies in header fields, nesting, bombs."""

import gzip
import json
import math
import struct
from dataclasses import dataclass

WRONG_NUMBERS = (0, 1, -1, 2, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**60, 2**63 - 1)
DEEP = 20_000
"""Brackets of a nested value: far more than Python's own limit of recursion."""
WRONG_VALUES = (
    None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, 0.5, math.inf, math.nan, "", "x", "../../x",
    "/etc/passwd", "\x1b]0;title\x07", "a" * 10_000, [], {}, [None], [[]], {"a": {}},
    [2**40, 2**40],
)  # fmt: skip


@dataclass(frozen=True)
class Mutation:
    """A changed file. flipped: offsets of the bytes with one flipped bit, if nothing else is."""

    what: str
    content: bytes
    flipped: tuple[int, ...] = ()


def flip_bits(content, chance):
    """Flip one to three bits anywhere."""
    changed, places = bytearray(content), []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places.append(chance.randrange(len(content)))
        changed[places[-1]] ^= 1 << chance.randrange(8)
    return Mutation(f"bits flipped in bytes {places}", bytes(changed), tuple(places))


def flip_early_bit(content, chance):
    """Flip a bit in the first 256 bytes, where headers are."""
    changed = bytearray(content)
    place = chance.randrange(min(len(content), 256))
    changed[place] ^= 1 << chance.randrange(8)
    return Mutation(f"a bit flipped in byte {place}", bytes(changed), (place,))


def cut(content, chance):
    """Cut the end off."""
    length = chance.choice((0, 1, len(content) - 1, chance.randrange(len(content))))
    return Mutation(f"cut to {length} bytes", content[:length])


def cut_out(content, chance):
    """Leave bytes out in the middle."""
    first, length = chance.randrange(len(content)), chance.choice((1, 4, 8, 64))
    changed = content[:first] + content[first + length :]
    return Mutation(f"{length} bytes from {first} on left out", changed)


def repeat(content, chance):
    """Write a part of the file twice."""
    first, last = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    changed = content[:last] + content[first:]
    return Mutation(f"bytes {first} to {last} twice", changed)


def swap(content, chance):
    """Exchange two parts of equal length."""
    length = min(chance.choice((1, 4, 8, 32)), len(content) // 2)
    one = chance.randrange(len(content) // 2 - length + 1)
    other = chance.randrange(len(content) // 2, len(content) - length + 1)
    changed = bytearray(content)
    changed[one : one + length], changed[other : other + length] = (
        content[other : other + length],
        content[one : one + length],
    )
    return Mutation(f"{length} bytes from {one} and from {other} exchanged", bytes(changed))


def lie(content, chance):
    """Write another number over four or eight bytes, mostly near the begin or the end."""
    size, wanted = chance.choice((4, 8)), chance.choice(WRONG_NUMBERS)
    last = max(len(content) - size, 0)
    place = chance.choice((min(8 * chance.randrange(16), last), max(last - 8, 0), last))
    place = chance.choice((place, chance.randrange(last + 1)))
    number = struct.pack("<Q", wanted % 2**64)[:size]
    changed = content[:place] + number + content[place + size :]
    return Mutation(f"{wanted} in {size} bytes from {place} on", changed)


def nest(content, chance):
    """Put a deeply nested value somewhere, or in place of everything."""
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}"), ("(", ")"), ("[", "")))
    middle = "1" if opening == '{"a":' else ""
    deep = (opening * DEEP + middle + closing * DEEP).encode()
    place = chance.choice((0, len(content), chance.randrange(len(content) + 1)))
    if chance.random() < 0.5:
        return Mutation(f"{DEEP} times {opening!r} alone", deep)
    return Mutation(
        f"{DEEP} times {opening!r} at {place}", content[:place] + deep + content[place:]
    )


def splice(content, chance):
    """Write bytes that mean something to many formats into the middle."""
    pieces = (
        b"\n", b"\r", b'"', b"\\", b"\x00" * 8, b"\xff" * 8, b"\xef\xbb\xbf", b"\x1b[31m", b"NaN",
        b"Infinity", b"-1", b"9" * 400, b"{{", b"%}", b"!!python/object/apply:os.system [id]",
        b"&a [*a]", b"cposix\nsystem\n(Vid\ntR.", "\u2028".encode(), b"\xed\xa0\x80",
    )  # fmt: skip
    piece, place = chance.choice(pieces), chance.randrange(len(content) + 1)
    return Mutation(f"{piece[:20]!r} at {place}", content[:place] + piece + content[place:])


BYTES = [
    flip_bits, flip_early_bit, cut, cut_out, repeat, swap, lie, lie, nest, splice,
]  # fmt: skip
"""Changes that need not know the format."""


def change_json(content, chance):
    """Write another value over one in a JSON text, drop a key or write it under another name.

    Raises ValueError if there is none.
    """
    lines = content.split(b"\n")
    number = chance.randrange(len(lines)) if len(lines) > 1 and lines[0][:1] == b"{" else None
    try:
        value = json.loads(content if number is None else lines[number])
    except ValueError:  # an empty last line, or a text over many lines
        number, value = None, json.loads(content)
    places = places_of(value) if isinstance(value, dict | list) else []
    if not places:
        raise ValueError("there is nothing in it to change")
    holder, key = chance.choice(places)
    kind = chance.choice(("value", "value", "value", "missing", "name"))
    if kind == "value" or not isinstance(holder, dict):
        holder[key] = chance.choice(WRONG_VALUES)
        what = f"{key!r} is {str(holder[key])[:30]!r}"
    elif kind == "missing":
        del holder[key]
        what = f"{key!r} is missing"
    else:
        holder[chance.choice(("", "x", "..", key + "\n"))] = holder.pop(key)
        what = f"{key!r} has another name"
    text = json.dumps(value).encode()
    if number is None:
        return Mutation(what, text)
    return Mutation(what, b"\n".join([*lines[:number], text, *lines[number + 1 :]]))


def places_of(value):
    """Return every (dictionary or list, key) of a JSON value."""
    pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    inner = [
        place for _, item in pairs if isinstance(item, dict | list) for place in places_of(item)
    ]
    return [(value, key) for key, _ in pairs] + inner


def change_safetensors(content, chance):
    """Change the JSON header of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    header = change_json(content[8 : 8 + size], chance)
    length = len(header.content).to_bytes(8, "little")
    return Mutation(header.what, length + header.content + content[8 + size :])


def compress_bomb(_content, chance):
    """Compress many zeros."""
    size = chance.choice((80, 400)) * 2**20
    packed = gzip.compress(bytes(2**20), 9)
    return Mutation(f"{size >> 20} MiB of zeros", packed * (size >> 20))
