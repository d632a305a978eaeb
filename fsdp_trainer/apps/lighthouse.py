"""The verb `lighthouse`: the place where groups of ranks find each other.

It only keeps who is there; a run whose lighthouse was restarted goes on.
"""

import os
import signal
import socket

from fsdp_trainer.base.process import PARENT, die_with_parent
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.verbs import LighthouseConfig
from fsdp_trainer.errors import UserError

EVERYWHERE = ("0.0.0.0", "[::]")
"""Values of `host` with which all addresses of this machine are listened at."""
TICK_MILLISECONDS = 50
"""Time between two looks at who is there."""


def lighthouse(cfg: LighthouseConfig) -> int:
    if PARENT in os.environ:  # of groups on one machine
        die_with_parent(int(os.environ[PARENT]))
    os.environ.setdefault("RUST_LOG", "error")  # it would report every quorum
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(
            bind=f"{cfg.host}:{cfg.port}",
            min_replicas=1,
            join_timeout_ms=round(parse_duration(cfg.patience) * 1000),
            quorum_tick_ms=TICK_MILLISECONDS,
            heartbeat_timeout_ms=round(parse_duration(cfg.silence) * 1000),
        )
    except RuntimeError as error:
        reason = f"cannot listen there: {error}. Use  port=0  for any that is free"
        raise UserError(
            "the lighthouse cannot start", f"host={cfg.host} port={cfg.port}", reason
        ) from None
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    port = server.address().rpartition(":")[2]
    host = socket.gethostname() if cfg.host in EVERYWHERE else cfg.host
    print(f"lighthouse: replicas.lighthouse={host}:{port}", flush=True)
    signal.sigwait(ends)
    server.shutdown()
    return 0
