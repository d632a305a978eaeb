"""Benchmarks run, and tell a slower result from the stored one."""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import patch

import inject
import pytest
from world import read_json

from benchmarks import gpu, harness, ladder, train_step, trl_common


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """Return the folder of stored results, an empty one."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return tmp_path


def finish(compared, check):
    harness.finish("some", {"what": "a test"}, compared, check)


def code_of_check(compared):
    with pytest.raises(SystemExit) as exited:
        finish(compared, check=True)
    return exited.value.code


def test_a_result_is_stored_with_its_machine_and_compared_with_on_request(results, capsys):
    finish({"speed": harness.spread([1.5, 2.0, 2.2]), "memory": 3.0}, check=False)
    file = results / harness.machine()["kind"] / "some.json"
    stored = read_json(file)
    assert stored["compared"] == {"speed": 2.0, "memory": 3.0}
    assert stored["versions"]["torch"]
    assert stored["machine"]["cores"]
    for compared, code in (
        ({"speed": 1.85, "memory": 9.0}, 0),
        ({"speed": 1.75, "memory": 3.0}, 1),
        ({"memory": 2.5}, 1),
        ({"speed": harness.spread([1.2, 1.5, 1.85])}, 0),
        ({"speed": harness.spread([1.2, 1.5, 1.75])}, 1),
    ):
        assert code_of_check(compared) == code
    said = capsys.readouterr().err
    assert "some: memory was 3, is 2.5" in said
    assert "some: speed was 2, is 1.5, 1.75 at best" in said
    assert read_json(file) == stored


def test_a_processor_without_a_result_is_compared_with_one_of_as_many_cores(monkeypatch, capsys):
    def on(cores, processor):
        machine = {"kind": f"{cores}-cpu-cores-{processor}", "processor": processor}
        monkeypatch.setattr(harness, "machine", lambda: machine)

    on(2, "old")
    finish({"speed": 2.0}, check=False)
    on(2, "new")
    assert code_of_check({"speed": 1.0}) == 1
    assert "some: the stored result is of another processor, old" in capsys.readouterr().err
    finish({"speed": 1.0}, check=False)
    assert code_of_check({"speed": 1.0}) == 0
    on(4, "new")
    assert "no stored result of this kind of machine" in code_of_check({"speed": 1.0})


def test_ways_take_turns_and_a_ratio_is_taken_within_a_round():
    order = []
    measured = harness.in_turn(
        {
            "a": lambda: order.append("a") or len(order),
            "b": lambda: order.append("b") or len(order),
        },
        2,
    )
    assert order == ["b", "a", "a", "b"]
    assert measured == {"b": [1, 4], "a": [2, 3]}
    assert harness.ratio([2.0, 9.0], [1.0, 3.0]) == {"minimum": 2.0, "median": 2.5, "maximum": 3.0}


@pytest.fixture
def in_the_pool(world, monkeypatch):
    """Train what benchmarks start on the tests' ranks: nothing is timed here."""

    def train(overrides, *_):
        world.command("train", *overrides, ranks=int(overrides[-1].rpartition("=")[2]))
        return ""

    def answer(line, **_):
        _, _, module, _, file = line
        return subprocess.CompletedProcess(line, 0, *world.call(1, answered, module, file), "")

    monkeypatch.setattr(gpu, "train_without_saving", train)
    monkeypatch.setattr(trl_common, "subprocess", SimpleNamespace(run=answer))


def test_a_gpu_benchmarks_run_ends_with_its_last_step_or_with_what_failed(tmp_path, monkeypatch):
    trainer = tmp_path / "trainer"
    monkeypatch.setattr(sys, "executable", str(trainer))
    trainer.write_text(
        f"#!/bin/sh\nmkdir {tmp_path}/run\nseq 3 > {tmp_path}/run/metrics.jsonl; sleep 900"
    )
    trainer.chmod(0o700)
    assert gpu.train_without_saving([], tmp_path, 3) == ""
    trainer.write_text("#!/bin/sh\necho started; echo CUDA out of memory >&2; echo; exit 1")
    assert gpu.train_without_saving([], tmp_path, 3) == "CUDA out of memory"
    trainer.write_text("#!/bin/sh\necho a reason >&2; exit 2")
    assert gpu.train_without_saving([], tmp_path, 3) == "a reason"


def answered(module, file):
    """Return what a process of a task prints, which no launcher has started."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    said = io.StringIO()
    with patch.object(os, "_exit"), contextlib.redirect_stdout(said):
        trl_common.answer_task(file, importlib.import_module(module).PROGRAMS)
    return said.getvalue()


def test_the_gpu_benchmark_runs_where_there_is_none_with_tiny_models(
    in_the_pool, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["gpu", "--small", "1", "--parts", "ceilings,sft"])
    gpu.main()
    said = capsys.readouterr().out
    assert '"tflops"' in said
    assert '"tokens_per_second"' in said
    assert '"mean_loss"' in said


@pytest.mark.parametrize("name", ["preferences", "rollouts"])
def test_what_is_compared_with_trl_runs_without_it_and_says_what_is_skipped(
    in_the_pool, enter, monkeypatch, capsys, name
):
    pytest.importorskip("transformers")
    enter(inject.without_package("trl"))
    words = ["--small", "1", "--ranks", "1", "--repeat", "1"]
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.setattr(train_step, "VOCABULARY", 1000)
    with patch.dict(train_step.SIZES):
        importlib.import_module(f"benchmarks.{name}").main()
    said = capsys.readouterr().out
    assert '"memory_mib"' in said
    assert "skipped: trl" in said


def test_what_several_gpus_would_show_runs_on_ranks_of_the_cpu(in_the_pool, world, tmp_path):
    rates = json.loads(world.call(2, rates_of_links)[0])
    assert all(rate["median"] > 0 for rate in rates.values())
    shared = gpu.run(tmp_path, "several", True, 64, [64] * 64, ["sharding.tensor=2"], 2, steps=4)
    assert shared["tokens_per_second"] > 0


def rates_of_links():
    """Return what a rank prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        gpu.print_link_speeds(small=True)
    return said.getvalue()


def test_what_torchruns_ranks_print_as_json_is_returned(tmp_path):
    line = """import json, os
for _ in range(300):
    print("as text", json.dumps(2), json.dumps({"a": os.environ["RANK"]}), sep="\\n")"""
    (tmp_path / "says.py").write_text(line)
    results = harness.run_ranks("says", 2, env={"PYTHONPATH": str(tmp_path)})
    assert sorted(each["a"] for each in results) == ["0"] * 300 + ["1"] * 300


def test_one_gpu_shows_nothing_of_layouts_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert gpu.several(tmp_path, small=False) == {
        "missing": "layouts need 2 GPUs or more, here is 1"
    }


def test_the_ladder_predicts_a_loss_that_follows_a_power_of_the_compute():
    rungs = [
        {"flops": flops, "validation_loss": 30 * flops**-0.05} for flops in (1e15, 4e16, 2e17, 1e18)
    ]
    assert ladder.predict(rungs) == pytest.approx(rungs[-1]["validation_loss"])
    assert ladder.predict(rungs[2:]) == pytest.approx(rungs[2]["validation_loss"])
