"""The watchdog finds a rank that died, was stopped or does not go on, names it and ends it; slow is
not dead. And who is slow is named."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import inject
import pytest
from folders import REPO, table
from world import read_lines, wait_until

from fsdp_trainer.base import phases, slots
from fsdp_trainer.base.process import pid_namespace, start_ticks
from fsdp_trainer.base.slots import PhaseVisit, RankSlot
from fsdp_trainer.launch.hangs import (
    ALONG,
    Durations,
    RankStatus,
    judge,
    look,
    standing,
    starved,
    stopped,
    suspended,
)
from fsdp_trainer.launch.watchdog import Watch, Watchdog, record_flights, start_watchdog
from fsdp_trainer.observe.stragglers import RankPace, slowest

COLLECTIVE, ELSEWHERE, DEBUGGER = (
    f"/lib/{name}.py" for name in ("torch/distributed/distributed_c10d", "mine/model", "python/bdb")
)
STEP = ("data", "forward", "backward", "update", "read", "agree")


def seen(
    rank=0,
    phase="forward",
    step=8,
    standing=11.0,
    allowed=10.0,
    file=COLLECTIVE,
    skipped_in=None,
    state="S",
    closed=False,
    **more,
):
    """A rank that has begun three collectives in each of 7 steps but where it skipped one, and now
    stands in `phase` of `step`."""
    visits = [(s, name) for s in range(1, step + 1) for name in STEP]
    visits = (
        visits[: visits.index((step, phase)) + 1] if phase in STEP else [*visits, (step, phase)]
    )
    trace, count = [], 0
    for visit in visits:
        trace.append(PhaseVisit(0.0, *visit, count, len(trace) + 1))
        count += visit[1] in ("forward", "backward", "agree") and [*visit] != skipped_in
    slot = RankSlot(
        pid=100 + rank,
        started=1,
        rank=rank,
        closed=closed,
        thread=0xABC,
        pid_namespace=pid_namespace(),
        background=PhaseVisit(0.0, 0, "start", 0, 0),
        trace=trace,
    )
    stacks = STACKS.format(other=0xDEF, own=0xABC, file=file)
    return RankStatus(slot, state, standing=standing, allowed=allowed, stacks=stacks, **more)


STACKS = """Thread 0x{other:016x} (most recent call first):
  File "/lib/other.py", line 1 in run

Current thread 0x{own:016x} (most recent call first):
  File "/lib/torch/_ops.py", line 2 in op
  File "{file}", line 3 in f
