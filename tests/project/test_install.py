"""Someone who installs a wheel has everything, in any folder."""

import os
import subprocess
import sys

import pytest
from folders import REPO

from fsdp_trainer.apps.quickstart import quickstart
from fsdp_trainer.cli import main


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel's content, and an environment in which it, and not the checkout, is
    fsdp_trainer."""
    built, target = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built],
        cwd=REPO,
        check=True,
        capture_output=True,
    )
    (wheel,) = built.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        target,
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": str(target)}


@pytest.mark.slow
@pytest.mark.further
def test_a_wheel_trains_a_recipe_from_any_folder(installed, tmp_path):
    command = [
        sys.executable,
        "-m",
        "fsdp_trainer",
        "+recipe=quickstart",
        "train.steps=1",
        "batch.rows=2",
        "launch.nproc_per_node=1",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/quickstart/hf/model.safetensors").is_file()
    reported = subprocess.run(
        [*command[:3], "report", "source=runs/quickstart"],
        cwd=tmp_path,
        env=installed,
        capture_output=True,
        text=True,
    )
    assert reported.returncode == 0, reported.stderr
    assert "The MIT License" in (tmp_path / "runs/quickstart/report.html").read_text(), (
        reported.stderr
    )
    swept = subprocess.run(
        [*command[:3], "-m", "+recipe=quickstart", "optim.lr=a,b"],
        cwd=tmp_path,
        env=installed,
        capture_output=True,
        text=True,
    )
    assert swept.returncode == 2
    assert "optim.lr=a,b  must be a number" in swept.stderr, "Hydra finds the launcher of sweeps"
    where = [sys.executable, "-c", "import fsdp_trainer; print(fsdp_trainer.__file__)"]
    assert (
        str(REPO)
        not in subprocess.run(
            where, cwd=tmp_path, env=installed, capture_output=True, text=True
        ).stdout
    )


@pytest.mark.slow
def test_the_quickstart_trains_and_asks_before_and_after(world, monkeypatch, tmp_path, capsys):
    def start_ranks(cfg, words):
        """Do what the launcher does, but for the processes."""
        assert cfg.launch.nproc_per_node == 2
        print(world.command("train", *words, ranks=2)[0].out)
        return 0

    monkeypatch.setattr(quickstart, "start_ranks", start_ranks)
    command = ["quickstart", f"root={tmp_path}", "steps=2", "questions=2"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "before training: 0 of 2" in said
    assert "after training:" in said
    assert "What to type next" in said
    assert main(command) == 0
    assert "already finished" in capsys.readouterr().out
