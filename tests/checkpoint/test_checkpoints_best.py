"""Validation decides: the best checkpoint is kept, training stops early; and what happens at the
end of a run."""

import contextlib
import json
import shutil
from pathlib import Path

import inject
import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from stored import checkpoint, end_of, newest, stored

from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.paths import MANIFEST
from fsdp_trainer.config.schema import Checkpoint

HOW = ["schedule=constant", "data.validation=0.1", "train.validate_every=2", "checkpoint.keep=1"]
BEST = 6


def up_the_hill_after_the_best(_real, _cfg, lr, step, _total):
    return lr if step <= BEST else -lr


TURNS_BAD = inject.around("learning_rate", up_the_hill_after_the_best)
"""After six steps the optimizer goes up the hill."""


def first_to_make_room(folder, best):
    """Return the checkpoint that checkpoint.make_room would delete, of three in a relative run."""
    dist.init_process_group("gloo")
    checkpoints = folder / "run/checkpoints"
    for step in (2, 4, 6):
        (checkpoints / f"step-{step:08d}").mkdir(parents=True)
        (checkpoints / f"step-{step:08d}" / MANIFEST).touch()
    (checkpoints / "best").symlink_to(f"step-{best:08d}")
    with contextlib.chdir(folder):
        store = CheckpointStore(Path("run"), Checkpoint(), 60, lambda *_: None, lambda _: None)
        return store.droppable()


def test_the_best_checkpoint_is_never_deleted_to_make_room(world, tmp_path):
    for best, first in ((2, 4), (4, 2)):
        (oldest,) = world.call(1, first_to_make_room, tmp_path / str(best), best)
        assert oldest.name == f"step-{first:08d}"


def losses(run):
    return {e["step"]: e["loss"] for e in run.event("evaluation")}


def best_step(run):
    values = losses(run)
    return min(values, key=values.get)


def assert_best_is_kept(run):
    best, last = best_step(run), run.metrics[-1]["step"]
    assert (run.folder / "checkpoints" / "best").resolve().name == f"step-{best:08d}"
    assert run.checkpoints == ["best", *sorted({f"step-{best:08d}", f"step-{last:08d}"})]
    return best, last


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "async"])
@pytest.mark.grid(1)
def test_the_best_checkpoint_stays_beside_the_newest_and_is_what_is_exported(train, mode):
    how = [*HOW, "checkpoint.best=true", f"checkpoint={mode}", "checkpoint.export_hf=true"]
    train("run", *how, "train.steps=8", ranks=2, seam=TURNS_BAD)
    run = train("run", *how, "train.steps=10", ranks=2, seam=TURNS_BAD)  # which remembers it
    best, last = assert_best_is_kept(run)
    assert (best, last) == (BEST, 10)
    exported, weights = (
        load_file(run.folder / "hf" / "model.safetensors"),
        stored(checkpoint(run, best)),
    )
    assert all((weights[f"weights/{name}"] == tensor).all() for name, tensor in exported.items())
    assert f"best   validation loss {losses(run)[best]:.4f} after step {best}" in run.out
    assert [e["best"] for e in run.event("checkpoint")] == [
        e["step"] in improvements(run) for e in run.event("checkpoint")
    ]


def improvements(run):
    """Steps at which the validation loss was lower than ever before."""
    values = losses(run)
    return [
        step
        for step in values
        if all(values[step] < values[before] for before in values if before < step)
    ]


@pytest.mark.slow
@pytest.mark.further
def test_what_another_validation_set_or_another_run_gave_is_no_measure(train):
    how = [*HOW, "checkpoint.best=true"]
    first = train("first", *how, "train.steps=4")
    moved = train(
        "first", *how, "train.steps=6", "data.validation=0.3", "checkpoint.allow_changes=[data]"
    )
    assert json.loads((newest(moved) / "trainer.json").read_text())["best_step"] == 6, (
        "its losses are those of other samples"
    )
    branch = train(
        "branch",
        *how,
        "train.steps=8",
        f"checkpoint.resume={checkpoint(first, 6)}",
        "data.validation=0.3",
    )
    assert branch.checkpoints == ["best", "step-00000008"]


@pytest.mark.slow
@pytest.mark.further
def test_training_stops_after_so_many_validations_without_a_lower_loss(train):
    how = [*HOW, "train.early_stop=3", "checkpoint.best=true"]
    run = train("run", *how, "train.steps=200", ranks=2, seam=TURNS_BAD)
    assert assert_best_is_kept(run) == (BEST, BEST + 3 * 2)
    assert end_of(run) == ("end", 0)
    assert run.events[-1]["reason"] == "early_stop"
    assert run.event("early_stop")[0]["best_step"] == BEST
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"event": "e')
    again = train("run", *how, "train.steps=200")
    assert "already finished" in again.out
    assert end_of(again) == ("end", 0), "no half-written event stays"
    assert "train.early_stop=null" in again.out
    assert again.metrics[-1]["step"] == 12
    more = train("run", *HOW, "train.steps=14", ranks=2)
    assert more.column("step") == list(range(1, 15))
    assert more.checkpoints == ["step-00000014"], "no longer asked to keep the best"


@pytest.mark.slow
def test_patience_and_its_delta_are_remembered_by_a_resume(train):
    how = [*HOW, "train.early_stop=3", "train.early_stop_delta=100"]
    train("run", *how, "train.steps=4")
    run = train("run", *how, "train.steps=100", "checkpoint.every=50")
    assert run.metrics[-1]["step"] == 8, (
        "of the validations after 2, 4, 6 and 8 steps only the first can count"
    )


