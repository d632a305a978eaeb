"""`make pull-the-plug`: break a run twice, and show that its final weights are unaffected."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.config.paths import committed_checkpoints

ROOT = Path("runs/pull-the-plug")
STEPS, EVERY, KILLED_AT, MORE = 24, 6, 18, 6
LINE = [
    "+recipe=quickstart", f"run.root={ROOT}", f"train.steps={STEPS}", f"checkpoint.every={EVERY}",
    "checkpoint.export_hf=false",
    "data.validation=null", "logging.every=1",
]  # fmt: skip
INJECT = Path(__file__).resolve().parent / "inject"


def tell(what: str) -> None:
    print(f"{time.monotonic() - BEGAN:5.0f} s  {what}", flush=True)


def command(*words: str, faults: str = "") -> subprocess.CompletedProcess:
    """Run a command line of the trainer. faults: see inject/breaks.py."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(INJECT), os.environ.get("PYTHONPATH", "")]),
        "FAULTS_FOLDER": str(ROOT / "faults"),
    }
    env |= {"FAULTS": faults} if faults else {}
    return subprocess.run(
        [sys.executable, "-m", "fsdp_trainer", *words], env=env, capture_output=True, text=True
    )


def train(name: str, *words: str, code: int = 0, faults: str = "") -> subprocess.CompletedProcess:
    """Train the run `name`, which must end with exit code `code`."""
    done = command(*LINE, f"run.name={name}", *words, faults=faults)
    if done.returncode != code:
        sys.exit(f"exit code {done.returncode} instead of {code}\n{done.stdout}{done.stderr}")
    return done


def losses(name: str) -> dict[int, float]:
    """Return a run's losses by step. Raises AssertionError if a step is missing or repeated."""
    lines = [json.loads(line) for line in (ROOT / name / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1)), (
        "a step is missing, or on record twice"
    )
    return {line["step"]: line["loss"] for line in lines}


def flip_a_bit(file: Path) -> None:
    """Flip the lowest bit of the byte in the middle of a file."""
    with file.open("r+b") as f:
        f.seek(file.stat().st_size // 2)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))


def main() -> int:
    shutil.rmtree(ROOT, ignore_errors=True)
    tell(f"two runs of one command: fsdp-trainer {' '.join(LINE)} run.name=…")
    train("undisturbed")
    whole = weights_digest(committed_checkpoints(ROOT / "undisturbed")[-1])
    tell(f"undisturbed: {STEPS} steps on 2 ranks, weights' digest {whole}")

    train("broken", code=1, faults=f"rank=1 phase=shards step={KILLED_AT} do=kill")
    remaining = committed_checkpoints(ROOT / "broken")
    tell(
        f"broken: rank 1 killed (SIGKILL) while it saved step {KILLED_AT}; the run ended "
        f"with exit code 1"
    )
    tell(
        f"        committed: {', '.join(path.name for path in remaining)}. Step {KILLED_AT} is "
        f"not: it never got its name"
    )

    damaged = max(remaining[-1].glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip_a_bit(damaged)
    verified = command("verify", f"source={remaining[-1]}")
    tell(
        f"        one bit flipped in {remaining[-1].name}/{damaged.name}, "
        f"{damaged.stat().st_size:,} bytes"
    )
    tell(
        f"        fsdp-trainer verify: exit code {verified.returncode}, "
        f"{'damaged' if damaged.name in verified.stdout + verified.stderr else 'not seen'}"
    )

    again = train("broken")
    went_on = next(
        line for line in again.stdout.splitlines() if "resumes after step" in line
    ).strip()
    tell(f"        the same command again: leaves {remaining[-1].name} aside, {went_on}")
    digest = weights_digest(committed_checkpoints(ROOT / "broken")[-1])
    equal = (
        digest == whole and losses("broken") == losses("undisturbed") and verified.returncode == 3
    )
    tell(f"        {STEPS} steps, each on record once, weights' digest {digest}")
    print(f"\ndigest equal: {'yes' if equal else 'NO'}\n", flush=True)

    train("undisturbed", f"train.steps={STEPS + MORE}")
    train("broken", f"train.steps={STEPS + MORE}", "launch.nproc_per_node=1")
    a, b = losses("undisturbed"), losses("broken")
    difference = max(abs(a[step] - b[step]) for step in range(STEPS + 1, STEPS + MORE + 1))
    tell(
        f"{MORE} more steps, undisturbed on 2 ranks and broken on 1: the losses differ by "
        f"{difference:.1e} at most"
    )
    tell(f"everything lies in {ROOT}; what happened in {ROOT}/broken/events.jsonl")
    return 0 if equal and difference < 1e-5 else 1


if __name__ == "__main__":
    BEGAN = time.monotonic()
    sys.exit(main())
