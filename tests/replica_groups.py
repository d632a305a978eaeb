"""Groups of ranks that train together: each in a pool of its own, with a lighthouse."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import inject
from world import RankFailed, World, end


@contextmanager
def lighthouse(port=0):
    """Start a lighthouse, and yield its HOST:PORT. port: to listen at; 0: any that is free."""
    listen = ["host=127.0.0.1", f"port={port}"]
    command = [sys.executable, "-m", "fsdp_trainer", "lighthouse", *listen]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield "127.0.0.1:" + process.stdout.readline().strip().rpartition(":")[2]
    finally:
        end([process])


class GroupPools:
    """Pools of ranks, one for each group, which meet at one lighthouse."""

    def __init__(self, first, address):
        self.pools, self.address = [first], address

    def train(self, folder, *overrides, groups=2, ranks=1, method="sync", seams=None, **options):
        """Train as some groups; return the run of each. A group that is killed starts again.

        seams: by number of a group, what is entered on each of its ranks, until it is killed.
        """
        self.pools += [World() for _ in range(len(self.pools), groups)]
        with ThreadPoolExecutor(groups) as threads:
            started = [
                threads.submit(
                    self._train_group, i, folder, method, overrides, ranks, seams or {}, options
                )
                for i in range(groups)
            ]
            return [each.result() for each in started]

    def _train_group(self, number, folder, method, overrides, ranks, seams, options):
        own = [f"replicas.id={number}", f"replicas.lighthouse={self.address}"]
        words = [f"replicas.method={method}", *own, *overrides]
        pool = self.pools[number]
        if number in seams:
            try:
                return pool.train(folder, *words, ranks=ranks, seam=seams[number], **options)
            except RankFailed:
                pass
        return pool.train(folder, *words, ranks=ranks, **options)

    def close(self):
        """End the pools but the first one, which is shared with other tests."""
        for pool in self.pools[1:]:
            pool.close()


def killed_at(step):
    """Return a seam that kills a group when it begins a step."""
    return inject.killed(step=step)


def stopped_by(file):
    """Return a seam that stops a group of one rank as soon as a file exists, which it deletes."""
    return inject.at("forward", partial(stop_by, file))


def stop_by(file):
    """Stop this process if a file exists."""
    if file.exists():
        file.unlink()
        inject.send(signal.SIGTERM)
