"""Tensor parallelism: what each parameter's placement is."""

import pytest
from layouts import SIZES

from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.parallel.tensor import sharded_form

BIASED = {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_placement_except_those_of_experts(family):
    sizes = SIZES | BIASED | FAMILIES[family].defaults | {"family": family}
    for path, module in meta_decoder(ModelConfig(**sizes)).named_modules():
        name = path.rpartition(".")[2]
        form = sharded_form(name, module, FAMILIES[family].qk_norm)
        parameters = dict(module.named_parameters(recurse=False))
        if parameters and name != "experts":
            assert form is not None, path
            assert parameters.keys() <= form.placements.keys(), path
