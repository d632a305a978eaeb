"""A number with its noun."""


def counted(number: int, noun: str) -> str:
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"
