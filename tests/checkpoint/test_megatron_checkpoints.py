"""Distributed checkpoints of megatron-core's GPT models are read as the model that they are of.

The folders in `megatron_checkpoints` were written by megatron-core on two ranks, each with half of
every matrix, beside the logits of megatron-core's own forward.
"""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from folders import TESTS
from foreign import make_other, of, require_equal, require_equal_on_ranks
from refused import refused
from safetensors.torch import load_file

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.errors import UserError

WRITTEN = TESTS / "checkpoint/megatron_checkpoints"


@pytest.mark.parametrize(
    "form, place", [("stacked", ""), ("separate", "iter_0000010"), ("halves", "")]
)
def test_logits_are_those_of_megatrons_own_forward_and_each_rank_reads_its_own_rows(
    world, form, place
):
    folder = WRITTEN / form
    expected = load_file(folder / "expected")
    model = load_model(folder / place)
    with torch.no_grad():
        assert torch.allclose(model.logits(expected["ids"]), expected["logits"], atol=1e-6)
    require_equal_on_ranks(world, folder, dict(model.named_weights()))


MEGATRON = {
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}
"""Names of megatron-core's in a block, by those of transformers."""


def as_megatron(model, is_stacked):
    """Return the weights of a model of transformers as megatron-core joins and names them."""
    config, state = model.config, model.state_dict()
    blocks = {}
    for number in range(config.num_hidden_layers):
        begin = f"model.layers.{number}."
        own = {n.removeprefix(begin): weight for n, weight in state.items() if n.startswith(begin)}
        halves = [own.pop(f"mlp.{part}_proj.weight") for part in ("gate", "up")]
        own["mlp.linear_fc1.weight"] = torch.cat(halves)
        for kind in ("weight", "bias"):
            parts = [own.pop(f"self_attn.{part}_proj.{kind}", None) for part in "qkv"]
            if parts[0] is not None:
                chunks = [part.chunk(config.num_key_value_heads) for part in parts]
                rows = [piece for group in zip(*chunks, strict=True) for piece in group]
                own[f"self_attention.linear_qkv.{kind}"] = torch.cat(rows)
        for name, weight in own.items():
            blocks.setdefault(MEGATRON.get(name, name), []).append(weight)
    padding = torch.zeros(5, config.hidden_size)
    embedding = torch.cat([state["model.embed_tokens.weight"], padding])
    whole = {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "optimizer.state.exp_avg.embedding.word_embeddings.weight": torch.ones(3, 3),
    }
    if not config.tie_word_embeddings:
        whole["output_layer.weight"] = torch.cat([state["lm_head.weight"], padding])
    for name, weights in blocks.items():
        if is_stacked:
            whole[f"decoder.layers.{name}"] = torch.stack(weights)
            continue
        for number, weight in enumerate(weights):
            whole[f"decoder.layers.{number}.{name}"] = weight.clone()
    return whole


@pytest.mark.parametrize(
    "family, is_stacked",
    [("llama", False), ("mistral", True), ("qwen2", True), ("qwen3", False)],
)
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
    problems = {one.what: one.reason for one in refused(load_model, other).problems}
    assert "is missing" in problems["model.layers.1.self_attn.q_proj.weight"]
    assert "is not part of this model" in problems["model.layers.7.self_attn.q_proj.weight"]


def test_a_file_of_the_checkpoint_that_is_gone_is_named(tmp_path):
    folder = tmp_path / "gone"
    shutil.copytree(WRITTEN / "stacked", folder)
    lost = next((folder / "iter_0000010").glob("__1_*.distcp"))
    lost.unlink()
    with pytest.raises(UserError, match=lost.name):
        load_model(folder)
