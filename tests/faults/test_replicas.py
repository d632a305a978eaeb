"""Groups of ranks that are killed and stopped at random moments: the others go on, and the weights
at the end are those of an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pytest
import torch
from replica_groups import lighthouse
from stored import newest, stored
from world import SMALL, Run, end, ranks_below, wait_until

pytestmark = pytest.mark.faults

STEPS, FAULTS, LONGEST = 400, 20, 10.0
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
HOW = [
    "model.hidden_size=128", "model.intermediate_size=256", "batch.seq_len=128", "batch.rows=24",
    "batch.micro_rows=2", "optim=sgd", "optim.momentum=0.9", "optim.lr=0.02", "schedule=constant",
    f"train.steps={STEPS}", "launch.watchdog=true",
]  # fmt: skip


def wait_for_more(lines, count, act, *args):
    """Call `act(*args)`, then wait until there are `count` lines more."""
    before = len(lines())
    act(*args)
    wait_until(lambda: len(lines()) >= before + count)


class Group:
    """A group in processes of its own, which is started again after each fault."""

    def __init__(self, number, address, folder, words, ranks):
        own = [
            f"replicas.id={number}",
            f"replicas.lighthouse={address}",
            f"launch.nproc_per_node={ranks}",
        ]
        place = [f"run.root={folder.parent}", f"run.name={folder.name}"]
        self.command = [sys.executable, "-m", "fsdp_trainer", "train", *words, *place, *own]
        self.log = (folder.parent / f"group-{number}.log").open("w")
        self.start()

    def start(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            self.command, env=env, stdout=self.log, stderr=self.log, start_new_session=True
        )

    def processes(self):
        """Return the process ids of the group: of the one that starts ranks, and of the ranks."""
        pids = {self.process.pid, *ranks_below(self.process.pid).values()}
        return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]

    def hit(self, signum):
        """Send a signal to all processes at once; those that it only stops are killed later."""
        for pid in self.processes():
            os.kill(pid, signum)

    def bury(self):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.parametrize(("groups", "ranks"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_others_go_on_when_a_group_is_killed_or_stopped(world, inputs, tmp_path, groups, ranks):
    chance = random.Random(f"{groups} {ranks}")
    words = [*SMALL, *(f"{key}={value}" for key, value in inputs.items()), *HOW]
    folder = tmp_path / "run"
    with lighthouse() as address:
        more = [*words, "replicas.method=sync"]
        started = [Group(i, address, folder, more, ranks) for i in range(groups)]
        try:
            shared = Run(folder)
            wait_until(lambda: len(shared.metrics) > 5)
            faults = 0
            while faults < FAULTS and len(shared.metrics) < STEPS - 40:
                victim = chance.choice(started)
                time.sleep(chance.random())
                wait_for_more(lambda: shared.metrics, 4, victim.hit, chance.choice(SIGNALS))
                victim.bury()
                others = [g.process.poll() for g in started if g is not victim]
                assert others == [None] * (groups - 1), "the others' processes still run"
                wait_for_more(lambda: shared.event("groups"), 1, victim.start)
                faults += 1
            for group in started:
                assert group.process.wait(timeout=600) == 0
        finally:
            end([group.process for group in started])
    assert shared.column("step") == list(range(1, STEPS + 1))
    times = shared.column("time")
    longest = max(b - a for a, b in pairwise(times))
    print(f"{groups} groups × {ranks} ranks: {faults} faults, longest step {longest:.1f} s")
    assert faults >= 5
    assert longest < LONGEST
    alone = world.train(tmp_path / "alone", *words, "launch.watchdog=false", base=SMALL)
    ours, theirs = stored(newest(shared)), stored(newest(alone))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5, msg=name)
