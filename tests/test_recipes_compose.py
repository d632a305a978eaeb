"""What every recipe promises, without training it."""

import pytest
import yaml

from fsdp_trainer.config.compose import CONF, compose, options
from fsdp_trainer.config.document import recipe_heads
from fsdp_trainer.config.schema import SELECTORS
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.resolve import resolve_model

RECIPES = options("train")["recipe"]
SHRUNK = [
    "model=tiny",
    "model.init_from=null",
    "data.path=demo:backwards",
    "tokenizer.path=demo:bytes",
    "batch.seq_len=128",
    "train.steps=2",
]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_as_it_is_and_shrunk(name):
    assert compose("train", [f"+recipe={name}"], inputs=False).run.name == name
    cfg = compose("train", [f"+recipe={name}", *SHRUNK])
    assert cfg.train.steps == 2 and cfg.model.name == "tiny"


def test_a_stage_of_the_chain_before_its_time_says_which_run_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # there is no runs/ yet, and runs/chain_mid must not be looked for on the hub
    with pytest.raises(UserError) as refused:
        compose("train", ["+recipe=chain_sft", "data.path=demo:backwards"])
    (problem,) = refused.value.problems
    assert problem.what == "model.init_from=runs/chain_mid" and "no such folder" in problem.why


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_line_chooses_groups_against_any_recipe(name):
    cfg = compose(
        "train",
        [f"+recipe={name}", "sharding=ddp", "precision=fp32", "activation_checkpoint=none", "model=auto", "schedule=wsd"],
        inputs=False,
    )
    assert (cfg.sharding.strategy, cfg.precision.param_dtype, cfg.activation_checkpoint.mode) == ("ddp", "float32", "none")
    assert (cfg.model.name, cfg.schedule.name) == ("auto", "wsd")


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_sets_a_selector_in_its_body(name):
    body = yaml.safe_load((CONF / "recipe" / f"{name}.yaml").read_text())
    assert not [group for group, selector in SELECTORS.items() if selector in (body.get(group) or {})]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_does_on_what_and_how_to_start_it(name):
    head = recipe_heads()[name]
    assert head.does.endswith(".") and "not said" not in head.hardware and f"+recipe={name}" in head.start


# Published parameter counts (model cards): a wrong number in conf/model would show here.
PUBLISHED = {
    "llama2_7b": (32_000, 6_738_415_616), "llama3_2_1b": (128_256, 1_235_814_400), "llama3_2_3b": (128_256, 3_212_749_824),
    "llama3_8b": (128_256, 8_030_261_248), "llama3_70b": (128_256, 70_553_706_496),
    "qwen3_0_6b": (151_936, 596_049_920), "qwen3_1_7b": (151_936, 1_720_574_976), "qwen3_4b": (151_936, 4_022_468_096),
    "qwen3_8b": (151_936, 8_190_735_360), "qwen3_14b": (151_936, 14_768_307_200), "qwen3_32b": (151_936, 32_762_123_264),
}  # fmt: skip


@pytest.fixture(scope="module")
def every_option():
    """Each option of each group, composed: (group, option) → configuration."""
    groups = {group: names for group, names in options("train").items() if group != "recipe"}
    found = {}
    for i in range(max(map(len, groups.values()))):
        chosen = {group: names[i % len(names)] for group, names in groups.items()}
        cfg = compose("train", [f"{group}={name}" for group, name in chosen.items()], inputs=False)
        found |= dict.fromkeys(chosen.items(), cfg)
    return found


def test_every_option_sets_its_groups_selector(every_option):
    for (group, name), cfg in every_option.items():
        selector = SELECTORS.get(group)
        values = {"bf16": "bfloat16", "fp32": "float32", "enabled": True, "disabled": False}
        assert selector is None or getattr(getattr(cfg, group), selector) == values.get(name, name), (group, name)


def test_named_sizes_have_their_published_parameter_counts(every_option):
    sizes = {name: cfg.model for (group, name), cfg in every_option.items() if group == "model"}
    assert set(PUBLISHED) == set(sizes) - {"auto", "tiny"}
    for name, (vocabulary, count) in PUBLISHED.items():
        assert resolve_model(sizes[name], vocabulary).parameters() == count, name
