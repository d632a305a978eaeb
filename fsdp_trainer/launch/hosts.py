"""Starts the nodes of several hosts from this one, over ssh: launch.hosts. Needs no torch.

Each host gets the command that people would type there, with launch.nodes and launch.rendezvous.
A node lives no longer than its connection: it reads its standard input (started_node.py), and ends
when this process ends, whatever signal ended it. A terminal (`ssh -t`) would mix stdout with
stderr, and hang up only if sshd notices the end.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any

from fsdp_trainer.base.process import HOST, PARENT, SIGNALS, STOPPED, arrived_signal
from fsdp_trainer.config.composing.overrides import quoted
from fsdp_trainer.config.host_list import Host, hosts_of, ranks_of
from fsdp_trainer.config.paths import run_folder
from fsdp_trainer.config.schema import Launch, TrainConfig
from fsdp_trainer.errors import Problem, Stopped, UserError
from fsdp_trainer.extensions import IMPORTS
from fsdp_trainer.launch.group_secret import TOKEN
from fsdp_trainer.launch.nodes import free_port, owns
from fsdp_trainer.launch.start import RankProcesses, advice_after_kill, passing_on_signals
from fsdp_trainer.launch.started_node import READY
from fsdp_trainer.version import __version__

CONNECT_SECONDS = 15
READY_SECONDS = 120.0  # for Python and the package to be read from a slow disk
BEAT_SECONDS = 10.0  # between signs of life
NODE_SECONDS = 30.0  # more than nodes need to end their ranks and be informed of each other's end
END_SECONDS = 10.0  # for ssh to end after its node
SSH = [
    *("ssh", "-T", "-S", "none", "-o", "BatchMode=yes", "-o", "ClearAllForwardings=yes"),
    *("-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
]
LINES = 3  # shown from the end of a host's output
SSH_FAILED = 255  # exit code of ssh itself; every other one comes from the remote command
NO_SUCH_COMMAND = (126, 127)  # exit codes of the shell

# The remote command gets its job through standard input: everybody on a host can see command lines,
# the environment holds secrets, and login shells quote differently.
COMMAND = (
    "import json,os,sys;"
    'job=json.loads(os.fdopen(0,"rb",buffering=0,closefd=False).readline());exec(job["code"])'
)
CODE = """
os.environ.update(job["environment"])
sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
try:
    os.chdir(job["folder"])
except OSError as error:
    sys.exit(f"cannot enter the folder {job['folder']}, where the run is started: {error.strerror}")
try:
    from fsdp_trainer.launch.started_node import start_when_told
    from fsdp_trainer.version import __version__
except ImportError as error:
    sys.exit(f"has no fsdp_trainer for {sys.executable}: {error}. Install it there, too")
if __version__ != job["version"]:
    sys.exit(f"has fsdp_trainer {__version__}, not {job['version']}: install the same there")
