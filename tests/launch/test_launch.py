"""Ranks that torchrun, Slurm or the trainer itself starts: one folder, one voice, the contract's
exit codes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import inject
import pytest
import torch.distributed as dist
from folders import REPO
from forked import Forked
from stored import end_of
from tables import rows
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from world import SMALL, RankFailed, Run, alive, command, end, ranks_below, wait_until

from fsdp_trainer.base.process import cores
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.launch.nodes import first_host, free_port
from fsdp_trainer.launch.start import RankProcesses, advice_after_kill
from fsdp_trainer.launch.world import environment_of_ranks, join, rendezvous
from fsdp_trainer.run.run_lock import RunLock
from fsdp_trainer.run.verb import limit_compile_threads

TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=c10d",
    "--rdzv_endpoint=127.0.0.1:0", "--nproc_per_node=2", "--max-restarts=2", "-m", "fsdp_trainer",
]  # fmt: skip


@pytest.fixture
def words(input_words, tmp_path):
    """Return the words of a small training into `run` of the test's folder."""
    return [*SMALL, *input_words, f"run.root={tmp_path}", "run.name=run"]


@pytest.fixture
def cwd(tmp_path):
    """Return an empty folder, in which commands are started."""
    (tmp_path / "cwd").mkdir()
    return tmp_path / "cwd"


def assert_no_other_files(folder):
    """Those of Hydra or of another run."""
    assert [p.name for p in folder.iterdir()] == ["runs"]
    assert [p.name for p in (folder / "runs").iterdir()] == ["run"]
    assert not [p for p in folder.rglob("*") if p.name == ".hydra" or p.suffix == ".log"]


SELF = [sys.executable, "-m", "fsdp_trainer"]


def test_ranks_have_their_launchers_configuration_and_stop_in_order(words, cwd, tmp_path):
    how = [
        "train.steps=100000",
        "launch.nproc_per_node=2",
        "run.name=run${oc.env:RANK,''}",  # a rank that composed again would call its run run0
        *("--import", "callback"),
    ]
    line = [*SELF, *words, "run.root=runs", *how]
    env = {"PYTHONPATH": f"{REPO}/examples/extend"}
    one_signal = inject.setting("signal_echo_seconds", 60)
    process = Forked(line, tmp_path / "log", env=env, cwd=cwd, own=one_signal)
    run = Run(cwd / "runs/run")
    wait_until(lambda: run.metrics, process)
    for pid in process.children:
        os.kill(pid, signal.SIGUSR1)
    # as `timeout` does, to the process and to its group, or an impatient user: to the very end
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.001)
    assert process.wait() == 75, process.said
    assert run.checkpoints == [f"step-{run.metrics[-1]['step']:08d}"]
    assert run.event("start")[0]["world_size"] == 2
    assert run.event("signal")[0]["reason"] == run.events[-1]["reason"] == "SIGUSR1"
    assert process.said.count("the same command resumes") == 1, "one voice"
    assert process.said.count("checkpoint committed") == 1
    assert "Traceback" not in process.said
    assert "world size 2" in (run.folder / "diary.txt").read_text(), "ranks import the module too"
    assert_no_other_files(cwd)


def test_ranks_have_launch_env_but_for_what_was_set_before_and_end_with_their_launcher(words, cwd):
    own = ["launch.nproc_per_node=2", "launch.env={NCCL_DEBUG: WARN, OMP_NUM_THREADS: 3}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*SELF, *words, *own], cwd=cwd, env=env)
    try:
        wait_until(lambda: len(ranks_below(process.pid)) == 2, process)
        ranks = [*ranks_below(process.pid).values()]
        for pid in ranks:
            its_own = {*Path(f"/proc/{pid}/environ").read_text().split("\0")}
            assert {"NCCL_DEBUG=WARN", "OMP_NUM_THREADS=1"} <= its_own, "the environment's word"
    finally:
        end([process])
    wait_until(lambda: not any(map(alive, ranks)))


def test_the_launcher_ends_with_the_exit_code_of_its_ranks_and_adds_nothing(capsys):
    """They say themselves what they refuse."""
    ranks = [subprocess.Popen(["sh", "-c", "exit 2"]) for _ in range(2)]
    assert RankProcesses(ranks).wait() == 2
    assert capsys.readouterr() == ("", "")


def test_a_rank_that_ends_before_the_first_one_is_seen_and_named(capsys):
    """The first rank waits; nobody else notices before the ranks have met."""
    waits, killed = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sh", "-c", "kill -9 $$"])
    with inject.setting("launch_grace_seconds", 0.2):
        assert RankProcesses([waits, killed]).wait() == 1
    assert waits.returncode == -signal.SIGKILL
    assert capsys.readouterr().err == "fsdp-trainer: rank 1 was killed by SIGKILL\n"


def test_after_a_killed_rank_the_launcher_says_how_to_go_on(tmp_path):
    assert advice_after_kill(tmp_path, "auto", "doctor") == ""
    assert "starts from the beginning" in advice_after_kill(tmp_path, "auto", "train")
    for step in (4, 10):
        folder = tmp_path / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / "MANIFEST.json").touch()
    advice = "The same command resumes after step 10"
    assert advice_after_kill(tmp_path, "auto", "train") == advice
    advice = "Resume after step 10 with  checkpoint.resume=auto"
    assert advice_after_kill(tmp_path, "never", "train") == advice


