"""Hangs under a real `torchrun --max-restarts=1`: found in seconds, the right rank named, and the
weights of an undisturbed run at the end.

`pytest -s -m faults tests/faults/test_hangs.py` prints the seconds, also without the watchdog.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import pytest
from folders import REPO
from stored import newest
from world import SMALL, Run, split

from fsdp_trainer.checkpoint.digest import weights_digest

pytestmark = pytest.mark.faults

INJECT = REPO / "tools/inject"
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1",
    "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0", "-m", "fsdp_trainer",
]  # fmt: skip
HOW = [
    *SMALL, "data.path=demo:backwards tokenizer.path=demo:bytes train.steps=12",
    "checkpoint.every=4 launch.timeout=30s",  # torchrun waits as long for ranks to end
]  # fmt: skip
FAULTS = {
    "is stopped (SIGSTOP)": ("rank=1 phase=forward step=8 do=stop", "forward"),
    "holds a lock": ("rank=1 phase=backward step=8 do=lock", "backward"),
    # not at a step that is saved, where a rank may wait for launch.timeout
    "skips a collective": ("rank=1 phase=agree step=7 do=skip", "forward"),
}
"""What rank 1 does, and the phase of step 8 in which it is found."""
SLOW = "rank=1 phase=forward step=* do=slow"
LIMIT_SECONDS = 150.0


@dataclass
class Hang:
    """The outcome of a run in which a rank hung.

    noticed, resumed: seconds from the fault until the watchdog found it, and until training
    resumed; None: never. said: output of torchrun and the ranks.
    """

    run: Run
    code: int
    noticed: float | None
    resumed: float | None
    said: str


def hang(folder, fault, *more):
    """Run with a fault until the end, or kill the run after LIMIT_SECONDS."""
    notes = folder.with_suffix(".faults")
    path = os.pathsep.join([str(INJECT), str(REPO), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FAULTS_FOLDER": str(notes)}
    place = f"data.cache={folder.parent}/data run.root={folder.parent}"
    process = subprocess.Popen(
        [*TORCHRUN, *split([*HOW, place, f"run.name={folder.name}", *more])],
        env=env | ({"FAULTS": fault} if fault else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        for file in notes.glob("pid.*"):
            with suppress(ProcessLookupError):
                os.kill(int(file.read_text()), 9)
        said, _ = process.communicate()
    run, happened = Run(folder), notes / "fault.0"
    began = float(happened.read_text()) if happened.exists() else time.time()

    def since(name):
        return next((event["time"] - began for event in run.event(name)), None)

    return Hang(run, process.returncode, since("hang"), since("resume"), said)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the digest of an undisturbed run's weights."""
    return weights_digest(newest(hang(tmp_path_factory.mktemp("whole") / "run", "").run))


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("name", FAULTS)
def test_a_hang_costs_seconds_and_no_bit(whole, tmp_path, capsys, name, watched):
    fault, phase = FAULTS[name]
    outcome = hang(tmp_path / "run", fault, f"launch.watchdog={watched}")
    with capsys.disabled():
        line = f"found after {outcome.noticed} s, training again after {outcome.resumed} s"
        print(f"\nrank 1 {name}, watched: {watched}: {line}, exit code {outcome.code}")
    if not watched:
        return
    assert outcome.code == 0, outcome.said
    assert outcome.noticed < (10 if "stopped" in name else 20), "far from torchrun's grace"
    assert outcome.resumed < outcome.noticed + 30, "far from torchrun's grace"
    (report,) = outcome.run.event("hang")
    assert (report["rank"], report["phase"], report["step"]) == (1, phase, 8)
    assert "rank 1 on" in outcome.said
    assert outcome.run["step"] == list(range(1, 13))
    assert weights_digest(newest(outcome.run)) == whole
    stacks = [file.read_text() for file in (outcome.run.folder / "hangs").rglob("rank-*.txt")]
    assert len(stacks) == 2
    assert any("/torch/distributed/" in text for text in stacks)


def test_a_slow_rank_is_named_and_nobody_is_killed(whole, tmp_path):
    how = "launch.watchdog=true launch.stall=1s logging.stragglers=1s"
    outcome = hang(tmp_path / "run", SLOW, how)
    assert outcome.code == 0, outcome.said
    assert not outcome.run.event("hang"), outcome.said
    assert not outcome.run.event("resume"), outcome.said
    assert {(e["rank"], e["phase"]) for e in outcome.run.event("straggler")} == {(1, "forward")}
    assert weights_digest(newest(outcome.run)) == whole