start_when_told()
"""
CARRIED = (
    *(IMPORTS, "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHON", "CUDA_", "NCCL_", "GLOO_"),
    *("UCX_", "FI_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_", "HF_"),
    *("TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "AWS_", "GOOGLE_", "HYDRA_", TOKEN),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
"""Prefixes of the names of environment variables that are sent to the other hosts."""
OF_THIS_MACHINE = ("CUDA_VISIBLE_DEVICES",)
SET_HERE = ("launch.hosts", "launch.nodes", "launch.rendezvous", "run.name")


def start_on_hosts(cfg: TrainConfig, overrides: list[str], verb: str = "train") -> int:
    """Start a node on each of launch.hosts, wait for them, and return the run's exit code.

    The first host has rank 0, and its output is passed on unchanged. Lines of the other hosts are
    prefixed with the host's name. Raises UserError with every host that cannot start its node,
    before any node is started.
    """
    refuse_other_launchers(os.environ)
    hosts = hosts_of(cfg.launch.hosts or [])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    nodes: list[NodeOfHost] = []
    try:
        for number, host in enumerate(hosts):
            nodes.append(node_on(host, number))
        with signs_of_life(nodes):
            wait_until_ready(nodes)
            common = common_overrides(cfg.launch, str(cfg.run.name), overrides, nodes)
            for node in nodes:
                node.start([verb, *common, *host_overrides(cfg.launch, node.host)])
            resume = cfg.checkpoint.resume
            advice = partial(advice_after_kill, run_folder(cfg), resume, verb)
            processes = NodeProcesses(nodes, advice)
            with passing_on_signals(processes):
                return processes.wait()
    except Stopped as stopped:
        print(f"stopped by {stopped.args[0]} before all hosts were ready", file=sys.stderr)
        return STOPPED
    finally:
        for node in nodes:
            node.hang_up()
        for node in nodes:
            node.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def refuse_other_launchers(env: Mapping[str, str]) -> None:
    reason = ""
    if "RANK" in env:
        reason = "torchrun starts the ranks here: leave launch.hosts out, or torchrun"
    elif "SLURM_JOB_ID" in env:
        reason = (
            "in a Slurm job srun starts the nodes, and without launch.hosts:\n"
            "srun --ntasks-per-node=1 fsdp-trainer …"
        )
    if reason:
        raise UserError("the nodes cannot be started", "launch.hosts", reason)


def node_on(host: Host, number: int) -> "NodeOfHost":
    """Return the node of a host: a local process if the host is this machine, else over ssh.

    number: position of the host in launch.hosts.
    """
    if host.user is None and host.port is None and owns(host.name):
        return LocalNode(host, number)
    if shutil.which("ssh") is None:
        reason = "there is no ssh on this machine: install OpenSSH's client"
        raise UserError("the nodes cannot be started", str(host), reason)
    return SshNode(host, number)


def common_overrides(
    launch: Launch, run: str, overrides: list[str], nodes: Sequence["NodeOfHost"]
) -> list[str]:
    words = [word for word in overrides if word.lstrip("+~").partition("=")[0] not in SET_HERE]
    where: str | None = "null"
    if len(nodes) > 1:  # at a free port of the first host unless another is named
        where = launch.rendezvous or f"{nodes[0].address(nodes[1].host)}:{nodes[0].port}"
    return [
        *words,
        f"run.name={quoted(run)}",
        "launch.hosts=null",
        f"launch.nodes={len(nodes)}",
        f"launch.rendezvous={where}",
    ]


def host_overrides(launch: Launch, host: Host) -> list[str]:
    ranks = ranks_of(host, launch.nproc_per_node)
    return [f"launch.nproc_per_node={ranks}"] if ranks else []


class Output:
    """An output stream of a host: stored until the host is ready, then passed on line by line.

    source: the stream; descriptor: the file descriptor to write to; prefix: of each line.
    """

    def __init__(self, source: IO[bytes], descriptor: int, prefix: str):
        self.before: list[bytes] = []
        self.ready: dict[str, Any] | None = None
        self._source, self._descriptor, self._prefix = source, descriptor, prefix.encode()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def pass_on_all(self) -> None:
        self.ready = {}

    def _read(self) -> None:
        for line in self._source:
            if self.ready is not None:
                self._write(line)
                continue
            text, marker, facts = line.partition(READY.encode())
            if marker:
                self.ready = json.loads(facts)
            elif text.strip():
                self.before.append(text)

    def _write(self, line: bytes) -> None:
        data = self._prefix + line
        with suppress(OSError):  # the reader, such as head, has ended: the node continues
            while data:
                data = data[os.write(self._descriptor, data) :]


class NodeOfHost:
    """The node of one host, represented by a local process: the node itself, or its ssh client."""

    port: int | None = None
    """A free port of the host; None until the host is ready."""

    def __init__(self, host: Host, number: int):
        self.host, self.number = host, number
        self.process: subprocess.Popen | None = None
        self.outputs: list[Output] = []
        self._hung_up_at: float | None = None
        self._lock = threading.RLock()  # a signal handler may send a line during hang_up

    def waits(self) -> bool:
        return False

    def why_not_ready(self) -> str:
        """Return the reason why no node can be started there, and what to do."""
        return ""

    def address(self, other: Host) -> str:
        """Return a name or address by which the host `other` reaches this one."""
        raise NotImplementedError

    def start(self, words: list[str]) -> None:
        raise NotImplementedError

    def poll(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def send_signal(self, signum: int) -> None:
        """Ask the node to send itself a signal."""
        self.send_line(f"{int(signum)}\n".encode())

    def send_line(self, line: bytes) -> None:
        """Write a line to the node. Errors are ignored: a node that no longer reads is ending."""
        with self._lock, suppress(OSError):
            if self.process and self.process.stdin and self._hung_up_at is None:
                os.write(self.process.stdin.fileno(), line)

    def hang_up(self) -> None:
        """End the node and its ranks at once, by closing its standard input."""
        with self._lock:
            if self.process and self.process.stdin and self._hung_up_at is None:
                self._hung_up_at = time.monotonic()
                self.process.stdin.close()

    def kill(self) -> None:
        self.hang_up()
        since = self._hung_up_at
        if self.process and since is not None and time.monotonic() > since + END_SECONDS:
            self.process.kill()

    def close(self) -> None:
        while self.process and self.process.poll() is None:
            self.kill()
            time.sleep(0.05)
        for output in self.outputs:
            output.thread.join(END_SECONDS)

    def _open(self, command: list[str], shown: bool, env: dict[str, str] | None = None) -> None:
        """Start the local process, with a pipe to its standard input.

        shown: True if it inherits stdout and stderr of this process; otherwise they are read.
        """
        output = None if shown else subprocess.PIPE
        # in a new session, so that Ctrl-C at a terminal reaches the node only through this process
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )
        assert process.stdin
        os.set_blocking(process.stdin.fileno(), False)
        prefix = f"[{self.host}] " if self.number else ""
        streams = ((process.stdout, 1), (process.stderr, 2))
        self.outputs = [Output(stream, number, prefix) for stream, number in streams if stream]
        self.process = process


class LocalNode(NodeOfHost):
    def __init__(self, host: Host, number: int):
        super().__init__(host, number)
        self.port = free_port()

    def address(self, other: Host) -> str:
        if not socket.gethostbyname(self.host.name).startswith("127."):
            return self.host.name
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((name_of_ssh(other), 9))  # UDP: nothing is sent
            return str(way.getsockname()[0])
        return self.host.name

    def start(self, words: list[str]) -> None:
        """Start the node as a child process. The first node inherits stdout and stderr."""
        env = {**os.environ, HOST: str(self.number), PARENT: str(os.getpid())}
        command = [sys.executable, "-m", "fsdp_trainer", *words]
        self._open(command, shown=self.number == 0, env=env)
        for output in self.outputs:
            output.pass_on_all()


class SshNode(NodeOfHost):
    def __init__(self, host: Host, number: int):
        """Connect, and let the host check whether a node can be started there."""
        super().__init__(host, number)
        there = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(COMMAND)}"
        self._open([*SSH, *destination(host), there], shown=False)
        job = {
            "code": CODE,
            "folder": os.getcwd(),
            "version": __version__,
            "environment": carried(os.environ) | {HOST: str(number), "PYTHONUNBUFFERED": "1"},
        }
        self._send(job)

    def waits(self) -> bool:
        readies = [output.ready for output in self.outputs]
        if None not in readies and readies[0]:
            self.port = int(readies[0]["port"])
        assert self.process is not None
        return self.port is None and self.process.poll() is None

    def why_not_ready(self) -> str:
        """Return an explanation of the error from ssh, the shell or Python, and what to type."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            return f"was not ready within {READY_SECONDS:.0f} s. Try  {self._trial()}"
        for output in self.outputs:
            output.thread.join(END_SECONDS)
        lines = [line for output in self.outputs for line in output.before]
        said = b"".join(lines).decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else f"exit code {code}, without a message"
        if code in NO_SUCH_COMMAND:
            return f"has no {sys.executable}: the same environment must be at the same place there"
        if code != SSH_FAILED:
            return "\n".join(said.splitlines()[-LINES:]) or last
        if "Host key verification failed" in said or "HOST IDENTIFICATION HAS CHANGED" in said:
            return f"has an unknown host key. Check it and accept it:  {self._trial()}"
        if "Permission denied" in said:
            copy = shlex.join(["ssh-copy-id", *destination(self.host)])
            return f"lets nobody in without a password ({last}). Copy a key:  {copy}"
        return f"cannot be reached: {last}. Try  {self._trial()}"

    def address(self, other: Host) -> str:
        return name_of_ssh(self.host)

    def start(self, words: list[str]) -> None:
        self._send(words)

    def poll(self) -> int | None:
        """Return the node's exit code; -1 if ssh itself failed."""
        code = super().poll()
        return -1 if code == SSH_FAILED else code

    def hang_up(self) -> None:
        """End the node. If it has not reported yet, kill ssh, which may still be connecting."""
        super().hang_up()
        if self.port is None and self.process:
            self.process.kill()

    def _send(self, message: Any) -> None:
        """Write a message as a line of JSON, which may exceed the capacity of the pipe."""
        data = f"{json.dumps(message)}\n".encode()
        assert self.process
        assert self.process.stdin
        descriptor = self.process.stdin.fileno()
        with self._lock, suppress(OSError):
            os.set_blocking(descriptor, True)
            while data:
                data = data[os.write(descriptor, data) :]
            os.set_blocking(descriptor, False)

    def _trial(self) -> str:
        return shlex.join(["ssh", *destination(self.host), "true"])


