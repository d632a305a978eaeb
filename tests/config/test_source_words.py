"""A path that exists takes the place of `source=`: `report runs/a runs/b`."""

import json

import pytest
import yaml

from fsdp_trainer.config.verbs import PRIMARY

VERBS = [verb for verb, config in PRIMARY.items() if "source" in config.__dataclass_fields__]


@pytest.fixture
def composed(tmp_path, monkeypatch, program):
    """Return a function that returns the configuration of a command line, given in a folder.

    The folder holds two runs and a job of a sweep.
    """
    for run in ("a", "b c", "sweep/optim.lr=0.1,seed=2"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    return lambda *words: yaml.safe_load(program(*words, "--cfg", "job"))


@pytest.mark.parametrize("verb", VERBS)
def test_a_path_is_what_source_names(composed, verb):
    for path in ("runs/a", "./runs/b c", "runs/sweep/optim.lr=0.1,seed=2"):
        assert composed(verb, path)["source"] == ([path] if verb == "report" else path)


def test_report_takes_several_paths_among_its_settings(composed):
    cfg = composed("report", "runs/a", "format=json", "runs/b c", "out=x.html")
    assert cfg == composed("report", "source=[runs/a,'runs/b c']", "format=json", "out=x.html")


def test_a_run_is_reported_on_by_its_path(ledger, monkeypatch, program):
    folder = ledger.run("plain").folder
    monkeypatch.chdir(folder.parent)
    assert json.loads(program("report", folder.name, "format=json"))
