"""Hosts that come and go: no row is lost or repeated, and the losses are those of an undisturbed
run."""

import math
import os
import signal

import pytest
from hosts import INJECT, Hosts, seconds_until
from namespaces import why_not
from stored import assert_columns, assert_near
from world import SMALL, Run, split

CONSTANT = "schedule=constant schedule.warmup_steps=0 optim.lr=3e-4"


def trained(run, world, since):
    """Return True if `world` ranks took over after `since` starts of ranks, and trained."""
    starts = [*run.event("start"), *run.event("resume")][since:]
    if not starts or starts[-1]["world_size"] != world or not run.metrics:
        return False
    return run.metrics[-1]["step"] > starts[-1]["step"] + 2


@pytest.mark.faults
def test_hosts_are_killed_cut_off_and_come_back_and_the_run_goes_on(
    train, inputs, tmp_path, capsys
):
    if reason := why_not():
        pytest.skip(reason)
    words = [
        *SMALL,
        *(f"{k}={v}" for k, v in inputs.items()),
        CONSTANT,
        f"run.root={tmp_path} run.name=run batch.micro_rows=1 checkpoint.every=5",
        "train.steps=100000 launch.timeout=25s launch.watchdog=true",
    ]
    env = {
        "PYTHONPATH": f"{INJECT}:{os.environ.get('PYTHONPATH', '')}",
        "FAULTS_FOLDER": str(tmp_path / "faults"),
        "FAULTS": "rank=0 phase=data step=* do=slow",
    }
    run, hosts, table = Run(tmp_path / "run"), Hosts(2), []

    def see(what, world, act):
        since = len(run.event("start")) + len(run.event("resume"))
        act()
        try:
            table.append((what, world, seconds_until(lambda: trained(run, world, since), 150)))
        except AssertionError:
            outputs = [f"host {i}\n{hosts.told(i)}" for i in hosts.running]
            text = "\n".join([what, *outputs, *map(str, run.events)])
            raise AssertionError(text) from None

    def start(*which):
        for i in which:
            hosts.start(i, split(words), env, tmp_path)

    def plug_in_again():
        hosts.kill(1)  # its torchrun has given up, or is about to
        hosts.cable(1, plugged=True)
        start(1)

    try:
        see("two hosts start", 2, lambda: start(1, 2))
        see("host 2 loses its power", 1, lambda: hosts.kill(2))
        see("host 2 comes back", 2, lambda: start(2))
        see("host 1, which has rank 0, is cut off", 1, lambda: hosts.cable(1, plugged=False))
        see("host 1 comes back", 2, plug_in_again)
        for process in hosts.running.values():
            process.send_signal(signal.SIGTERM)
        for process in hosts.running.values():
            process.wait(600)
    finally:
        hosts.close()
    lines = [f"{what:40} {world} ranks {seconds:6.1f}" for what, world, seconds in table]
    with capsys.disabled():
        print("\nseconds until the run trains on", *lines, sep="\n  ")
    whole = train("whole", CONSTANT, f"train.steps={len(run.metrics)}")
    assert run["step"] == whole["step"]
    assert_columns(run, whole, "tokens", "supervised_tokens", "lr")
    assert_near(run, whole, "loss", rel=0, abs=1e-5)
    assert math.isfinite(run.metrics[-1]["loss"])
