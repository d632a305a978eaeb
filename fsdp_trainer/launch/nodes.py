"""The meeting of nodes that were started with the same command. Imports no torch.

Each node gets its place there, and is informed when another node ends. The host that owns
`launch.rendezvous` is the server. It uses plain sockets and lines of JSON: a torch TCPStore (2.13)
waits far beyond its timeout if another program listens on the port without answering, and does not
report that a node died. Here the kernel closes the connection of a dead node.
"""

import contextlib
import errno
import json
import random
import re
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.process import HOST, STOPPED, arrived_signal
from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.schema import Launch
from fsdp_trainer.errors import RunFailed, Stopped, UserError

HELLO, ANSWER_SECONDS = "fsdp-trainer", 10.0
NAME_SECONDS = 30.0  # for a name to appear in the DNS: late for a Kubernetes service
LINGER_SECONDS = 15.0  # that the serving node waits for the others to end
MOMENT = 0.2  # seconds between two checks of signals and deadlines
NO_FAILURE = (0, STOPPED)  # exit codes of a node that do not make the other nodes end


class Meeting(socketserver.ThreadingTCPServer):
    """The server of the meeting.

    Every node introduces itself, gets its place when all have joined, and at the end the exit codes
    of the other nodes.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, port: int, run: str, nodes: int):
        self.run, self.nodes = run, nodes
        self.joined: list[tuple[Json, Any]] = []
        """The nodes that have joined: first line of each, and the file that sends lines to it."""
        self.full, self.over, self.changed = False, False, threading.Condition()
        super().__init__(("", port), Visit)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def accept(self, said: Json, out: Any) -> str:
        """Accept a node. Returns the reason if it is refused, else "".

        said: first line of the node; out: file that sends lines to it.
        """
        with self.changed:
            nodes = [node for node, _ in self.joined]
            same_devices = [node for node in nodes if node["devices"] == said["devices"]]
            twin = said["devices"] and same_devices
            if said["run"] != self.run:
                return (
                    f"is where the run {self.run} meets, not {said['run']}. Use another port, or"
                    " the same  run.name  on all nodes"
                )
            if said["nodes"] != self.nodes:
                return (
                    f"is where launch.nodes={self.nodes} meet, not {said['nodes']}: give the same"
                    " command on all nodes"
                )
            if self.full or twin:
                problem = f"all {self.nodes} nodes are there"
                if twin:
                    problem = f"{said['host']} is there already"
                hosts = ", ".join(node["host"] for node in nodes)
                return f"{problem} ({hosts}): the command was given twice"
            self.joined.append((said, out))
            self.send_all(here=[node["host"] for node, _ in self.joined])
            self.full = len(self.joined) == self.nodes
            if self.full:
                self.assign_places()
        return ""

    def assign_places(self) -> None:
        """Send every node its place: the server first, then by `order`, then by time of arrival."""
        self.joined.sort(key=lambda node: (not node[0]["serves"], node[0]["order"]))
        ranks, port = [node["ranks"] for node, _ in self.joined], self.joined[0][0]["serves"]
        for number, (_, to) in enumerate(self.joined):
            send(to, node=number, first=sum(ranks[:number]), size=sum(ranks), port=port)

    def remove(self, said: Json, code: int | None) -> None:
        """Remove a node that ended, and inform the others. code: None if its connection broke."""
        with self.changed:
            self.joined = [node for node in self.joined if node[0] is not said]
            if self.full:
                self.over = True
                self.send_all(
                    code=1 if code is None else code, host=said["host"], lost=code is None
                )
            self.changed.notify_all()

    def send_all(self, **what: Any) -> None:
        for _, to in self.joined:
            send(to, **what)


class Visit(socketserver.StreamRequestHandler):
    """One node's connection to the Meeting."""

    server: Meeting

    def handle(self) -> None:
        keep_alive(self.connection)
        code = None
        try:
            said = json.loads(self.rfile.readline())
            refused = "speaks another language"
            if said.pop("hello") == HELLO:
                refused = self.server.accept(said, self.wfile)
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            return  # not a node: a port scanner or a web browser
        if refused:
            send(self.wfile, **{"over" if self.server.over else "refused": refused})
            return
        with contextlib.suppress(ValueError, OSError):
            code = json.loads(self.rfile.readline())["code"]
        self.server.remove(said, code)


