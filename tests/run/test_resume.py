"""A run that was stopped, killed or damaged goes on as if nothing had happened, or says why it does
not."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import inject
import pytest
import torch
from inject import ONE_SIGNAL, seamed
from stored import assert_bitwise_equal, end_of, newest, stored
from world import SMALL, RankFailed, Run, alive, wait_until, write_chats

from fsdp_trainer.errors import UserError
from fsdp_trainer.run.run_lock import RunLock

# --- killed hard --------------------------------------------------------------------------------


def started(folder, inputs, *overrides, env=None):
    """A command line of its own that starts its ranks itself."""
    words = [
        *SMALL,
        *(f"{k}={v}" for k, v in inputs.items()),
        f"run.root={folder.parent}",
        f"run.name={folder.name}",
        *overrides,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-m", "fsdp_trainer", *words],
        start_new_session=True,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.further
def test_killed_hard_and_started_again_ends_bitwise_where_an_uninterrupted_run_does(
    train, tmp_path
):
    how = ["train.steps=8", "checkpoint.every=3", "batch.micro_rows=2"]
    with pytest.raises(RankFailed):
        train("killed", *how, ranks=2, seam=inject.killed(step=6))
    killed = Run(tmp_path / "killed")
    assert "end" not in [e["event"] for e in killed.events]
    assert len(killed.metrics) == 5
    with (killed.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # a half line
    killed = train("killed", *how, ranks=2)
    whole = train("whole", *how, ranks=2)
    assert killed.column("step") == list(range(1, 9))
    assert killed.event("resume")[0]["step"] == 3
    for column in ("loss", "grad_norm", "lr", "tokens", "supervised_tokens"):
        assert killed.column(column) == whole.column(column), column
    assert_bitwise_equal(stored(newest(killed)), stored(newest(whole)))
    assert [e["event"] for e in killed.events if e["event"] in ("start", "resume", "end")] == [
        "start",
        "resume",
        "end",
    ]
    assert end_of(killed) == ("end", 0)
    assert len(killed.checkpoints) == 2


@pytest.mark.slow
@pytest.mark.further
def test_no_rank_outlives_a_launcher_that_was_killed_hard(inputs, tmp_path):
    process = started(tmp_path / "run", inputs, "train.steps=100000", "launch.nproc_per_node=2")
    wait_until((tmp_path / "run" / "metrics.jsonl").exists, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, children)))
    process.stdout.close()


# --- stopped in order ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.further
def test_sigterm_commits_a_checkpoint_exits_75_and_the_same_command_goes_on(
    train, inputs, tmp_path
):
    how = ["train.steps=100000", "schedule=constant", "launch.nproc_per_node=2"]
    process = started(tmp_path / "run", inputs, *how, env=seamed(tmp_path / "seam", ONE_SIGNAL))
    run = Run(tmp_path / "run")
    wait_until(lambda: len(run.metrics) > 3, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGTERM)
    for (
        pid
    ) in children:  # as a scheduler that signals every process; the launcher passes its own on too
        os.kill(int(pid), signal.SIGTERM)
    out = process.communicate(timeout=600)[0]
    assert process.returncode == 75, out
    stopped = run.metrics[-1]["step"]
    assert end_of(run) == ("end", 75)
    assert run.event("signal")[0]["reason"] == "SIGTERM"
    assert run.checkpoints == [f"step-{stopped:08d}"]
    assert "the same command resumes" in out
    assert out.count("checkpoint committed") == 1
    again = train("run", f"train.steps={stopped + 3}", "schedule=constant", ranks=2)
    assert again.column("step") == list(range(1, stopped + 4))
    assert end_of(again) == ("end", 0)


@pytest.mark.slow
def test_a_time_limit_exits_75_with_a_checkpoint(train):
    run = train("run", "train.steps=100000", "train.time_limit=1s", "logging.every=1000", code=75)
    step = run.metrics[-1]["step"]
    assert end_of(run) == ("end", 75)
    assert run.event("time_limit")
    assert run.checkpoints == [f"step-{step:08d}"]
    assert run.column("step") == list(range(1, step + 1)), (
        "what was not yet written is written before leaving"
    )


# --- another world ------------------------------------------------------------------------------


@pytest.mark.slow
def test_any_number_of_ranks_goes_on_and_no_row_is_lost_or_repeated(train):
    how = ["schedule=constant", "batch.rows=7", "batch.micro_rows=7"]
    worlds = (1, 4, 2, 1)
    for i, ranks in enumerate(worlds, 1):
        run = train("run", *how, f"train.steps={2 * i}", ranks=ranks)
    whole = train("whole", *how, f"train.steps={2 * len(worlds)}", ranks=2)
    assert run.column("step") == list(range(1, 2 * len(worlds) + 1))
    assert run.column("tokens") == whole.column("tokens")
    assert run.column("supervised_tokens") == whole.column("supervised_tokens")
    assert run.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=1e-4)
    assert json.loads((newest(run) / "trainer.json").read_text())["rows"] == 7 * 2 * len(worlds)
    assert [e["world_size"] for e in run.events if e["event"] in ("start", "resume")] == list(
        worlds
    )


@pytest.mark.slow
def test_a_resume_is_bitwise_also_across_shardings_of_one_world(train):
    how = ["schedule=constant", "checkpoint.every=4"]
    whole = train("whole", *how, "train.steps=8", ranks=2)
    train("run", *how, "train.steps=4", ranks=2)
    run = train(
        "run",
        *how,
        "train.steps=8",
        "sharding.blocks_per_unit=2",
        "activation_checkpoint=full",
        ranks=2,
    )
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


# --- may it go on -------------------------------------------------------------------------------


@pytest.mark.further
def test_what_changes_no_loss_is_a_note(train):
    how = ["schedule=constant", "checkpoint.keep=9"]
    whole = train("whole", *how, "batch.micro_rows=2", "train.steps=4")
    train("run", *how, "batch.micro_rows=2", "train.steps=2")
    others = ["batch.micro_rows=1", "data.on_error=skip", "data.format=prompt_completion"]
    run = train("run", *how, *others, "train.steps=4", ranks=2)
    changes = run.event("resume")[0]["changes"]
    assert changes["batch.micro_rows"] == [2, 1]
    assert "batch.micro_rows was 2, is 1" in run.out
    assert changes.keys() >= {"data.on_error", "data.format"}
    assert run.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=1e-4)


@pytest.mark.slow
def test_other_tokens_are_refused_with_the_key_that_gives_them(train):
    train("run", "train.steps=1")
    refused = train("run", "train.steps=2", "data.loss_on=all", code=2)
    assert "data.loss_on=all" in refused.err
    assert "data.fingerprint" in refused.err


@pytest.mark.slow
def test_what_is_trained_may_not_change_unless_it_is_allowed(train, tmp_path):
    train("run", "train.steps=2", "schedule=constant")
    refused = train(
        "run",
        "train.steps=4",
        "schedule=linear",
        "optim.lr=1e-4",
        "batch.rows=4",
        "run.seed=5",
        ranks=2,
        code=2,
    )
    for text in (
        "optim.lr=0.0001",
        "0.003",
        "batch.rows=4",
        "schedule.name=linear",
        "run.seed=5",
        "run.name=NEW",
        "checkpoint.allow_changes=[",
    ):
        assert text in refused.err, text
    assert "train.steps" not in refused.err
    assert refused.column("step") == [1, 2]
    assert end_of(refused) == ("end", 2)
    refused = train(
        "run",
        "train.steps=4",
        "schedule=constant",
        f"data.path={write_chats(tmp_path / 'other.jsonl', 90)}",
        code=2,
    )
    assert "data.fingerprint" in refused.err
    run = train(
        "run",
        "train.steps=4",
        "schedule=constant",
        "optim.lr=1e-4",
        "checkpoint.allow_changes=[optim.lr]",
        "logging.every=2",
        "run.name=run",
    )
    assert run.column("lr")[:2] == [0.001, 0.002]
    assert run.column("lr")[3] == pytest.approx(1e-4)
    assert run.column("step") == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_resume_with_changed_data_names_the_files_that_changed(train, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, start in (("a", 0), ("b", 40), ("c", 80)):
        write_chats(folder / f"{name}.jsonl", 40, start)
    how = [f"data.path={folder}", "schedule=constant"]
    train("run", *how, "train.steps=2")
    write_chats(folder / "b.jsonl", 40, 300)
    refused = train("run", *how, "train.steps=3", code=2).err
    assert f"{folder}/b.jsonl has other content\n" in refused
    assert "a.jsonl" not in refused
    (folder / "a.jsonl").unlink()
    (folder / "c.jsonl").rename(folder / "renamed.jsonl")
    write_chats(folder / "d.jsonl", 40, 500)
    changed = ("b.jsonl has other content", "a.jsonl is left out", "d.jsonl is new")
    refused = train("run", *how, "train.steps=3", code=2).err
    allow = "checkpoint.allow_changes=[data.fingerprint]"
    allowed = train("run", *how, "train.steps=3", allow)
    for text in changed:
        assert f"{folder}/{text}\n" in refused
        assert f"data   {folder}/{text}\n" in allowed.out
    assert "renamed.jsonl" not in refused
    write_chats(folder / "d.jsonl", 40, 600)  # compared with the data that was allowed
    refused = train("run", *how, "train.steps=4", code=2).err
    assert f"{folder}/d.jsonl has other content\n" in refused
    assert "b.jsonl" not in refused


@pytest.mark.slow
def test_the_same_data_at_another_place_is_the_same_data(train, chats, tmp_path):
    train("run", "train.steps=2")
    shutil.copy(chats, tmp_path / "moved.jsonl")
    assert train("run", "train.steps=3", f"data.path={tmp_path / 'moved.jsonl'}").column(
        "step"
    ) == [1, 2, 3]


@pytest.mark.slow
def test_a_finished_run_says_so_and_goes_on_only_for_more_steps(train):
    train("run", "train.steps=2", ranks=2)
    again = train("run", "train.steps=2", ranks=2)
    assert "already finished" in again.out
    assert again.column("step") == [1, 2]
    assert end_of(again) == ("end", 0)
    assert train("run", "train.steps=4", "checkpoint.keep=1", ranks=2).checkpoints == [
        "step-00000004"
    ]


@pytest.mark.slow
def test_a_finished_run_can_still_be_exported(train):
    train("run", "train.steps=2")
    run = train("run", "train.steps=2", "checkpoint.export_hf=true", ranks=2)
    assert (run.folder / "hf" / "model.safetensors").exists()
    assert run.event("export")


@pytest.mark.slow
def test_never_refuses_a_used_folder_and_overwrite_starts_anew(train):
    first_loss = train("run", "train.steps=3").column("loss")[0]
    refused = train("run", "train.steps=3", "checkpoint.resume=never", code=2, ranks=2)
    assert "run.overwrite=true" in refused.err
    assert refused.column("step") == [1, 2, 3]
    assert refused.checkpoints == ["step-00000003"]
    (refused.folder / "checkpoints").rename(refused.folder.parent / "elsewhere")
    (refused.folder / "checkpoints").symlink_to(refused.folder.parent / "elsewhere")
    anew = train("run", "train.steps=2", "checkpoint.resume=never", "run.overwrite=true", ranks=2)
    assert anew.column("step") == [1, 2]
    assert anew.checkpoints == ["step-00000002"]
    assert anew.events[0]["event"] == "start"
    assert anew.column("loss")[0] == pytest.approx(first_loss)


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


@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_of_another(train):
    first = train("first", "train.steps=4", "checkpoint.every=2", "schedule=constant")
    whole = train("first", "train.steps=6", "checkpoint.every=2", "schedule=constant")
    branch = train(
        "branch",
        "train.steps=6",
        "schedule=constant",
        f"checkpoint.resume={first.folder}/checkpoints/step-00000004",
    )
    assert branch.column("step") == [5, 6]
    assert branch.column("loss") == whole.column("loss")[4:]
    assert branch.checkpoints == ["step-00000006"]


@pytest.mark.slow
def test_the_same_command_goes_on_also_when_it_names_the_checkpoint_it_began_with(train):
    first = train("first", "train.steps=2", "schedule=constant")
    how = ["schedule=constant", "checkpoint.every=1", f"checkpoint.resume={first.folder}"]
    train("branch", "train.steps=4", *how)
    again = train("branch", "train.steps=6", *how)
    assert again.column("step") == [3, 4, 5, 6]
    assert [e["step"] for e in again.event("resume")] == [
        2,
        4,
    ]


# --- what is on disk ----------------------------------------------------------------------------


@pytest.mark.slow
def test_keep_counts_committed_checkpoints_only(train, tmp_path):
    partial = (
        tmp_path / "run" / "checkpoints" / "step-00000099"
    )  # looks like one, but has no manifest
    partial.mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "run" / "checkpoints" / ".step-00000002.partial").mkdir()
    run = train("run", "train.steps=6", "checkpoint.every=1", "checkpoint.keep=2", ranks=2)
    assert run.column("step") == [1, 2, 3, 4, 5, 6]
    assert run.checkpoints == ["step-00000005", "step-00000006"]
    assert "MANIFEST.json is missing" in run.event("damaged")[0]["problems"][0]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture(scope="module")
def broken_run(world, inputs, tmp_path_factory):
    """Two checkpoints by two ranks, to be broken."""
    where = tmp_path_factory.mktemp("broken") / "run"
    return world.train(
        where,
        *(f"{k}={v}" for k, v in inputs.items()),
        "train.steps=4",
        "schedule=constant",
        "checkpoint.every=2",
        ranks=2,
    )


@pytest.mark.slow
def test_where_everything_is_damaged_the_run_starts_at_its_beginning(train, broken_run, tmp_path):
    shutil.copytree(broken_run.folder, tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        cut(checkpoint / "__0_0.distcp")
    run = train("run", "train.steps=5", "schedule=constant", "checkpoint.every=2")
    assert len(run.event("damaged")) == 2
    assert run.column("step") == [1, 2, 3, 4, 5]
    assert run.column("loss")[0] == pytest.approx(broken_run.column("loss")[0])


@pytest.mark.slow
def test_a_damaged_checkpoint_never_drives_out_a_good_one(train, broken_run, tmp_path):
    shutil.copytree(broken_run.folder, tmp_path / "run")
    cut(tmp_path / "run" / "checkpoints" / "step-00000004" / "__0_0.distcp")
    run = train(
        "run",
        "train.steps=3",
        "schedule=constant",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        ranks=2,
    )
    assert "step-00000003" in run.checkpoints
    again = train(
        "run",
        "train.steps=5",
        "schedule=constant",
        "checkpoint.every=1",
        "checkpoint.keep=1",
        ranks=2,
    )
    assert again.event("resume")[-1]["step"] == 3
    assert again.checkpoints[-1] == "step-00000005"


@pytest.mark.slow
def test_going_back_to_an_older_checkpoint_makes_it_the_run(train, broken_run, tmp_path):
    shutil.copytree(broken_run.folder, tmp_path / "run")
    older = tmp_path / "run" / "checkpoints" / "step-00000002"
    how = [
        "schedule=constant",
        "optim.lr=1e-4",
        "checkpoint.allow_changes=[optim.lr]",
        "checkpoint.keep=1",
    ]
    run = train("run", "train.steps=3", *how, f"checkpoint.resume={older}")
    assert run.column("step") == [1, 2, 3]
    assert "step-00000003" in run.checkpoints
    again = train("run", "train.steps=5", *how)
    assert again.event("resume")[-1]["step"] == 3, (
        "the newest checkpoint is that of the branch, not the one that was left behind"
    )


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_at_the_end_fails_the_run_on_all_ranks_and_leaves_none(
    train,
):
    full_disk = inject.together(
        inject.fails("checkpoint_write", inject.no_space(), rank=1), inject.quick_retries()
    )
    run = train("run", "train.steps=4", "checkpoint.every=2", ranks=2, seam=full_disk, code=1)
    assert "No space left" in run.err
    assert "Traceback" not in run.err
    assert run.checkpoints == []
    assert end_of(run) == ("end", 1)
    assert train("run", "train.steps=4", "checkpoint.every=2", ranks=2).column("step") == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.slow
def test_what_a_checkpoint_holds_is_on_record_when_it_commits(train):
    """Were the lines of steps 1 to 3 only written at step 10, a kill after the checkpoint would
    lose them for good."""
    run = train(
        "run",
        "train.steps=4",
        "checkpoint.every=3",
        "logging.every=10",
        seam=inject.failed(step=4),  # as good as killed after the first checkpoint
        code=1,
    )
    assert run.column("step") == [1, 2, 3]


@pytest.mark.slow
def test_a_finished_run_that_went_on_is_exported_again(train):
    how = ["schedule=constant", "checkpoint.export_hf=true"]
    first = train("run", "train.steps=1", *how)
    train("run", "train.steps=2", "schedule=constant", "checkpoint.export_hf=false")
    run = train("run", "train.steps=2", *how)
    assert [e["step"] for e in run.event("export")] == [1, 2]
    assert (first.folder / "hf" / "model.safetensors").is_file()


# --- changes that were allowed ------------------------------------------------------------------


@pytest.mark.slow
def test_epochs_end_with_the_data_also_if_steps_become_smaller_on_the_way(train):
    how = ["train.epochs=2", "schedule=constant", "checkpoint.keep=9"]
    first = train("run", *how, "batch.rows=20", "checkpoint.every=1")
    tokens, steps = first.column("tokens")[-1], len(first.metrics)
    middle = f"checkpoint.resume={first.folder}/checkpoints/step-00000002"
    run = train("run", *how, "batch.rows=7", middle, "checkpoint.allow_changes=[batch]")
    assert end_of(run) == ("end", 0)
    assert run.column("tokens")[-1] == tokens
    assert len(run.metrics) > steps


@pytest.mark.slow
def test_shapes_of_weights_are_not_among_what_may_change(train):
    train("run", "train.steps=1")
    changed = ["model.vocab_size=300", "checkpoint.allow_changes=[model.vocab_size]"]
    refused = train("run", "train.steps=2", *changed, code=2)
    assert "model.embed_tokens.weight" in refused.err
    assert "run.name=NEW model.init_from=" in refused.err
    for blocks, said in (
        (1, "is not in this model"),
        (3, "and is not in the checkpoint"),
    ):  # neither are blocks forgotten or made up
        changed = [
            f"model.num_hidden_layers={blocks}",
            "checkpoint.allow_changes=[model.num_hidden_layers]",
        ]
        refused = train("run", "train.steps=2", *changed, code=2)
        assert said in refused.err
        assert "… and" in refused.err
        assert len(refused.err.splitlines()) < 20


def test_a_step_without_a_target_is_a_step(train, tmp_path):
    (tmp_path / "z.txt").write_text("a" * 32)
    run = train(
        "run",
        "data=pretrain",
        f"data.path={tmp_path / 'z.txt'}",
        "batch.seq_len=16",
        "batch.rows=1",
        "batch.micro_rows=1",
        "train.epochs=2",
    )
    assert len(run.metrics) == 6
    assert not run.event("skipped")
    assert 0 in run.column("loss")


# --- deterministic kernels ----------------------------------------------------------------------


def refuse_other_kernels():
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def refuse_deterministic_kernels():
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_a_deterministic_run_takes_deterministic_kernels_until_it_ends(train):
    how = ["train.steps=5", "schedule=constant", "train.spike_window=4"]
    run = train("run", *how, "train.deterministic=true", seam=inject.at(None, refuse_other_kernels))
    plain = train("plain", *how, seam=inject.at(None, refuse_deterministic_kernels))
    assert run.column("loss") == plain.column("loss")
