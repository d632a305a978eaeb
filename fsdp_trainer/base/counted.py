"""A number with its noun."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"