@pytest.mark.slow
def test_without_best_nothing_is_kept_beside_the_newest(train):
    assert train("run", *HOW, "train.steps=6", "checkpoint.every=1").checkpoints == [
        "step-00000006"
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["checkpoint.best=true", "data.validation=null"],
            ["checkpoint.best", "data.validation=0.02"],
        ),
        (
            ["train.early_stop=2", "data.validation=0.1"],
            ["train.early_stop", "train.validate_every=100"],
        ),
        (["train.early_stop_delta=0.1"], ["train.early_stop=N"]),
        (["checkpoint.export_dtype=float16"], ["checkpoint.export_hf=true"]),
    ],
    ids=lambda value: value[0],
)
def test_a_key_that_would_do_nothing_is_refused(train, overrides, message):
    err = train("run", "train.steps=1", *overrides, code=2).err
    assert all(text in err for text in message), err


# --- the export ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_export_is_made_again_only_if_it_would_differ(train):
    how = ["schedule=constant", "train.steps=2", "checkpoint.export_hf=true"]
    run = train("run", *how, "checkpoint.export_dtype=bfloat16")
    name = run.folder / "hf" / "model.safetensors"
    assert {str(tensor.dtype) for tensor in load_file(name).values()} == {"torch.bfloat16"}
    assert json.loads((run.folder / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    again = train("run", *how, "checkpoint.export_dtype=bfloat16", ranks=2)
    assert len(again.event("export")) == 1
    other = train("run", *how)
    assert len(other.event("export")) == 2
    assert {str(tensor.dtype) for tensor in load_file(name).values()} == {"torch.float32"}
    shutil.move(
        run.folder / "hf", run.folder / ".hf.partial"
    )  # as after a kill in the middle of it
    (run.folder / ".hf.partial" / "model.safetensors").write_bytes(b"half")
    assert len(train("run", *how).event("export")) == 3
    assert load_file(name)
    assert not (run.folder / ".hf.partial").exists()


@pytest.mark.slow
def test_another_branch_that_ends_at_the_same_step_is_exported_again(train):
    how = ["schedule=constant", "train.steps=4", "checkpoint.every=2", "checkpoint.export_hf=true"]
    run = train("run", *how)
    before = (run.folder / "hf" / "model.safetensors").read_bytes()
    other = ["optim.lr=1e-4", "checkpoint.allow_changes=[optim.lr]"]
    train(
        "run", *how, *other, "checkpoint.export_hf=false", f"checkpoint.resume={checkpoint(run, 2)}"
    )
    train("run", *how, *other)  # finished, but what is exported is the branch that was left
    assert (run.folder / "hf" / "model.safetensors").read_bytes() != before


# --- what a resume tells, and what it clears up -------------------------------------------------


@pytest.mark.slow
def test_a_resume_tells_what_is_not_as_it_was(train):
    train("run", "train.steps=2", "schedule=constant", ranks=2)
    same = train(
        "run",
        "train.steps=3",
        "schedule=constant",
        "optim.lr=1e-3",
        "checkpoint.allow_changes=[optim]",
        "logging.every=2",
    )
    assert same.event("resume")[0]["changes"] == {
        "train.steps": [2, 3], "optim.lr": [0.003, 0.001], "logging.every": [None, 2],
        "world_size": [2, 1]
    }  # fmt: skip
    for line in (
        "optim.lr was 0.003, is 0.001",
        "world_size was 2, is 1",
        "logging.every was null, is 2",
    ):
        assert line in same.out, line


@pytest.mark.slow
def test_a_key_that_is_younger_than_the_checkpoint_had_its_default(train):
    run = train("run", "train.steps=2", "schedule=constant")
    config, manifest = newest(run) / "config.yaml", newest(run) / "MANIFEST.json"
    config.write_text(config.read_text().replace("  eps: 1.0e-08\n", ""))
    listed = json.loads(manifest.read_text())
    del listed["files"]["config.yaml"]
    manifest.write_text(json.dumps(listed))
    assert train("run", "train.steps=3", "schedule=constant").column("step") == [1, 2, 3]
    assert (
        "optim.eps=1e-6"
        in train("run", "train.steps=4", "schedule=constant", "optim.eps=1e-6", code=2).err
    )


@pytest.mark.slow
@pytest.mark.further
def test_what_a_crash_or_another_branch_left_does_not_stay_for_ever(train):
    how = ["schedule=constant", "checkpoint.every=1", "checkpoint.keep=2"]
    run = train("run", *how, "train.steps=4")
    (run.folder / "checkpoints" / ".step-00000077.partial").mkdir()
    run = train("run", *how, "train.steps=4", f"checkpoint.resume={checkpoint(run, 3)}")
    assert run.checkpoints == ["step-00000003", "step-00000004", "step-00000004.left"], (
        "one new checkpoint: the old branch can be had back"
    )
    back = train("run", *how, "train.steps=5", f"checkpoint.resume={checkpoint(run, 4)}.left")
    assert back.event("resume")[-1]["step"] == 4
    assert back.column("step") == [1, 2, 3, 4, 5]
    assert train("run", *how, "train.steps=7", "checkpoint.keep=2").checkpoints == [
        "step-00000006",
        "step-00000007",
    ]