"""


# --- whose fault it is --------------------------------------------------------------------------


def test_each_file_that_names_a_dimension_is_there_and_starts_collectives():
    for end in ALONG:
        if end.startswith("/fsdp_trainer/"):
            text = (REPO / end[1:]).read_text()
            assert re.search(r"ALL_GATHER|all_to_all|all_reduce|isend|P2POp|schedule", text), end


VERDICTS = table("launch/verdicts.yaml")
FILES = {"elsewhere": ELSEWHERE, "debugger": DEBUGGER}


@pytest.mark.parametrize("promise", VERDICTS)
def test_whose_fault_it_is(promise):
    for case in VERDICTS[promise]:
        ranks = [
            seen(i, **one | {"file": FILES.get(one.get("file"), COLLECTIVE)})
            for i, one in enumerate(case["ranks"])
        ]
        how = {"on_device": True} if case.get("gpu") else {}
        verdict = judge(ranks, case.get("world", len(ranks)), 1800, **how)
        said = [verdict.what, [status.rank for status in verdict.ranks], verdict.kill]
        assert said == case["verdict"], case
        assert case.get("reason", "") in verdict.reason


def test_a_rank_that_a_debugger_stops_is_left_alone():
    assert stopped([seen(0), seen(1, state="T", stopped=5.0, traced=True)]) is None
    assert [s.rank for s in stopped([seen(0), seen(1, state="T", stopped=1.1)]).ranks] == [1]


def test_while_one_rank_is_within_its_time_the_others_wait_for_it():
    assert standing([seen(0), seen(1)])
    assert not standing([seen(0), seen(1, phase="data", standing=40, allowed=1800)])
    assert standing([seen(0), seen(1, state=None, closed=True)])
    assert not standing([seen(0, closed=True)])


def test_a_rank_that_its_terminal_stopped_is_suspended():
    ours, theirs = os.openpty()
    code = (
        "import fcntl, os, signal, termios; os.isatty(0) and fcntl.ioctl(0, "
        "termios.TIOCSCTTY, 0); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    for stdin, meant in ((theirs, True), (subprocess.DEVNULL, False)):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=stdin, start_new_session=True
        )
        os.waitpid(process.pid, os.WUNTRACED)
        rank = look(replace(seen().slot, pid=process.pid, started=start_ticks(process.pid)))
        assert rank.state == "T"
        assert suspended(rank) == meant
        process.kill()
        process.wait()
    os.close(ours)
    os.close(theirs)


# --- slow is not dead ---------------------------------------------------------------------------


def allowed(phase, state="S", **seconds):
    """Seconds that `phase` may take after three visits to each phase of `seconds`."""
    durations, now, trace = Durations(), 0.0, []
    for name, spent in [*seconds.items()] * 3 + [(phase, 0)]:
        trace.append(PhaseVisit(now, 9, name, 0, len(trace) + 1))
        now += spent
    slot = replace(seen().slot, trace=trace)
    durations.note([slot])
    return pytest.approx(durations.allowed(slot, state, 10, 1800))


def test_time_is_allowed_by_what_a_phase_took_so_far():
    for case in table("launch/allowed_seconds.yaml"):
        for phase in case["phases"]:
            seconds = {phase if name == "itself" else name: n for name, n in case["took"].items()}
            assert allowed(phase, case.get("state", "S"), **seconds) == case["allowed"], case


def watchdog_over(tmp_path, *ranks, seconds=0.0, **options):
    """One that has looked once at ranks whose slots say this, and the processes that it ended;
    `seconds` have passed since."""
    ended, board = [], tmp_path / "board"
    board.touch()
    with inject.around("rank_slots", lambda *_: list(ranks)):
        watchdog = Watchdog(
            Watch(str(board), str(tmp_path), len(ranks), 10, 1800, **options),
            lambda pid, signum: ended.append((pid, signum)),
        )
        watchdog.look()
    watchdog.counts_from = watchdog.looked = time.monotonic() - min(seconds, 4)
    watchdog.counts_from -= seconds
    return watchdog, ended


@pytest.fixture
def rank_process():
    """A process that sleeps: what it would show of itself, standing in a step for 11 s."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    slot = seen().slot
    yield replace(
        slot,
        pid=process.pid,
        started=start_ticks(process.pid),
        trace=[*slot.trace[:-1], slot.training._replace(since=time.monotonic() - 11)],
    )
    process.kill()
    process.communicate()


def act(watchdog, *ranks):
    with inject.around("rank_slots", lambda *_: list(ranks)):
        watchdog.act(watchdog.look())


def stand(watchdog, slot):
    """Let the watchdog see enough steps to know how long they take."""
    watchdog.durations._seconds |= {name: deque([0.1]) for name in STEP}
    watchdog.watch.timeout = 1800
    act(watchdog, slot)


def test_a_rank_that_stands_is_ended_but_not_while_its_disk_or_the_processors_keep_it_waiting(
    tmp_path, rank_process
):
    disk = inject.around("reads_disk", lambda *_: True)
    for reason, done in (
        (contextlib.nullcontext(), 1),
        (disk, 0),
        (inject.around("starved_for", lambda *_: 5.0), 0),
    ):
        watchdog, ended = watchdog_over(tmp_path, rank_process, seconds=20)
        with reason:
            stand(watchdog, rank_process)
        assert ended == [(rank_process.pid, signal.SIGKILL)] * done


