"""Simulated hosts on one machine: network namespaces with their own addresses on one switch.

They share the disk, as in a cluster.
"""

import os
import signal
import subprocess
from contextlib import suppress

PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def ip(*words):
    """Run ip(8) and return its output. Raises CalledProcessError."""
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, env={**os.environ, "PATH": PATH}
    ).stdout


def why_not():
    """Return the reason why network namespaces cannot be made here, or None."""
    name = f"probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', error)}".strip()
    try:
        ip("-n", name, "link", "add", "switch", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr}".strip()
    finally:
        ip("netns", "del", name)
    return None


class Network:
    """A switch, at 10.77.0.1, and hosts 1 … count, at 10.77.0.2 and so on."""

    def __init__(self, count):
        self.switch = f"switch-{os.getpid()}"
        self.names = [f"host{i}-{os.getpid()}" for i in range(1, count + 1)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(1, count + 1)]
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "addr", "add", "10.77.0.1/24", "dev", "switch")
        for device in ("switch", "lo"):
            ip("-n", self.switch, "link", "set", device, "up")
        for i in range(1, count + 1):
            self._plug_in(i)

    def _plug_in(self, i):
        name = self.names[i - 1]
        ip("netns", "add", name)
        ends = ["netns", self.switch, "type", "veth", "peer", "name", "eth0", "netns", name]
        ip("link", "add", f"to{i}", *ends)
        ip("-n", self.switch, "link", "set", f"to{i}", "master", "switch", "up")
        ip("-n", name, "addr", "add", f"{self.addresses[i - 1]}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", name, "link", "set", device, "up")

    def at(self, i):
        """Return the words before a command that runs it on host i, or at the switch if i is 0."""
        return ["ip", "netns", "exec", self.names[i - 1] if i else self.switch]

    def processes(self, i):
        """Return the process ids on host i."""
        return [int(pid) for pid in ip("netns", "pids", self.names[i - 1]).split()]

    def power_off(self, i):
        """Kill all processes of host i, as if it lost its power."""
        for pid in self.processes(i):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cable(self, i, plugged):
        """Connect host i to the network, or disconnect it."""
        ip("-n", self.switch, "link", "set", f"to{i}", "up" if plugged else "down")

    def close(self):
        """Delete all hosts and the switch."""
        for name in [*self.names, self.switch]:
            ip("netns", "del", name)
