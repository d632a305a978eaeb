"""Distributed checkpoints of megatron-core's GPT models are read as the model that they are of.

The folders in `megatron_checkpoints` were written by megatron-core on two ranks, each with half of
every matrix, beside the logits of megatron-core's own forward.
"""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from folders import REPO
from foreign import make_other, of, read_on_ranks, require_equal
from safetensors.torch import load_file

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.errors import RunFailed, UserError

pytestmark = pytest.mark.slow

WRITTEN = REPO / "tests" / "checkpoint" / "megatron_checkpoints"
FORMS = ["stacked", "separate", "halves"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["", "iter_0000010"])
def test_logits_are_those_of_megatrons_own_forward(form, place):
    expected = load_file(WRITTEN / form / "expected")
    with torch.no_grad():
        logits = load_model(WRITTEN / form / place).logits(expected["ids"])
    assert torch.allclose(logits, expected["logits"], atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_each_rank_reads_its_own_rows_of_joined_matrices(world, form):
    alone = dict(load_model(WRITTEN / form).named_weights())
    for read in world.call(3, read_on_ranks, WRITTEN / form):
        for name, weight in alone.items():
            assert torch.equal(read[name], weight), name


def as_megatron(model, is_stacked):
    """Return the weights of a model of transformers as megatron-core joins and names them."""
    config, state, joined = model.config, model.state_dict(), {}
    groups = config.num_key_value_heads
    for number in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"model.layers.{number}."): weight
            for name, weight in state.items()
            if name.startswith(f"model.layers.{number}.")
        }
        block = {
            "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
            "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
            "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
            "mlp.linear_fc1.weight": torch.cat(
                [own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]
            ),
        }
        for kind in ("weight", "bias"):
            parts = [own.get(f"self_attn.{part}_proj.{kind}") for part in "qkv"]
            if parts[0] is not None:
                chunks = [part.chunk(groups) for part in parts]
                rows = [piece for group in zip(*chunks, strict=True) for piece in group]
                block[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        for part in "qk":
            if f"self_attn.{part}_norm.weight" in own:
                name = f"self_attention.{part}_layernorm.weight"
                block[name] = own[f"self_attn.{part}_norm.weight"]
        joined[number] = block
    padding = torch.zeros(5, config.hidden_size)
    whole = {
        "embedding.word_embeddings.weight": torch.cat(
            [state["model.embed_tokens.weight"], padding]
        ),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "optimizer.state.exp_avg.embedding.word_embeddings.weight": torch.ones(3, 3),
    }
    if not config.tie_word_embeddings:
        whole["output_layer.weight"] = torch.cat([state["lm_head.weight"], padding])
    for name in joined[0]:
        tensors = [block[name] for block in joined.values()]
        if is_stacked:
            whole[f"decoder.layers.{name}"] = torch.stack(tensors)
            continue
        for number, tensor in enumerate(tensors):
            whole[f"decoder.layers.{number}.{name}"] = tensor.clone()
    return whole


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_weights_of_each_family_are_those_of_the_folder(tmp_path, family, is_stacked):
    folder, other = make_other(tmp_path, family, tie_word_embeddings=family == "qwen3")
    dcp.save(as_megatron(of(folder), is_stacked), checkpoint_id=other / "iter_0000003")
    (other / "latest_checkpointed_iteration.txt").write_text("3\n")
    require_equal(folder, other)


def test_a_block_too_many_or_too_few_is_named(tmp_path):
    folder, other = make_other(tmp_path)
    state = as_megatron(of(folder), False)
    moved = {name: state.pop(name) for name in [*state] if name.startswith("decoder.layers.1.")}
    state |= {name.replace(".1.", ".7."): tensor for name, tensor in moved.items()}
    dcp.save(state, checkpoint_id=other)
    with pytest.raises(UserError) as error:
        load_model(other)
    problems = {problem.what: problem.reason for problem in error.value.problems}
    assert "is missing" in problems["model.layers.1.self_attn.q_proj.weight"]
    assert "is not part of this model" in problems["model.layers.7.self_attn.q_proj.weight"]


def test_a_file_of_the_checkpoint_that_is_gone_is_named(tmp_path):
    folder = tmp_path / "gone"
    shutil.copytree(WRITTEN / "stacked", folder)
    lost = next((folder / "iter_0000010").glob("__1_*.distcp"))
    lost.unlink()
    with pytest.raises(RunFailed, match=lost.name):
        load_model(folder)