def test_a_rank_that_goes_on_while_it_is_looked_into_is_left_alone(tmp_path, rank_process):
    watchdog, ended = watchdog_over(tmp_path, rank_process, seconds=20)
    moved = replace(
        rank_process,
        trace=[*rank_process.trace, PhaseVisit(time.monotonic(), 8, "read", 0, 100)],
    )

    def ask(_real, self, _pids):
        self.slots = lambda: [moved]

    with inject.around("ask_for_stacks", ask):
        stand(watchdog, rank_process)
    assert not ended


def stop_process(pid):
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


@pytest.mark.parametrize("when", ["before it is looked at", "while its stacks are asked for"])
def test_a_stopped_rank_is_reported_as_stopped_though_its_phase_already_lasts_too_long(
    tmp_path, rank_process, capsys, when
):
    watchdog, ended = watchdog_over(tmp_path, rank_process, seconds=20)
    watchdog.watch.world_size = 2  # the other rank's node: this one alone was stopped
    stopped_late = contextlib.nullcontext()
    if when == "before it is looked at":
        stop_process(rank_process.pid)
    else:
        stopped_late = inject.around("ask_for_stacks", lambda *_: stop_process(rank_process.pid))
    with inject.around("suspended", lambda *_: False):
        with stopped_late:
            stand(watchdog, rank_process)
        assert not ended, "its missing stacks prove nothing"
        watchdog.stopped_since = {rank: since - 5 for rank, since in watchdog.stopped_since.items()}
        act(watchdog, rank_process)
    assert ended == [(rank_process.pid, signal.SIGKILL)]
    assert "stopped by a signal" in capsys.readouterr().err


def test_a_rank_that_dies_while_stacks_are_asked_for_is_reported_as_dead(
    tmp_path, rank_process, capsys
):
    watchdog, ended = watchdog_over(tmp_path, rank_process, seconds=20)

    def die(*_):
        os.kill(rank_process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, rank_process.pid, os.WEXITED | os.WNOWAIT)

    with inject.around("ask_for_stacks", die):
        stand(watchdog, rank_process)
    act(watchdog, rank_process)
    assert not ended
    assert "died" in capsys.readouterr().err


def test_a_rank_that_nobody_would_start_again_is_told_of_but_lives(tmp_path, rank_process, capsys):
    watchdog, ended = watchdog_over(tmp_path, rank_process, seconds=20, alone=True)
    stand(watchdog, rank_process)
    assert not ended
    assert "rank 0 on" in capsys.readouterr().err


def test_a_rank_that_leaves_between_two_looks_has_not_died(tmp_path):
    gone = replace(seen().slot, pid=2**22 + 1)
    watchdog, _ = watchdog_over(tmp_path, replace(gone, closed=True))
    views = [[gone], [replace(gone, closed=True)]]
    with inject.around("rank_slots", lambda *_: views.pop(0)):
        assert [(s.state, s.died) for s in watchdog.look()] == [(None, False)]


def test_ranks_of_another_container_are_not_taken_for_dead(tmp_path):
    elsewhere = replace(seen().slot, pid=2**22 + 1, pid_namespace=1)
    watchdog, _ = watchdog_over(tmp_path, elsewhere)
    with inject.around("rank_slots", lambda *_: [elsewhere]):
        assert watchdog.look() == []


def test_a_rank_of_which_the_system_says_nothing_is_not_taken_for_dead(rank_process):
    with patch.object(Path, "read_text", side_effect=OSError("out of memory")):
        assert look(rank_process).state == "?"


