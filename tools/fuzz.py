"""Cases of another seed than the tests', by hand; exit code 1 if one is wrong.

    make fuzz SEED=2 N=50                   # chats, tokenizers, combinations of methods and layouts
    make fuzz SEED=2 TEMPLATES=DIR          # chats with templates of one's own, too: *.jinja
    make fuzz-files SEED=1 N=200 ONLY=GGUF  # changed files of the formats whose name has the word
    make covering                           # writes covering_array.json, after a new value

`python tools/fuzz.py chats SEED N --only=NUMBER` shows a single chat and its template.
"""

import argparse
import importlib
import itertools
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

SEED = 1
"""Of the combinations that are stored."""


def chats(seed: int, count: int, only: str) -> int:
    """Learn random chats over templates. only: the number of one that is shown."""
    from fuzz_chats import WRONG, cases, chat_of, outcome

    from fsdp_trainer.data.templates.chat_template import BUILT_IN

    own = os.environ.get("TEMPLATES")
    files = sorted(Path(own).glob("**/*.jinja")) if own else ()
    given = BUILT_IN | {file.stem: file.read_text(encoding="utf-8") for file in files}
    outcomes: Counter[str] = Counter()
    for number, case in cases(seed, count, given):
        if only and number != int(only):
            continue
        if only:
            row, _ = chat_of(seed, number)
            print(case.source, json.dumps(row, indent=1, ensure_ascii=False), sep="\n")
        outcomes[outcome(case, seed, number)] += 1
    print("\n".join(f"{n:6,} {what}" for what, n in outcomes.most_common()))
    return int(bool(outcomes[WRONG]))


def tokenizers(seed: int, count: int, _only: str) -> int:
    """Print how random tokenizers differ from transformers, with seeds that make them again."""
    from random_tokenizers import differences

    logging.disable(logging.WARNING)
    different = 0
    for number in range(seed * 1_000_000, seed * 1_000_000 + count):
        with tempfile.TemporaryDirectory() as folder:
            lines = differences(Path(folder), number)
        for line in lines:
            print(f"{number}: {line}")
        different += bool(lines)
    print(f"{count:,} tokenizers, {different:,} differ from transformers")
    return int(different > 0)


def files(seed: int, count: int, only: str) -> int:
    """Read changed files of every format; print a row for each."""
    from file_formats import FORMATS
    from fuzz_files import REFUSED, RIGHT, SAME, run_all

    importlib.import_module("warm")  # what every reader needs, once for all processes
    forms = [form for form in FORMATS if only.lower() in form.name.lower()]
    with tempfile.TemporaryDirectory() as home:
        say = lambda text: print(text, flush=True)  # noqa: E731
        tallies = run_all(Path(home), seed, count, forms, say)
    print("| format | mutants | right or same value | one message | wrong |\n|---|---|---|---|---|")
    for name, tally in tallies.items():
        values = tally.counts[RIGHT] + tally.counts[SAME]
        cells = [name, tally.counts.total(), values, tally.counts[REFUSED], len(tally.bad)]
        print(f"| {' | '.join(map(str, cells))} |")
    return int(any(tally.bad for tally in tallies.values()))


def combinations(seed: int, count: int, _only: str) -> int:
    """Compare combinations with one rank; without a count, write those that tests run."""
    import composing
    from combinations import Fuzz, run_all
    from covering_array import Dealer
    from world import World

    composing.keep()
    world = World()
    fuzz = Fuzz(world, Path("build/fuzz").resolve(), Path("build/fuzz/data").resolve())
    try:
        fuzz.write_inputs()
        dealer = Dealer(seed, fuzz.require_accepted)
        if not count:
            write(dealer)
            return 0
        reports = run_all(fuzz, itertools.islice(dealer.deal(), count))
    finally:
        world.close()
    print(f"{count} combinations of seed {seed}, {len(reports)} differ")
    return int(bool(reports))


def write(dealer) -> None:
    """Write all combinations of a dealer, each without its simplest values, and refused pairs."""
    from combinations import SIMPLEST
    from covering_array import FILE, all_pairs

    rows = [
        {name: words for name, words in one.items() if words != SIMPLEST[name]}
        for one in dealer.deal()
    ]
    refused = sorted(sorted(pair) for pair in dealer.refused)
    lines = ",\n".join(json.dumps(row) for row in rows)
    pairs = ",\n".join(json.dumps(pair) for pair in refused)
    FILE.write_text(f'{{"combinations": [\n{lines}\n], "refused": [\n{pairs}\n]}}\n')
    print(f"{len(rows)} combinations, {len(refused)} of {len(all_pairs())} pairs refused")


KINDS = {each.__name__: each for each in (chats, tokenizers, files, combinations)}
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("seed", type=int, nargs="?", default=SEED)
    parser.add_argument("count", type=int, nargs="?", default=0)
    parser.add_argument("--only", default="", help="a chat's number, or a word in formats' names")
    words = parser.parse_args()
    sys.exit(KINDS[words.kind](words.seed, words.count, words.only))
