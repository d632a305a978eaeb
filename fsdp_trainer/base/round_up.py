"""Rounding numbers of rows, tokens or bytes up to a multiple."""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple
