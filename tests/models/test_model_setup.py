"""A model setup: what a process resolves once about the model that it trains."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from small_decoder import SIZES

from fsdp_trainer.config.schema import Adapter, Model
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.from_config.setup import ModelSetup, WeightSource

CONFIG = ModelConfig(**SIZES | {"intermediate_size": 64, "head_dim": 128, "num_key_value_heads": 4})
DOWN = "mlp.down_proj"


def test_a_part_with_narrower_matrices_gets_the_adapters_of_the_whole_model():
    """A part of a matrix may be narrower than the rank of its adapter."""
    setup = ModelSetup.resolve(CONFIG, Adapter(name="lora", rank=32), [])
    part = replace(CONFIG, intermediate_size=16)
    with pytest.raises(UserError):
        ModelSetup.resolve(part, Adapter(name="lora", rank=32), [])
    layer = replace(setup, config=part).model.model.layers["0"].mlp.down_proj
    assert layer.lora_A.weight.shape == (32, 16)
    assert layer.lora_B.weight.shape == (32, 32)


@pytest.mark.parametrize(
    "adapter, freeze, trains",
    yaml.safe_load("""
- [{}, [], true]
- [{}, ['*.down_proj.weight'], false]
- [{}, ['model.layers.0.*'], true]
- [{name: lora}, [], true]
- [{name: lora}, ['*.lora_A.weight'], false]
- [{name: lora, targets: [q_proj]}, [], false]
- [{name: lora, targets: [q_proj], also: [down_proj]}, [], true]
"""),
)
def test_blocks_of_eight_bits_matter_where_a_row_is_trained(adapter, freeze, trains):
    """Two ranks would have 32 of a row's 64 numbers, which are one block of moments."""
    setup = ModelSetup.resolve(CONFIG, Adapter(**adapter, rank=4), freeze)
    assert setup.trains_rows(DOWN) is trains
    assert bool(setup.tensor_problems(2, 64, "8bit")) is trains
    assert setup.tensor_problems(2, 64, "float32") == []


def test_adapters_that_continue_are_judged_by_their_own_layers():
    """Their folder defines the layers, which the configuration does not know."""
    spec = ModelSetup.resolve(CONFIG, Adapter(name="lora", targets=["down_proj"]), []).adapters
    assert ModelSetup(CONFIG, spec).trains_rows(DOWN)
    assert not ModelSetup(CONFIG, spec).trains_rows("self_attn.o_proj")


def test_four_bits_are_those_of_frozen_matrices():
    nf4 = Adapter(name="lora", rank=4, base="nf4")
    (problem,) = ModelSetup.resolve(CONFIG, nf4, []).tensor_problems(2, 64, "float32")
    assert problem.what == "adapter.base=nf4"


def test_the_first_weights_are_in_the_folder_that_was_fetched():
    source = WeightSource.of(Model(init_from="owner/name"), Adapter(), Path("fetched"), 3)
    assert source == WeightSource(3, Path("fetched"), "owner/name", None)
    continued = WeightSource.of(
        Model(init_from="./here"), Adapter(init_from="old"), Path("here"), 0
    )
    assert continued == WeightSource(0, Path("here"), "", Path("old"))
    assert WeightSource.of(Model(), Adapter(), None, 5) == WeightSource(5)