def test_a_world_that_is_stopped_as_a_whole_is_suspended(tmp_path, rank_process):
    stop_process(rank_process.pid)
    for world, done in ((1, 0), (2, 1)):
        watchdog, ended = watchdog_over(tmp_path, rank_process)
        watchdog.watch.world_size = world
        with inject.around("suspended", lambda *_: False):
            act(watchdog, rank_process)
            watchdog.stopped_since = {
                rank: since - 5 for rank, since in watchdog.stopped_since.items()
            }
            act(watchdog, rank_process)
        assert len(ended) == done


NO_ROOM = {
    "open_slot": (os, "posix_fallocate"), "touch": (Path, "touch"),
    "start_watchdog": (subprocess, "Popen"),
}  # fmt: skip


@pytest.mark.parametrize("full", NO_ROOM)
def test_a_run_without_memory_for_a_watchdog_trains_without_one(train, full, world):
    run = train("run", "train.steps=1", "launch.watchdog=true", seam=partial(no_room, full))
    assert len(run.metrics) == 1
    assert "rank 0 has no watchdog" in run.err
    pid = world.workers[0][0].pid
    assert not [*Path("/dev/shm").glob(f"fsdp_trainer-{pid}-*")]


def no_room(full):
    return patch.object(*NO_ROOM[full], side_effect=OSError(28, "No space left on device"))


def test_time_without_a_processor_counts_from_the_beginning_of_a_phase(tmp_path):
    watchdog, _ = watchdog_over(tmp_path)
    totals = iter([3.0, 5.5, 9.0, 10.0])
    phases = [seen(), seen(), seen(phase="backward"), seen(phase="backward")]
    with patch("fsdp_trainer.launch.watchdog.starved", lambda _pid: next(totals)):
        assert [watchdog.starved_for(status) for status in phases] == [0.0, 2.5, 0.0, 1.0]


def test_time_without_a_processor_is_counted_by_the_system(tmp_path):
    """Two busy processes on one core: each of them waits for about half the time."""
    code = (
        "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "print(flush=True)\nwhile True: pass"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)
    ]
    for process in processes:
        process.stdout.readline()
    before = starved(processes[0].pid)
    wait_until(lambda: starved(processes[0].pid) - before > 0.2)
    for process in processes:
        process.kill()
        process.communicate()


# --- with real processes ------------------------------------------------------------------------

RANK = """
import os, pathlib, signal, sys, threading, time
from fsdp_trainer.base import phases
from fsdp_trainer.base import slots
from fsdp_trainer.launch.watchdog import Watch, Watched

board, run, rank, fault = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def tell(what):
    pathlib.Path(run, what).touch()

def hear(what):
    while not pathlib.Path(run, what).exists():
        time.sleep(0.01)

watched = Watched(Watch(board, run, 2, 1.0, 60.0), rank, rank)
tell(f"rank {rank} is here")
hear(f"rank {1 - rank} is here")
waits = "def collective():\\n    time.sleep(60)"
exec(compile(waits, "/torch/distributed/distributed_c10d.py", "exec"))
gathers = "def gather():\\n    collective()"
exec(compile(gathers, "/fsdp_trainer/parallel/tensor_ranks.py", "exec"))
slots.show_coordinates(f"tensor {rank}")
for step in range(1, 6):
    for phase in ("data", "forward", "read", "agree"):
        phases.enter(phase, step)
        time.sleep(0.02)
phases.enter("forward", 6)
if fault == "compiles":
    if rank:
        phases.compiling.begins(None)
        tell("compiling")
        hear("rank 0 has left")
        phases.compiling.ends(None)
    else:
        hear("compiling")
        time.sleep(2.2)
elif rank == 0:
    gather()
elif fault == "dies":
    os._exit(3)
elif fault == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    threading.Event().wait()
phases.enter("end")
watched.close()
tell(f"rank {rank} has left")
"""