class Node:
    """This node, and its connection to the others.

    node, nodes: number of this node, and of nodes; first: the first of its ranks, which are
    consecutive; size: number of ranks on all nodes; address, port: where rank 0 listens.
    """

    def __init__(self, launch: Launch, run: str, ranks: int, devices: str, env: Mapping[str, str]):
        """Meet the other nodes.

        run: name of the run; ranks: number of ranks of this node; devices: names the GPUs of this
        node, which no other node may use; "" for none. Signals must be blocked: Stopped is raised
        when one arrives. Raises UserError if the nodes cannot meet, RunFailed after launch.timeout.
        """
        self.nodes, where = where_to_meet(launch, env)
        self.address, _, port = where.rpartition(":")
        self.where = f"launch.rendezvous={where}"
        self._deadline = time.monotonic() + parse_duration(launch.timeout)
        self.heard: tuple[int, str] | None = None
        """The first failure of another node: its exit code and a description."""
        self._left = False
        self._run = run
        self._host = env.get(HOST)
        self._meeting: Meeting | None = None
        self._silent_since: float | None = None  # when a program accepted but did not answer
        who = {
            "run": run,
            "nodes": self.nodes,
            "host": socket.gethostname(),
            "devices": devices,
            "ranks": ranks,
        }
        try:
            place = None
            while place is None:  # an earlier Meeting at this port may still be closing
                self._connect(int(port))
                order = {
                    "serves": free_port() if self._meeting else 0,
                    "order": int(self._host or env.get("SLURM_NODEID", "0")),
                }
                send(self._connection.makefile("wb"), hello=HELLO, **order, **who)
                place = self._place()
        except BaseException:
            self._close()
            raise
        self.node, self.first, self.size, self.port = (
            int(place[name]) for name in ("node", "first", "size", "port")
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Return the environment variables that torchrun would set for all ranks of this node."""
        of_node = {
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "WORLD_SIZE": self.size,
            "MASTER_PORT": self.port,
        }
        return {
            "MASTER_ADDR": self.address,
            **{name: str(value) for name, value in of_node.items()},
        }

    def leave(self, code: int) -> None:
        """Report this node's exit code to the others.

        The serving node then waits up to LINGER_SECONDS for the others to report theirs.
        """
        self._left = True
        send(self._connection.makefile("wb"), code=code)
        meeting = self._meeting
        if meeting:
            with meeting.changed:
                meeting.changed.wait_for(lambda: not meeting.joined, LINGER_SECONDS)
        self._close()

    def _close(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.close()
        if self._meeting:
            self._meeting.shutdown()
            self._meeting.server_close()

    def _serve(self, port: int) -> Meeting | None:
        try:
            # the first of launch.hosts is the server, even if others have the same address
            if self._host == "0" if self._host else owns(self.address):
                return Meeting(port, self._run, self.nodes)
        except OSError as error:
            # in use by another node of this run on the same host, or by a program that the missing
            # answer reveals later
            if error.errno != errno.EADDRINUSE:
                raise self._wrong(f"cannot be listened on: {error}") from None
        return None

    def _connect(self, port: int) -> None:
        """Connect to the Meeting. Start it first if this host is its server."""
        began, printed = time.monotonic(), False
        while True:
            self._meeting = self._meeting or self._serve(port)
            try:
                self._connection = socket.create_connection((self.address, port), timeout=5)
                self._rest = b""
                keep_alive(self._connection)
                self._connection.settimeout(MOMENT)
                return
            except OSError as error:
                self._silent_since = None
                reason = unreachable(self.address, port, error)
                nameless = isinstance(error, socket.gaierror)
            waited = time.monotonic() - began
            if nameless and waited > NAME_SECONDS:
                raise self._wrong(reason)
            if time.monotonic() > self._deadline:
                raise RunFailed(f"{self.where}: {reason}")
            if not printed and waited > 3:
                print(visible(f"waiting: {reason}"), flush=True)
                printed = True
            self._pause(MOMENT)

    def _place(self) -> Json | None:
        """Wait until all nodes have joined, and return this node's place.

        Returns None if the Meeting is that of an earlier attempt: connect again.
        """
        here: list[str] = []
        self._silent_since = self._silent_since or time.monotonic()
        while True:
            self._pause(0)
            lines = self._receive()
            if not (here or lines) and time.monotonic() > self._silent_since + ANSWER_SECONDS:
                raise self._wrong(
                    "something that is not fsdp-trainer answers: the port is in use (ss -ltnp"
                    " says by whom).\nTake another"
                )
            if not here and lines is None:
                self._wait_for_next()  # a Meeting that is closing may end the connection unanswered
                return None
            if lines is None:
                raise RunFailed(
                    f"{self.where}: the node that serves it left before all {self.nodes} had come"
                )
            for line in lines:
                if "over" in line and time.monotonic() < self._deadline:
                    self._silent_since = None
                    self._wait_for_next()
                    return None
                if "refused" in line:
                    raise self._wrong(line["refused"])
                if "node" in line:
                    return line
                here = line.get("here", here)
                self._print_nodes(here)
            if time.monotonic() > self._deadline:
                came = f"{len(here)} of {self.nodes} nodes came within launch.timeout:"
                raise RunFailed(
                    f"{self.where}: {came} {', '.join(here)}."
                    " Give the same command on the others, too"
                )

    def _print_nodes(self, here: list[str]) -> None:
        if self._meeting and len(here) < self.nodes:
            hosts = visible(", ".join(here))
            print(f"{len(here)} of {self.nodes} nodes have come: {hosts}", flush=True)

    def _wait_for_next(self) -> None:
        self._connection.close()
        self._pause(MOMENT)

    def _listen(self) -> None:
        ended = False
        while (lines := self._receive()) is not None:
            for line in lines:
                ended = True
                if line["code"] not in NO_FAILURE:
                    how = "was lost" if line["lost"] else f"ended with {line['code']}"
                    self.heard = self.heard or (line["code"], f"the node {line['host']} {how}")
        if not ended and not self._left:
            self.heard = self.heard or (1, f"the node that serves {self.where} was lost")

    def _receive(self) -> list[Json] | None:
        """Return the lines received within MOMENT seconds.

        Returns None if the connection is closed, or if the other side does not send JSON.
        """
        try:
            more = self._connection.recv(2**16)
            *lines, self._rest = (self._rest + more).split(b"\n")
            return [dict(json.loads(line)) for line in lines] if more else None
        except TimeoutError:
            return []
        except (OSError, ValueError, TypeError):
            return None

    def _pause(self, seconds: float) -> None:
        if arrived := arrived_signal(seconds):
            raise Stopped(arrived)

    def _wrong(self, reason: str) -> UserError:
        return UserError("the nodes cannot meet", self.where, reason)


def where_to_meet(launch: Launch, env: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of nodes, and host:port where they meet.

    Taken from the configuration, or else from a Slurm step with one task on each of several nodes.
    Raises UserError if neither names a place.
    """
    if launch.nodes > 1 and launch.rendezvous:
        return launch.nodes, launch.rendezvous
    nodes = nodes_of_step(env)
    if nodes and launch.rendezvous:
        return nodes, launch.rendezvous
    if nodes:
        return nodes, f"{first_host(env['SLURM_STEP_NODELIST'])}:{port_of_job(env)}"
    reason = (
        "where do they meet? Name one of them, and a free port there:"
        "  launch.rendezvous=HOST:29500  (the same on all)"
    )
    raise UserError("the nodes cannot meet", f"launch.nodes={launch.nodes}", reason)


def nodes_of_step(env: Mapping[str, str]) -> int:
    """Return the number of nodes of a Slurm step with one task on each of several nodes, else 0."""
    nodes = int(env.get("SLURM_STEP_NUM_NODES", "1"))
    return nodes if nodes == int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 else 0


def first_host(nodes: str) -> str:
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)  # up to a comma outside brackets
    assert first, nodes
    return re.sub(r"\[([^,\-\]]+)[^\]]*\]", r"\1", first[0])