def test_launch_env_counts_for_ranks_that_a_launcher_started(world, words):
    own = ["train.steps=1", "launch.env={TOLD: here, SAID: here}"]
    assert world.call(1, env_of_rank, [*words, *own]) == [("here", "before")]


def env_of_rank(argv):
    os.environ["SAID"] = "before"
    assert command(["train", *argv], None).code == 0
    return os.environ.pop("TOLD"), os.environ.pop("SAID")


def stay_until_the_end(events):
    wait_until(lambda: '"end"' in events.read_text())


def test_a_rank_that_hangs_ends_the_run_after_launch_timeout(train, tmp_path):
    stays = partial(stay_until_the_end, tmp_path / "run/events.jsonl")
    seam = inject.at("forward", stays, rank=1, step=3)
    # two of gloo's timers end at that time, and either may be first
    with pytest.raises(RankFailed, match=r"Timed out waiting 8000ms|Application timeout caused"):
        train("run", "train.steps=9 launch.timeout=8s", ranks=2, seam=seam)
    run = Run(tmp_path / "run")
    assert run["step"] == [1, 2]
    assert end_of(run) == ("end", 1)


BROKEN = '{"prompt": "a", "completion": "b"}\n{"prompt": "a", \n'


def say_that_it_leaves():
    print("leaves", file=sys.stderr)


def test_a_failed_run_prints_its_error_before_it_leaves_and_waits_for_no_collective(train):
    never_ends = inject.fails("destroy_groups", AssertionError("waits for a rank that failed"))
    fault = inject.together(inject.failed(step=2), inject.at("end", say_that_it_leaves), never_ends)
    run = train("run", "train.steps=3", ranks=2, seam=fault, code=1)
    assert run.err == "fsdp-trainer: as good as killed\nleaves\n"
    assert run.events[-1]["event"] == "end"
    with pytest.raises(RankFailed, match="waits for a rank that failed"):
        train("whole", "train.steps=1", ranks=2, seam=never_ends)


def test_what_only_another_node_finds_stands_in_its_torchruns_table(monkeypatch, tmp_path, program):
    error = f"{tmp_path}/error.json"
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error)
    said = program("data.path=missing.jsonl", "tokenizer.path=demo:bytes", code=2)
    table = str(ChildFailedError("fsdp_trainer", {8: ProcessFailure(0, 1, 2, error)}))
    assert "data.path=missing.jsonl there is no such file" in table
    assert "missing.jsonl" not in said


def stopped_while_it_waits(rendezvous, *args):
    os.kill(os.getpid(), signal.SIGTERM)
    return rendezvous(*args)


def test_a_rank_that_waits_for_others_to_start_stops_at_a_signal(train):
    seam = inject.around("join_world", stopped_while_it_waits)
    train("run", "train.steps=1", code=75, seam=seam, env={"WORLD_SIZE": "2"})


def test_who_finds_a_folder_locked_is_told_by_whom(tmp_path):
    cfg = compose("train", ["data.path=demo:backwards", "tokenizer.path=demo:bytes"])
    with RunLock(["a"]).acquire(cfg.run, cfg.checkpoint.resume, tmp_path / "run"):
        assert RunLock.read(tmp_path / "run") == RunLock(["a"])
        place = f"process {os.getpid()} on {re.escape(socket.gethostname())}"
        with pytest.raises(UserError, match=f"{place} trains in it, since 20"):
            RunLock(["b"]).acquire(cfg.run, cfg.checkpoint.resume, tmp_path / "run")
    RunLock(["b"]).acquire(cfg.run, cfg.checkpoint.resume, tmp_path / "run").close()


