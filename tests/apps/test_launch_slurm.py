"""hydra/launcher=slurm, through the real submitit, over commands that stand for Slurm's
(fake_slurm.py)."""

import os
import signal
import subprocess
import sys

import fake_slurm
import inject
import pytest
from forked import Forked
from world import SMALL, Run, read_lines, wait_until

from fsdp_trainer.apps.sweep import slurm
from fsdp_trainer.apps.sweep.jobs import JobToStart
from fsdp_trainer.apps.sweep.slurm import OnSlurm, Training
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.sweep_keys import Slurm

DEMO = [
    "model=tiny", "data.path=demo:backwards", "tokenizer.path=demo:bytes", "run.name=s",
    "hydra/launcher=slurm",
]  # fmt: skip


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


def test_jobs_that_wait_are_counted_found_again_and_cancelled(place, cluster, tmp_path):
    (cluster / "hold").touch()
    output = tmp_path / "runs/s/jobs/a/output.log"
    place.start(JobToStart(None, ["--version"], output))
    process = OnSlurm(place.settings, None).start(JobToStart(None, ["--version"], output))
    assert list(fake_slurm.states(cluster).values()) == ["PENDING"], "not submitted twice"
    assert place.has_room(None)
    place.start(JobToStart(None, ["--version"], tmp_path / "runs/s/jobs/b/output.log"))
    assert not place.has_room(None)
    process.signal(signal.SIGTERM)
    # no result is waited for
    assert fake_slurm.states(cluster) == {process.id: "CANCELLED", "1001": "PENDING"}
    assert process.poll() == 1
    again = OnSlurm(place.settings, None).start(JobToStart(None, ["--version"], output))
    assert again.id == "1002", "what was cancelled is submitted again"
    for job in (again.id, "1001"):
        subprocess.run(["scancel", job], check=True)


@pytest.mark.parametrize("signum, queued", [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_a_run_is_queued_again_when_its_time_is_up_and_not_when_somebody_ends_it(
    tmp_path, enter, monkeypatch, signum, queued
):
    """SIGUSR1 comes from Slurm, SIGTERM from the sweep."""
    commands = []
    ready = tmp_path / "up"
    run = (
        f"import signal, time; signal.signal({int(signum)}, lambda *_: exit(75)); "
        f"open('{ready}', 'w'); signal.pthread_sigmask(1, {{10, 15}}); time.sleep(60)"
    )
    send = f"while ! test -e {ready}; do sleep 0.01; done; kill -{int(signum)} {os.getpid()}"
    popen = subprocess.Popen

    def start(words, **options):
        return popen([sys.executable, "-c", run], **options)

    def done(words, check):
        commands.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(slurm.subprocess, "Popen", start)
    monkeypatch.setattr(slurm.subprocess, "run", done)
    enter(inject.setting("slurm_requeue_seconds", 0))
    for name, value in {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}.items():
        monkeypatch.setenv(name, value)
    before = {number: signal.getsignal(number) for number in slurm.SIGNALS}
    sender = popen(["bash", "-c", send])
    try:
        if queued:
            with pytest.raises(SystemExit, match="75"):
                Training([], f"{tmp_path}/log", True)()
        else:
            assert Training([], f"{tmp_path}/log", True)() == 75
    finally:
        sender.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert commands == ([["scontrol", "requeue", "7"]] if queued else [])


def test_a_dry_run_prints_the_script_and_submits_nothing(cluster, program):
    settings = [
        "nodes=2", "gpus_per_node=4", "timeout_min=90", "partition=gpu", "mem_gb=64", "qos=high",
        "setup=['module load cuda']", "additional_parameters={exclude: node7}", "dry_run=true",
    ]  # fmt: skip
    words = [f"hydra.launcher.{setting}" for setting in settings]
    said = program("-m", *DEMO, "optim.lr=1e-3,2e-3", *words)
    for option in (
        "nodes=2", "ntasks-per-node=1", "gpus-per-node=4", "time=90", "partition=gpu",
        "mem=65536M", "cpus-per-task=48", "qos=high", "exclude=node7",
    ):  # fmt: skip
        assert f"\n#SBATCH --{option}\n" in said
    for line in ("#SBATCH --requeue", "#SBATCH --signal=USR1@600", "module load cuda", "srun "):
        assert f"\n{line}" in said
    assert "optim.lr=0.001" in said
    assert not fake_slurm.states(cluster)


def test_without_slurm_or_submitit_the_search_says_what_is_missing(
    program, monkeypatch, tmp_path, enter
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    search = ["-m", *DEMO, "optim.lr=1e-3,2e-3"]
    assert "no sbatch" in program(*search, code=2)
    enter(inject.around("sweep_extra", lambda find, name: name != "submitit" and find(name)))
    assert "pip install 'fsdp_trainer[slurm]'" in program(*search, code=2)


def test_a_sweep_that_was_killed_finds_its_job_again_and_stops_it_in_order(
    cluster, input_words, tmp_path
):
    words = [*SMALL, *input_words, *DEMO[-2:]]
    words += ["train.steps=100000", "optim.lr=1e-3", "hydra.launcher.gpus_per_node=0"]
    place = tmp_path / "runs/s"

    def sweep(log):
        command = [sys.executable, "-m", "fsdp_trainer", "-m", *words]
        return Forked(command, tmp_path / log)

    first = sweep("first")
    wait_until(lambda: list((place / "slurm").glob("*/job_id")), first)
    first.kill()
    first.wait()
    second = sweep("second")
    (file,) = wait_until(lambda: list((place / "jobs").glob("*/metrics.jsonl")), second)
    run = Run(file.parent)
    second.send_signal(signal.SIGTERM)
    assert second.wait() == 75, second.said
    assert "found again: Slurm job 1000" in second.said
    assert [line["state"] for line in read_lines(place / "sweep.jsonl")] == ["stopped"]
    assert [event["reason"] for event in run.event("end")] == ["SIGTERM"]
    assert "the same command resumes" in (run.folder / "output.log").read_text()
    assert fake_slurm.states(cluster).keys() == {"1000"}
