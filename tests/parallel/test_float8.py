"""Float8 products, emulated where there is no GPU that has them: the numbers, and that names,
checkpoints, exports and restarts do not notice."""

import contextlib
import shutil
from unittest.mock import patch

import inject
import pytest
import torch
from stored import assert_near, assert_undisturbed, checkpoint
from torch import nn
from world import Run

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.parallel import convert

pytest.importorskip("torchao")
WIDE = (
    "model.hidden_size=64 model.intermediate_size=128 model.head_dim=16"
    " precision.param_dtype=bfloat16 schedule=constant"
)
FLOAT8 = [WIDE, "precision.float8=tensorwise"]


EMULATED = inject.emulated_float8()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_the_loss_is_near_that_of_bfloat16(train, ledger, recipe):
    steps = "train.steps=6"
    exact = ledger.run(words=["data.path=DATA/chats.jsonl", WIDE, steps])
    run = train("run", WIDE, f"precision.float8={recipe}", steps, seam=EMULATED)
    assert_near(run, exact, loss=0.03)
    assert run["loss"] != exact["loss"]
    assert f"float8 products ({recipe}) in 14 linear layers" in run.out


def test_a_run_goes_on_bitwise_on_two_ranks(train):
    how = [
        *FLOAT8,
        "optim=adamw_8bit activation_checkpoint=selective checkpoint=async",
        "sharding.accumulate=unsharded sharding.blocks_per_unit=2",
        "batch.micro_rows=1 checkpoint.every=2 checkpoint.keep=9 batch.rows=4",
    ]
    whole = train("whole", *how, "train.steps=3", ranks=2, seam=EMULATED)
    shutil.copytree(whole.folder, whole.folder.with_name("run"))
    shutil.rmtree(checkpoint(Run(whole.folder.with_name("run")), 3))
    again = train("run", *how, "train.steps=3", ranks=2, seam=EMULATED)
    assert_undisturbed(again, whole)


@contextlib.contextmanager
def watched():
    """The weights of 2 × 7 layers are gathered in float8, the first time each finding its scale,
    later with the one that all found together."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Wrapped

    real, gathered = Wrapped.fsdp_pre_all_gather, []

    def gather(self, mesh):
        sent, scale = real(self, mesh)
        gathered.append((sent[0].dtype, self._precomputed_scale is not None))
        return sent, scale

    with EMULATED, patch.object(Wrapped, "fsdp_pre_all_gather", gather):
        yield
    assert {dtype for dtype, _ in gathered} == {torch.float8_e4m3fn}
    together = [together for _, together in gathered]
    assert together == sorted(together)
    assert together.count(True) == 2 * together.count(False) > 0


def test_weights_are_gathered_in_float8_and_their_scales_found_together(train):
    train("run", *FLOAT8, "train.steps=3", ranks=2, seam=watched)


def test_exports_and_imports_know_nothing_of_float8(train):
    export = "checkpoint.export_hf=true checkpoint.export_dtype=float32"
    run = train("run", *FLOAT8, export, "train.steps=2", seam=EMULATED)
    folder = run.folder / "hf"
    how = ["precision=fp8 batch.seq_len=64 batch.rows=6 train.steps=1 optim.lr=0"]
    how += [f"model.init_from={folder}", export]
    on = train("on", *how, base=[], seam=EMULATED, ranks=2)
    exported, *others = (load_model(one) for one in (folder, run.folder, on.folder / "hf"))
    for other in others:
        for a, b in zip(exported.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)


def test_a_run_may_change_to_and_from_float8(train):
    train("run", WIDE, "train.steps=2")
    changed = train("run", *FLOAT8, "train.steps=3", seam=EMULATED)
    assert "precision.float8 was null, is tensorwise" in changed.out
    again = train("run", WIDE, "train.steps=4")
    assert len(again.metrics) == 4
    assert "float8 products" not in again.out


def test_a_model_too_small_to_gain_is_refused(train):
    emulated = inject.setting("float8_emulated", True)
    assert "large enough" in train("run", *FLOAT8, code=2, seam=emulated).err


def test_matrices_gain_where_torchaos_own_filter_says_so():
    utilities = pytest.importorskip("torchao.float8.float8_linear_utils")
    for recipe in ("tensorwise", "rowwise"):
        theirs = utilities._auto_filter_for_recipe(recipe, [])
        for rows in (64, 1000, 1024, 1040, 2048, 2064, 4096, 4112, 14336):
            for columns in (16, 1024, 1040, 2048, 2064, 4096, 4112, 14336):
                with torch.device("meta"):
                    linear = nn.Linear(columns, rows)
                same = convert.worth_float8(linear, recipe) == theirs(linear, "q_proj")
                assert same, (recipe, rows, columns)
    assert not convert.worth_float8(nn.Embedding(2048, 4112), "tensorwise")


def test_without_torchao_it_is_named(train):
    run = train("run", *FLOAT8, code=2, seam=inject.without_package("torchao"))
    assert "pip install 'fsdp_trainer[ao]'" in run.err
