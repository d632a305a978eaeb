"""A state passes between groups that know the same secret, and between no others."""

import math
import os
import pickle
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from addresses import listening
from json_server import JsonServer
from stored import assert_byte_equal

from fsdp_trainer.config.schema import Replicas
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.launch.group_secret import FILE, TOKEN, secret_of_groups

pytest.importorskip("torchft")

# imports torchft
from fsdp_trainer.replicas.connections import Stranger, opened, sealed
from fsdp_trainer.replicas.membership import Membership
from fsdp_trainer.replicas.state_transfer import ASKS, StateTransport

WAIT = timedelta(seconds=2)
HOST = "127.0.0.1"
PARTS = {
    "matrix": torch.arange(15).view(5, 3).to(torch.bfloat16).T,
    "number": torch.tensor(2.5, dtype=torch.float64),
    "none": torch.empty(0, 4),
    "bits": torch.tensor([True, False]),
}
STATE = {"parts": PARTS, "record": {"loss": math.nan, "recent": (1, 2)}, "exchanges": True}


@contextmanager
def transport(secret, host=HOST):
    """Yield one end of a transfer."""
    end = StateTransport(host, WAIT, secret)
    try:
        yield end
    finally:
        end.shutdown()


@contextmanager
def answering(answer):
    """Yield where a server listens whose answer to a request is `answer(its path, its headers)`."""
    server = JsonServer(lambda path, _body, headers: (200, answer(path, headers)))
    try:
        yield f"{server.url}/checkpoint/"
    finally:
        server.close()


def test_a_state_arrives_as_it_was_sent():
    with transport(b"same") as source, transport(b"same", "[::1]") as target:
        threading.Timer(0.1, source.send_checkpoint, ([0], 7, STATE, WAIT)).start()
        arrived = target.recv_checkpoint(0, source.metadata(), 7, WAIT)
        assert [end._server.server_address[0] for end in (source, target)] == [HOST, "::1"]
        assert_byte_equal(arrived["parts"], {n: t.contiguous() for n, t in PARTS.items()})
        assert math.isnan(arrived["record"]["loss"])
        assert (arrived["record"]["recent"], arrived["exchanges"]) == ([1, 2], True)
        with pytest.raises(ConnectionError, match="404"):
            target.recv_checkpoint(0, source.metadata(), 8, WAIT)


def test_a_state_that_changes_while_it_is_read_is_not_taken_over(monkeypatch):
    with transport(b"same") as source, transport(b"same") as target:
        source.send_checkpoint([0], 7, {"large": torch.zeros(2**24)}, WAIT)
        require = source.require_unchanged

        def changed_before(served):
            source.disallow_checkpoint()
            require(served)

        monkeypatch.setattr(source, "_seconds", 0.0)
        monkeypatch.setattr(source, "require_unchanged", changed_before)
        with pytest.raises(ConnectionError, match="ends before"):
            target.recv_checkpoint(0, source.metadata(), 7, WAIT)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_nobody_takes_over_the_state_of_a_stranger(tmp_path):
    marker = tmp_path / "marker"
    with transport(b"ours") as target, transport(b"ours") as source:
        source.send_checkpoint([0], 7, STATE, WAIT)

        def passed_on(path, headers):
            """Ask a group with the proof that was given to a stranger."""
            request = urllib.request.Request(source.metadata() + "7", headers=dict(headers))
            try:
                return urllib.request.urlopen(request, timeout=2).read()
            except urllib.error.HTTPError as error:
                assert error.code == 403
                return b""

        answers = [
            lambda *_: pickle.dumps(Evil(marker)),
            lambda *_: (2**63).to_bytes(8, "little"),
            lambda *_: (2).to_bytes(8, "little") + b"{}" + bytes(64),
            lambda *_: b"",
            passed_on,
        ]
        for answer in answers:
            with answering(answer) as address, pytest.raises(ConnectionError):
                target.recv_checkpoint(0, address, 7, WAIT)
    assert not marker.exists()


@pytest.mark.parametrize("other", [b"theirs", b"", None])
def test_a_stranger_is_given_no_state(other):
    with transport(b"ours") as source, transport(other) as target:
        source.send_checkpoint([0], 7, STATE, WAIT)
        with pytest.raises(ConnectionError, match="403"):
            target.recv_checkpoint(0, source.metadata(), 7, WAIT)
        request = urllib.request.Request(source.metadata() + "7", headers={ASKS: "ü"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(request)


def test_the_handle_of_a_group_that_does_not_know_the_secret_is_refused():
    handle = {"store": "host:1", "connection": None}
    assert opened(sealed(handle, b"ours"), b"ours") == handle
    moved = sealed(handle, b"ours").replace("host", "evil")
    strangers = [
        sealed(handle, b"theirs"),
        moved,
        "",
        "[]",
        '{"seal": 1}',
        '{"seal": "ü"}',
        "[" * 10**5,
    ]
    for stranger in strangers:
        with pytest.raises(Stranger):
            opened(stranger, b"ours")


def test_groups_without_a_token_share_a_secret_in_the_runs_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    secret = secret_of_groups(tmp_path)
    assert len(secret) == 64
    assert secret_of_groups(tmp_path) == secret
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(TOKEN, "typed")
    assert secret_of_groups(tmp_path) == b"typed"


def beside_a_stranger():
    """Meet alone, then beside a group that claims to be far ahead; return what was seen."""
    from torchft.coordination import LighthouseClient, LighthouseServer

    before, states = listening(), []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    times = {"join_timeout_ms": 200, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1000}
    server = LighthouseServer(bind=f"{HOST}:0", min_replicas=1, **times)
    address = f"{HOST}:{server.address().rpartition(':')[2]}"
    world = SimpleNamespace(rank=0, size=1, from_main=lambda what, make, timeout: make())
    cfg = Replicas(method="sync", lighthouse=address)
    member = Membership(cfg, world, torch.device("cpu"), 1.5, {}, b"secret", dict, states.append)
    alone = member.meet(0), member.present
    addresses = listening() - before
    client = LighthouseClient(f"http://{address}", timedelta(seconds=5))

    def claims():
        where = {"address": f"http://{HOST}:1", "store_address": f"{HOST}:1"}
        with suppress(RuntimeError, TimeoutError):  # the lighthouse has ended
            while True:
                client.quorum("stranger", WAIT, step=10**9, world_size=1, **where)

    stranger = threading.Thread(target=claims)
    stranger.start()
    time.sleep(0.3)
    try:
        member.meet(1)
        message = ""
    except RunFailed as error:
        message = error.args[0]
    server.shutdown()
    stranger.join()
    member.shutdown(wait=False)
    dist.destroy_process_group()
    return alone, addresses, message, states


def test_a_group_listens_at_its_own_address_and_takes_nothing_from_a_stranger():
    alone, addresses, message, states = beside_a_stranger()
    assert alone == ((False, False), 1)
    assert {host for host, _ in addresses} == {HOST}
    assert "has a group with other settings or another secret" in message
    assert states == []
