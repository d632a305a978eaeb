"""`launch.hosts`: the nodes of all hosts, started from one over ssh."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ssh_hosts
import yaml
from inject import seamed
from world import end, read_json, wait_until

from fsdp_trainer.cli import main
from fsdp_trainer.config.host_list import Host, read_hosts

DEMO = ["+recipe=quickstart", "run.name=r"]
HOSTFILE = """# DeepSpeed's
worker-1 slots=8
user@worker-2:2222 slots=4  # fewer

worker-3 slots=2 max_slots=4
worker-4
"""
# nodes that train nothing: node N says what it was given, and ends with the Nth of CODES
NODES = """
import json, os, sys

if sys.orig_argv[1:3] == ["-m", "fsdp_trainer"]:
    number = os.environ["FSDP_TRAINER_HOST"]
    shown = ("FSDP_TRAINER_HOST", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "SECRET")
    env = {name: os.environ[name] for name in shown if name in os.environ}
    with open(f"node{number}.json", "w") as file:
        json.dump({"words": sys.orig_argv[4:], "env": env, "folder": os.getcwd()}, file)
    print("out of", number, flush=True)
    print("err of", number, file=sys.stderr, flush=True)
    os._exit(CODES[int(number)])
"""


def test_hosts_are_listed_or_stand_in_deepspeeds_hostfile(tmp_path):
    assert read_hosts(["a", "me@b.c", "d:2222", "e slots=2"]) == [
        Host("a"), Host("b.c", "me"), Host("d", port=2222), Host("e", slots=2)
    ]  # fmt: skip
    (tmp_path / "hosts").write_text(HOSTFILE)
    assert read_hosts(f"{tmp_path}/hosts") == [
        Host("worker-1", slots=8),
        Host("worker-2", "user", 2222, 4),
        Host("worker-3", slots=2),
        Host("worker-4"),
    ]


@pytest.mark.parametrize(
    "name, said", [("RANK", "torchrun starts the ranks"), ("SLURM_JOB_ID", "srun")]
)
def test_hosts_are_refused_where_a_launcher_starts_the_ranks(program, monkeypatch, name, said):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(name, "0")
    assert said in program(*DEMO, "launch.hosts=[a,b]", code=2)


def test_a_plan_counts_the_ranks_of_all_hosts(program, tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=4\nc slots=2")
    usual = "model=tiny", "data.path=demo:backwards", "tokenizer.path=demo:bytes"
    hosts = f"launch.hosts={tmp_path / 'hosts'}", "plan.gpu=h100", "plan.format=json"
    plan = json.loads(program("plan", "plan.rehearse=false", *usual, *hosts))
    assert plan["world_size"] == 8


@pytest.fixture
def by_ssh(monkeypatch, tmp_path):
    """Hosts that are all this machine, in an empty folder; gives that of the stand-in for ssh."""
    for name, value in ssh_hosts.stand_in(tmp_path / "ssh").items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "ssh"


@pytest.fixture
def nodes(by_ssh, monkeypatch, tmp_path):
    """`nodes(codes)`: instead of a training each host's node ends with its code at once."""

    def become(codes):
        env = seamed(tmp_path / "seam", f"CODES = {codes}\n{NODES}")
        monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])

    return become


def test_each_host_is_given_the_command_with_its_place(nodes, by_ssh, monkeypatch, capfd):
    nodes([0, 0])
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("SECRET", "here")
    Path("hosts").write_text("node1 slots=2\nme@node2:2222 slots=3\n")
    assert main([*DEMO, "launch.nproc_per_node=auto", "launch.hosts=hosts"]) == 0
    environments = [read_json(Path(f"node{number}.json")) for number in (0, 1)]
    for number, node in enumerate(environments):
        assert node["folder"] == os.getcwd()
        assert node["env"] == {"FSDP_TRAINER_HOST": str(number), "NCCL_DEBUG": "WARN"}
        assert node["words"][:2] == ["+recipe=quickstart", "launch.nproc_per_node=auto"]
        assert {"launch.nodes=2", "launch.hosts=null"} <= set(node["words"])
        assert node["words"][-1] == f"launch.nproc_per_node={number + 2}"
    (where,) = [word for word in environments[0]["words"] if word.startswith("launch.rendezvous")]
    assert re.fullmatch(r"launch.rendezvous=localhost:\d+", where), "as ssh's configuration has it"
    assert where in environments[1]["words"]
    out, err = capfd.readouterr()
    assert set(out.splitlines()) == {"out of 0", "[me@node2:2222] out of 1"}
    assert set(err.splitlines()) == {"err of 0", "[me@node2:2222] err of 1"}
    calls = (by_ssh / "calls").read_text()
    assert "-p 2222 me@node2 " in calls
    assert calls.count("BatchMode=yes") == 2
    assert "WARN" not in calls, "the environment may hold secrets, and everybody sees command lines"


@pytest.mark.parametrize(
    "codes, code",
    yaml.safe_load("""
- [[75, 75], 75]
- [[2, 2], 2]
- [[3, 0], 3]
- [[1, 1], 1]
- [[255, 0], 1]
"""),
)
def test_the_exit_code_of_the_run_comes_back(nodes, capfd, codes, code):
    nodes(codes)
    assert main([*DEMO, "launch.hosts=[node1,node2]"]) == code
    assert ("node1 was lost" in capfd.readouterr().err) == (255 in codes)


