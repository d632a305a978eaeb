"""A signal or a limit of time, wherever it finds a run: all ranks leave together, and the same command ends with the same weights."""

import contextlib
import ctypes
import json
import os
import re
import select
import signal
import sys
import threading
import time
from functools import partial
from unittest.mock import patch

import pytest
from stored import assert_bitwise_equal, end_of, newest, stored
from world import RankFailed, wait_until, write_chats

from fsdp_trainer import phases
from fsdp_trainer.training import stop as stop_module
from fsdp_trainer.training.stop import StopRequests, slurm_seconds_left

HOW = [
    "schedule=constant", "train.steps=4", "checkpoint.every=2", "batch.micro_rows=1", "data.validation=0.2", "train.validate_every=2",
    "train.sample_prompts=[a,bb]", "train.sample_tokens=3", "checkpoint.best=true",
]  # fmt: skip


@contextlib.contextmanager
def signalled(phase, rank=1, nth=2, signum=signal.SIGTERM):
    """A rank gets a signal when it enters a phase for the nth time."""
    real, entered = phases.enter, []

    def enter(name, step=None):
        real(name, step)
        if name == phase and os.environ["RANK"] == str(rank):
            entered.append(name)
            if len(entered) == nth:
                os.kill(os.getpid(), signum)
                time.sleep(0.05)  # the thread that listens has heard

    with patch.object(phases, "enter", enter):
        yield


@pytest.fixture(scope="module")
def undisturbed(world, inputs, tmp_path_factory):
    return world.train(
        tmp_path_factory.mktemp("whole") / "run",
        *(f"{k}={v}" for k, v in inputs.items()),
        *HOW,
        ranks=2,
    )


def assert_the_same_end(run, undisturbed):
    for column in ("step", "loss", "tokens"):
        assert run.column(column) == undisturbed.column(column), column
    assert [line.get("validation_loss") for line in run.metrics] == [
        line.get("validation_loss") for line in undisturbed.metrics
    ]
    assert [(e["step"], e["loss"]) for e in run.event("evaluation")] == [
        (e["step"], e["loss"]) for e in undisturbed.event("evaluation")
    ]
    assert run.checkpoints[-1] == undisturbed.checkpoints[-1] and end_of(run) == ("end", 0)
    assert_bitwise_equal(stored(newest(run)), stored(newest(undisturbed)))
    said, expected = (
        json.loads((newest(r) / "trainer.json").read_text()) for r in (run, undisturbed)
    )
    assert said == expected, "what is remembered besides tensors, the best validation too"
    assert (run.folder / "samples.jsonl").read_text() == (
        undisturbed.folder / "samples.jsonl"
    ).read_text()


def ALL(*phase):
    return pytest.param(*phase, marks=[pytest.mark.slow, pytest.mark.faults])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "nth", "rank"),
    [
        ("backward", 5, 1),
        ("validation", 3, 1),
        ("shards", 1, 0),
        *[ALL(phase, nth, rank) for rank in (0, 1) for nth, *of in ((1, "data", "forward", "clip", "update", "log", "staging"), (2, "samples", "agree")) for phase in of],
        *[ALL(phase, 1, 0) for phase in ("manifest", "rename", "prune")],
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["sync", ALL("async")])
def test_a_signal_in_any_phase_on_any_rank_stops_all_and_the_weights_at_the_end_are_the_same(
    train, undisturbed, phase, nth, rank, mode
):
    how = [*HOW, f"checkpoint={mode}"]
    stopped = train(
        "run", *how, ranks=2, seam=partial(signalled, phase, rank, nth, signal.SIGUSR1), code=75
    )
    assert (
        end_of(stopped) == ("end", 75)
        and stopped.events[-1]["reason"] == "SIGUSR1"
        and len(stopped.event("signal")) == 1
    )
    step = len(stopped.metrics)
    assert (
        stopped.checkpoints[-1] == f"step-{step:08d}"
        and stopped.event("checkpoint")[-1]["step"] == step
    )
    assert (
        step < 4 or mode == "async"
    )  # whose thread may be in its first `prune` when the steps are over
    assert_the_same_end(train("run", *how, ranks=2), undisturbed)


