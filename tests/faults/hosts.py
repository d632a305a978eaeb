"""Hosts of one machine: network namespaces with an address each on one switch, where the rendezvous
lies, outside all of them."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INJECT = Path(__file__).parent / "inject"
PORT = 29400
STORE = f"""
import time, torch.distributed as dist
store = dist.TCPStore(
    "10.77.0.1", {PORT}, is_master=True, wait_for_workers=False, multi_tenant=True
)
print("ready", flush=True)
time.sleep(3600)
"""


def ip(*words: str) -> str:
    """Raises CalledProcessError."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, env={**os.environ, "PATH": path}
    ).stdout


def why_not() -> str | None:
    """Why there can be no hosts here, if there can be none."""
    name = f"faults-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "switch", "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', error)}".strip()
    finally:
        subprocess.run(
            ["ip", "netns", "del", name], capture_output=True, check=False
        ) if ip_there() else None
    return None


def ip_there() -> bool:
    """Whether there is such a command."""
    try:
        ip("-V")
        return True
    except OSError:
        return False


class Hosts:
    """Hosts 1 … count, each with its own network; the disk is common, as a cluster's is."""

    def __init__(self, count: int):
        self.switch, self.names = (
            f"switch-{os.getpid()}",
            [f"host{i}-{os.getpid()}" for i in range(1, count + 1)],
        )
        self.running: dict[int, subprocess.Popen] = {}
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "addr", "add", "10.77.0.1/24", "dev", "switch")
        for device in ("switch", "lo"):
            ip("-n", self.switch, "link", "set", device, "up")
        for i, name in enumerate(self.names, 1):
            ip("netns", "add", name)
            ip(
                "link",
                "add",
                f"to{i}",
                "netns",
                self.switch,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            ip("-n", self.switch, "link", "set", f"to{i}", "master", "switch", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        self.store = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, sys.executable, "-c", STORE],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.store.stdout.readline() == "ready\n"

    def start(self, i: int, words: list[str], env: dict[str, str], cwd: Path) -> None:
        """torchrun on host i; it takes part in a world of 1 to all hosts."""
        conf = (
            "is_host=false,last_call_timeout=2,"
            "keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10"
        )
        torchrun = [
            *(
                "ip",
                "netns",
                "exec",
                self.names[i - 1],
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nnodes=1:{len(self.names)}",
            ),
            *(
                "--nproc_per_node=1",
                "--max-restarts=20",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=10.77.0.1:{PORT}",
                "--rdzv-id=run",
            ),
            *(f"--rdzv-conf={conf}", f"--local-addr=10.77.0.{i + 1}", "-m", "fsdp_trainer", *words),
        ]
        told = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when something goes wrong
        env = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            **env,
        }
        process = subprocess.Popen(torchrun, env=env, cwd=cwd, stdout=told, stderr=told, text=True)
        process.told = told
        self.running[i] = process

    def kill(self, i: int) -> None:
        """Host i loses its power: torchrun and all ranks at once."""
        for pid in ip("netns", "pids", self.names[i - 1]).split():
            os.kill(int(pid), 9)
        self.running.pop(i).wait()

    def cable(self, i: int, plugged: bool) -> None:
        """Host i is cut off, or is back on the network."""
        ip("-n", self.switch, "link", "set", f"to{i}", "up" if plugged else "down")

    def told(self, i: int) -> str:
        """What host i's torchrun and ranks have printed."""
        file = self.running[i].told
        file.seek(0)
        return file.read()

    def close(self) -> None:
        """Everything ends."""
        for i in list(self.running):
            self.kill(i)
        self.store.kill()
        self.store.wait()
        for name in [*self.names, self.switch]:
            ip("netns", "del", name)


def seconds_until(there, limit: float) -> float:
    """How long it took."""
    began = time.monotonic()
    while not there():
        assert time.monotonic() - began < limit, "it did not happen"
        time.sleep(0.1)
    return time.monotonic() - began
