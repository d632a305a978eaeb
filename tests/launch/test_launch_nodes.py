"""Several nodes that are given the same command, without torchrun: they meet, and hear of one
another's end."""

import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import inject
import pytest
import torch
from addresses import listening
from forked import Forked
from refused import refusal
from world import SMALL, Run, end, wait_until

from fsdp_trainer.cli import main
from fsdp_trainer.config.schema import Launch
from fsdp_trainer.errors import RunFailed, Stopped, UserError
from fsdp_trainer.launch import start
from fsdp_trainer.launch.nodes import Node, free_port, where_to_meet
from fsdp_trainer.launch.start import RankProcesses, starts_ranks
from fsdp_trainer.launch.world import join, open_store


@pytest.fixture
def come(enter):
    """`come(name, **differs)`: a node comes in a thread of its own; `come.all()` waits, and gives
    each one's Node or error, by name."""
    port, came, threads, heard = free_port(), {}, [], []

    def hear(come, meeting, said, out):
        answer = come(meeting, said, out)
        heard.append(said)
        return answer

    enter(inject.around("node_joins", hear))

    def one(name, count=2, run="run", ranks=1, devices="", timeout="30s", env=None, at=None):
        launch = Launch(nodes=count, rendezvous=at or f"localhost:{port}", timeout=timeout)

        def meet():
            try:
                came[name] = Node(launch, run, ranks, devices, env or {})
            except (UserError, RunFailed) as error:
                came[name] = error

        threads.append(threading.Thread(target=meet))
        threads[-1].start()
        if name == "serves":
            wait_until(lambda: heard)

    def everyone():
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
        return came

    one.all, one.came = everyone, came
    yield one
    for node in everyone().values():
        if isinstance(node, Node):
            node._left = True
            node._close()


def test_nodes_get_their_places_and_ranks_as_torchrun_would_number_them(come):
    come("serves", count=3, ranks=2)
    come("late", count=3, ranks=4, env={"SLURM_NODEID": "2"})
    come("early", count=3, ranks=1, env={"SLURM_NODEID": "1"})
    came = come.all()
    places = {name: (node.node, node.first, node.size) for name, node in came.items()}
    assert places == {"serves": (0, 0, 7), "early": (1, 2, 7), "late": (2, 3, 7)}
    environments = [node.environment() for node in came.values()]
    assert environments[0]["MASTER_ADDR"] == "localhost"
    assert len({env["MASTER_PORT"] for env in environments}) == 1
    assert {env["WORLD_SIZE"] for env in environments} == {"7"}
    assert {env["GROUP_WORLD_SIZE"] for env in environments} == {"3"}


@pytest.mark.parametrize("code, heard", [(7, 7), (0, None), (75, None)])
def test_only_a_node_that_failed_ends_the_others(come, code, heard):
    come("serves")
    come("other")
    serves, other = (come.all()[name] for name in ("serves", "other"))
    leaving = threading.Thread(target=serves.leave, args=[code])
    leaving.start()
    if heard:
        wait_until(lambda: other.heard)
        assert other.heard[0] == heard
        assert "ended with 7" in other.heard[1]
    other.leave(code)
    leaving.join(300)
    assert not leaving.is_alive()
    assert serves.heard is None
    assert heard or other.heard is None


@pytest.mark.parametrize("lost", ["serves", "other"])
def test_a_node_that_dies_is_noticed(come, lost):
    come("serves")
    come("other")
    came = come.all()
    stays = came["other" if lost == "serves" else "serves"]
    if lost == "serves":  # as the kernel does when a process is killed
        for _, out in came["serves"]._meeting.joined:
            out._sock.shutdown(socket.SHUT_RDWR)
    came[lost]._connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: stays.heard)
    assert stays.heard[0] == 1
    assert "was lost" in stays.heard[1]