@pytest.mark.slow
def test_a_signal_amid_the_last_validation_leaves_it_to_the_next_start(train, undisturbed):
    stopped = train("run", *HOW, ranks=2, seam=partial(signalled, "validation", 1, 12), code=75)
    assert stopped.column("step") == [1, 2, 3, 4] and "validation_loss" not in stopped.metrics[-1]
    assert_the_same_end(train("run", *HOW, ranks=2), undisturbed)


# --- waiting -----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def blocked_read(nth):
    """Rank 1's nth read hangs, and rank 0 gets the signal."""
    from fsdp_trainer.training.batches import Batches

    real, calls, over = Batches.assemble, [], threading.Event()

    def assemble(self, rows):
        calls.append(rows)
        if os.environ["RANK"] == "1" and len(calls) == nth:
            over.wait()
        if os.environ["RANK"] == "0" and len(calls) == nth:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return real(self, rows)

    with patch.object(Batches, "assemble", assemble):
        yield
    over.set()


@pytest.mark.parametrize(
    ("ahead", "nth", "step"), [(0, 5, 1), (2, 5, 1), pytest.param(2, 9, 2, marks=pytest.mark.slow)]
)
def test_a_rank_whose_data_hangs_stops_with_the_others_after_the_step_before(
    train, undisturbed, ahead, nth, step
):
    """In the second micro-batch of three, or in validation."""
    stopped = train(
        "run", *HOW, f"data.prefetch={ahead}", ranks=2, seam=partial(blocked_read, nth), code=75
    )
    assert (
        len(stopped.metrics) == step
        and stopped.checkpoints[-1] == f"step-{step:08d}"
        and not stopped.event("skipped")
    )
    assert_the_same_end(train("run", *HOW, ranks=2), undisturbed)


@contextlib.contextmanager
def slow_tokenising():
    """Rank 0 tokenises for ever; rank 1, which waits for it, gets the signal."""
    from fsdp_trainer.data.samples import SampleBuilder
    from fsdp_trainer.launch.world import World

    real = World.node_by_node

    def node_by_node(self, name, *args):
        if name == "preparing the data" and self.rank == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        return real(self, name, *args)

    with (
        patch.object(World, "node_by_node", node_by_node),
        patch.object(SampleBuilder, "tokenize", lambda self, texts: time.sleep(100)),
    ):
        yield


def test_a_signal_while_another_rank_tokenises_ends_all_and_leaves_nothing_half_made(
    train, tmp_path
):
    other = write_chats(tmp_path / "other.jsonl", 50)
    how = ["train.steps=1", f"data.path={other}", f"data.cache={tmp_path / 'cache'}"]
    stopped = train("run", *how, ranks=2, seam=slow_tokenising, code=75)
    assert (
        end_of(stopped) == ("end", 75)
        and stopped.events[-1]["reason"] == "SIGINT"
        and "the same command goes on" in stopped.out
    )
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {"hashes.json"}
    assert train("run", *how, ranks=2).column("step") == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "kept"), [("start", 0), ("export", 1)])
def test_a_signal_before_or_after_training_is_heard_too(train, phase, kept):
    how = ["train.steps=1", "checkpoint.export_hf=true"]
    seam = partial(signalled, "export", 0, 1) if phase == "export" else at_once
    stopped = train("run", *how, ranks=2, seam=seam, code=75)
    assert (
        len(stopped.checkpoints) == kept
        and end_of(stopped) == ("end", 75)
        and not (stopped.folder / "hf").exists()
    )
    done = train("run", *how, ranks=2)
    assert end_of(done) == ("end", 0) and (done.folder / "hf" / "model.safetensors").exists()


@contextlib.contextmanager
def at_once():
    """Rank 1 gets the signal while the model is built."""
    from fsdp_trainer.training import run

    real = run.build

    def build(*args):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    with patch.object(run, "build", build):
        yield


