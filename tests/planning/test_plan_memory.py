"""The bound of the plan's memory. Steps are in test_plan_of_steps.py."""

import pytest

from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.planning.plan.block_memory import trace_blocks
from fsdp_trainer.planning.plan.memory import memory
from fsdp_trainer.planning.plan.planned_run import PlannedRun

MODEL = ModelConfig(
    vocab_size=8000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=False,
)


def configured(ranks=8, **keys):
    """keys: `group__key`."""
    cfg = TrainConfig()
    cfg.batch.seq_len = 512
    for name, value in keys.items():
        group, key = name.split("__")
        setattr(getattr(cfg, group), key, value)
    cfg.batch.rows = ranks * cfg.batch.micro_rows
    return cfg


def test_offloaded_states_are_the_hosts():
    here, there = (
        memory(PlannedRun.of(configured(2, sharding__cpu_offload=offload), MODEL, 2), "cuda")
        for offload in (False, True)
    )
    states = [there.peak.bytes[name] for name in ("parameters", "gradients", "optimizer")]
    assert (here.host, states) == (0, [0, 0, 0])
    assert there.host == pytest.approx(MODEL.parameters() * 16 / 2, rel=1e-3)


def test_a_block_that_is_computed_again_keeps_its_input_alone():
    def saved(**keys):
        """Return the bytes that each block keeps. keys: of activation_checkpoint."""
        cfg = configured(**{f"activation_checkpoint__{key}": each for key, each in keys.items()})
        return [part.saved for part in trace_blocks(PlannedRun.of(cfg, MODEL, 1).model, "cpu")[0]]

    selective = {"mode": "selective"}
    amounts = [
        saved(**how)[0]
        for how in ({"mode": "full"}, selective, selective | {"save": ["matmul"]}, {})
    ]
    assert amounts[0] == 512 * 512 * 2
    assert amounts == sorted(set(amounts))
    assert saved(mode="full", every=2) == [amounts[0], amounts[3]] * 2
    assert saved(mode="budget")[0] == amounts[0], "at least"


def test_a_mask_costs_the_rows_length_squared():
    def amounts(length, layout):
        cfg = configured(batch__seq_len=length, model__attention=layout)
        cfg.model.attention_kernel = "auto"
        blocks, shared = trace_blocks(PlannedRun.of(cfg, MODEL, 1).model, "cpu")
        return blocks[0].saved, shared

    (block, shared), (longer, more) = (amounts(length, "mask") for length in (512, 1024))
    assert more - 2 * shared == 2 * 512**2
    assert longer > 2 * block + 2 * 512**2
    assert amounts(1024, "documents")[0] < 2.01 * amounts(512, "documents")[0]
