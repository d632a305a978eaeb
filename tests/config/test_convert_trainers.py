"""Settings that mean another thing in each trainer: TRL's, and data sets of the other tools."""

import json
from io import StringIO
from pathlib import Path

import pytest
import yaml
from folders import table
from world import write_json

from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.interop.convert.converter import (
    convert,
    first_answers,
    read_back,
    recipe_text,
    settings_text,
)
from fsdp_trainer.interop.convert.foreign_file import read_foreign_file, read_source
from fsdp_trainer.interop.convert.translation import IMPOSSIBLE
from tests.config.test_convert import FILES
from tests.config.test_convert import sets_of as sets_of_recipe

CASES = table("config/convert_cases.yaml")


def converted(folder, settings, ranks=1, name="a.yaml"):
    """Answers to settings, before the recipe is composed."""
    file = folder / name
    is_text = isinstance(settings, str)
    file.write_text(settings if is_text else yaml.safe_dump(settings, sort_keys=False))
    return first_answers(read_foreign_file(file), ranks)


def sets_of(result):
    """Groups and keys that a recipe sets."""
    return sets_of_recipe(read_back(settings_text(result)))


GENERATIONS = CASES["generations"]
"""What trl 1.16's GRPOConfig and RepeatSampler do with these."""


@pytest.mark.parametrize("case", GENERATIONS)
def test_prompts_of_a_step_and_steps_of_a_generation_are_those_of_trl(case, tmp_path):
    micro, times, ranks, samples, more, prompts, updates = case
    settings = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": times,
                "num_generations": samples, "max_steps": 5, **more}  # fmt: skip
    result = converted(tmp_path, settings, ranks)
    sets = sets_of(result)
    assert sets.get("batch.rows") == prompts
    assert sets.get("objective.updates") == updates
    lost = {name for name in more if updates is None}
    lost |= {"per_device_train_batch_size"} if prompts is None else set()
    assert result.of_kind(IMPOSSIBLE).keys() == lost


def require(result, case, folder="FOLDER"):
    """Fail unless a recipe sets the keys of a case, besides others, and says what is lost."""
    done = json.loads(json.dumps(sets_of(result)).replace(str(folder), "FOLDER"))
    assert {key: done.get(key) for key in case["sets"]} == case["sets"]
    assert {n.rpartition("].")[2] for n in result.of_kind(IMPOSSIBLE)} == {*case["lost"]}
    return done


@pytest.mark.parametrize("name", CASES["trainers"])
def test_a_setting_means_what_its_own_trainer_means_by_it(name, tmp_path):
    case = CASES["trainers"][name]
    base = {} if "base_model" in case["settings"] else {"output_dir": "out"}
    done = require(converted(tmp_path, base | case["settings"]), case)
    if not case["sets"] and "beta" in case["settings"]:
        assert "objective.beta" not in done


def test_an_anchor_is_read_where_it_is_used(tmp_path):
    settings = "x: &b {weight_decay: 0.1}\noutput_dir: o\n<<: *b\nseed: 3\n"
    sets = {"optim.weight_decay": 0.1, "run.seed": 3}
    require(converted(tmp_path, settings), {"sets": sets, "lost": ["x.weight_decay"]})


def test_an_unknown_name_is_told_with_the_nearest_known_one(tmp_path):
    result = converted(tmp_path, {"output_dir": "out", "learning_rat": 1e-4, "xylophone": 1})
    assert "Is  learning_rate  meant?" in result.answers["learning_rat"].note
    assert "meant?" not in result.answers["xylophone"].note


@pytest.mark.parametrize("names", CASES["from_index"])
def test_data_sets_of_llama_factorys_index_are_read_as_it_says(names, tmp_path):
    case = CASES["from_index"][names]
    write_json(tmp_path / "dataset_info.json", CASES["index"])
    settings = {"dataset_dir": ".", "dataset": names, "mix_strategy": "concat"}
    settings |= {"stage": case["stage"]}
    settings |= {"eval_dataset": names} if "data.validation" in case["sets"] else {}
    require(converted(tmp_path, settings), case, tmp_path)


@pytest.mark.parametrize("name", CASES["axolotl"])
def test_data_sets_of_axolotls_list_are_read_as_it_says(name, tmp_path):
    case = CASES["axolotl"][name]
    settings = {key: case[key] for key in ("rl", "datasets") if key in case}
    require(converted(tmp_path, {"base_model": "m"} | settings), case)