# --- limits ------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def slow_steps():
    """Steps of 70 s and saves of 300 s by a clock that is put forward: beside them it does not count how fast this machine is."""
    from fsdp_trainer.checkpoint.store import CheckpointStore
    from fsdp_trainer.training.trainer import Trainer

    update, write, later = Trainer.update, CheckpointStore._complete, [0.0]

    def put_forward(clock):
        return lambda: clock() + later[0]

    def slowly(real, seconds, self, *args):
        later[0] += seconds
        print(f"[{later[0]:.0f} s]")
        return real(self, *args)

    with (
        patch.object(time, "monotonic", put_forward(time.monotonic)),
        patch.object(time, "perf_counter", put_forward(time.perf_counter)),
        patch.object(Trainer, "update", lambda self, *args: slowly(update, 70, self, *args)),
        patch.object(
            CheckpointStore, "_complete", lambda self, *args: slowly(write, 300, self, *args)
        ),
    ):
        yield


def test_a_run_stops_early_enough_to_save_within_its_limit(train):
    run = train(
        "run",
        "train.steps=99",
        "train.time_limit=900s",
        "checkpoint.every=2",
        seam=slow_steps,
        code=75,
    )
    assert (
        int(re.findall(r"\[(\d+) s\]", run.out)[-1]) == 3 * 70 + 2 * 300
        and run.events[-1]["reason"] == "time_limit"
    )
    assert run.checkpoints[-1] == "step-00000003" and len(run.metrics) == 3


def test_a_run_stops_before_its_slurm_job_is_over_unless_told_not_to(train):
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 3)}
    run = train("run", "train.steps=100000", ranks=2, env=env, code=75)
    assert run.events[-1]["reason"] == "slurm_time_limit" and run.event("slurm_time_limit")
    assert (
        len(train("other", "train.steps=3", "launch.slurm_time_limit=false", env=env).metrics) == 3
    )


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("1-02:03:04", 93784), ("2-03", 183600), ("2:03:04", 7384), ("59:10", 3550), ("42", 42), ("UNLIMITED", None), ("INVALID", None), ("", None)],
)  # fmt: skip
def test_squeue_is_asked_where_the_environment_says_nothing(tmp_path, monkeypatch, said, seconds):
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "-h -j 77 -o %L" ] && echo "{said}"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm_seconds_left({"SLURM_JOB_ID": "77"}) == seconds
    assert slurm_seconds_left({}) is None


# --- leaving at once ---------------------------------------------------------------------------------------------------------------


def blocked():
    """As in a collective of C++ that never ends."""
    while True:  # a signal wakes it, but not for long
        ctypes.CDLL(None).usleep(60_000_000)


def signalled_twice():
    """This process, blocked from now on. On a busy machine the second signal may be heard together with the first: then the third is the second."""

    def send():
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    threading.Thread(target=send, daemon=True).start()
    blocked()


@contextlib.contextmanager
def twice(phase):
    """Two signals in a phase of the second checkpoint, in which the main thread runs no handler."""
    real, entered = phases.enter, []

    def enter(name, step=None):
        real(name, step)
        entered.append(name)
        if name == phase and entered.count(name) == 2:
            signalled_twice()

    with (
        patch.object(phases, "enter", enter),
        patch("fsdp_trainer.training.stop.ECHO_SECONDS", 0.1),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase",
    [
        "shards",
        pytest.param("staging", marks=pytest.mark.faults),
        pytest.param("rename", marks=pytest.mark.faults),
    ],
)
def test_a_second_signal_ends_a_blocked_run_at_once_and_what_is_committed_stays(train, phase):
    how = ["train.steps=4", "checkpoint.every=2"]
    with pytest.raises(RankFailed, match="rank 0: died"):
        train("run", *how, seam=partial(twice, phase))
    run = train("run", *how)
    assert run.event("resume")[0]["step"] == 2 and run.column("step") == [1, 2, 3, 4]
    assert (
        run.events[-3]["event"] == "resume"
        or run.event("end")[0]["reason"] == "second signal (SIGTERM)"
    )


@contextlib.contextmanager
def peer_dies():
    """Rank 1 dies hard; rank 0 sits where it notices nothing, and gets the launcher's signal."""
    real = phases.enter

    def enter(name, step=None):
        real(name, step)
        if name == "clip" and os.environ["RANK"] == "1":
            os._exit(9)
        if name == "clip":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            blocked()

    with patch.object(phases, "enter", enter):
        yield


