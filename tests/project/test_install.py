"""Someone who installs a wheel has everything, in any folder."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import zipfile

import inject
import pytest
from folders import REPO

from fsdp_trainer.apps.quickstart import quickstart
from fsdp_trainer.base.process import arrived_signal
from fsdp_trainer.cli import main

USER = """
import fsdp_trainer
from fsdp_trainer.cli import main

print(fsdp_trainer.__file__)
assert main(["+recipe=quickstart", "train.steps=1", "launch.nproc_per_node=1"]) == 0
assert main(["report", "source=runs/quickstart"]) == 0
assert main(["-m", "+recipe=quickstart", "optim.lr=a,b"]) == 2
"""


def test_a_wheel_trains_a_recipe_from_any_folder(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=REPO, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "cwd").mkdir()
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}/site"}
    command = [sys.executable, "-c", USER]
    done = subprocess.run(command, cwd=tmp_path / "cwd", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/site/fsdp_trainer"), "not the checkout"
    run = tmp_path / "cwd/runs/quickstart"
    assert (run / "hf/model.safetensors").is_file()
    assert "The MIT License" in (run / "report.html").read_text(), done.stderr
    wrong = "optim.lr=a,b  must be a number"
    assert wrong in done.stderr, "Hydra finds the launcher of sweeps"


def test_the_quickstart_trains_and_asks_before_and_after(world, monkeypatch, tmp_path, capsys):
    def start_ranks(cfg, words):
        """Do what the launcher does, but for the processes."""
        assert cfg.launch.nproc_per_node == 2
        print(world.command("train", *words, ranks=2)[0].out)
        return 0

    monkeypatch.setattr(quickstart, "start_ranks", start_ranks)
    command = ["quickstart", f"root={tmp_path}", "steps=1", "questions=1"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "before training: 0 of 1" in said
    assert "after training:" in said
    assert "What to type next" in said
    assert main(command) == 0
    assert "already finished" in capsys.readouterr().out


WINDOWS = """
import signal, sys
sys.modules.update(fcntl=None, resource=None)
del signal.SIGUSR1, signal.SIGURG
sys.platform = "win32"
import fsdp_trainer.__main__
"""


def test_windows_is_told_where_it_runs_in_one_sentence():
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True)
    said = "fsdp-trainer runs on Linux and macOS. On Windows use it within WSL:  wsl --install\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, said, "")


def test_a_mac_trains_with_one_rank(train):
    how = "optim.offload=disk train.steps=2 schedule=constant"
    run = train("run", how, seam=inject.as_on_macos())
    assert run["loss"] == train("other", how)["loss"]


@pytest.mark.parametrize("system", [contextlib.nullcontext, inject.as_on_macos()])
def test_a_blocked_signal_is_waited_for(system):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    with system():
        assert arrived_signal(0.01) == ""
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert arrived_signal(10) == "SIGUSR1"
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