def test_a_node_that_starts_again_waits_for_the_others_to_end(come):
    come("serves")
    come("other")
    before = [come.all()[name] for name in ("serves", "other")]
    before[1].leave(1)
    wait_until(lambda: before[0].heard)
    come("again")
    come("again too")
    before[0].leave(1)
    assert sorted(node.node for name, node in come.all().items() if "again" in name) == [0, 1]


def test_a_failure_elsewhere_ends_the_ranks_here_with_its_code(enter, capsys):
    enter(inject.setting("launch_grace_seconds", 0.1))
    ranks = [subprocess.Popen(["sleep", "60"])]
    node = SimpleNamespace(first=4, heard=(2, "the node b ended with 2"))
    assert RankProcesses(ranks, node).wait() == 2
    assert capsys.readouterr().err == "fsdp-trainer: the node b ended with 2\n"
    assert ranks[0].returncode == -signal.SIGKILL


def test_who_does_not_belong_there_is_told_why(come):
    come("serves", count=3, devices="a:all")
    come("other run", count=3, run="another")
    come("other command", count=2)
    come("given twice", count=3, devices="a:all")
    come("second", count=3, devices="b:all")
    come("third", count=3)
    wait_until(lambda: len(come.came) == 6)
    come("too late", count=3)
    errors = {
        name: str(error) for name, error in come.all().items() if isinstance(error, UserError)
    }
    assert "where the run run meets, not another" in errors["other run"]
    assert "launch.nodes=3" in errors["other command"]
    assert "is there already" in errors["given twice"]
    assert "all 3 nodes are there" in errors["too late"]
    assert set(errors) == {"other run", "other command", "given twice", "too late"}


def test_who_waits_in_vain_says_who_came(come):
    come("serves", count=3, timeout="1s")
    come("second", count=3, timeout="1s")
    errors = come.all().values()
    assert all(isinstance(error, RunFailed) for error in errors)
    came = f"2 of 3 nodes came within launch.timeout: {socket.gethostname()}"
    assert any(came in str(error) for error in errors)


def test_a_port_in_use_and_a_host_that_is_none_are_told(come, enter):
    enter(inject.setting("node_answer_seconds", 0.3))
    enter(inject.setting("node_name_seconds", 0.1))
    with socket.socket() as silent:
        silent.bind(("", 0))
        silent.listen()
        come("in use", at=f"localhost:{silent.getsockname()[1]}")
        come("no host", at="no-such-host.invalid:29500")
        answers = come.all()
    assert "the port is in use" in str(answers["in use"])
    assert "launch.rendezvous=localhost:" in str(answers["in use"])
    assert "resolves to no address" in str(answers["no host"])
    assert answers["no host"].exit_code == 2


def test_a_signal_ends_the_wait_for_others():
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Stopped, match="SIGUSR1"):
            meeting = Launch(nodes=2, rendezvous=f"localhost:{free_port()}", timeout="20s")
            Node(meeting, "run", 1, "", {})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


STEP = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[3-4]",
    "SLURM_JOB_ID": "7",
}


def test_slurm_says_how_many_nodes_there_are_and_where_they_meet():
    assert where_to_meet(Launch(), STEP) == (2, "gpu3:20007")
    assert where_to_meet(Launch(nodes=4, rendezvous="a:1"), {}) == (4, "a:1")
    each, several = Launch(nproc_per_node=8), STEP | {"SLURM_STEP_NUM_TASKS": "16"}
    assert starts_ranks(each, STEP), "one task a node, or one a rank"
    assert not starts_ranks(each, several), "one task a node, or one a rank"
    assert not starts_ranks(each, STEP | {"RANK": "0"})
    assert starts_ranks(Launch(nodes=2), {})


def test_a_store_of_one_machine_is_out_of_reach_for_others():
    port, before = free_port(), listening()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = open_store(place, rank=0, size=1, timeout=5)
    assert listening() - before == {("127.0.0.1", port)}
    assert store.add("ranks", 1) == 1


