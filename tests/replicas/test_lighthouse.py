"""The lighthouse only keeps who is there: groups train on when it comes back."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from replica_groups import GroupPools, lighthouse
from world import Run, alive, wait_until

STEPS = 150
STARTER = """
from fsdp_trainer.launch.start_groups import Lighthouse
with Lighthouse() as started:
    print(started._process.pid, flush=True)
    input()
"""


@pytest.fixture(scope="module")
def words(inputs):
    return [*(f"{key}={value}" for key, value in inputs.items()), f"train.steps={STEPS}"]


@pytest.mark.further
def test_groups_go_on_when_the_lighthouse_is_started_again(world, words, tmp_path):
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        first = lighthouse()
        address = stack.enter_context(first)
        pools = GroupPools(world, address)
        stack.callback(pools.close)
        training = thread.submit(pools.train, tmp_path / "run", *words, "replicas.min=2")
        shared = Run(tmp_path / "run")
        wait_until(lambda: len(shared.metrics) > 3 or training.done())
        first.__exit__(None, None, None)
        stack.enter_context(lighthouse(int(address.rpartition(":")[2])))
        training.result()
    assert shared.column("step") == list(range(1, STEPS + 1))
    assert [e["groups"] for e in shared.event("groups")][-1] == 2


@pytest.mark.further
def test_a_run_whose_lighthouse_stays_away_says_so(world, words, tmp_path):
    with ExitStack() as stack, ThreadPoolExecutor(1) as thread:
        first = lighthouse()
        pools = GroupPools(world, stack.enter_context(first))
        more = [*words, "launch.timeout=4s", "train.steps=9999"]
        training = thread.submit(pools.train, tmp_path / "run", *more, groups=1, code=1)
        shared = Run(tmp_path / "run")
        wait_until(lambda: len(shared.metrics) > 3 or training.done())
        first.__exit__(None, None, None)
        training.result()
    (end,) = shared.event("end")
    assert "no meeting of the groups for 4 s" in end["reason"]


@pytest.mark.further
def test_a_lighthouse_does_not_outlive_who_started_it_for_groups():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    starter = subprocess.Popen([sys.executable, "-c", STARTER], **pipes)
    pid = int(starter.stdout.readline())
    starter.kill()
    starter.wait()
    wait_until(lambda: not alive(pid))
