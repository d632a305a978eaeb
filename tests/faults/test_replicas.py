"""Groups of ranks that are killed, stopped and cut off: the others go on, and the weights at the
end are those of an undisturbed run."""

import os
import signal
import subprocess
import sys
from itertools import pairwise

import namespaces
import pytest
import torch
from stored import newest, stored
from world import SMALL, Run, end, ranks_below, split, wait_until

pytestmark = pytest.mark.faults

STEPS, LONGEST, PORT = 320, 10.0, 29510
HOW = (
    "model.hidden_size=128 model.intermediate_size=256 batch.seq_len=128 batch.rows=24"
    " batch.micro_rows=2 optim=sgd optim.momentum=0.9 optim.lr=0.005 schedule=constant"
    f" train.steps={STEPS} launch.watchdog=true"
)


def wait_for_more(lines, count, act, *args):
    """Call `act(*args)`, then wait until there are `count` lines more."""
    before = len(lines())
    act(*args)
    wait_until(lambda: len(lines()) >= before + count)


class Group:
    """A group in processes of its own on a simulated host, started again after each fault."""

    def __init__(self, number, host, folder, words):
        """Start it. host: words that run a command on a simulated host."""
        own = f"replicas.id={number} replicas.lighthouse=10.77.0.1:{PORT}"
        place = f"run.root={folder.parent} run.name={folder.name}"
        words = split([*words, place, own])
        self.command = [*host, sys.executable, "-m", "fsdp_trainer", "train", *words]
        self.log = (folder.parent / f"group-{number}.log").open("w")
        self.start()

    def start(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
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


@pytest.fixture
def hosts():
    if reason := namespaces.why_not():
        pytest.skip(reason)
    network = namespaces.Network(2)
    yield network
    network.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", ["sync", "diloco"])
def test_others_go_on_when_a_group_is_killed_stopped_or_cut_off(
    world, hosts, input_words, tmp_path, method, ranks
):
    words = [
        *SMALL,
        *input_words,
        HOW,
        f"replicas.method={method} launch.nproc_per_node={ranks}",
    ]
    words += ["replicas.every=4"] if method == "diloco" else []
    serve = [*hosts.at(0), sys.executable, "-m", "fsdp_trainer", "lighthouse", f"port={PORT}"]
    started = [subprocess.Popen(serve)]
    run = Run(tmp_path / "run")
    try:
        groups = [Group(i, hosts.at(i + 1), run.folder, words) for i in range(2)]
        started += [group.process for group in groups]
        wait_until(lambda: run.event("groups") and len(run.metrics) > 5)
        for victim, signum in ((groups[1], signal.SIGKILL), (groups[0], signal.SIGSTOP)):
            wait_for_more(lambda: run.metrics, 4, victim.hit, signum)
            victim.bury()
            others = [group.process.poll() for group in groups if group is not victim]
            assert others == [None], "the other's processes still run"
            wait_for_more(lambda: run.event("groups"), 1, victim.start)
            started.append(victim.process)
        wait_for_more(lambda: run.metrics, 12, hosts.cable, 2, False)
        wait_for_more(lambda: run.event("groups"), 1, hosts.cable, 2, True)
        assert run.event("groups")[-1]["groups"] == 2
        assert [group.process.wait(timeout=600) for group in groups] == [0, 0]
    finally:
        end(started)
    assert run["step"] == list(range(1, STEPS + 1))
    assert max(after - before for before, after in pairwise(run["time"])) < LONGEST
    if method == "sync":
        alone = world.train(
            tmp_path / "alone", *SMALL, *input_words, HOW, "launch.watchdog=false", base=[]
        )
        ours, theirs = stored(newest(run)), stored(newest(alone))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
