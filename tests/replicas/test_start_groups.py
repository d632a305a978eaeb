"""launch.groups: one command starts several groups on this machine, and starts lost ones again."""

import re
import sys
from pathlib import Path

import inject
import pytest
from forked import Forked
from world import SMALL, Run, alive, split, wait_until

pytestmark = pytest.mark.slow
SECRET = "only the groups know"


@pytest.fixture
def start(input_words, tmp_path):
    """Return a function that starts a command of two groups, and waits for its processes."""
    words = [*SMALL, *input_words, "replicas.min=2"]
    words += [f"run.root={tmp_path} run.name=run replicas.method=sync launch.groups=2"]
    command = [sys.executable, "-m", "fsdp_trainer", "train", *split(words), "train.steps=5"]

    def run(**options):
        env = {"FSDP_TRAINER_REPLICAS_TOKEN": SECRET}
        started = Forked(command, tmp_path / "log", env, **options)
        wait_until(lambda: len(started.children) == 3, started)
        return started, started.children

    return run


def test_a_group_that_is_killed_is_started_again_and_the_command_ends_with_0(start, tmp_path):
    started, _ = start(seam=inject.killed_once(tmp_path / "killed", step=3))
    assert started.wait() == 0, started.said
    assert " ended with code -9: started again" in started.said
    named = re.findall(r"^group  (\d) is process \d+$", started.said, re.M)
    assert sorted(named[:2]) == ["0", "1"]
    assert len(named) == 3
    run = Run(tmp_path / "run")
    records = [tmp_path / "log", *filter(Path.is_file, run.folder.rglob("*"))]
    assert not any(SECRET.encode() in file.read_bytes() for file in records)
    assert not (run.folder / ".groups-secret").exists()
    assert run["step"] == [1, 2, 3, 4, 5]
    assert run.event("groups")[0]["groups"] == 2


def test_groups_and_their_lighthouse_do_not_outlive_who_started_them(start):
    started, children = start()
    started.kill()
    wait_until(lambda: not any(map(alive, children)))
