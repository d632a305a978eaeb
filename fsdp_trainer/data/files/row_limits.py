"""Limits of a row, so that a small file cannot fill memory."""

LONGEST = 1 << 28
"""Bytes of a line, an element of a list, a document, or a row of a table."""
MOST_VALUES = 1 << 23
"""Commas and brackets in a line or element: each may be a value of 200 bytes in memory."""
TOO_LONG = f"is longer than {LONGEST >> 20} MiB"
TOO_MANY = f"has more than {MOST_VALUES:,} values"
