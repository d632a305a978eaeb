"""Tensor parallelism: what each parameter's placement is, and what is refused."""

import pytest
from layouts import SIZES

from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.families import FAMILIES
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


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sharding.tensor=3"], "Use sharding.tensor=2"),
        (["sharding.tensor=2", "batch.seq_len=63"], "must divide batch.seq_len=63"),
        (
            ["sharding.tensor=2", "optim=adamw_8bit", "model.intermediate_size=64"],
            "cuts blocks of 64. Use optim.state_dtype=bfloat16",
        ),
        (
            [
                *["sharding.tensor=2", "optim=adamw_8bit", "model.intermediate_size=64"],
                "train.freeze=['*.o_proj.weight']",
            ],
            "intermediate_size=64 leaves each of 2 ranks 32",
        ),
        (["sharding.tensor=2", "adapter=qlora"], "cuts blocks of 64. Use adapter.base=bf16"),
        (["sharding.tensor=2", "data.pad_to_multiple=3"], "Use data.pad_to_multiple=4"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_what_can(train, overrides, words):
    run = train("refused", *overrides, code=2)
    assert words in " ".join(run.err.split())


def test_ranks_that_tensor_groups_do_not_divide_are_refused_before_data_is_read(train):
    run = train("refused", "sharding.tensor=2", code=2)
    assert "must divide the number of ranks, which is 1" in " ".join(run.err.split())


def test_ranks_of_a_tensor_group_read_one_stream_and_pass_the_check_of_computation(train):
    how = ["data.streaming=true", "data.workers=1", "batch.rows=4", "batch.micro_rows=1"]
    how += ["train.steps=2", "train.check_every=2", "optim.eps=1e-3", "schedule=constant"]
    expected = train("alone", *how)
    run = train("group", *how, "sharding.tensor=2", ranks=2)
    assert run.column("tokens") == expected.column("tokens")
    assert run.column("loss") == pytest.approx(expected.column("loss"), rel=1e-5)
    assert run.event("end")[-1]["exit_code"] == 0