@pytest.mark.parametrize("typed", ["train compile=enabled", "prepare", "prepare prepare.shard=0/2"])
def test_what_is_refused_leaves_no_folder_that_it_made(world, tmp_path, typed):
    (tmp_path / "broken.jsonl").write_text(BROKEN)
    how = [f"data.path={tmp_path / 'broken.jsonl'}", "tokenizer.path=demo:bytes"]
    place = f"run.root={tmp_path}/new/runs run.name=group/run"
    ranks = 2 if "train" in typed else 1
    first, *others = world.command(*typed.split(), *SMALL, *how, place, ranks=ranks, code=2)
    assert "broken.jsonl:2" in first.err
    assert [(other.err, other.out) for other in others] == [("", "")] * (ranks - 1)
    assert [path.name for path in tmp_path.iterdir()] == ["broken.jsonl"]


def test_a_refused_start_keeps_a_folder_that_was_there_and_records_its_end(train, tmp_path):
    (tmp_path / "broken.jsonl").write_text(BROKEN)
    wrong = [f"data.path={tmp_path / 'broken.jsonl'}", "train.steps=1"]
    (tmp_path / "empty").mkdir()
    for name in ("empty", "run"):
        if name == "run":
            train(name, "train.steps=1")
        run = train(name, *wrong, code=2)
        assert end_of(run) == ("end", 2)
    assert run.checkpoints == ["step-00000001"]
    assert train("run", "train.steps=2")["step"] == [1, 2]


# --- restarts -----------------------------------------------------------------------------------


def test_torchrun_restarts_a_world_whose_rank_was_killed_and_it_finishes(words, cwd, tmp_path):
    """The run stays in one folder, with one voice, and without files of Hydra."""
    line = [*TORCHRUN, *words, "run.root=runs", "train.steps=4", "checkpoint.every=2"]
    killed = inject.killed_once(tmp_path / "killed", step=4, rank=1)
    torchrun = Forked(line, tmp_path / "log", cwd=cwd, seam=killed)
    assert torchrun.wait() == 0, torchrun.said
    run, out = Run(cwd / "runs/run"), torchrun.said
    assert run["step"] == [1, 2, 3, 4]
    assert run.event("start")[0]["world_size"] == 2
    assert [(e["attempt"], e["step"]) for e in run.event("resume")] == [(1, 2)]
    assert run.events[-1].items() >= {"event": "end", "reason": "finished", "exit_code": 0}.items()
    assert out.count("4/4 100%") == 1
    assert out.count("done: runs/run") == 1
    assert out.count("\n  fsdp-trainer chat runs/run\n") == 1
    assert_no_other_files(cwd)


def launched(words, environments):
    """Train as a rank in whose environment a launcher has set more; None: it has unset that."""
    for name, value in environments[int(os.environ["RANK"])].items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}
    return command(["train", *words], None)


def by_torchrun(number, launch):
    """Return what torchrun says to a rank that it has started so often in this launch."""
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": str(number),
        "TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_x/{launch}/attempt_{number}/0/error.json",
    }


def test_torchrun_does_not_train_again_what_stopped_in_order(world, words, tmp_path):
    """--max-restarts restarts any non-zero exit; the second attempt reads in the folder that there
    is nothing to do, and leaves at once."""
    (tmp_path / "broken.jsonl").write_text(BROKEN)
    wrong = [*words, f"data.path={tmp_path / 'broken.jsonl'}", "train.steps=2"]
    attempts = [(0, "first"), (1, "first"), (1, "another")]
    first, again, other = (
        world.call(1, launched, wrong, [by_torchrun(*attempt)])[0] for attempt in attempts
    )
    assert (first.code, again.code) == (2, 2)
    said = first.err + again.err
    assert said.count("broken.jsonl:2") == 1
    assert "broken.jsonl" not in first.out + again.out
    assert "fsdp_trainer/" not in said, "no traceback of ours"
    assert "broken.jsonl:2" in other.err, "an attempt of another launch tries again"
    run = Run(tmp_path / "run")
    assert end_of(run) == ("end", 2)
    assert not run.event("resume")


def test_ranks_meet_in_a_store_full_of_earlier_attempts_although_their_counts_differ(world):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = world.call(2, three_attempts, store.port)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 3


def three_attempts(port):
    """Return what rank 0 told each time, over a store that torchrun would have kept; one attempt is
    cut short after rank 1 has come."""
    from fsdp_trainer.launch.world import connect

    answers, rank = [], int(os.environ["RANK"])
    os.environ |= {
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(rank),
    }
    for attempt in range(3):
        if attempt == 1 and rank == 0:
            cut_short = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
            cut_short.set("name of the attempt", "cut short")
            time.sleep(0.3)
        joined = join(os.environ, "cpu", 30)
        connect(joined, 30)
        message = f"{attempt} {time.monotonic()}"
        answers.append(joined.from_main("told", lambda message=message: message, 30))
        dist.barrier()
        dist.destroy_process_group()
    return answers


