"""torchrun on simulated hosts of one machine."""

import os
import subprocess
import sys
import tempfile
import time

from folders import REPO
from namespaces import Network

INJECT = REPO / "tools/inject"
PORT = 29400
STORE = f"""
import time, torch.distributed as dist
store = dist.TCPStore(
    "10.77.0.1", {PORT}, is_master=True, wait_for_workers=False, multi_tenant=True
)
print("ready", flush=True)
time.sleep(3600)
"""


class Hosts(Network):
    """Hosts that run torchrun, with the rendezvous at the switch, outside of all hosts."""

    def __init__(self, count):
        super().__init__(count)
        self.running = {}
        self.store = subprocess.Popen(
            [*self.at(0), sys.executable, "-c", STORE],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.store.stdout.readline() == "ready\n"

    def start(self, i, words, env, cwd):
        """Start torchrun on host i, for a world of one up to all hosts."""
        conf = (
            "is_host=false,last_call_timeout=2,"
            "keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"
        )
        torchrun = [
            *self.at(i), sys.executable, "-m", "torch.distributed.run",
            f"--nnodes=1:{len(self.names)}", "--nproc_per_node=1", "--max-restarts=20",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}", "--rdzv-id=run",
            f"--rdzv-conf={conf}", f"--local-addr=10.77.0.{i + 1}", "-m", "fsdp_trainer", *words,
        ]  # fmt: skip
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when something goes wrong
        env = os.environ | env | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        process = subprocess.Popen(torchrun, env=env, cwd=cwd, stdout=log, stderr=log, text=True)
        process.told = log
        self.running[i] = process

    def kill(self, i):
        """Kill torchrun and all ranks of host i at once, as if it lost its power."""
        self.power_off(i)
        self.running.pop(i).wait()

    def told(self, i):
        """Return the output of host i's torchrun and ranks."""
        file = self.running[i].told
        file.seek(0)
        return file.read()

    def close(self):
        """End all processes and delete the hosts."""
        for i in list(self.running):
            self.kill(i)
        self.store.kill()
        self.store.wait()
        super().close()


def seconds_until(there, limit):
    """Return the seconds until `there()` holds. Raises AssertionError after `limit` seconds."""
    began = time.monotonic()
    while not there():
        assert time.monotonic() - began < limit, "it did not happen"
        time.sleep(0.1)
    return time.monotonic() - began
