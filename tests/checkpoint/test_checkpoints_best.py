"""Validation decides: the best checkpoint is kept, training stops early; and what happens at the
end of a run."""

import contextlib
import shutil
from pathlib import Path

import inject
import pytest
import torch
import torch.distributed as dist
from stored import checkpoint, end_of, go_on, newest, stored, tensors
from world import read_json, write_json

from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.paths import MANIFEST, committed_checkpoints, step_of
from fsdp_trainer.config.schema import Checkpoint

HOW = "schedule=constant data.validation=0.1 train.validate_every=2 checkpoint.keep=1"
BEST = 6


def up_the_hill_after_the_best(_real, _cfg, lr, step, _total, _warmup):
    return lr if step <= BEST else -lr


TURNS_BAD = inject.around("learning_rate", up_the_hill_after_the_best)
"""After six steps the optimizer goes up the hill."""


def first_to_make_room(folder):
    """Return the checkpoint of a relative run that checkpoint.make_room would delete."""
    dist.init_process_group("gloo")
    with contextlib.chdir(folder):
        store = CheckpointStore(Path("run"), Checkpoint(), 60, lambda *_: None, lambda _: None)
        return store.droppable()


def test_the_best_checkpoint_is_never_deleted_to_make_room(world, ledger, tmp_path):
    link = ledger.copy("every step", tmp_path / "run").folder / "checkpoints/best"
    for best, first in ((1, 2), (4, 1)):
        link.unlink(missing_ok=True)
        link.symlink_to(f"step-{best:08d}")
        (oldest,) = world.call(1, first_to_make_room, tmp_path)
        assert oldest.name == f"step-{first:08d}"


def test_only_deleting_that_belongs_to_the_newest_checkpoint_is_finished(monkeypatch, tmp_path):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for step in (1, 2, 3):
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / MANIFEST).touch()
    settings = Checkpoint(mode="sync", keep=1)
    store = CheckpointStore(tmp_path, settings, 60, lambda *_: None, lambda _: None)
    for step, staying in ((1, [1, 2, 3]), (2, [1, 2, 3]), (3, [1, 3])):
        store.finish_deleting(step, best_step=1)
        assert [step_of(path) for path in committed_checkpoints(tmp_path)] == staying


def test_the_best_checkpoint_stays_is_exported_and_training_stops_when_none_is_better(train):
    how = [HOW, "checkpoint=async checkpoint.best=true train.early_stop=3"]
    how += ["checkpoint.export_hf=true"]
    train("run", *how, "train.steps=8", ranks=2, seam=TURNS_BAD)
    run = train("run", *how, "train.steps=200", ranks=2, seam=TURNS_BAD)  # which remembers it
    losses = {e["step"]: e["loss"] for e in run.event("evaluation")}
    assert min(losses, key=losses.get) == BEST
    assert (run.folder / "checkpoints/best").resolve() == checkpoint(run, BEST)
    last = BEST + 3 * 2
    staying = ["best", f"step-{BEST:08d}", f"step-{last:08d}"]
    assert run.checkpoints == staying
    weights = stored(checkpoint(run, BEST))
    for name, tensor in tensors(run.folder / "hf").items():
        assert (weights[f"weights/{name}"] == tensor).all()
    assert f"best   validation loss {losses[BEST]:.4f} after step {BEST}" in run.out
    improvements = [
        step
        for step in losses
        if all(losses[step] < losses[before] for before in losses if before < step)
    ]
    events = run.event("checkpoint")
    assert [e["best"] for e in events] == [e["step"] in improvements for e in events]
    assert end_of(run) == ("end", 0)
    assert run.events[-1]["reason"] == "early_stop"
    assert run.event("early_stop")[0]["best_step"] == BEST
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"event": "e')
    shutil.copytree(checkpoint(run, last), run.folder / "checkpoints/step-00000001")
    (run.folder / "checkpoints/.step-00000077.partial").mkdir()
    again = train("run", *how, "train.steps=200")
    assert "already finished" in again.out
    assert end_of(again) == ("end", 0), "no half-written event stays"
    assert again.checkpoints == staying, "nor what the last save had still to delete"
    assert "train.early_stop=null" in again.out
    assert again.metrics[-1]["step"] == last
    more = train("run", HOW, "train.steps=14 checkpoint.every=1", ranks=2)
    assert more["step"] == list(range(1, 15))
    assert more.checkpoints == ["step-00000014"], "no longer asked to keep the best"


