"""A signal or a limit of time, wherever it finds a run: all ranks leave together, and the same
command ends with the same weights."""

import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
from functools import partial
from unittest.mock import patch

import inject
import pytest
from named_runs import NamedRun
from stored import assert_bitwise_equal, end_of, newest, stored
from world import RankFailed, Run, read_json, wait_until, write_chats

from fsdp_trainer.base import phases
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stopping.stop import StopSignals
from fsdp_trainer.training.stopping.time_limits import slurm_seconds_left

HOW = (
    "data.path=DATA/chats.jsonl", "schedule=constant", "train.steps=4", "checkpoint.every=2",
    "batch.micro_rows=1", "data.validation=0.2", "train.validate_every=2",
    "train.sample_prompts=[a,bb]", "train.sample_tokens=3", "checkpoint.best=true",
    "train.validate_first=false",
)  # fmt: skip


@pytest.fixture
def undisturbed(ledger):
    return ledger.run(words=HOW, ranks=2)


@pytest.fixture
def start(ledger, world, tmp_path):
    """Return a function that gives the command of `undisturbed`, into another folder."""
    words = ledger.words_of(NamedRun(2, HOW))
    return partial(world.train, tmp_path / "run", *words, base=[], ranks=2)


IN_BACKGROUND = ("shards", "manifest", "rename", "prune")
"""Phases of a checkpoint, which another thread may write."""


def assert_the_same_end(run, undisturbed):
    for column in ("step", "loss", "tokens"):
        assert run[column] == undisturbed[column], column
    for each in ("loss", "step"):
        evaluated = [[e[each] for e in r.event("evaluation")] for r in (run, undisturbed)]
        assert evaluated[0] == evaluated[1], each
    validated = [[line.get("validation_loss") for line in r.metrics] for r in (run, undisturbed)]
    assert validated[0] == validated[1]
    assert run.checkpoints[-1] == undisturbed.checkpoints[-1]
    assert end_of(run) == ("end", 0)
    assert_bitwise_equal(stored(newest(run)), stored(newest(undisturbed)))
    said, expected = (read_json(newest(r) / "trainer.json") for r in (run, undisturbed))
    assert said == expected, "with the best validation"
    samples = [(r.folder / "samples.jsonl").read_text() for r in (run, undisturbed)]
    assert samples[0] == samples[1]


QUICK = [("backward", 5, 1, "sync"), ("shards", 1, 0, "async")]
MOMENTS = [
    ("backward", 5, 1), ("validation", 3, 1),
    *((phase, 1, rank) for phase in ("data", "forward", "clip", "update", "log", "staging")
      for rank in (0, 1)),
    *((phase, 2, rank) for phase in ("samples", "agree") for rank in (0, 1)),
    *((phase, 1, 0) for phase in IN_BACKGROUND),
]  # fmt: skip
CASES = [(*moment, mode) for moment in MOMENTS for mode in ("sync", "async")]


@pytest.mark.parametrize(
    ("phase", "nth", "rank", "mode"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.faults) for case in CASES],
)
def test_a_signal_in_any_phase_on_any_rank_stops_all_and_the_weights_at_the_end_are_the_same(
    start, undisturbed, phase, nth, rank, mode
):
    seam = inject.signalled(phase, rank, nth, signal.SIGUSR1)
    if phase in IN_BACKGROUND:  # the first checkpoint is that of step 2
        seam = inject.signalled_before(3, phase, rank, nth, signal.SIGUSR1)
    stopped = start(f"checkpoint={mode}", seam=seam, code=75)
    assert end_of(stopped) == ("end", 75)
    assert stopped.events[-1]["reason"] == "SIGUSR1"
    assert len(stopped.event("signal")) == 1
    step = len(stopped.metrics)
    assert stopped.checkpoints[-1] == f"step-{step:08d}"
    assert stopped.event("checkpoint")[-1]["step"] == step
    assert step < 4
    assert_the_same_end(start(f"checkpoint={mode}"), undisturbed)


