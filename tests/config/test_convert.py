"""Other trainers' configuration files become recipes, and every setting in them is answered."""

from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from folders import table
from world import write_json

from fsdp_trainer.config.composing.compose import compose, options
from fsdp_trainer.errors import UserError
from fsdp_trainer.evaluation.environment_tasks import EnvironmentTask
from fsdp_trainer.interop.convert.converter import convert, recipe_text
from fsdp_trainer.interop.convert.foreign_file import read_foreign_file

FILES = table("config/convert_files.yaml")


def sets_of(recipe):
    """The groups and keys that a recipe sets, given as text or as a tree."""
    tree = yaml.safe_load(recipe) if isinstance(recipe, str) else recipe
    groups = {}
    for entry in tree.pop("defaults", []):
        ((group, option),) = entry.items()
        groups[group.removeprefix("override /")] = option
    return groups | {
        f"{node}.{key}": value for node, each in tree.items() for key, value in each.items()
    }


def line_after(text, start):
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"#   {start}"))
    return next(line for line in lines[at:] if line.startswith("#       "))


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_the_recipe_it_means_and_each_setting_has_a_line(name, tmp_path, program):
    case = FILES[name]
    (tmp_path / name).write_text(case["content"])
    known = {"known": {"file_name": "k.json"}, "other": {"hf_hub_url": "a/b"}}
    write_json(tmp_path / "dataset_info.json", known)
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    write_json(tmp_path / "ds_z2_offload.json", {"zero_optimization": zero})
    text = program("convert", tmp_path / name, "world_size=2")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    compose("train", [f"+recipe={recipe}"], inputs=False)
    assert sets_of(text.replace(str(tmp_path), "FOLDER")) == case["sets"]
    for setting in read_foreign_file(tmp_path / name).settings:
        assert f"{setting}: " in text, setting
    for setting, answer in case["said"].items():
        assert answer in line_after(text, setting), setting


def test_a_value_that_the_recipe_is_refused_for_is_told_and_left_out(tmp_path):
    file = tmp_path / "a.yml"
    file.write_text("base_model: a/b\nsequence_len: 4\nlearning_rate: -1\n")
    text = recipe_text(convert(read_foreign_file(file), 1))
    assert "batch.seq_len=4" in line_after(text, "sequence_len: 4")
    assert "optim.lr=-1" in line_after(text, "learning_rate: -1")
    assert sets_of(text)["model.init_from"] == "a/b"
    assert not {"batch.seq_len", "optim.lr"} & sets_of(text).keys()
    assert "recipe.own" not in options("train")["recipe"]  # the file with which it was tried


BOMB = "a: &a [x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n" for before, name in pairwise("abcdefgh")
)
TOO_MUCH = {
    "repeats": (BOMB, "aliases that repeat more than 10,000 values"),
    "itself": ("run: &a {name: *a}", "one that contains itself"),
    "deep": ("run: " + "[" * 200 + "]" * 200, "more than 100 lists and mappings within each other"),
    "chain": ("a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}]\n" for i in range(120)),
              "more than 100 lists and mappings within each other"),
    "control": ("run: {name: '\x07'}", "control characters are not allowed"),
    "typed": ("run: {name: !!int x}", "a value cannot be read"),
    "set": ("run: {name: !!set {a, b}}", "could not determine a constructor"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_yaml_that_is_too_much_is_refused_wherever_it_is_read(name, tmp_path, monkeypatch, program):
    """YAML is read as another trainer's file, as a recipe, in a folder of recipes, as a task.

    Each is one message.
    """
    content, reason = TOO_MUCH[name]
    monkeypatch.chdir(tmp_path)
    Path("own/model").mkdir(parents=True)
    for file in ("a.yaml", "own/model/mine.yaml"):
        Path(file).write_text(f"{content}\n")
    for line in ("convert a.yaml", "config a.yaml", "config --config-dir own model=mine"):
        assert reason in " ".join(program(line, code=2).split())
    with pytest.raises(UserError, match="a task cannot be run") as raised:
        EnvironmentTask.read("a.yaml")
    assert reason in str(raised.value)


REPEATED = "".join(f"    A{i + 1}: '{f'${{launch.env.A{i}}}' * 10}'\n" for i in range(9))
USED = "run: {name: '${launch.env.A9}'}\n"
INTERPOLATIONS = {
    "repeats": (f"    A0: x\n{REPEATED}{USED}", "of them refer to values with others"),
    "deep": (f"    A: '{'${a:' * 5000}{'}' * 5000}'\n", "a.yaml cannot be read: maximum recursion"),
}


@pytest.mark.parametrize("name", INTERPOLATIONS)
def test_interpolations_that_are_too_much_are_refused(name, tmp_path, monkeypatch, program):
    lines, reason = INTERPOLATIONS[name]
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(f"launch:\n  env:\n{lines}")
    for line in ("config a.yaml", "-m run.seed=1,2 a.yaml"):
        assert reason in " ".join(program(line, code=2).split())


def test_many_interpolations_of_short_values_are_read(tmp_path, monkeypatch, program):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINE", "runs")
    used = "".join(
        f"    A{i}: ${{run.root}}/{i}\n    B{i}: /{i}${{data.path}}\n" for i in range(100)
    )
    run = "run: {name: 2026-01-01, root: '${oc.env:MINE}'}\ndata: {path: null}"
    Path("a.yaml").write_text(f"{run}\nlaunch:\n  env:\n{used}")
    shown = program("config a.yaml")
    assert "2026-01-01" in shown
    assert "A99: ${run.root}/99" in shown
    assert "B99: /99None" in shown


def test_values_that_are_named_once_and_used_often_are_read(tmp_path):
    file = tmp_path / "a.yml"
    file.write_text("optimizer: &o adamw\nbase_model: a/b\nsequence_len: 64\nother: [*o, *o]\n")
    assert read_foreign_file(file).settings["other"] == ["adamw", "adamw"]


HOSTILE = table("config/convert_cases.yaml")["hostile"]


def test_no_name_and_no_value_adds_a_key_or_becomes_another(tmp_path, program):
    texts = {f"{i}{text}": text for i, text in enumerate(HOSTILE)}
    nested = {"datasets": [{"path": text, "type": text} for text in HOSTILE if text], "seed": 7}
    settings = {"base_model": HOSTILE[0], "sequence_len": 64, **texts, **nested}
    file = tmp_path / "a\nrun:\n  name: A.json"
    write_json(file, settings)
    text = program("convert", file)
    assert all(line.isprintable() for line in text.split("\n"))
    sets = sets_of(text)
    assert sets.pop("data.path") == [each["path"] for each in nested["datasets"]]
    write_json(file, {"base_model": HOSTILE[0], "sequence_len": 64, "seed": 7})
    assert sets == {"data.format": "auto"} | sets_of(
        recipe_text(convert(read_foreign_file(file), 1))
    )


def test_a_value_that_stands_for_another_is_not_kept(tmp_path, program):
    file = tmp_path / "a.yml"
    file.write_text("base_model: a/b\nsequence_len: 64\noutput_dir: ${oc.env:HOME}\n")
    text = program("convert", f"source={file}")
    assert "run.root" not in sets_of(text)
    assert "${…}" in line_after(text, "output_dir")


def test_files_that_trl_ships_are_converted_whole():
    trl = pytest.importorskip("trl")
    files = sorted((Path(trl.__file__).parent / "accelerate_configs").glob("*.yaml"))
    assert files
    for path in files:
        file = read_foreign_file(path)
        result = convert(file, 1)
        assert result.answers.keys() == file.settings.keys()
        assert result.open == []