def test_a_master_port_in_use_is_told():
    with socket.socket() as busy:
        busy.bind(("", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with pytest.raises(UserError, match=f"MASTER_PORT={port}.*is in use"):
            join(rank, "cpu", 5)


@pytest.mark.parametrize(
    "local, by_slurm, said",
    [
        ("2", False, "has 2 that are visible"),
        ("2", False, "launch.ranks_per_gpu=2"),
        ("1", True, "--gpus-per-node, not --gpus-per-task"),
    ],
)
def test_more_ranks_than_gpus_are_told_and_srun_users_which_flag_to_use(
    monkeypatch, local, by_slurm, said
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(not by_slurm) + 1)
    if by_slurm:
        monkeypatch.setenv("SLURM_LOCALID", local)
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": local}
    assert said in refusal(join, rank, "auto", 5)


def test_ranks_share_a_gpu_if_that_is_wanted_and_nccl_lets_them(monkeypatch):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("torch.cuda.is_available", bool)
    monkeypatch.setattr("torch.cuda.device_count", int)
    with pytest.raises(UserError, match=r"ranks_per_gpu=2(.|\n)*torch sees none here"):
        join(rank, "auto", 5, 2)
    for name, value in {
        "is_available": True, "device_count": 1, "set_device": None, "nccl.version": (2, 28, 9)
    }.items():  # fmt: skip
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
    with pytest.raises(UserError, match=r"ranks_per_gpu=2(.|\n)*from 2.30 on, and here is 2.28"):
        join(rank, "auto", 5, 2)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 30, 1))
    assert join(rank, "auto", 5, 2).device == torch.device("cuda", 0)
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_torch_cannot_use_are_told_and_nothing_trains_on_the_cpu(monkeypatch, device):
    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.init", too_old)
    rank = {"RANK": "0", "WORLD_SIZE": "1"}
    said = refusal(join, rank, device, 5)
    assert "driver on your system is too old (found version 12020)" in said
    assert "launch.device=cpu" in said
    assert join(rank, "cpu", 5).device.type == "cpu"


def test_auto_is_one_rank_for_each_visible_gpu(enter, monkeypatch):
    enter(inject.around("device_files", lambda *_: ["/dev/nvidia0", "/dev/nvidia1"]))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert start.ranks_to_start(Launch()) == 2
    assert start.ranks_to_start(Launch(ranks_per_gpu=3)) == 6
    assert start.ranks_to_start(Launch(device="cpu")) == 1
    assert start.ranks_to_start(Launch(nproc_per_node=3)) == 3


def test_a_node_without_rank_0_says_where_the_message_is(input_words, capfd, enter):
    class Second:
        first, node, address, heard = 1, 1, "gpu3", None

        def __init__(self, *_):
            self.environment, self.leave = dict, lambda code: None

    fails = [sys.executable, "-c", "raise SystemExit(2)"]
    enter(inject.around("node", lambda *_: Second()))
    enter(inject.around("start_rank", lambda *_, **__: subprocess.Popen(fails)))
    where = ["launch.nodes=2", "launch.nproc_per_node=1", "launch.rendezvous=gpu3:29500"]
    assert main([*SMALL, *input_words, *where]) == 2
    assert "ends with code 2; rank 0, on gpu3, says why" in capfd.readouterr().err


def test_two_nodes_train_as_one_world_and_stop_as_one(input_words, tmp_path):
    words = [*SMALL, *input_words, "train.steps=100000", f"run.root={tmp_path}", "run.name=run"]
    meet = f"launch.rendezvous=localhost:{free_port()}"
    words += ["launch.nodes=2", "launch.nproc_per_node=1", meet]
    line = [sys.executable, "-m", "fsdp_trainer", *words]
    both = [Forked(line, tmp_path / "log") for _ in range(2)]
    try:
        run = Run(tmp_path / "run")
        wait_until(lambda: run.metrics, both[0])
        both[1].send_signal(signal.SIGTERM)
        codes = [node.wait(600) for node in both]
    finally:
        end(both)
    assert codes == [75, 75], both[0].said
    assert run.event("start")[0]["world_size"] == 2
    assert run.events[-1]["reason"] == "SIGTERM"
