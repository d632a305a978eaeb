"""hydra/launcher=slurm, through the real submitit, over commands that stand for Slurm's
(fake_slurm.py)."""

import os
import signal
import subprocess
import sys
import time

import fake_slurm
import inject
import pytest
from world import SMALL, Run, read_lines, wait_until

from fsdp_trainer.apps.sweep import slurm
from fsdp_trainer.apps.sweep.slurm import OnSlurm, Training
from fsdp_trainer.cli import main
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.sweep_keys import Slurm

DEMO = [
    "model=tiny",
    "data.path=demo:backwards",
    "tokenizer.path=demo:bytes",
    "run.name=s",
    "hydra/launcher=slurm",
]


@pytest.fixture
def cluster(tmp_path, enter, monkeypatch):
    """A Slurm; the folder of its queue."""
    monkeypatch.chdir(tmp_path)
    for name, value in fake_slurm.install(tmp_path / "queue").items():
        monkeypatch.setenv(name, value)
    enter(inject.setting("slurm_look_seconds", 0.05))
    return tmp_path / "queue"


@pytest.fixture
def place(cluster):
    """A Slurm that takes jobs."""
    return OnSlurm(Slurm(gpus_per_node=0, jobs=2), compose("train", DEMO[:-1]).launch)


def ended(job):
    deadline = time.monotonic() + 300
    while (code := job.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return code


@pytest.mark.slow
def test_a_job_gives_its_exit_code_and_prints_into_its_folder(place, tmp_path):
    output = tmp_path / "runs/s/jobs/a/output.log"
    assert ended(place.start(None, ["optim.lrr=1"], output)) == 2
    assert "optim.lr=1" in output.read_text()


@pytest.mark.slow
def test_jobs_that_wait_are_counted_found_again_and_cancelled(place, cluster, tmp_path):
    (cluster / "hold").touch()
    output = tmp_path / "runs/s/jobs/a/output.log"
    place.start(None, ["--version"], output)
    process = OnSlurm(place.settings, None).start(None, ["--version"], output)
    assert list(fake_slurm.states(cluster).values()) == ["PENDING"], "not submitted twice"
    assert place.has_room(None)
    place.start(None, ["--version"], tmp_path / "runs/s/jobs/b/output.log")
    assert not place.has_room(None)
    process.signal(signal.SIGTERM)
    assert fake_slurm.states(cluster) == {process.id: "CANCELLED", "1001": "PENDING"}, (
        "no result is waited for"
    )
    assert process.poll() == 1
    again = OnSlurm(place.settings, None).start(None, ["--version"], output)
    assert again.id == "1002", "what was cancelled is submitted again"
    for job in (again.id, "1001"):
        subprocess.run(["scancel", job], check=True)


@pytest.mark.parametrize(("signum", "queued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_run_is_queued_again_when_its_time_is_up_and_not_when_somebody_ends_it(
    tmp_path, enter, monkeypatch, signum, queued
):
    """SIGUSR1 comes from Slurm, SIGTERM from the sweep."""
    commands = []
    run = (
        f"import signal, time; signal.signal({int(signum)}, lambda *_: exit(75)); "
        f"open('{tmp_path}/up', 'w'); signal.pthread_sigmask(1, {{10, 15}}); time.sleep(60)"
    )
    popen = subprocess.Popen

    def start(words, **options):
        return popen([sys.executable, "-c", run], **options)

    monkeypatch.setattr(slurm.subprocess, "Popen", start)
    monkeypatch.setattr(
        slurm.subprocess,
        "run",
        lambda words, check: commands.append(words) or subprocess.CompletedProcess(words, 0),
    )
    enter(inject.setting("slurm_requeue_seconds", 0))
    for name, value in {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    before = {number: signal.getsignal(number) for number in slurm.SIGNALS}
    sender = popen(
        [
            sys.executable,
            "-c",
            (
                f"import os, time\nwhile not os.path.exists('{tmp_path}/up'): "
                f"time.sleep(.01)\nos.kill({os.getpid()}, {int(signum)})"
            ),
        ]
    )
    try:
        if queued:
            with pytest.raises(SystemExit, match="75"):
                Training([], str(tmp_path / "log"), True)()
        else:
            assert Training([], str(tmp_path / "log"), True)() == 75
    finally:
        sender.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert commands == ([["scontrol", "requeue", "7"]] if queued else [])


@pytest.mark.slow
def test_a_dry_run_prints_the_script_and_submits_nothing(cluster, capsys):
    expected = {
        "nodes": 2,
        "gpus_per_node": 4,
        "timeout_min": 90,
        "partition": "gpu",
        "mem_gb": 64,
        "qos": "high",
    }
    words = [f"hydra.launcher.{name}={value}" for name, value in expected.items()]
    more = [
        "hydra.launcher.setup=['module load cuda']",
        "hydra.launcher.additional_parameters={exclude: node7}",
    ]
    assert (
        main(["-m", *DEMO, "optim.lr=1e-3,2e-3", "hydra.launcher.dry_run=true", *words, *more]) == 0
    )
    said = capsys.readouterr().out
    for line in (
        "nodes=2",
        "ntasks-per-node=1",
        "gpus-per-node=4",
        "time=90",
        "partition=gpu",
        "mem=65536M",
        "cpus-per-task=48",
        "qos=high",
    ):
        assert f"#SBATCH --{line}\n" in said
    for line in (
        "#SBATCH --requeue",
        "#SBATCH --signal=USR1@600",
        "#SBATCH --exclude=node7",
        "module load cuda",
        "srun ",
    ):
        assert f"\n{line}" in said
    assert "optim.lr=0.001" in said
    assert not fake_slurm.states(cluster)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["hydra.launcher.partion=gpu"], "hydra.launcher.partition=gpu"),
        (["hydra.launcher.array_parallelism=4"], "hydra.launcher.jobs=2"),
        (["hydra.launcher.nodes=0"], "at least 1"),
        (["hydra.launcher.timeout_min=soon"], "a whole number"),
        ([], "no sbatch"),
    ],
)
def test_what_is_wrong_is_told(capsys, monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert main(["-m", *DEMO, "optim.lr=1e-3,2e-3", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_submitit_the_line_to_type_is_told(capsys, enter):
    enter(
        inject.around("sweep_extra", lambda find, name: None if name == "submitit" else find(name))
    )
    assert main(["-m", *DEMO, "optim.lr=1e-3,2e-3"]) == 2
    assert "pip install 'fsdp_trainer[slurm]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.further
def test_a_sweep_that_was_killed_finds_its_job_again_which_is_queued_again_when_its_time_is_up(
    cluster, inputs, tmp_path
):
    words = [
        *SMALL,
        *(f"{k}={v}" for k, v in inputs.items()),
        "run.name=s",
        "train.steps=100000",
        "optim.lr=1e-3",
        *DEMO[-1:],
    ]
    command = [sys.executable, "-m", "fsdp_trainer", "-m", *words, "hydra.launcher.gpus_per_node=0"]

    def sweep():
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    first = sweep()
    wait_until(lambda: list((tmp_path / "runs/s/slurm").glob("*/job_id")), first)
    first.kill()
    first.communicate()
    second = sweep()
    run = Run(
        wait_until(lambda: list((tmp_path / "runs/s/jobs").glob("*/metrics.jsonl")), second)[
            0
        ].parent
    )
    for pid in (cluster / "1000.tasks").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)
    wait_until(lambda: run.event("resume"), second)
    second.terminate()
    out, _ = second.communicate(timeout=600)
    assert second.returncode == 75, out
    assert "found again: Slurm job 1000" in out, out
    assert (cluster / "requeued").read_text() == "1000\n", out
    assert [line["state"] for line in read_lines(tmp_path / "runs/s/sweep.jsonl")] == ["stopped"]
    assert [event["reason"] for event in run.event("end")] == [
        "SIGUSR1",
        "SIGTERM",
    ]
    assert fake_slurm.states(cluster).keys() == {"1000"}