def test_a_signal_amid_the_last_validation_leaves_it_to_the_next_start(start, undisturbed):
    stopped = start(seam=inject.signalled("validation", 1, 12), code=75)
    assert stopped["step"] == [1, 2, 3, 4]
    assert "validation_loss" not in stopped.metrics[-1]
    assert_the_same_end(start(), undisturbed)


def test_work_that_a_stop_left_is_dropped_where_nothing_asks_for_it_any_more(start):
    stopped = start(seam=inject.signalled("validation", 0, 2), code=75)
    assert stopped["step"] == [1, 2]
    run = start("train.validate_every=3 train.sample_prompts=[]")
    assert run["step"] == [1, 2, 3, 4]
    assert [event["step"] for event in run.event("evaluation")] == [3, 4]


def test_progress_that_an_earlier_version_stored_is_read():
    stored = {"step": 5, "rows": 30, "cut_short": "validation", "left_out": [[6, 12]]}
    progress = Progress.from_stored(stored)
    assert progress.step == 5
    assert progress.pending == ["validate", "sample"]
    assert progress.skipped_row_ranges == [[6, 12]]


# --- waiting ------------------------------------------------------------------------------------


@inject.fault
def blocked_read(nth):
    """Let rank 1's nth read hang, and send rank 0 the signal."""
    calls, over = [], threading.Event()

    def read(real, self, rows):
        calls.append(rows)
        if os.environ["RANK"] == "1" and len(calls) == nth:
            over.wait()
        if os.environ["RANK"] == "0" and len(calls) == nth:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return real(self, rows)

    with inject.around("batch_read", read):
        yield
    over.set()


@pytest.mark.parametrize(("ahead", "nth", "step"), [(0, 5, 1), (2, 9, 2)])
def test_a_rank_whose_data_hangs_stops_with_the_others_after_the_step_before(
    start, undisturbed, ahead, nth, step
):
    """The data hang in the second micro-batch of three, or in validation."""
    stopped = start(f"data.prefetch={ahead}", seam=blocked_read(nth), code=75)
    assert len(stopped.metrics) == step
    assert stopped.checkpoints[-1] == f"step-{step:08d}"
    assert not stopped.event("skipped")
    assert_the_same_end(start(), undisturbed)


def interrupted(real, self, name, *args):
    if name == "preparing the data":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    return real(self, name, *args)


def for_ever(*_):
    time.sleep(100)


def slow_tokenizing():
    """Let rank 0 tokenize for ever, and send the signal to rank 1, which waits for it."""
    return inject.together(
        inject.around("wait_for_node", interrupted, rank=1),
        inject.around("tokenize_texts", for_ever),
    )


def test_a_signal_while_another_rank_tokenizes_ends_all_and_leaves_nothing_half_made(
    train, tmp_path
):
    other = write_chats(tmp_path / "other.jsonl", 50)
    how = ["train.steps=1", f"data.path={other}", f"data.cache={tmp_path / 'cache'}"]
    stopped = train("run", *how, ranks=2, seam=slow_tokenizing(), code=75)
    assert end_of(stopped) == ("end", 75)
    assert stopped.events[-1]["reason"] == "SIGINT"
    assert "the same command resumes" in stopped.out
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {"hashes.json"}
    assert train("run", *how, ranks=2)["step"] == [1]


@pytest.mark.parametrize(("phase", "committed"), [("start", 0), ("export", 1)])
def test_a_signal_before_or_after_training_is_heard_too(train, phase, committed):
    how = "train.steps=1 checkpoint.export_hf=true"
    seam = inject.signalled("export", 0, 1) if phase == "export" else AT_ONCE
    stopped = train("run", how, ranks=2, seam=seam, code=75)
    assert len(stopped.checkpoints) == committed
    assert end_of(stopped) == ("end", 75)
    assert not (stopped.folder / "hf").exists()
    done = train("run", how, ranks=2)
    assert end_of(done) == ("end", 0)
    assert (done.folder / "hf" / "model.safetensors").exists()


