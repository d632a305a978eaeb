"""Transfer of a rank's state to the rank of another group with the same number.

Both prove that they know the groups' secret, for one address, so that nobody else can pass a proof
on. A state is JSON and the bytes of its tensors: to read it runs no code, and no tensor is made
before its description is known to come from a group.
"""

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor
from torchft.checkpointing.transport import CheckpointTransport

from fsdp_trainer.launch.group_secret import proof

ASKS, NONCE = "X-Groups-Proof", "X-Groups-Nonce"
"""Headers of a request: a proof that it comes from a group, and a number that is used once."""
DIGEST_BYTES = 32
LONGEST_DESCRIPTION = 2**26
PIECE_BYTES = 2**24
WHOLE = b"unchanged until here"
"""What the second proof of an answer is for."""
TENSOR = "tensor of a state"
"""Key of what stands for a tensor in a description."""

State = dict[str, Any]


class OfferedState(NamedTuple):
    step: int
    description: bytes
    tensors: list[Tensor]


class StateServer(ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, handler: type[BaseHTTPRequestHandler]):
        host = host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), handler)

    def handle_error(self, *_: Any) -> None:
        """Print nothing: the other group says what went wrong."""


class StateTransport(CheckpointTransport[State]):
    """Sends this rank's state to other groups, and receives that of one of them."""

    def __init__(self, host: str, timeout: timedelta, secret: bytes | None = None):
        """host: this machine's address for other groups, and the only one that is listened at.

        timeout: without a byte after which a transfer is given up. secret: see secret_of_groups;
        None: no other group is trusted.
        """
        self._host, self._seconds = host, timeout.total_seconds()
        self._secret = secrets.token_bytes() if secret is None else secret
        self._served: OfferedState | None = None
        self._readers = 0
        self._changed = threading.Condition()
        handler = type(
            "StateRequest", (StateRequest,), {"transport": self, "timeout": self._seconds}
        )
        self._server = StateServer(host, handler)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._server:
            self._server.serve_forever()

    def metadata(self) -> str:
        """Return where other groups fetch the state, without the step at the end."""
        return f"http://{self._host}:{self._server.server_address[1]}/checkpoint/"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: State, timeout: timedelta
    ) -> None:
        """Let others read this state until disallow_checkpoint."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        tensors: list[Tensor] = []
        description = json.dumps(described(state_dict, tensors)).encode()
        with self._changed:
            self._served = OfferedState(
                step, description, [tensor.detach().cpu() for tensor in tensors]
            )
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._readers, self._seconds)
            self._served = None

    def shutdown(self, wait: bool = True) -> None:
        end = threading.Thread(target=self._server.shutdown, daemon=True)
        end.start()
        if wait:
            end.join()

    @contextmanager
    def reading(self) -> Iterator[OfferedState | None]:
        """Wait for a state, and yield it; None if there is none. See also require_unchanged."""
        with self._changed:
            self._changed.wait_for(lambda: self._served is not None, self._seconds)
            served = self._served
            self._readers += 1
        try:
            yield served
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def require_unchanged(self, served: OfferedState) -> None:
        """Raise ConnectionError if a state may have been changed while it was read."""
        if self._served is not served:
            raise ConnectionError("reading the state has taken too long")

    def asks(self, url: str, nonce: str) -> str:
        """Return the proof that a request comes from a group."""
        return proof(self._secret, b"asks", url.encode(), nonce.encode()).hexdigest()

    def gives(self, url: str, nonce: str) -> hmac.HMAC:
        """Return what becomes the proof that an answer comes from a group."""
        return proof(self._secret, b"gives", url.encode(), nonce.encode())

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> State:
        """Return the state of another group.

        Raises OSError if there is none, or if it is not from a group that knows the secret.
        """
        url, nonce = f"{metadata}{step}", secrets.token_hex(16)
        parts = urlsplit(url)
        connection = HTTPConnection(str(parts.hostname), parts.port, timeout.total_seconds())
        try:
            headers = {NONCE: nonce, ASKS: self.asks(url, nonce)}
            connection.request("GET", parts.path, headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ConnectionError(f"{url}: {answer.status} {answer.reason}")
            return read_state(answer, self.gives(url, nonce))
        finally:
            connection.close()


class StateRequest(BaseHTTPRequestHandler):
    transport: StateTransport

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Send the state of the step in the path to whoever knows the secret."""
        nonce, given = self.headers.get(NONCE, ""), self.headers.get(ASKS, "")
        step = self.path.rpartition("/")[2]
        url = f"{self.transport.metadata()}{step}"
        if not hmac.compare_digest(given.encode(), self.transport.asks(url, nonce).encode()):
            self.send_error(403)
            return
        with self.transport.reading() as served:
            if served is None or str(served.step) != step:
                self.send_error(404)
                return
            self.send_response(200)
            self.end_headers()
            self.send_state(served, self.transport.gives(url, nonce))

    def send_state(self, served: OfferedState, mac: hmac.HMAC) -> None:
        """Send a description with a proof, the tensors' bytes, and a second proof.

        Raises OSError, also if the state is changed meanwhile.
        """
        size = len(served.description).to_bytes(8, "little")
        mac.update(size + served.description)
        self.wfile.write(size + served.description + mac.digest())
        for tensor in served.tensors:
            numbers = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            for start in range(0, len(numbers), PIECE_BYTES):
                self.wfile.write(numbers[start : start + PIECE_BYTES])
                self.transport.require_unchanged(served)
        mac.update(WHOLE)
        self.wfile.write(mac.digest())


def read_state(answer: HTTPResponse, mac: hmac.HMAC) -> State:
    """Return what send_state has sent. Raises ConnectionError for anything else, and OSError."""
    size = exactly(answer, bytearray(8))
    length = int.from_bytes(size, "little")
    if length > LONGEST_DESCRIPTION:
        raise ConnectionError("this is not the state of a group")
    description = exactly(answer, bytearray(length))
    mac.update(size + description)
    require_proof(answer, mac)
    tensors: list[Tensor] = []
    state = restored(json.loads(description), tensors)
    for tensor in tensors:
        exactly(answer, tensor.reshape(-1).view(torch.uint8).numpy().data)
    mac.update(WHOLE)
    require_proof(answer, mac)
    return state


def require_proof(answer: HTTPResponse, mac: hmac.HMAC) -> None:
    if not hmac.compare_digest(exactly(answer, bytearray(DIGEST_BYTES)), mac.digest()):
        raise ConnectionError("this is not from a group that knows the secret of this one")


def exactly(answer: HTTPResponse, into: Any) -> Any:
    """Return a buffer, filled from an answer. Raises ConnectionError if the answer ends before."""
    view = memoryview(into)
    done = 0
    while done < len(view):
        count = answer.readinto(view[done : done + PIECE_BYTES])
        if not count:
            raise ConnectionError("the state ends before it is whole")
        done += count
    return into


def described(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, dict):
        return {key: described(one, tensors) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [described(one, tensors) for one in value]
    return value


def restored(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            dtype, shape = value[TENSOR]
            tensors.append(torch.empty(shape, dtype=getattr(torch, dtype)))
            return tensors[-1]
        return {key: restored(one, tensors) for key, one in value.items()}
    return [restored(one, tensors) for one in value] if isinstance(value, list) else value
