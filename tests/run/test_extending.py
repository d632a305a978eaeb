"""A user's own code may extend a run, from the command line and from Python."""

import json
import os
import re
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from folders import REPO
from world import SMALL, read_json, read_lines

import fsdp_trainer
from fsdp_trainer import extensions
from fsdp_trainer.api import as_words
from fsdp_trainer.cli import main
from fsdp_trainer.errors import UserError
from fsdp_trainer.rl.environments.known_environments import find_environment
from fsdp_trainer.rl.rewards.reward import Attempt
from fsdp_trainer.rl.rewards.table import make_rewards

EXAMPLES = REPO / "examples" / "extend"


@pytest.fixture(autouse=True)
def nothing_registered_afterwards(monkeypatch):
    monkeypatch.setenv(extensions.IMPORTS, "")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES}:{os.environ.get('PYTHONPATH', '')}")
    before = {kind: dict(names) for kind, names in extensions.KINDS.items()}
    yield
    for kind, names in extensions.KINDS.items():
        names.clear()
        names.update(before[kind])
    for name in ("callback", "metric", "objective", "reward", "tracker"):
        sys.modules.pop(name, None)


@pytest.fixture
def words(input_words, tmp_path):
    place = [f"run.root={tmp_path}", "run.name=run", "launch.nproc_per_node=1"]
    return [*SMALL, *input_words, *place, "train.steps=2", "launch.device=cpu"]


def test_callbacks_see_steps_figures_validations_checkpoints_and_the_end(words, tmp_path):
    result = fsdp_trainer.train([*words, "data.validation=0.1"], imports=["callback"])
    assert result == result.exit_code == 0
    assert result.folder == tmp_path / "run"
    assert result.history == read_lines(tmp_path / "run" / "metrics.jsonl")
    assert result.metrics == result.history[-1]
    diary = (tmp_path / "run" / "diary.txt").read_text().splitlines()
    assert diary[0] == "run starts, world size 1"
    assert [line for line in diary if line.startswith("step")] == ["step 1", "step 2"]
    assert sum(line.startswith("loss of step") for line in diary) == 2
    assert sum(line.startswith("validation after") for line in diary) == 2  # and before the first
    assert "checkpoint step-00000002" in diary
    assert diary[-1] == "finished, exit code 0"


def test_a_metric_and_an_objective_of_ones_own_are_in_every_line(words, tmp_path, program):
    modules = ["--import", "metric", "--import", "objective"]
    program(*modules, *words, "objective.name=focal")
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(0 <= line["confident_share"] <= 1 for line in lines)
    assert all(line["own_metrics"] == ["confident_share"] for line in lines)
    assert all(0 < line["objective"] < line["loss"] for line in lines)


def test_an_object_as_a_callback_is_called_in_one_rank_alone(words):
    done = []

    class Steps(fsdp_trainer.Callback):
        def step(self, run, step):
            done.append(step)

    assert fsdp_trainer.train(words, callbacks=[Steps()]) == 0
    assert done == [1, 2]
    assert not extensions.CALLBACKS
    with pytest.raises(UserError, match="would not be called"):
        fsdp_trainer.train([*words, "launch.nproc_per_node=2"], callbacks=[Steps()])
    with pytest.raises(UserError, match="cannot be called"):
        fsdp_trainer.train([*words, "run.name=other"], callbacks=[print])


def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    display = types.SimpleNamespace(clear_output=lambda wait: None)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    cells = read_json(REPO / "examples/notebook.ipynb")["cells"]
    names = {}
    hook = sys.excepthook
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]).replace("steps = 300", "steps = 3"), names)
    printed = capsys.readouterr().out
    assert "after 2," in printed  # tokens
    assert float(re.search(r"largest difference of logits (\S+)", printed)[1]) < 1e-4
    assert "adapted" in names
    assert sys.excepthook is hook  # torch's names the rank in every line of a traceback


def test_overrides_are_a_list_a_line_or_a_dictionary():
    expected = ["+recipe=quickstart", "train.steps=3", "run.name='a b'", "data.path=[a,b]"]
    line = "+recipe=quickstart train.steps=3 \"run.name='a b'\" data.path=[a,b]"
    assert as_words(expected) == as_words(line) == expected
    tree = {
        "+recipe": "quickstart",
        "train": {"steps": 3},
        "run.name": "a b",
        "data.path": ["a", "b"],
    }
    assert as_words(tree) == expected
    others = {"a.b": None, "c": True, "d.e": {"x": 1}}
    assert as_words(others) == ["a.b=null", "c=true", "d.e={x:1}"]


def test_the_package_shows_what_there_is():
    names = [name for name in dir(fsdp_trainer) if not name.startswith("_")]
    assert {"Callback", "RunInfo", "TrackedRun", "Tracker", "load_model", "register", "train"} == {
        *names
    }
    assert all(hasattr(fsdp_trainer, name) for name in names)


def test_what_is_not_in_a_file_or_not_installed_is_told(words, program):
    trackers = f"logging.trackers=[{EXAMPLES}/tracker.py:X]"
    for typed, said in {
        trackers: "It has: csv fsdp_trainer Table",
        f"optim.name={EXAMPLES}/spectral.py:X": "It has: torch",
        f"optim.name={EXAMPLES}/tickets.py:conversation": "is no OptimizerSpec",
        "logging.comet=offline": "pip install 'fsdp_trainer[comet]'",
    }.items():
        assert said in program(*words, typed, code=2)
    assert "--import no_such_module" in program(*words, "--import", "no_such_module", code=2)