def stopped(real, *args):
    os.kill(os.getpid(), signal.SIGTERM)
    return real(*args)


AT_ONCE = inject.around("build", stopped, rank=1)
"""Rank 1 gets the signal while the model is built."""


# --- limits -------------------------------------------------------------------------------------


@inject.fault
def slow_steps():
    """Let steps take 70 s and saves 300 s by a clock that is put forward.

    Beside them it does not count how fast this machine is.
    """
    later = [0.0]

    def put_forward(clock):
        return lambda: clock() + later[0]

    def wait(seconds):
        later[0] += seconds
        print(f"[{later[0]:.0f} s]")

    with (
        patch.object(time, "monotonic", put_forward(time.monotonic)),
        patch.object(time, "perf_counter", put_forward(time.perf_counter)),
        inject.at("update", partial(wait, 70)),
        inject.at("manifest", partial(wait, 300)),
    ):
        yield


def test_a_run_stops_early_enough_to_save_within_its_limit(train):
    how = "train.steps=99 train.time_limit=900s checkpoint.every=2"
    run = train("run", how, seam=slow_steps(), code=75)
    assert int(re.findall(r"\[(\d+) s\]", run.out)[-1]) == 3 * 70 + 2 * 300
    assert run.events[-1]["reason"] == "time_limit"
    assert run.event("time_limit")
    assert run.checkpoints[-1] == "step-00000003"
    assert run["step"] == [1, 2, 3]


def test_a_run_stops_before_its_slurm_job_is_over_unless_told_not_to(train):
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + 3)}
    how = "train.steps=100000 logging.every=1000"
    run = train("run", how, ranks=2, env=env, code=75)
    assert run.events[-1]["reason"] == "slurm_time_limit"
    (stop,) = run.event("slurm_time_limit")
    assert run["step"] == [*range(1, stop["step"] + 1)], "what was unwritten is written"
    assert run.checkpoints == [f"step-{stop['step']:08d}"]
    other = train("other", "train.steps=3 launch.slurm_time_limit=false", env=env)
    assert len(other.metrics) == 3


SAID = {"1-02:03:04": 93784, "2-03": 183600, "2:03:04": 7384, "59:10": 3550, "42": 42}


@pytest.mark.parametrize("said", [*SAID, "UNLIMITED", "INVALID", ""])
def test_squeue_is_asked_where_the_environment_says_nothing(tmp_path, monkeypatch, said):
    squeue = tmp_path / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$*" = "-h -j 77 -o %L" ] && echo "{said}"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert slurm_seconds_left({"SLURM_JOB_ID": "77"}) == SAID.get(said)
    assert slurm_seconds_left({}) is None


# --- leaving at once ----------------------------------------------------------------------------


def blocked():
    """Block as a collective of C++ that never ends."""
    while True:  # a signal wakes it, but not for long
        ctypes.CDLL(None).usleep(60_000_000)


def signalled_twice():
    """This process, blocked from now on.

    On a busy machine the second signal may be heard together with the first: then the third is the
    second.
    """

    def send():
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)

    threading.Thread(target=send, daemon=True).start()
    blocked()


def twice(phase):
    """Two signals in a phase of the second checkpoint, in which the main thread runs no handler."""
    return inject.together(
        inject.at(phase, signalled_twice, nth=2), inject.setting("signal_echo_seconds", 0.1)
    )


OTHERS = [pytest.param(phase, marks=pytest.mark.faults) for phase in ("staging", "rename")]


