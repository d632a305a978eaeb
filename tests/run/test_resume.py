"""A run that was stopped, killed or damaged goes on as if nothing had happened, or says why it does
not."""

import json
import os
import shutil
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import inject
import pytest
import stored
import torch
import yaml
from folders import table
from stored import end_of, newest
from world import read_json, write_chats

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.errors import UserError
from fsdp_trainer.run import resume
from fsdp_trainer.run.run_lock import RunLock


@pytest.fixture
def go_on(ledger, tmp_path):
    """Return a function that trains on in a copy of a run of the ledger.

    The run has made four steps, and checkpoints after the second and the fourth.
    """
    ledger.copy("plain", tmp_path / "run")
    return partial(stored.go_on, ledger, "plain", tmp_path / "run")


@pytest.fixture
def checkpoints(go_on, tmp_path):
    """Return the folder of the checkpoints from which `go_on` goes on."""
    return tmp_path / "run" / "checkpoints"


# --- another world ------------------------------------------------------------------------------


def test_any_number_of_ranks_goes_on_and_no_row_is_lost_or_repeated(train):
    """7 rows do not divide by 2 or 4 ranks: some are empty."""
    how = "schedule=constant batch.rows=7 batch.micro_rows=2"
    worlds = (1, 4, 2)
    for i, ranks in enumerate(worlds, 1):
        run = train("run", how, f"train.steps={2 * i}", ranks=ranks)
    whole = train("whole", how, "train.steps=6")
    assert run["step"] == list(range(1, 7))
    assert run["tokens"] == whole["tokens"]
    assert run["supervised_tokens"] == whole["supervised_tokens"]
    assert run["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert run["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert read_json(newest(run) / "trainer.json")["rows"] == 7 * 6
    starts = [e for e in run.events if e["event"] in ("start", "resume")]
    assert [e["world_size"] for e in starts] == list(worlds)
    assert [e["rows"] for e in starts] == [0, 14, 28]


# --- may it go on -------------------------------------------------------------------------------


def test_what_changes_no_loss_is_a_note(go_on, checkpoints, ledger):
    shutil.rmtree(checkpoints / "step-00000004")
    others = "batch.micro_rows=1 data.on_error=skip data.format=prompt_completion loss.chunk_mib=7"
    run, whole = go_on(others, ranks=2), ledger.run("plain")
    changes = run.event("resume")[0]["changes"]
    assert changes["batch.micro_rows"] == [6, 1]
    assert "batch.micro_rows was 6, is 1" in run.out
    assert changes.keys() >= {"data.on_error", "data.format", "loss.chunk_mib"}
    assert run["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert run["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


def test_a_longer_run_keeps_the_steps_of_its_warm_up(train):
    share = "schedule.warmup_steps=0 schedule.warmup=0.5"
    train("run", "train.steps=3")  # with three steps of warm-up, as recipes once had them
    train("run", share, "train.steps=8")
    run = train("run", share, "train.steps=12")
    assert "the warm-up has the checkpoint's 3 steps" in run.out
    assert run["lr"][2:4] == pytest.approx([3e-3, 3e-3])
    assert run["lr"][4] < 2.99e-3
    allow = "checkpoint.allow_changes=[schedule]"
    assert "the warm-up has" not in train("run", share, "train.steps=14", allow).out


CHANGES = table("run/refused_changes.yaml")


@pytest.mark.parametrize(("words", "said"), CHANGES.values(), ids=CHANGES)
def test_what_is_trained_may_not_change(go_on, words, said):
    refused = go_on("train.steps=6", *words, code=2, ranks=2)
    assert [text for text in said if text not in refused.err] == []
    assert "train.steps" not in refused.err
    assert len(refused.err.splitlines()) < 20
    assert refused["step"] == [1, 2, 3, 4]
    assert end_of(refused) == ("end", 2)


def test_a_record_of_an_earlier_version_has_the_environments_values(tmp_path, monkeypatch):
    monkeypatch.setenv("MINE", "https://me:pw@host/a?key=SECRET")
    cfg = compose("train", ["launch.env={K: '${oc.env:MINE}'}"], inputs=False)
    (tmp_path / "config.yaml").write_text(yaml.dump(json.loads(json.dumps(asdict(cfg)))))
    monkeypatch.setattr(resume, "read_progress", lambda _: {"data": "a"})
    monkeypatch.setattr(resume, "read_manifest", lambda _: {"world_size": 1})
    monkeypatch.setattr(resume.dist, "get_world_size", lambda: 1)
    setup, order = SimpleNamespace(cfg=cfg), SimpleNamespace(fingerprint="a")
    assert resume.check_unchanged(setup, order, tmp_path) == {}


def test_a_resume_with_changed_data_names_the_files_that_changed(train, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, start in (("a", 0), ("b", 40), ("c", 80)):
        write_chats(folder / f"{name}.jsonl", 40, start)
    how = f"data.path={folder} schedule=constant"
    train("run", how, "train.steps=2")
    write_chats(folder / "b.jsonl", 40, 300)
    refused = train("run", how, "train.steps=3", code=2).err
    assert f"{folder}/b.jsonl has other content\n" in refused
    assert "a.jsonl" not in refused
    (folder / "a.jsonl").unlink()
    (folder / "c.jsonl").rename(folder / "renamed.jsonl")
    write_chats(folder / "d.jsonl", 40, 500)
    changed = ("b.jsonl has other content", "a.jsonl is left out", "d.jsonl is new")
    refused = train("run", how, "train.steps=3", code=2).err
    allow = "checkpoint.allow_changes=[data.fingerprint]"
    allowed = train("run", how, "train.steps=3", allow)
    for text in changed:
        assert f"{folder}/{text}\n" in refused
        assert f"data   {folder}/{text}\n" in allowed.out
    assert "renamed.jsonl" not in refused
    write_chats(folder / "d.jsonl", 40, 600)  # compared with the data that was allowed
    refused = train("run", how, "train.steps=4", code=2).err
    assert f"{folder}/d.jsonl has other content\n" in refused
    assert "b.jsonl" not in refused


def test_the_same_data_at_another_place_is_the_same_data(go_on, ledger, tmp_path):
    moved = shutil.copy(ledger.data / "chats.jsonl", tmp_path / "moved.jsonl")
    assert go_on(f"train.steps=5 data.path={moved}")["step"] == [1, 2, 3, 4, 5]


def test_a_finished_run_says_so_and_goes_on_only_for_more_steps(go_on):
    again = go_on("checkpoint.export_hf=true", ranks=2)
    assert "already finished" in again.out
    export = f"{again.folder}/hf is a Hugging Face folder, of step 4"
    assert export in again.out
    assert again["step"] == [1, 2, 3, 4]
    assert end_of(again) == ("end", 0)
    more = "train.steps=6 checkpoint.keep=1 checkpoint.best=false"
    longer = go_on(more, "checkpoint.export_hf=false", ranks=2)
    assert longer.checkpoints == ["step-00000006"]
    assert export in longer.out, "it is of an earlier step"


def test_never_refuses_a_used_folder_and_overwrite_starts_anew(go_on, checkpoints, ledger):
    refused = go_on("checkpoint.resume=never", code=2, ranks=2)
    assert "run.overwrite=true" in refused.err
    assert refused["step"] == [1, 2, 3, 4]
    assert refused.checkpoints == ["step-00000002", "step-00000004"]
    elsewhere = checkpoints.rename(checkpoints.parents[1] / "elsewhere")
    checkpoints.symlink_to(elsewhere)
    anew = go_on("train.steps=2 checkpoint.resume=never run.overwrite=true", ranks=2)
    assert anew["step"] == [1, 2]
    assert anew.checkpoints == ["step-00000002"]
    assert anew.events[0]["event"] == "start"
    assert anew["loss"] == pytest.approx(ledger.run("plain")["loss"][:2])


def test_a_process_that_was_refused_a_folder_does_not_keep_it_locked(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    cfg = SimpleNamespace(
        checkpoint=SimpleNamespace(resume="never"), run=SimpleNamespace(overwrite=False)
    )
    with pytest.raises(UserError) as refused:
        RunLock([]).acquire(cfg.run, cfg.checkpoint.resume, tmp_path)
    cfg.run.overwrite = True
    RunLock([]).acquire(cfg.run, cfg.checkpoint.resume, tmp_path).close()
    assert "holds an earlier run" in str(refused.value)


# --- what is on disk ----------------------------------------------------------------------------


def test_keep_counts_committed_checkpoints_only(go_on, checkpoints):
    partial = checkpoints / "step-00000099"  # looks like one, but has no manifest
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    (checkpoints / ".step-00000002.partial").mkdir()
    run = go_on("train.steps=7 checkpoint.every=1 checkpoint.keep=2", ranks=2)
    assert run["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert run.checkpoints == ["step-00000006", "step-00000007"]
    assert "MANIFEST.json is missing" in run.event("damaged")[0]["problems"][0]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_where_everything_is_damaged_the_run_starts_at_its_beginning(go_on, checkpoints, ledger):
    for checkpoint in checkpoints.iterdir():
        cut(checkpoint / "__0_0.distcp")
    run = go_on()
    assert len(run.event("damaged")) == 2
    assert run["step"] == [1, 2, 3, 4]
    assert run["loss"] == ledger.run("plain")["loss"]


def test_a_damaged_checkpoint_never_drives_out_a_good_one(go_on, checkpoints):
    cut(checkpoints / "step-00000004" / "__0_0.distcp")
    often = "checkpoint.every=1 checkpoint.keep=1"
    assert "step-00000003" in go_on("train.steps=3", often, ranks=2).checkpoints
    again = go_on("train.steps=5", often, ranks=2)
    assert again.event("resume")[-1]["step"] == 3
    assert again.checkpoints[-1] == "step-00000005"


def test_going_back_to_an_older_checkpoint_makes_it_the_run(go_on, checkpoints):
    how = "optim.lr=1e-4 checkpoint.allow_changes=[optim.lr] checkpoint.keep=1"
    back = f"checkpoint.resume={checkpoints / 'step-00000002'}"
    run = go_on("train.steps=3", how, back)
    assert run["step"] == [1, 2, 3]
    assert "step-00000003" in run.checkpoints
    again = go_on("train.steps=5", how)
    assert again.event("resume")[-1]["step"] == 3, "of the branch, not what was left behind"


def test_a_checkpoint_that_cannot_be_written_at_the_end_fails_the_run_on_all_ranks_and_leaves_none(
    train,
):
    full_disk = inject.together(
        inject.fails("checkpoint_write", inject.no_space(), rank=1), inject.quick_retries()
    )
    how = "train.steps=4 checkpoint.every=2"
    run = train("run", how, ranks=2, seam=full_disk, code=1)
    assert "No space left" in run.err
    assert "Traceback" not in run.err
    assert run.checkpoints == []
    assert end_of(run) == ("end", 1)
    assert train("run", how, ranks=2)["step"] == [1, 2, 3, 4]


def test_what_a_checkpoint_holds_is_on_record_when_it_commits(train):
    """Were the lines of steps 1 to 3 only written at step 10, a kill after the checkpoint would
    lose them for good."""
    how = "train.steps=4 checkpoint.every=3 logging.every=10"
    # as good as killed after the first checkpoint
    run = train("run", how, seam=inject.failed(step=4), code=1)
    assert run["step"] == [1, 2, 3]


# --- changes that were allowed ------------------------------------------------------------------


def test_epochs_end_with_the_data_also_if_steps_become_smaller_on_the_way(train):
    how = "train.epochs=2 schedule=constant checkpoint.keep=9"
    first = train("run", how, "batch.rows=20 checkpoint.every=1")
    tokens, steps = first["tokens"][-1], len(first.metrics)
    middle = f"checkpoint.resume={first.folder}/checkpoints/step-00000002"
    run = train("run", how, "batch.rows=7", middle, "checkpoint.allow_changes=[batch]")
    assert end_of(run) == ("end", 0)
    assert run["tokens"][-1] == tokens
    assert len(run.metrics) > steps


def test_a_step_without_a_target_is_a_step(train, tmp_path):
    (tmp_path / "z.txt").write_text("a" * 32)
    data = ["data=pretrain", f"data.path={tmp_path / 'z.txt'}", "train.epochs=2"]
    run = train("run", *data, "batch.seq_len=16 batch.rows=1 batch.micro_rows=1")
    assert len(run.metrics) == 6
    assert not run.event("skipped")
    assert 0 in run["loss"]


# --- deterministic kernels ----------------------------------------------------------------------


def refuse_other_kernels():
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def refuse_deterministic_kernels():
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_deterministic_run_takes_deterministic_kernels_until_it_ends(train):
    how = "train.steps=5 schedule=constant train.spike_window=4"
    run = train("run", how, "train.deterministic=true", seam=inject.at(None, refuse_other_kernels))
    plain = train("plain", how, seam=inject.at(None, refuse_deterministic_kernels))
    assert run["loss"] == plain["loss"]
