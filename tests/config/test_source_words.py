"""A path that exists takes the place of `source=`: `report runs/a runs/b`."""

import json

import pytest
import yaml

from fsdp_trainer import cli
from fsdp_trainer.config.verbs import PRIMARY

VERBS = [verb for verb, config in PRIMARY.items() if "source" in config.__dataclass_fields__]


@pytest.fixture
def composed(tmp_path, monkeypatch, capsys):
    """Return a function that returns the configuration of a command line, given in a folder.

    The folder holds two runs and a job of a sweep.
    """
    for run in ("a", "b c", "sweep/optim.lr=0.1,seed=2"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def compose(*words: str) -> dict:
        assert cli.main([*words, "--cfg", "job"]) == 0, capsys.readouterr().err
        return yaml.safe_load(capsys.readouterr().out)

    return compose


@pytest.fixture
def refused(composed, capsys):
    """Return a function that returns the message to a command line that is refused."""

    def refuse(*words: str) -> str:
        assert cli.main([*words]) == 2
        return capsys.readouterr().err

    return refuse


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("path", ["runs/a", "./runs/b c", "runs/sweep/optim.lr=0.1,seed=2"])
def test_a_path_is_what_source_names(composed, verb, path):
    source = composed(verb, path)["source"]
    assert source == ([path] if verb == "report" else path)


def test_report_takes_several_paths_among_its_settings(composed):
    cfg = composed("report", "runs/a", "format=json", "runs/b c", "out=x.html")
    assert cfg == composed("report", "source=[runs/a,'runs/b c']", "format=json", "out=x.html")


def test_a_path_that_is_one_too_many_is_refused_with_what_to_type(refused):
    assert "fsdp-trainer chat runs/a port=1" in refused("chat", "runs/a", "runs/b c", "port=1")
    assert "given twice" in refused("report", "runs/a", "source=runs/b")


def test_a_path_that_does_not_exist_is_told_as_one_problem(refused):
    said = refused("chat", "runs/mien")
    assert "a problem in the configuration" in said
    assert "there is no such file or folder" in said


def test_training_takes_no_path(refused):
    assert "is neither a verb nor key=value" in refused("train", "runs/a")


@pytest.mark.slow
def test_a_run_is_reported_on_by_its_path(train, monkeypatch, capsys):
    run = train("run", "train.steps=1")
    monkeypatch.chdir(run.folder.parent)
    assert cli.main(["report", run.folder.name, "format=json"]) == 0
    assert json.loads(capsys.readouterr().out)
