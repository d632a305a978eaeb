"""A rank that runs out of memory says what it held, what the plan has for it and what to type;
nothing that was committed is lost."""

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import inject
import pytest
import torch
from torch.distributed import HashStore
from world import RankFailed, Run

from fsdp_trainer.base.process import OWN_ALLOCATION
from fsdp_trainer.run.out_of_memory import is_out_of_memory, report_out_of_memory

BUFFERS = """
import resource, sys, torch
from pathlib import Path
from fsdp_trainer.base.process import freed_memory_stays

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

def faults_of_a_buffer():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first, before = faults_of_a_buffer(), pages()
with freed_memory_stays():
    least = min(faults_of_a_buffer() for _ in range(30))
print(least / first, (pages() - before) / first)
"""
"""Prints the page faults of a buffer of 40 MiB that is used again, and the memory kept at the end,
both as shares of a new one."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(("own", "is_reused"), [({}, True), ({OWN_ALLOCATION[0]: "131072"}, False)])
def test_a_step_reuses_the_memory_of_the_one_before_unless_the_user_decides(own, is_reused):
    env = {name: value for name, value in os.environ.items() if name not in OWN_ALLOCATION} | own
    command = [sys.executable, "-c", BUFFERS]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    faults, held = map(float, done.stdout.split())
    assert (faults < 0.25) == is_reused
    assert held < 0.25, "given back at the end"


HOW = "train.steps=6 checkpoint.every=2 batch.rows=8 batch.micro_rows=4"
GREEDY = inject.at("update", inject.exhaust_memory, rank="last", step=5)


def test_what_a_rank_held_is_told_beside_the_plan_and_what_to_type(train):
    run = train("run", HOW, seam=GREEDY, code=1)
    assert run.err.startswith(
        "fsdp-trainer: rank 0 ran out of memory on cpu, in update of step 5: tried to "
        "allocate 1125899906842624 bytes"
    )
    (event,) = run.event("out_of_memory")
    measured, planned = event["measured"], event["planned"]
    # of one rank: what the plan has for them is what is there
    for name in ("parameters", "gradients", "optimizer"):
        assert measured[name] == pytest.approx(planned[name], rel=0.01)
        assert measured[name] > 50_000
        (line,) = [line for line in run.err.splitlines() if line.split()[:1] == [name]]
        assert line.split()[1] == line.split()[3] == f"{measured[name] / 2**20:.1f}"
    assert sum(measured.values()) == event["allocated"]
    assert any("batch.micro_rows=" in suggestion for suggestion in event["suggestions"])
    assert f"  {event['suggestions'][0]} " in run.err
    assert run.events[-1]["exit_code"] == 1
    assert "rank 0 ran out of memory" in run.events[-1]["reason"]
    assert "also with another batch.micro_rows" in run.err
    again = train("run", HOW, "batch.micro_rows=1")
    assert again["step"] == [1, 2, 3, 4, 5, 6]
    assert [e["step"] for e in again.event("resume")] == [4]


def test_what_another_rank_measured_is_on_record_also_without_a_plan(train, tmp_path):
    no_plan = inject.fails("make_plan", ValueError("no such shape"))
    with pytest.raises(RankFailed, match="rank 0: died"):  # it waits in a collective
        train("run", HOW, ranks=2, seam=inject.together(GREEDY, no_plan))
    run = Run(tmp_path / "run")
    (event,) = run.event("out_of_memory")
    assert event["rank"] == 1
    assert event["measured"]["parameters"] > 25_000
    assert "planned" not in event
    assert "rank 1 ran out of memory on cpu, in update of step 5" in run.events[-1]["reason"]
    assert run.checkpoints == ["step-00000002", "step-00000004"]


def test_rank_0_hears_of_a_rank_that_runs_out_before_there_is_a_model():
    heard = []
    world = SimpleNamespace(rank=1, main=False, device="cuda:1", store=HashStore())
    report = report_out_of_memory(
        torch.OutOfMemoryError("CUDA out of memory."),
        None,
        world,
        None,
        SimpleNamespace(report_failure=heard.append),
    )
    assert heard == [report.args[0]] == ["rank 1 ran out of memory on cuda:1: CUDA out of memory."]


def test_running_out_is_known_by_what_allocators_say():
    said = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 8 bytes."
    )
    kinds = [
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError(said),
        RuntimeError("CUDA error: out of memory"),
    ]
    assert all(map(is_out_of_memory, kinds))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(OSError(28, "x"))
