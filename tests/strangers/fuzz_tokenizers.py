"""Random tokenizers, described by random files, against AutoTokenizer of transformers.

    python tests/strangers/fuzz_tokenizers.py SEED N     # exit code 1 if one differs

Tokens, their text, special tokens, the size of the vocabulary, and those of the saved folder.
"""

import logging
import sys
import tempfile
from pathlib import Path

from random_tokenizers import differences


def main(seed: int, count: int) -> int:
    """Print each difference with the seed that makes it again; return the exit code."""
    different = 0
    for number in range(seed * 1_000_000, seed * 1_000_000 + count):
        with tempfile.TemporaryDirectory() as folder:
            lines = differences(Path(folder), number)
        for line in lines:
            print(f"{number}: {line}")
        different += bool(lines)
    print(f"{count:,} tokenizers, {different:,} differ from transformers")
    return int(different > 0)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