def test_a_name_is_registered_once():
    fsdp_trainer.register("metric", "mine", object)
    with pytest.raises(UserError, match="already in use"):
        fsdp_trainer.register("metric", "mine", object)
    with pytest.raises(UserError, match="already in use"):
        fsdp_trainer.register("objective", "sft", object)
    with pytest.raises(UserError, match="kind"):
        fsdp_trainer.register("kernel", "mine", object)


def test_parts_of_an_installed_wheel_are_chosen_by_name(words, tmp_path, monkeypatch, capsys):
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    shutil.copytree(EXAMPLES, source := tmp_path / "source")
    built = ["wheel", str(source), "-w", str(tmp_path), "--no-build-isolation"]
    subprocess.run([*pip, *built, "--no-deps", "--no-index"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    place = ["install", str(wheel), "--target", str(tmp_path / "site")]
    subprocess.run([*pip, *place, "--no-deps", "--no-index"], check=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (empty := tmp_path / "empty").mkdir()
    monkeypatch.chdir(empty)
    assert not main(["train", "--help", "optim.name"])
    assert "Yours: spectral" in " ".join(capsys.readouterr().out.split())
    assert not main(["--help"])
    assert "  largest      (yours)" in capsys.readouterr().out
    notes = [{"by": "staff", "text": "Switch it on."}]
    ticket = json.dumps({"subject": "No light", "body": "It is dark.", "notes": notes})
    (empty / "tickets.jsonl").write_text(4 * f"{ticket}\n")
    own = ["data.path=tickets.jsonl", "data.format=tickets", "optim.name=spectral"]
    assert main(["plan", *words, *own, "plan.gpu=h100"]) == 0
    assert main([*words, *own, "logging.trackers=[table]"]) == 0
    assert main([*words, *own, "logging.trackers=[table]", "train.steps=3"]) == 0  # resumes
    rows = (tmp_path / "run" / "run.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["1", "2", "3"]
    assert main(["export", str(tmp_path / "run"), "out=exported", "form=numpy"]) == 0
    assert "model.norm.weight" in np.load(empty / "exported" / "weights.npz")
    assert main([*words, "objective=grpo", "objective.environment=agian"]) == 2
    assert "Did you mean  again" in capsys.readouterr().err
    assert find_environment({"name": "again", "tries": 1}).make().tries == 1
    for name in ("says", f"{EXAMPLES}/reward.py:says"):
        [reward] = make_rewards([{"name": name, "word": "because"}])
        assert reward.title == "says"
        assert reward.score([Attempt("?", "just because", {}), Attempt("?", "so", {})]) == [1, 0]
    np.arange(900, dtype="<u2").clip(0, 60).tofile(empty / "a.tok")
    named = ["data.path=a.tok", "data.too_long=split", "model.family=squared", "run.name=named"]
    assert main([*words, *named, "data.template=simple", "data.validation=null"]) == 0
    assert main(["export", str(tmp_path / "named"), "out=other"]) == 0
    assert main(["largest", "folder=other", "count=1"]) == 0
    assert capsys.readouterr().out.endswith("model.embed_tokens.weight\n")
    config = read_json(empty / "other" / "config.json")
    assert (config["model_type"], config["hidden_act"]) == ("squared", "squared_relu")
    template = (empty / "other" / "chat_template.jinja").read_text()
    assert "needs" not in template
    assert "message['role'] + ': '" in template


OWN_VERB = """
from dataclasses import dataclass
from fsdp_trainer.config.keys import key
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import Verb

@dataclass
class Rates(TrainConfig):
    \"\"\"Prints the learning rate of a run some times.\"\"\"

    times: int = key(2, "how often", minimum=1)

def show(cfg, words):
    print(*[cfg.optim.lr] * cfg.times, *words)
    return 3

rates = Verb(Rates, show, ("words",))
train = Verb(Rates, show)
"""


def test_a_verb_in_a_file_has_help_and_trainings_keys_and_its_exit_code(tmp_path, program):
    (file := tmp_path / "own.py").write_text(OWN_VERB)
    verb = f"{file}:rates"
    program(verb, "+recipe=quickstart", "times=3", "optim.lr=0.5", code=3)
    assert program.out == "0.5 0.5 0.5 +recipe=quickstart times=3 optim.lr=0.5\n"
    assert "times=2  how often [at least 1]" in program(verb, "--help")
    assert "must be at least 1" in program(verb, "times=0", code=2)
    assert "there is a verb train" in program(f"{file}:train", code=2)
    assert "there is no such verb" in program("rates", code=2)


def test_a_program_and_a_tracker_get_every_line(words, tmp_path, program):
    copy = f"logging.command=tee {tmp_path / 'copy.jsonl'}"
    program(*words, copy, f"logging.trackers=[{EXAMPLES}/tracker.py:Table]")
    table = (tmp_path / "run" / "run.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in table[1:]] == ["1", "2"]
    lines = read_lines(tmp_path / "copy.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert "checkpoint" in [line.get("event") for line in lines]


def test_a_program_or_tracker_that_fails_stops_no_run(words, tmp_path, capfd):
    (tmp_path / "mine.py").write_text(
        "import fsdp_trainer\nclass Mine(fsdp_trainer.Tracker):\n    def log(*_): 1 / 0\n"
    )
    own = f"logging.trackers=[{tmp_path}/mine.py:Mine]"
    assert main([*words, "logging.command=cat /no/such/file", own]) == 0
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 2
    said = capfd.readouterr().out
    assert "command" in said
    assert said.count("Mine: division by zero") == 1