def port_of_job(env: Mapping[str, str]) -> int:
    return 20_000 + int(env["SLURM_JOB_ID"]) % 20_000


def unreachable(address: str, port: int, error: OSError | None = None) -> str:
    """Return the reason why a port cannot be reached; "" if it can.

    error: error of an earlier attempt to connect; None: try now.
    """
    if error is None:
        try:
            socket.create_connection((address, port), timeout=5).close()
            return ""
        except OSError as raised:
            error = raised
    if isinstance(error, socket.gaierror):
        return f"{address} resolves to no address here: use one, or fix DNS or /etc/hosts"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens on {address}:{port}: rank 0 is not there, or another host is meant"
    return (
        f"{address}:{port} cannot be reached ({error}): a firewall, or an address of another"
        " network"
    )


def owns(address: str) -> bool:
    try:
        with socket.socket() as s:
            s.bind((socket.gethostbyname(address), 0))
        return True
    except OSError:
        return False


def free_port() -> int:
    """Return a free TCP port of this machine.

    If possible it is below the range from which the system assigns ports, so that no other program
    gets it before rank 0 listens there.
    """
    range_file = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(range_file.read_text().split()[0]) if range_file.exists() else 0
    reserved = random.SystemRandom().sample(range(10_000, first), 50) if first > 20_000 else []
    for port in (*reserved, 0):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(("", port))
            return s.getsockname()[1]
    raise OSError("every port is in use")


def send(to: Any, **what: Any) -> None:
    """Send a line of JSON. Errors are ignored: the receiver may have ended."""
    with contextlib.suppress(OSError, ValueError):
        to.write(json.dumps(what).encode() + b"\n")
        to.flush()


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel probe the connection, and close it after half a minute without an answer.

    A host that lost power does not close its connections.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
