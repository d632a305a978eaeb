"""What every recipe promises, without training it."""

import re

import pytest
import yaml

from fsdp_trainer.config.compose import CONF, compose, options
from fsdp_trainer.config.document import recipe_heads
from fsdp_trainer.config.schema import SELECTORS
from fsdp_trainer.models.config import resolve_model

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
    does, hardware, start = recipe_heads()[name]
    assert does.endswith(".") and "not said" not in hardware and f"+recipe={name}" in start


@pytest.mark.parametrize(("name", "vocabulary"), [("qwen3_0_6b_sft", 151_936), ("llama8b_sft", 128_256), ("llama70b_sft", 128_256)])
def test_the_memory_arithmetic_in_recipes_adds_up(name, vocabulary):
    text = (CONF / "recipe" / f"{name}.yaml").read_text().replace(",", "")
    cfg = compose("train", [f"+recipe={name}", "model.init_from=null"], inputs=False)
    model = resolve_model(cfg.model, vocabulary)
    billions, state = map(float, re.search(r"16 B × ([\d.]+) G = ([\d.]+) GB", text).groups())
    assert billions == pytest.approx(model.parameters() / 1e9, rel=2e-3) and state == pytest.approx(16 * billions, rel=5e-3)
    rows, length, tokens = map(int, re.search(r"(\d+) rows × (\d+) tokens = (\d+) tokens a step", text).groups())
    assert (rows, length) == (cfg.batch.rows, cfg.batch.seq_len) and rows * length == tokens
    kept, layers, width, row = re.search(r"activations +([\d.]+) GB +(\d+) blocks × (\d+) × 2 B × (\d+) tokens", text).groups()
    assert (int(layers), int(width), int(row)) == (model.num_hidden_layers, model.hidden_size, cfg.batch.micro_rows * cfg.batch.seq_len)
    assert float(kept) == pytest.approx(int(layers) * int(width) * 2 * int(row) / 1e9, rel=0.1)


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
        if chosen["activation_checkpoint"] == "budget":
            chosen["compile"] = "enabled"  # one needs the other
        cfg = compose("train", [f"{group}={name}" for group, name in chosen.items()], inputs=False)
        found |= dict.fromkeys(chosen.items(), cfg)
    return found


def test_every_option_sets_its_groups_selector(every_option):
    for (group, name), cfg in every_option.items():
        selector = SELECTORS.get(group)
        values = {"bf16": "bfloat16", "fp32": "float32", "pure_bf16": "bfloat16", "enabled": True, "disabled": False}
        assert selector is None or getattr(getattr(cfg, group), selector) == values.get(name, name), (group, name)


def test_named_sizes_have_their_published_parameter_counts(every_option):
    sizes = {name: cfg.model for (group, name), cfg in every_option.items() if group == "model"}
    assert set(PUBLISHED) == set(sizes) - {"auto", "tiny"}
    for name, (vocabulary, count) in PUBLISHED.items():
        assert resolve_model(sizes[name], vocabulary).parameters() == count, name