@pytest.mark.slow
def test_a_signal_after_another_rank_has_died_ends_this_one_at_once(train, tmp_path):
    with pytest.raises(RankFailed, match="rank 0: died"):
        train("run", "train.steps=4", ranks=2, seam=peer_dies)
    last = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (
        last["event"] == "end"
        and last["exit_code"] == 1
        and last["reason"] == "SIGTERM after rank 1 had ended"
    )


@contextlib.contextmanager
def a_disk_that_hangs():
    """Two signals while the main thread hangs in a write of the run's records."""
    from fsdp_trainer.observe.records import Records

    def write(self, lines):
        with self._lock:
            signalled_twice()

    with (
        patch.object(Records, "write", write),
        patch("fsdp_trainer.training.stop.ECHO_SECONDS", 0.1),
    ):
        yield


@pytest.mark.slow
def test_a_second_signal_ends_a_run_whose_disk_hangs(train):
    with pytest.raises(RankFailed, match="rank 0: died"):
        train("run", "train.steps=2", seam=a_disk_that_hangs)


# --- in a process that is more than a run ------------------------------------------------------------------------------------------


@pytest.fixture
def listening():
    stop = StopRequests(None, lambda text: None)
    yield stop
    stop.close()


def test_a_signal_to_a_forked_worker_stops_the_worker_and_not_the_run(listening):
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGTERM
    time.sleep(0.2)
    assert not listening.received


def test_the_second_interrupt_of_a_notebook_ends_the_run_and_not_the_notebook(
    listening, monkeypatch
):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(stop_module, "ECHO_SECONDS", 0.1)
    os.kill(os.getpid(), signal.SIGINT)
    wait_until(lambda: listening._heard)
    time.sleep(0.2)
    assert listening.received == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_an_event_loop_hears_its_own_signals_meanwhile_and_afterwards():
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    os.set_blocking(ear, False)
    before, handler = signal.set_wakeup_fd(mouth), signal.signal(signal.SIGUSR2, lambda *_: None)
    stop = StopRequests(None, lambda text: None)
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        select.select([ear], [], [], 60)
        assert os.read(ear, 9) == bytes([signal.SIGUSR2])
        stop.close()
        stop.close()
        os.kill(os.getpid(), signal.SIGUSR2)
        select.select([ear], [], [], 60)
        assert os.read(ear, 9) == bytes([signal.SIGUSR2])
    finally:
        stop.close()
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR2, handler)
        os.close(ear)
        os.close(mouth)


# --- what the watchdog allows time for ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def places_told():
    """Of waits that may be long: for the rest of a failed save, for replicas' digests, for the records' disk."""
    from fsdp_trainer.checkpoint import store
    from fsdp_trainer.observe.records import Records
    from fsdp_trainer.training.corruption import Corruption

    def telling(where, name):
        real = getattr(where, name)

        def tell(*args, **options):
            print(f"[{name} in {phases.main.phase}]")
            return real(*args, **options)

        return patch.object(where, name, tell)

    no_disk = patch.object(store, "write_file", side_effect=OSError(28, "No space left on device"))
    no_pauses = patch("fsdp_trainer.training.saving.PAUSES", (0.1, 0.1))
    with (
        no_pauses,
        telling(store.CheckpointStore, "wait"),
        telling(Corruption, "check_replicas"),
        telling(Records, "write"),
        no_disk,
    ):
        yield


@pytest.mark.slow
def test_waits_that_may_be_long_are_no_ordinary_phases(train):
    how = ["train.steps=6", "checkpoint=async", "checkpoint.every=2", "train.check_every=2"]
    run = train("run", *how, ranks=2, seam=places_told, code=1)
    told = set(re.findall(r"\[(\w+) in (\w+)\]", run.out))
    assert {name for name, _ in told} == {"wait", "check_replicas", "write"}
    assert told <= {
        ("wait", "staging"),
        ("wait", "end"),
        ("check_replicas", "check"),
        ("write", "log"),
    }
