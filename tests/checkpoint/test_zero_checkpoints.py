"""Checkpoints of DeepSpeed's ZeRO are the weights that DeepSpeed's own script makes of them.

The folders in `zero_checkpoints` were written by DeepSpeed on two ranks.
"""

import shutil

import inject
import pytest
import torch
from folders import TESTS
from foreign import Evil, make_other, require_equal_on_ranks, why_refused
from safetensors.torch import load_file
from stored import assert_byte_equal, tensors

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.checkpoint.other_states import read_states
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.other_weights import zero_folder
from fsdp_trainer.models.hf.read_architecture import read_architecture

WRITTEN = TESTS / "checkpoint/zero_checkpoints"


@pytest.fixture
def checkpoint(tmp_path):
    """Return `checkpoint(stage)`: a copy of DeepSpeed's folder, and the weights of its script."""

    def make(stage):
        folder = tmp_path / f"stage_{stage}"
        shutil.copytree(WRITTEN / folder.name, folder)
        return folder, load_file(folder / "expected")

    return make


def require_read(folder, expected):
    read = dict(load_model(folder).named_weights())
    assert_byte_equal(read, {name: weight.float() for name, weight in expected.items()})


def divided(whole, ranks):
    """Return the parts of a flat tensor that ranks have, the last ones filled up."""
    return torch.cat([whole, whole.new_full((-len(whole) % ranks,), 7)]).chunk(ranks)


@pytest.mark.parametrize("stage", [1, 2, 3, "2_frozen", "3_frozen"])
def test_weights_are_those_of_deepspeeds_own_script(checkpoint, stage):
    folder, expected = checkpoint(stage)
    named = "" if stage in (1, 3) else "global_step2"
    with inject.setting("tensor_piece_bytes", 72):
        require_read(folder / named, expected)


def test_frozen_parameters_that_the_ranks_do_not_divide_are_read_without_the_filling(checkpoint):
    folder, expected = checkpoint("3_frozen")
    ranks = 5
    files = [
        folder / f"global_step2/zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        for rank in range(ranks)
    ]
    states = [torch.load(file, weights_only=True) for file in files[:2]]
    fragments = [{} for _ in files]
    for name in states[0]["frozen_param_shapes"]:
        whole = torch.cat([state["frozen_param_fragments"][name] for state in states])
        for own, part in zip(fragments, divided(whole, ranks), strict=True):
            own[name] = part.clone()
    for file, own in zip(files, fragments, strict=True):
        torch.save(states[0] | {"frozen_param_fragments": own}, file)
    require_read(folder, expected)
    files[-1].unlink()
    assert "and its parts hold" in why_refused(folder)


