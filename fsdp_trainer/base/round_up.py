"""Rounding numbers of rows, tokens or bytes up to a multiple."""


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
