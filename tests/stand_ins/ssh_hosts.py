"""Hosts that are reached by ssh.

A stand-in for ssh that runs everything on this machine, and OpenSSH's sshd on two simulated hosts.
"""

import os
import shutil
import subprocess
from pathlib import Path

import namespaces
from world import wait_until

from fsdp_trainer.launch.nodes import free_port

# its last argument is the command, the one before it the host, whose name selects the failure
STAND_IN = r"""#!/bin/bash
host=${@: -2:1}
for word in "$@"; do
  if [ "$word" = -G ]; then echo "hostname localhost"; exit 0; fi
done
echo "$@" >> "${BASH_SOURCE%/*}/../calls"
echo "welcome to $host"
there() { exec env -i HOME="$HOME" PATH=/usr/bin:/bin sh -c "$1"; }
case $host in
  unknown) echo "Host key verification failed." >&2; exit 255;;
  closed) echo "$host: Permission denied (publickey)." >&2; exit 255;;
  down) echo "ssh: connect to host $host port 22: Connection timed out" >&2; exit 255;;
  bare) echo "bash: python: No such file or directory" >&2; exit 127;;
  elsewhere) there "${@: -1}" < <(sed -u '1s|"folder": "[^"]*"|"folder": "/no/such"|' 2>/dev/null);;
  older) there "${@: -1}" < <(sed -u '1s|"version": "[^"]*"|"version": "0.0.1"|' 2>/dev/null);;
  *) there "${@: -1}";;
esac
"""


def stand_in(folder):
    """Return an environment in which ssh is STAND_IN.

    Its command lines are appended to `calls` in the folder.
    """
    return ssh_of(folder, STAND_IN)


def ssh_of(folder, script):
    """Return an environment in which ssh is the given script."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/ssh").write_text(script)
    (folder / "bin/ssh").chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def sshd():
    """Return the path of sshd, or None if OpenSSH is not installed."""
    return shutil.which("sshd", path=namespaces.PATH)


def why_not():
    """Return the reason why sshd cannot run here, or None."""
    if not (sshd() and shutil.which("ssh") and shutil.which("ssh-keygen")):
        return "no OpenSSH here: apt-get install openssh-server"
    return None


class SshHosts:
    """Two hosts with an sshd each: network namespaces if possible, else addresses of this machine.

    names: for launch.hosts. before: words with which a launching command line begins. env:
    environment variables that it needs.
    """

    def __init__(self, folder):
        self.network = None if namespaces.why_not() else namespaces.Network(2)
        if self.network:
            self.port, addresses = 22, self.network.addresses
            self.names, self.before = addresses, self.network.at(0)
        else:
            self.port, addresses = free_port(), ["127.0.0.1", "127.0.0.2"]
            self.names, self.before = [f"{address}:{self.port}" for address in addresses], []
        self.env = ssh_of(folder, f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"')
        if self.network:
            self.env["GLOO_SOCKET_IFNAME"] = "eth0"  # reaches ranks only if the launcher sends it
        self._write_files(folder)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # for sshd's privilege separation
        self.servers = [self._serve(folder, i, address) for i, address in enumerate(addresses, 1)]

    def _write_files(self, folder):
        for name in ("host", "user"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{folder}/{name}"]
            subprocess.run(keygen, check=True)
        key = " ".join((folder / "host.pub").read_text().split()[:2])
        (folder / "known").write_text(f"* {key}\n")
        (folder / "config").write_text(
            f"IdentityFile {folder}/user\nIdentitiesOnly yes\nStrictHostKeyChecking yes\n"
            f"UserKnownHostsFile {folder}/known\nGlobalKnownHostsFile none\n"
        )

    def _serve(self, folder, i, address):
        config = folder / f"sshd_config{i}"
        config.write_text(
            f"Port {self.port}\nListenAddress {address}\nHostKey {folder}/host\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/user.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nPermitRootLogin yes\n"
        )
        at = self.network.at(i) if self.network else []
        with (folder / f"log{i}").open("w") as log:
            server = subprocess.Popen([*at, sshd(), "-D", "-e", "-f", str(config)], stderr=log)
        wait_until(lambda: "listening" in (folder / f"log{i}").read_text(), server)
        return server

    def close(self):
        """End the servers and delete the hosts."""
        for server in self.servers:
            server.kill()
            server.wait()
        if self.network:
            for i in (1, 2):
                self.network.power_off(i)
            self.network.close()
