"""Benchmarks run, and tell a slower result from the stored one."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu, harness, ladder

ROOT = Path(__file__).parent.parent


def finish(compared, check):
    harness.finish("some", {"what": "a test"}, compared, check)


def test_a_result_is_stored_with_its_machine_and_compared_with_on_request(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    finish({"speed": harness.spread([1.5, 2.0, 2.2]), "memory": 3.0}, check=False)
    stored = json.loads((tmp_path / harness.machine()["kind"] / "some.json").read_text())
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
        with pytest.raises(SystemExit) as left:
            finish(compared, check=True)
        assert left.value.code == code
    said = capsys.readouterr().err
    assert "some: memory was 3, is 2.5" in said
    assert "some: speed was 2, is 1.5, 1.75 at best" in said
    assert json.loads((tmp_path / harness.machine()["kind"] / "some.json").read_text()) == stored


def test_a_check_without_a_stored_result_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    with pytest.raises(SystemExit, match="no stored result of this kind of machine"):
        finish({"speed": 2.0}, check=True)


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


@pytest.mark.slow
def test_the_gpu_benchmark_runs_where_there_is_none_with_tiny_models():
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "1", "--parts", "ceilings,sft"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stderr
    assert '"tokens_per_second"' in told.stdout
    assert '"mean_loss"' in told.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["preferences", "rollouts"])
def test_what_is_compared_with_trl_runs_without_it_and_says_what_is_skipped(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "1", "--ranks", "1"]
    done = subprocess.run(
        [*command, "--repeat", "1"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert '"memory_mib"' in done.stdout
    is_installed = importlib.util.find_spec("trl") is not None
    assert ("skipped: trl" in done.stdout) != is_installed


@pytest.mark.slow
def test_what_several_gpus_would_show_runs_on_ranks_of_the_cpu(tmp_path):
    [rates] = harness.run_ranks("benchmarks.gpu", 2, "--links", "1", "--small", "1")
    assert all(rate["median"] > 0 for rate in rates.values())
    shared = gpu.run(tmp_path, "several", True, 256, [256] * 64, ["sharding.tensor=2"], ranks=2)
    assert shared["tokens_per_second"] > 0


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