def test_trained_parameters_that_the_ranks_do_not_divide_are_read_without_the_filling(checkpoint):
    folder, expected = checkpoint(3)
    step, ranks = folder / "global_step2", 5
    model = step / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    about = torch.load(model, weights_only=True)
    shapes = {name: shape for group in about["param_shapes"] for name, shape in group.items()}
    assert any(shape.numel() % ranks for shape in shapes.values())
    parts = [[] for _ in range(ranks)]
    for name in shapes:
        whole = expected[name].float().flatten()
        for own, part in zip(parts, divided(whole, ranks), strict=True):
            own.append(part)
    torch.save(about | {"dp_world_size": ranks}, model)
    for rank, own in enumerate(parts):
        state = {"optimizer_state_dict": {"fp32_flat_groups": [torch.cat(own)]}}
        torch.save(state, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    require_read(folder, expected)


@pytest.mark.parametrize("stage", [2, "3_frozen"])
def test_each_rank_reads_its_own_rows(world, checkpoint, stage):
    require_equal_on_ranks(world, *checkpoint(stage))


@pytest.mark.parametrize(
    "lost, reason",
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
    file = folder / "global_step2/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {}, "more": Evil()}, file)
    assert "holds more than tensors (print)" in why_refused(folder)
    assert "code of others" not in capsys.readouterr().out


MODEL, STATES = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture
def written(tmp_path):
    """Return `written(**changes)`: a checkpoint of one rank in stage 2, and its weights.

    part, moment: functions of the flat tensors. about, state: what the two files hold besides.
    """

    def write(part=None, moment=None, about=(), state=()):
        folder, other = make_other(tmp_path)
        weights = tensors(folder)
        flat = torch.cat([weight.flatten() for weight in weights.values()])
        states = {"step": torch.tensor(3.0), "exp_avg": flat, "exp_avg_sq": flat}
        if moment:
            states["exp_avg"] = moment(flat)
        optimizer = {
            "single_partition_of_fp32_groups": [part(flat) if part else flat],
            "base_optimizer_state": {"state": {0: states}, "param_groups": []},
            **dict(state),
        }
        shapes = [{name: weight.shape for name, weight in weights.items()}]
        torch.save({"param_shapes": shapes, "dp_world_size": 1, **dict(about)}, other / MODEL)
        torch.save({"optimizer_state_dict": optimizer}, other / STATES)
        return other, weights

    return write


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_are_read_in_the_number_format_that_they_are_in(written, dtype):
    folder, weights = written(lambda flat: flat.to(dtype))
    read = dict(load_model(folder).named_weights())
    assert_byte_equal(read, {name: weight.to(dtype).float() for name, weight in weights.items()})


NOT_FLAT = {
    "int64": (torch.Tensor.long, "is stored as torch.int64"),
    "float64": (torch.Tensor.double, "is stored as torch.float64"),
    "view": (lambda flat: torch.stack([flat, -flat], 1).flatten()[::2], "not contiguous"),
    "negated": (lambda flat: torch._neg_view(-flat), "is no plain tensor"),
    "sparse": (torch.Tensor.to_sparse, "is no plain tensor"),
    "meta": (lambda flat: flat.to("meta"), "is no plain tensor"),
    "short": (lambda flat: flat[:-40], "and its parts hold"),
    "long": (lambda flat: torch.cat([flat, flat]), "and its parts hold"),
}


@pytest.mark.parametrize("case", NOT_FLAT)
def test_a_part_that_is_not_whole_and_flat_is_refused(written, case):
    change, reason = NOT_FLAT[case]
    folder, _ = written(part=change)
    assert reason in why_refused(folder)


@pytest.mark.parametrize("case", sorted(NOT_FLAT.keys() - {"int64", "float64"}))
def test_moments_that_are_not_whole_and_flat_are_refused(written, case):
    change, reason = NOT_FLAT[case]
    folder, _ = written(moment=change)
    with pytest.raises(UserError, match=reason):
        read_states(folder, read_architecture(folder))


@pytest.mark.parametrize(
    "about, reason",
    [
        ({"dp_world_size": 10**9}, "the parts of 1 of 1000000000 ranks: rank 1 is missing"),
        ({"dp_world_size": -1}, "dp_world_size=-1"),
        ({"dp_world_size": [1]}, "is no checkpoint of ZeRO"),
        ({"param_shapes": None}, "is no checkpoint of ZeRO"),
        ({"param_shapes": [{"a": torch.Size([-1])}]}, "a has -1 numbers"),
        ({"param_shapes": [{5: torch.Size([2])}]}, "5 is no name"),
        ({"frozen_param_shapes": {"x": torch.Size([3])}}, "frozen_param_fragments"),
    ],
)
def test_a_description_that_lies_is_refused_before_anything_is_read(written, about, reason):
    folder, _ = written(about=about)
    assert reason in why_refused(folder)


@pytest.mark.parametrize("state", [{"fp32_flat_groups": None}, {"param_alignment_paddings": [[1]]}])
def test_a_state_of_another_form_is_refused(written, state):
    folder, _ = written(state=state)
    assert "is no checkpoint of ZeRO" in why_refused(folder)


@pytest.mark.parametrize("name", ["..", ".", "step/..", "step/../step", "/etc", "x" * 300, "a\0b"])
def test_latest_names_a_folder_below_its_own(tmp_path, name):
    (tmp_path / "step").mkdir()
    (tmp_path / "latest").write_text(name)
    assert zero_folder(tmp_path) is None
