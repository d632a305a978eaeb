"""A run that is broken repeatedly at random.

`python tests/faults/thirty_faults.py [FAULTS] [SEED]` prints the faults and the time they cost.
"""

import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import Bench, Broken
from world import write_chats

from fsdp_trainer.config.paths import committed_checkpoints, step_of

EVERY = 4
OF_A_STEP = ["data", "forward", "backward", "clip", "update", "log", "agree"]
OF_A_SAVE = ["staging", "shards", "manifest", "rename", "prune"]


def soak(
    folder: Path, words: list[str], faults: int, seed: int
) -> tuple[Broken, Broken, list[tuple[str, list[int], float]]]:
    """Return a run with at least `faults` faults, an undisturbed run, and the list of faults.

    An entry of the list is (fault, exit codes of the ranks, seconds until they had ended).
    """
    bench, draw, happened = Bench(), random.Random(seed), []
    words = [
        *words,
        f"train.steps={5 * faults}",
        f"checkpoint.every={EVERY}",
        "checkpoint.keep=3",
        "checkpoint=async",
        "launch.watchdog=true",
    ]
    whole = bench.train(folder / "whole", *words)
    run, damaged = Broken(folder / "run"), Path()
    while len(happened) < faults:
        committed = committed_checkpoints(run.folder)
        if len(committed) > 1 and committed[-2] != damaged and draw.random() < 0.2:
            damaged = committed[-1]
            happened.append((f"{flip(damaged, draw)} of step {step_of(damaged)}", [], 0.0))
            continue
        planned = plan(draw, step_of(committed[-1]) if committed else 0)
        notes = folder / f"faults-{len(happened)}"
        attempt = bench.attempt(
            ["train", *bench.words(run.folder), *words], 2, "; ".join(planned), notes
        )
        broke = [
            fault for number, fault in enumerate(planned) if (notes / f"fault.{number}").exists()
        ]
        assert broke, f"{attempt.codes} without a fault\n{attempt.out}"
        assert 2 not in attempt.codes, attempt.out
        happened += [(fault, attempt.codes, attempt.seconds) for fault in broke]
    run.attempts = bench.train(run.folder, *words).attempts
    return run, whole, happened


def plan(draw: random.Random, newest: int) -> list[str]:
    """Return faults soon after the newest checkpoint.

    A full disk does not end a run, so it is followed by a kill. newest: step of the checkpoint.
    """
    do = draw.choice(["kill", "kill", "kill_all", "term", "full", "stop"])
    phase = "shards" if do == "full" else draw.choice(OF_A_STEP + OF_A_SAVE)
    saves = phase in OF_A_SAVE
    step = newest + EVERY - newest % EVERY if saves else newest + draw.randint(1, EVERY + 1)
    rank = 0 if phase in ("rename", "prune") else draw.randint(0, 1)
    after = (
        [f"rank={draw.randint(0, 1)} phase=update step={step + 2} do=kill"] if do == "full" else []
    )
    return [f"rank={rank} phase={phase} step={step} do={do}", *after]


def flip(checkpoint: Path, draw: random.Random) -> str:
    """Flip one bit of one file of a committed checkpoint; return a description."""
    file = draw.choice(
        [path for path in sorted(checkpoint.rglob("*")) if path.is_file() and path.stat().st_size]
    )
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)
    return f"bit flipped in {file.relative_to(checkpoint)}"


def table(
    run: Broken, whole: Broken, happened: list[tuple[str, list[int], float]], wall: float
) -> str:
    """Return a text with a line for each fault, and a summary of the run."""
    lines = [f"{what:48} {codes!s:12} {seconds:5.1f} s" for what, codes, seconds in happened]
    kinds = Counter(what.rpartition("do=")[2].split()[0] for what, _, _ in happened)
    useful = sum(run.column("step_seconds"))
    return "\n".join(
        [
            *lines,
            f"{len(happened)} faults "
            f"({', '.join(f'{n} × {kind}' for kind, n in sorted(kinds.items()))}), "
            f"{len(run.metrics)} steps, "
            f"{len(run.event('resume'))} resumes, {len(run.event('damaged'))} damaged "
            f"checkpoints left aside",
            (
                f"{wall:.0f} s, of which {useful:.0f} s in steps that counted: "
                f"{useful / wall:.0%} effective training time"
            ),
            (
                f"digest equal to that of the undisturbed run: "
                f"{'yes' if run.digest == whole.digest else 'NO'}"
            ),
        ]
    )


def main(faults: int = 30, seed: int = 0) -> int:
    with tempfile.TemporaryDirectory() as folder:
        chats = write_chats(Path(folder) / "chats.jsonl", 100)
        words = [f"data.path={chats}", "tokenizer.path=demo:bytes", f"data.cache={folder}/cache"]
        began = time.monotonic()
        run, whole, happened = soak(Path(folder), words, faults, seed)
        print(table(run, whole, happened, time.monotonic() - began - whole.attempts[0].seconds))
        return 0 if run.digest == whole.digest else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
