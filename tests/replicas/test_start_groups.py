"""launch.groups: one command starts several groups on this machine, and starts lost ones again."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from world import SMALL, Run, alive, end, wait_until

STEPS = 100
SECRET = "only the groups know"


@pytest.mark.slow
def test_a_group_that_is_killed_is_started_again_and_the_command_ends_with_0(inputs, tmp_path):
    words = [f"{key}={value}" for key, value in inputs.items()]
    place = [f"run.root={tmp_path}", "run.name=run"]
    how = ["replicas.method=sync", "launch.groups=2", f"train.steps={STEPS}", "batch.micro_rows=1"]
    command = [sys.executable, "-m", "fsdp_trainer", "train", *SMALL, *words, *place, *how]
    log = tmp_path / "log"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FSDP_TRAINER_REPLICAS_TOKEN": SECRET}
    with log.open("w") as file:
        started = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        run = Run(tmp_path / "run")
        wait_until(lambda: len(run.metrics) > 2, started)
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        groups = [pid for pid in children if not is_lighthouse(pid)]
        assert len(groups) == 2
        os.kill(int(groups[1]), signal.SIGKILL)
        assert started.wait(timeout=300) == 0
    finally:
        end([started])
    assert "group 1 ended with code -9: started again" in log.read_text()
    assert run.column("step") == list(range(1, STEPS + 1))
    assert not any(alive(pid) for pid in children)
    records = [log, *filter(Path.is_file, run.folder.rglob("*"))]
    assert not any(SECRET.encode() in file.read_bytes() for file in records)
    assert ".groups-secret" not in os.listdir(run.folder)


def is_lighthouse(pid):
    """Return True if a process serves a lighthouse."""
    return bool(re.search(r"fsdp_trainer\0lighthouse", Path(f"/proc/{pid}/cmdline").read_text()))
