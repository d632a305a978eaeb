"""Rounding up to a multiple: of rows, tokens, bytes."""


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `number`."""
    return -(-number // multiple) * multiple