@pytest.mark.parametrize("phase", ["shards", *OTHERS])
def test_a_second_signal_ends_a_blocked_run_at_once_and_what_is_committed_stays(train, phase):
    how = "train.steps=4 checkpoint.every=2"
    with pytest.raises(RankFailed, match="rank 0: died"):
        train("run", how, "launch.watchdog=true", seam=twice(phase))
    run = train("run", how)
    assert not run.event("hang"), "the watchdog reports no hang"
    assert run.event("resume")[0]["step"] == 2
    assert run["step"] == [1, 2, 3, 4]
    ended = run.event("end")[0]["reason"] == "second signal (SIGTERM)"
    assert ended or run.events[-3]["event"] == "resume"


def signalled_while_blocked():
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    blocked()


PEER_DIES = inject.together(
    inject.at("clip", partial(os._exit, 9), rank=1),
    inject.at("clip", signalled_while_blocked, rank=0),
)
"""Rank 1 dies hard; rank 0 sits where it notices nothing, and gets the launcher's signal."""


def test_a_signal_after_another_rank_has_died_ends_this_one_at_once(train, tmp_path):
    with pytest.raises(RankFailed, match="rank 0: died"):
        train("run", "train.steps=4", ranks=2, seam=PEER_DIES)
    run = Run(tmp_path / "run")
    assert end_of(run) == ("end", 1)
    assert run.events[-1]["reason"] == "SIGTERM after rank 1 had ended"


def hanging_write(_real, records, _lines):
    with records._lock:
        signalled_twice()


A_DISK_THAT_HANGS = inject.together(
    inject.around("records_write", hanging_write), inject.setting("signal_echo_seconds", 0.1)
)
"""Two signals while the main thread hangs in a write of the run's records."""


def test_a_second_signal_ends_a_run_whose_disk_hangs(train):
    with pytest.raises(RankFailed, match="rank 0: died"):
        train("run", "train.steps=2", seam=A_DISK_THAT_HANGS)


# --- in a process that is more than a run -------------------------------------------------------


@pytest.fixture
def listening():
    stop = StopSignals(None, lambda text: None, lambda reason, code: None)
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
    listening, enter, monkeypatch
):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    enter(inject.setting("signal_echo_seconds", 0.1))
    os.kill(os.getpid(), signal.SIGINT)
    wait_until(lambda: listening.first_at)
    time.sleep(0.2)
    assert listening.received == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_an_event_loop_hears_its_own_signals_meanwhile_and_afterwards():
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    before, handler = signal.set_wakeup_fd(mouth), signal.signal(signal.SIGUSR2, lambda *_: None)
    stop = StopSignals(None, lambda text: None, lambda reason, code: None)
    try:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR2)
            assert select.select([ear], [], [], 60)[0], "it is heard"
            assert os.read(ear, 9) == bytes([signal.SIGUSR2])
            stop.close()
    finally:
        stop.close()
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGUSR2, handler)
        os.close(ear)
        os.close(mouth)


# --- what the watchdog allows time for ----------------------------------------------------------


def tell_phase(point, real, *args, **options):
    print(f"[{point} in {phases.training.phase}]")
    return real(*args, **options)


LONG_WAITS = ("checkpoint_wait", "compare_copies", "records_write")
"""For the rest of a failed save, for replicas' digests, for the records' disk."""


def test_waits_that_may_be_long_are_no_ordinary_phases(train):
    how = "train.steps=6 checkpoint=async checkpoint.every=2 train.check_every=2"
    seam = inject.together(
        inject.quick_retries(),
        *(inject.around(point, partial(tell_phase, point)) for point in LONG_WAITS),
        inject.fails("checkpoint_write", inject.no_space()),
    )
    run = train("run", how, ranks=2, seam=seam, code=1)
    places = set(re.findall(r"\[(\w+) in (\w+)\]", run.out))
    assert {name for name, _ in places} == set(LONG_WAITS)
    assert places <= {
        ("checkpoint_wait", "staging"),
        ("checkpoint_wait", "end"),
        ("compare_copies", "check"),
        ("records_write", "log"),
    }