def test_a_rank_that_waits_in_vain_for_the_others_says_what_may_be_wrong(world):
    (answers,) = world.call(1, lonely)
    assert "all 2 ranks" in answers
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in answers


def lonely():
    try:
        join({**os.environ, "WORLD_SIZE": "2"}, "cpu", 1)
    except RunFailed as error:
        return str(error)


def test_a_run_goes_on_when_a_node_came_or_went_and_not_when_it_had_stopped_in_order(
    world, words, tmp_path
):
    stops = [*words, "checkpoint.resume=never", "train.steps=100000", "train.time_limit=1s"]
    run = Run(tmp_path / "run")

    def train_on(*launchers):
        """Train with a rank on each of some nodes, which have launchers of these names."""
        size = {"LOCAL_RANK": "0", "GROUP_WORLD_SIZE": str(len(launchers))}
        of_nodes = [
            by_torchrun(0, name) | size | {"GROUP_RANK": str(i), "TORCHELASTIC_RESTART_COUNT": None}
            for i, name in enumerate(launchers)
        ]
        return [rank.code for rank in world.call(len(launchers), launched, stops, of_nodes)]

    assert train_on("a", "b") == [75, 75]
    assert train_on("a", "b") == [75, 75]
    assert not run.event("resume"), "torchrun restarts what stopped in order"
    assert train_on("b") == [75]
    assert run.event("resume")[-1]["world_size"] == 1
    assert train_on("b", "c") == [75, 75]
    assert run.event("resume")[-1]["attempt"] == 2
    assert train_on("d", "e") == [2, 2], "another launch finds the folder used"


# --- Slurm --------------------------------------------------------------------------------------

SLURM = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-007,9]",
    "SLURM_JOB_ID": "123456",
}


def test_an_srun_step_of_several_tasks_makes_a_world():
    env = environment_of_ranks(SLURM)
    ours = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "GROUP_RANK": "1"}
    assert env.items() >= (ours | {"MASTER_ADDR": "gpu003"}).items()
    assert 1024 < int(env["MASTER_PORT"]) < 65536
    assert env["MASTER_PORT"] == environment_of_ranks({**SLURM, "SLURM_PROCID": "0"})["MASTER_PORT"]
    own = SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "5"}
    assert environment_of_ranks(own)["MASTER_PORT"] == "5"


def test_torchrun_wins_over_slurm_and_a_single_task_is_no_world():
    assert environment_of_ranks({**SLURM, "RANK": "1", "WORLD_SIZE": "2"})["RANK"] == "1"
    assert environment_of_ranks({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert environment_of_ranks({}) is None


FIRST_HOSTS = rows("""
gpu1 → gpu1
gpu[003-007,9] → gpu003
a-1,b2 → a-1
gpu[9,11] → gpu9
n[1-2],login1 → n1
gpu-a[01-04] → gpu-a01
r[1-2]n[3-4] → r1n3
n[1-4]-ib → n1-ib
""")


@pytest.mark.parametrize("nodes, host", FIRST_HOSTS)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_slurm_ranks_train(world, words, tmp_path):
    """Real ranks with nothing but Slurm's variables."""
    step = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")) | SLURM
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0", "MASTER_PORT": str(free_port())}
    step |= {"SLURM_STEP_NODELIST": "localhost"}
    tasks = [step | dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID"), str(i)) for i in range(2)]
    ended = world.call(2, launched, [*words, "train.steps=2"], tasks)
    assert [rank.code for rank in ended] == [0, 0]
    assert Run(tmp_path / "run").event("start")[0]["world_size"] == 2


def test_a_port_is_given_to_nobody_else_until_rank_0_comes():
    given_away = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not given_away.exists() or (first := int(given_away.read_text().split()[0])) <= 20_000:
        pytest.skip("the system gives away nearly all ports")
    assert all(10_000 <= free_port() < first for _ in range(20))


def test_the_ranks_of_a_node_divide_its_cores_for_compiling(monkeypatch):
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    limit_compile_threads()
    assert name not in os.environ, "one rank alone has torch's default"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(2 * cores()))
    limit_compile_threads()
    assert os.environ[name] == "1"
    monkeypatch.setenv(name, "5")
    limit_compile_threads()
    assert os.environ[name] == "5"


def test_a_thousand_ranks_that_wait_for_one_do_not_flood_its_store():
    store, looks = dist.HashStore(), []
    counting = SimpleNamespace(check=lambda keys: looks.append(keys) or store.check(keys))
    with pytest.raises(RunFailed):
        rendezvous(counting, 999, 1000, timeout=1.0)
    assert len(looks) <= 6