class NodeProcesses(RankProcesses):
    """The nodes of all hosts, and a deadline for them."""

    def __init__(self, nodes: Sequence[NodeOfHost], advice: Callable[[], str]):
        super().__init__(nodes, advice=advice)
        self.nodes = nodes

    def end_within(self, seconds: float) -> None:
        """Have `wait` kill nodes that still run after `seconds` and the time to end their ranks."""
        super().end_within(seconds + NODE_SECONDS)

    def _how_killed(self, rank: int, code: int) -> str:
        host = self.nodes[rank].host
        if isinstance(self.nodes[rank], LocalNode):
            return f"the node of {host} was killed by {signal.Signals(-code).name}"
        return f"{host} was lost: the connection broke, or its process was killed there"


def destination(host: Host) -> list[str]:
    port = ["-p", str(host.port)] if host.port else []
    return [*port, f"{host.user}@{host.name}" if host.user else host.name]


def name_of_ssh(host: Host) -> str:
    """Return the name or address to which ssh's configuration maps a host."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["ssh", "-G", *destination(host)]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=CONNECT_SECONDS)
        for line in printed.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname":
                return value
    return host.name


def carried(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(CARRIED) and name not in OF_THIS_MACHINE
    }


def wait_until_ready(nodes: Sequence[NodeOfHost]) -> None:
    """Wait until all hosts are ready.

    Raises UserError with those that are not ready in time, and Stopped at a signal.
    """
    deadline = time.monotonic() + READY_SECONDS
    while [node for node in nodes if node.waits()] and time.monotonic() < deadline:
        if arrived := arrived_signal(0.05):
            raise Stopped(arrived)
    problems = [
        Problem(str(node.host), node.why_not_ready()) for node in nodes if node.port is None
    ]
    if problems:
        raise UserError("the nodes cannot be started, and none was", problems)


@contextmanager
def signs_of_life(nodes: Sequence[NodeOfHost]) -> Iterator[None]:
    """Send every node an empty line each BEAT_SECONDS: it ends if it receives nothing for long."""
    over = threading.Event()

    def show() -> None:
        while not over.wait(BEAT_SECONDS):
            for node in nodes:
                node.send_line(b"\n")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