@pytest.mark.parametrize("path", [{"data_files": []}, {"path": f"org/{'n' * 400}"}, [[]], None])
def test_an_odd_list_of_data_sets_stops_nothing(path, tmp_path):
    settings = {"base_model": "m", "datasets": [path, {"path": "a"}], "seed": 3}
    assert sets_of(converted(tmp_path, settings))["run.seed"] == 3
    named = {"model_name_or_path": "m", "finetuning_type": "lora", "dataset": "a", "seed": 3}
    named |= {"dataset_dir": "d" * 400}
    assert sets_of(converted(tmp_path, named))["run.seed"] == 3


def leaves(value, key=""):
    """Names and values of all leaves of a file, however deep."""
    if isinstance(value, dict) and value:
        yield from (leaf for inner, each in value.items() for leaf in leaves(each, inner))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for place, each in enumerate(value):
            yield from leaves(each, f"{key}[{place}]")
    else:
        yield key, value


ARGUMENTS = json.loads(FILES["arguments.json"]["content"])
CHAT = CASES["axolotl"]["chat"]["datasets"]
NESTED = {
    "axolotl.yml": yaml.safe_dump({"base_model": "m", "datasets": [*CHAT, {"path": "y", "a": [1]}],
                                   "trl": {"x": {"y": 5}}, "plugins": ["p.q"]}),
    "titan.yaml": "output_dir: o\noptimizer: {name: AdamW, lr: 1e-4, deep: {er: [x, {y: z}]}}\n",
    "grpo.json": json.dumps(ARGUMENTS | {"num_generations": 4, "generation_kwargs": {"k": 1}}),
}  # fmt: skip


@pytest.mark.parametrize("name", [*NESTED, *FILES])
def test_every_leaf_of_a_file_is_in_its_recipe(name, tmp_path):
    content = NESTED.get(name) or FILES[name]["content"]
    index = {"known": CASES["index"]["chats"], "other": CASES["index"]["kto"]}
    write_json(tmp_path / "dataset_info.json", index)
    result = converted(tmp_path, content, name=name)
    text = recipe_text(result)
    of_index = index.values() if "dataset: known" in content else []
    tree = json.loads(content) if name.endswith("json") else load_yaml(content)
    for key, value in leaves([tree, *of_index]):
        shown = yaml.safe_dump(value, default_flow_style=True, width=999).split("\n")[0]
        assert any(f"{key}: {shown}" in line for line in text.splitlines()), (key, value)


@pytest.mark.parametrize("trainer", ["grpo", "dpo"])
def test_defaults_that_trl_writes_out_are_all_possible(trainer, tmp_path):
    result = converted(tmp_path, CASES["defaults"]["all"] | CASES["defaults"][trainer])
    assert result.of_kind(IMPOSSIBLE) == {}
    assert sets_of(result)["optim.betas"] == [0.9, 0.999]


@pytest.mark.parametrize("name", CASES["lengths"])
def test_a_run_is_as_long_as_the_source_of_its_own_trainer_says(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = CASES["lengths"][name]
    rows = [{"instruction": f"{i}", "output": "x"} for i in range(100)]
    write_json(Path("a.json"), rows)
    write_json(Path("dataset_info.json"), {"mine": {"file_name": "a.json"}})
    result = converted(tmp_path, case["settings"], case.get("ranks", 1))
    require(result, case | {"lost": []}, tmp_path)
    result = convert(read_foreign_file(tmp_path / "a.yaml"), case.get("ranks", 1))
    unknown = "unknown until the data is read"
    for (_, there, here), number in zip(result.comparison()[1:], case["there"], strict=False):
        assert [there, here] == [unknown if number is None else str(number)] * 2


STARTED = CASES["command lines"]


@pytest.mark.parametrize("line, sets", STARTED)
def test_a_command_line_is_converted_with_the_files_that_it_names(
    line, sets, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("trl.yaml").write_text("output_dir: o\nseed: 3\n")
    Path("run.sh").write_text(line)
    monkeypatch.setattr("sys.stdin", StringIO(line))
    for source in (line, "run.sh", "-"):
        done = sets_of(first_answers(read_source(source), 1))
        assert {key: done.get(key) for key in sets} == sets