def test_what_another_validation_set_or_another_run_gave_is_no_measure(train):
    how = [HOW, "checkpoint.best=true"]
    first = train("run", *how, "train.steps=4")
    how += ["data.validation=0.3"]
    moved = train("run", *how, "train.steps=6 checkpoint.allow_changes=[data]")
    progress = read_json(newest(moved) / "trainer.json")
    assert progress["best_step"] == 6, "its losses are those of other samples"
    resume = f"checkpoint.resume={checkpoint(first, 6)}"
    branch = train("branch", *how, "train.steps=8", resume)
    assert branch.checkpoints == ["best", "step-00000008"]


def test_patience_and_its_delta_are_remembered_by_a_resume(train):
    how = [HOW, "train.early_stop=3 train.early_stop_delta=100"]
    train("run", *how, "train.steps=4")
    run = train("run", *how, "train.steps=100 checkpoint.every=50")
    assert run.metrics[-1]["step"] == 8, (
        "of the validations after 2, 4, 6 and 8 steps only the first can count"
    )


# --- the export ---------------------------------------------------------------------------------


def test_the_export_is_made_again_only_if_it_would_differ(ledger, tmp_path):
    bfloat16 = ledger, "plain", tmp_path / "run", "checkpoint.export_dtype=bfloat16"
    run = go_on(*bfloat16)
    assert len(run.event("export")) == 2
    hf = run.folder / "hf"
    assert {tensor.dtype for tensor in tensors(hf).values()} == {torch.bfloat16}
    assert read_json(hf / "config.json")["dtype"] == "bfloat16"
    assert len(go_on(*bfloat16, ranks=2).event("export")) == 2
    half = hf.rename(run.folder / ".hf.partial")  # as after a kill in the middle of it
    (half / "model.safetensors").write_bytes(b"half")
    assert len(go_on(*bfloat16).event("export")) == 3
    assert tensors(hf)
    assert not half.exists()


def test_another_branch_that_ends_at_the_same_step_is_exported_again(ledger, tmp_path):
    run = ledger.copy("plain", tmp_path / "run")
    before = (run.folder / "hf/model.safetensors").read_bytes()
    other = ledger, "plain", run.folder, "optim.lr=1e-4", "checkpoint.allow_changes=[optim.lr]"
    go_on(*other, f"checkpoint.export_hf=false checkpoint.resume={checkpoint(run, 2)}")
    go_on(*other)  # finished, but what is exported is the branch that was left
    assert (run.folder / "hf/model.safetensors").read_bytes() != before


# --- what a resume tells, and what it clears up -------------------------------------------------


def test_a_resume_tells_what_is_not_as_it_was(ledger, tmp_path):
    words = ["train.steps=5 optim.lr=1e-3 logging.every=2"]
    words += ["checkpoint.allow_changes=[optim]"]
    same = go_on(ledger, "plain on two", tmp_path / "run", *words)
    assert same["lr"] == pytest.approx([0.001, 0.002, 0.003, 0.003, 0.001])
    changes = same.event("resume")[0]["changes"]
    assert {key: change for key, change in changes.items() if not key.startswith("run.")} == {
        "train.steps": [4, 5], "optim.lr": [0.003, 0.001], "logging.every": [None, 2],
        "world_size": [2, 1]
    }  # fmt: skip
    for line in (
        "optim.lr was 0.003, is 0.001",
        "world_size was 2, is 1",
        "logging.every was null, is 2",
    ):
        assert line in same.out, line


def test_a_key_that_is_younger_than_the_checkpoint_had_its_default(ledger, tmp_path):
    run = ledger.copy("plain", tmp_path / "run")
    config, manifest = newest(run) / "config.yaml", newest(run) / "MANIFEST.json"
    config.write_text(config.read_text().replace("  eps: 1.0e-08\n", ""))
    listed = read_json(manifest)
    del listed["files"]["config.yaml"]
    write_json(manifest, listed)
    more = ledger, "plain", run.folder, "train.steps=5"
    assert "optim.eps=1e-6" in go_on(*more, "optim.eps=1e-6", code=2).err
    assert go_on(*more)["step"] == [1, 2, 3, 4, 5]


def test_what_a_crash_or_another_branch_left_does_not_stay_for_ever(ledger, tmp_path):
    run = ledger.copy("every step", tmp_path / "run")
    (run.folder / "checkpoints/.step-00000077.partial").mkdir()
    how = ledger, "every step", run.folder, "checkpoint.keep=2"
    run = go_on(*how, f"checkpoint.resume={checkpoint(run, 8)}")
    assert run.checkpoints == ["step-00000008", "step-00000009", "step-00000009.left"], (
        "one new checkpoint: the old branch can be had back"
    )
    back = go_on(*how, f"train.steps=10 checkpoint.resume={checkpoint(run, 9)}.left")
    assert back.event("resume")[-1]["step"] == 9
    assert back["step"] == list(range(1, 11))
    assert go_on(*how, "train.steps=12").checkpoints == ["step-00000011", "step-00000012"]
