"""Promises of every recipe, option and named size that need neither training nor a plan."""

import os

import pytest
import yaml
from recipe import PARAMETERS, RECIPES, named_size, published_model, recipe_as_it_is
from world import split

from fsdp_trainer.config.check import flatten
from fsdp_trainer.config.composing.compose import CONF, compose, options
from fsdp_trainer.config.composing.handover import (
    DESCRIPTOR,
    configuration_file,
    inherited_configuration,
)
from fsdp_trainer.config.composing.recipe_heads import recipe_heads
from fsdp_trainer.config.schema import SELECTORS, TrainConfig
from fsdp_trainer.errors import UserError

SHRUNK = """model=tiny model.init_from=null data.path=demo:backwards tokenizer.path=demo:bytes
batch.seq_len=128 train.steps=2 sharding=ddp sharding.cpu_offload=false optim.offload=none
sharding.tensor=1 sharding.pipeline=1 precision=fp32 activation_checkpoint=none schedule=wsd
loss.load_balancing=0 loss.router_z_loss=0 loss.bias_update_speed=0 sharding.expert=1"""


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_tells_its_use_and_composes_as_it_is_and_with_other_groups_and_values(name):
    head = recipe_heads()[name]
    assert head.does.endswith(".")
    assert "not said" not in head.hardware
    assert f"+recipe={name}" in head.start

    body = yaml.safe_load(file_of("recipe", name))
    assert not [group for group, key in SELECTORS.items() if key in (body.get(group) or {})]

    cfg = recipe_as_it_is(name)
    assert cfg.run.name == name
    shorter = ["objective.max_new_tokens=64"] if cfg.objective.method.samples else []
    cfg = compose("train", split([f"+recipe={name}", SHRUNK, *shorter]))
    assert handed_over(cfg) == [cfg, cfg]
    assert cfg.train.steps == 2
    assert (cfg.model.name, cfg.schedule.name) == ("tiny", "wsd")
    assert (cfg.sharding.strategy, cfg.precision.param_dtype) == ("ddp", "float32")
    assert cfg.activation_checkpoint.mode == "none"


def file_of(group, name):
    return (CONF / group / f"{name}.yaml").read_text()


def handed_over(cfg):
    """Return what two ranks get of the process that composed `cfg` and starts them."""
    with configuration_file(cfg) as file:
        configurations = []
        for _ in range(2):
            os.environ[DESCRIPTOR] = str(os.dup(file.fileno()))
            configurations.append(inherited_configuration(TrainConfig))
            assert inherited_configuration(TrainConfig) is None, "what a rank starts is no rank"
    return configurations


def test_what_is_handed_over_is_checked_like_what_was_composed():
    cfg = compose("train", ["+recipe=quickstart"])
    cfg.batch.rows = 0
    with pytest.raises(UserError, match=r"batch\.rows=0"):
        handed_over(cfg)


def test_every_option_sets_its_groups_selector_and_keys_that_exist():
    values = yaml.safe_load(
        "{bf16: bfloat16, pure_bf16: bfloat16, fp8: bfloat16, fp16: float16, fp32: float32,"
        " enabled: true, disabled: false, adamw_8bit: adamw, adamw_bf16: adamw, normuon: muon,"
        " qlora: lora}"
    )
    for group, names in options("train").items():
        for name in names if group not in ("recipe", "sweep") else []:
            body = yaml.safe_load(file_of(group, name))
            keys = {f"{group}.{key}" for key in body}
            assert keys <= flatten(TrainConfig).keys(), (group, name)
            if group in SELECTORS:
                assert body[SELECTORS[group]] == values.get(name, name), (group, name)


def test_named_sizes_have_their_published_parameter_counts():
    assert set(PARAMETERS) == set(options("train")["model"]) - {"auto", "tiny"}
    for name, (_, count) in PARAMETERS.items():
        assert named_size(name).name == name, name
        assert published_model(name).parameters() == count, name