def test_one_message_names_every_host_that_cannot_start_and_none_is_started(nodes, capfd):
    nodes([0] * 7)
    hosts = ["good", "unknown", "closed", "down", "bare", "elsewhere", "older"]
    assert main([*DEMO, f"launch.hosts=[{','.join(hosts)}]"]) == 2
    out, err = capfd.readouterr()
    said = dict(re.findall(r"(?m)^  (\w+) +(\S.*)$", err))
    assert "accept it:  ssh unknown true" in said.pop("unknown")
    assert "ssh-copy-id closed" in said.pop("closed")
    assert "Connection timed out. Try  ssh down true" in said.pop("down")
    assert f"has no {sys.executable}" in said.pop("bare")
    assert "cannot enter the folder /no/such" in err
    assert "not 0.0.1: install the same there" in err
    assert {"elsewhere", "older"} == set(said)
    assert err.startswith("fsdp-trainer: the nodes cannot be started, and none was")
    assert "Traceback" not in err
    assert out == ""
    assert not list(Path().glob("node*.json"))


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_host_whose_starter_is_gone_or_falls_silent_ends(is_gone):
    code = "from fsdp_trainer.launch import started_node as node\n"
    code += f"node.SILENCE_SECONDS = {999 if is_gone else 0.2}\nnode._obey()"
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as node:
        if is_gone:
            node.stdin.close()
        assert node.wait(300) == 1
        assert node.stderr.read() == b"", "it ends by itself"


@pytest.fixture
def cluster(tmp_path):
    """Two hosts with an sshd."""
    if reason := ssh_hosts.why_not():
        pytest.skip(reason)
    (tmp_path / "ssh").mkdir()
    hosts = ssh_hosts.SshHosts(tmp_path / "ssh")
    yield hosts
    hosts.close()


@pytest.fixture
def start(tmp_path):
    """Start a training by a process of its own, whose ranks train nothing, and wait for these."""
    processes = []

    def run(*words, before, env):
        env = os.environ | seamed(tmp_path / "seam", RANKS) | env
        for name in ("RANK", "SLURM_JOB_ID"):
            env.pop(name, None)
        line = [
            *before,
            sys.executable,
            "-m",
            "fsdp_trainer",
            *DEMO,
            f"run.root={tmp_path}",
            *words,
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(line, cwd=tmp_path, env=env, **pipes))
        there = {tmp_path / "rank 0", tmp_path / "rank 1"}
        wait_until(lambda: {*tmp_path.glob("rank ?")} == there, processes[-1])
        return processes[-1]

    yield run
    end(processes)


@pytest.fixture
def on_two_hosts(start, cluster):
    """Return a started training of two hosts."""
    hosts = f"launch.hosts=[{','.join(cluster.names)}]"
    return start(hosts, "launch.nproc_per_node=1", before=cluster.before, env=cluster.env)


def processes_of(run):
    """Process ids of all nodes and ranks of a run."""
    ids = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes()
        except OSError:
            continue
        if b"launch.hosts=null" in words and f"run.root={run.parent}".encode() in words:
            ids.append(file.parent.name)
    return ids


# ranks that train nothing: they are there, and end at the second signal that they hear
RANKS = """
import os, pathlib, signal, sys, time
from fsdp_trainer.base import process

process.ECHO_SECONDS = 0.2
if process.HOST in os.environ:
    from fsdp_trainer.launch import start
    start.GRACE_SECONDS = 0.2
if sys.orig_argv[1:3] == ["-m", "fsdp_trainer"] and "RANK" in os.environ:
    process.die_with_parent(int(os.environ[process.PARENT]))
    rank = os.environ["RANK"]

    def hear(signum, frame):
        signal.signal(signum, leave)
        os.write(1, b"heard\\n")  # at once: both ranks write to one pipe

    def leave(signum, frame):
        os._exit(128 + signum)

    signal.signal(signal.SIGINT, hear)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    pathlib.Path("rank " + rank).touch()
    while True:
        time.sleep(60)
"""


def assert_a_second_signal_ends(process):
    process.send_signal(signal.SIGINT)
    heard = 0
    while heard < 2:
        heard += "heard" in process.stdout.readline()
        assert process.poll() is None
    time.sleep(0.5)  # two at once would count as one
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGINT, out


def test_a_second_signal_ends_all_ranks_at_once(start):
    assert_a_second_signal_ends(start("launch.nproc_per_node=2", before=[], env={}))


def test_a_second_signal_ends_all_hosts_at_once(on_two_hosts, tmp_path):
    assert len(processes_of(tmp_path / "r")) >= 4, "a node and a rank on each host"
    assert_a_second_signal_ends(on_two_hosts)
    assert not processes_of(tmp_path / "r")


def test_a_host_that_loses_its_power_ends_the_run_and_is_named(cluster, on_two_hosts, tmp_path):
    if cluster.network is None:
        pytest.skip("no network namespaces here")
    cluster.network.power_off(2)
    out, _ = on_two_hosts.communicate(timeout=600)
    assert on_two_hosts.returncode == 1, out
    assert f"{cluster.names[1]} was lost" in out
    assert not processes_of(tmp_path / "r")
