"""Checkpoints of DeepSpeed's ZeRO are the weights that DeepSpeed's own script makes of them.

The folders in `zero_checkpoints` were written by DeepSpeed on two ranks.
"""

import shutil

import inject
import pytest
import torch
from folders import REPO
from foreign import Evil, require_equal_on_ranks, why_refused
from safetensors.torch import load_file
from stored import assert_byte_equal

from fsdp_trainer.checkpoint.load import load_model

WRITTEN = REPO / "tests" / "checkpoint" / "zero_checkpoints"


@pytest.fixture
def checkpoint(tmp_path):
    """Return `checkpoint(stage)`: a copy of DeepSpeed's folder, and the weights of its script."""

    def make(stage):
        folder = tmp_path / f"stage_{stage}"
        shutil.copytree(WRITTEN / folder.name, folder)
        return folder, load_file(folder / "expected")

    return make


@pytest.mark.parametrize("stage", [1, 2, 3, "2_frozen", "3_frozen"])
def test_weights_are_those_of_deepspeeds_own_script(checkpoint, stage):
    folder, expected = checkpoint(stage)
    named = "" if stage in (1, 3) else "global_step2"
    with inject.setting("tensor_piece_bytes", 72):
        read = dict(load_model(folder / named).named_weights())
    assert_byte_equal(read, {name: weight.float() for name, weight in expected.items()})


@pytest.mark.parametrize("stage", [2, "3_frozen"])
def test_each_rank_reads_its_own_rows(world, checkpoint, stage):
    require_equal_on_ranks(world, *checkpoint(stage))


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        ("global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "rank 1 is missing"),
        ("config.json", "config.json"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(checkpoint, lost, reason):
    folder, _ = checkpoint(2)
    (folder / lost).unlink()
    assert reason in why_refused(folder)


def test_other_objects_than_deepspeeds_own_are_refused_and_none_is_made(checkpoint, capsys):
    folder, _ = checkpoint(1)
    file = folder / "global_step2" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {}, "more": Evil()}, file)
    assert "cannot be read" in why_refused(folder)
    assert "code of others" not in capsys.readouterr().out