def ranks_that(fault, folder):
    """Two ranks of no torch: exit codes, what was said, the events and the folder of the run."""
    board, run = folder / "board", folder / "run"
    run.mkdir()
    board.touch()
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    how = {"env": env, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    command = [sys.executable, "-S", "-c", RANK, str(board), str(run)]
    ranks = [subprocess.Popen([*command, str(rank), fault], **how) for rank in range(2)]
    # the watchdog's too: it ends with them
    said = "".join(rank.communicate(timeout=600)[1] for rank in ranks)
    assert not list(folder.glob("board*")), "nothing is left in memory"
    return [rank.returncode for rank in ranks], said, read_lines(run / "events.jsonl"), run


@pytest.mark.parametrize(
    "fault, what", [("stopped", "stopped by a signal"), ("waits", "outside any collective")]
)
def test_a_rank_that_does_not_go_on_is_ended_and_named_with_its_stacks(tmp_path, fault, what):
    codes, said, events, run = ranks_that(fault, tmp_path)
    assert codes == [-signal.SIGKILL, -signal.SIGKILL]
    assert [(e["rank"], e["phase"], e["step"], e["killed"]) for e in events] == [
        (1, "forward", 6, True)
    ]
    assert what in said
    assert said.count("fsdp-trainer: rank 1 (tensor 1) on") == 1
    assert "; waiting: rank 0 along tensor;" in said
    assert [(e["coordinates"], e["waiting"]) for e in events] == [("tensor 1", {"tensor": [0]})]
    stacks = run / "hangs" / Path(events[0]["files"]).name
    waiting, guilty = ((stacks / f"rank-{r}.txt").read_text() for r in range(2))
    assert "distributed_c10d.py" in waiting
    assert "state T" in guilty if fault == "stopped" else "threading.py" in guilty


def test_a_rank_that_dies_is_named_and_those_that_wait_for_it_are_ended(tmp_path):
    codes, said, events, _ = ranks_that("dies", tmp_path)
    assert codes == [-signal.SIGKILL, 3]
    assert [(e["what"], e["rank"]) for e in events] == [("dead", 1)]
    assert "rank 1" in said


def test_ranks_that_compile_and_leave_in_order_are_left_alone(tmp_path):
    codes, said, events, _ = ranks_that("compiles", tmp_path)
    assert codes == [0, 0]
    assert not events
    assert not said


def test_a_run_is_watched_unless_it_says_no(train):
    for overrides, watched in ((["launch.watchdog=true"], True), ([], False)):
        name = f"run{watched}"
        looking = inject.at("clip", partial(look_for_a_watchdog, name))
        run = train(name, "train.steps=1", *overrides, seam=looking)
        assert ("a watchdog is there" in run.out) == watched
        assert run.events[-1]["exit_code"] == 0


def look_for_a_watchdog(run):
    """Print whether there is one of this run: that of a run before may still be ending."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    lines = [Path(f"/proc/{child}/cmdline").read_text() for child in children]
    if any("watchdog" in line and f"/{run}" in line for line in lines):
        print("a watchdog is there")


@pytest.fixture
def board(tmp_path):
    """A file of slots in which this process shows itself as rank 5 in slot 1; slot 0 is empty."""
    board = tmp_path / "board"
    board.touch()
    phases.begin()
    slots.open_slot(board, 1, 5)
    yield board
    slots.leave()


def test_a_slot_shows_a_ranks_newest_phases_the_collectives_before_each_and_its_end(board):
    slots.count_collectives(iter([10, 20]).__next__)
    phases.enter("data", 3)
    phases.enter("forward")
    (slot,) = slots.read_slots(board.read_bytes())
    assert (slot.pid, slot.rank) == (os.getpid(), 5)
    visits = [(visit.step, visit.phase, visit.collectives) for visit in slot.trace]
    assert visits == [(0, "start", 0), (3, "data", 10), (3, "forward", 20)]
    slots.count_collectives(lambda: 30)
    for step in range(4, 2 * slots.TRACE_LENGTH):
        phases.enter("forward", step)
    slots.leave()
    phases.enter("start", 0)
    (slot,) = slots.read_slots(board.read_bytes())
    assert slot.closed
    newest = range(slots.TRACE_LENGTH, 2 * slots.TRACE_LENGTH)
    assert [visit.step for visit in slot.trace] == [*newest]


def test_a_checkpoints_thread_has_a_visit_of_its_own(board):
    phases.enter("forward", 3)
    thread = threading.Thread(target=phases.enter, args=("shards", 2))
    thread.start()
    thread.join()
    (slot,) = slots.read_slots(board.read_bytes())
    assert (slot.training.phase, slot.background.phase) == ("forward", "shards")


def test_a_run_in_a_worker_thread_leaves_the_main_thread_to_the_next(tmp_path):
    (tmp_path / "board").touch()

    def in_a_thread():
        phases.begin()
        slots.open_slot(tmp_path / "board", 0, 0)
        phases.enter("forward", 3)
        slots.leave()

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    phases.begin()
    phases.enter("data", 7)
    assert (phases.training.phase, phases.training.step) == ("data", 7)


# --- stragglers ---------------------------------------------------------------------------------


def paces(*seconds, device=None):
    return {
        rank: RankPace(
            f"host{rank}", 10, 10.0, {"forward": 10 * s, "update": 1.0}, device and device[rank]
        )
        for rank, s in enumerate(seconds)
    }


def test_the_rank_that_all_wait_for_is_named_with_its_phase():
    slow = slowest(paces(0.1, 0.5, 0.1))
    assert (slow.rank, slow.host, slow.phase) == (
        1,
        "host1",
        "forward",
    )
    assert slow.lost == pytest.approx(0.4)
    assert slowest(paces(0.3, 0.35, 0.3)) is None, "not worth a word"
    assert slowest(paces(0.1, 0.2)) is None, "not worth a word"


def test_a_slow_device_is_named_where_hosts_are_alike():
    slow = slowest(paces(0.1, 0.1, 0.1, device=[0.010, 0.010, 0.016]))
    assert slow.rank == 2
    assert "device" in slow.phase
    assert slowest(paces(0.1, 0.1, device=[0.010, 0.011])) is None


def test_a_slow_rank_of_a_run_is_named(train):
    how = ["train.steps=2000", "logging.stragglers=0.5s"]
    run = train("run", *how, ranks=2, seam=SLOW_RANK_UNTIL_IT_IS_NAMED, code=75)
    # on a machine that others use another rank or phase may have stood out before
    event = run.event("straggler")[-1]
    assert event["seconds"] > event["others"]
    assert "rank 1 on" in run.out


def stop_when_it_is_named(event, self, name, **details):
    event(self, name, **details)
    if name == "straggler" and (details["rank"], details["phase"]) == (1, "forward"):
        os.kill(os.getpid(), signal.SIGTERM)


SLOW_RANK_UNTIL_IT_IS_NAMED = inject.together(
    inject.at("forward", partial(time.sleep, 0.07), rank=1),
    inject.around("event", stop_when_it_is_named),
)


# --- what NCCL writes ---------------------------------------------------------------------------


def test_what_nccl_wrote_before_it_gave_up_is_kept(tmp_path):
    board = tmp_path / "board"
    board.touch()
    Path(f"{board}.flight-3").write_bytes(b"collectives")
    os.mkfifo(f"{board}.flight-3.pipe")
    start_watchdog(Watch(str(board), f"{tmp_path}/run", 1, 10, 1800, on_device=True))
    wait_until(lambda: not list(tmp_path.glob("board*")))
    (flight,) = (tmp_path / "run").glob("hangs/*/*")
    assert flight.name == "flight-3"
    assert flight.read_bytes() == b"collectives"


def test_a_second_run_in_a_process_has_its_own_files_of_nccl(monkeypatch):
    name = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "50")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "/a/user/has/one")
    for board in ("first", "second"):
        record_flights(board)
        assert os.environ[name] == f"{board}.flight-"
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "50"
    assert os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] == "/a/user/has/one"
