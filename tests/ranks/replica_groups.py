"""Groups of ranks that train together: each in a pool of its own, with a lighthouse."""

import contextlib
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import inject
from world import RankFailed, World, end_workers, pack, wait_until

from fsdp_trainer.cli import main


@contextlib.contextmanager
def lighthouse(port=0):
    """Start a lighthouse, and yield its HOST:PORT. port: to listen at; 0: any that is free."""
    worker = World().new_worker()
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        worker[1].send((pack((serve, (port, said))), {}))
        try:
            line = wait_until(lambda: said.exists() and said.read_text())
            yield "127.0.0.1:" + line.strip().rpartition(":")[2]
        finally:
            end_workers([worker])


def serve(port, said):
    """Run the command of a lighthouse, whose output goes to a file."""
    with said.open("w", buffering=1) as file, contextlib.redirect_stdout(file):
        main(["lighthouse", "host=127.0.0.1", f"port={port}"])


class GroupPools:
    """Pools of ranks, one for each group, which meet at one lighthouse."""

    def __init__(self, first, address):
        self.pools, self.address = [first], address

    def train(self, folder, *overrides, groups=2, ranks=1, method="sync", seams=None, **options):
        """Train as some groups; return the run of each. A group that is killed starts again.

        seams: by number of a group, what is entered on each of its ranks, until it is killed.
        """
        self.pools += [World() for _ in range(len(self.pools), groups)]
        place = [f"replicas.method={method}", f"replicas.lighthouse={self.address}"]

        def train_group(number):
            words = [*place, f"replicas.id={number}", *overrides]
            train = partial(self.pools[number].train, folder, *words, ranks=ranks, **options)
            if seams and number in seams:
                with contextlib.suppress(RankFailed):
                    return train(seam=seams[number])
            return train()

        with ThreadPoolExecutor(groups) as threads:
            return list(threads.map(train_group, range(groups)))

    def close(self):
        """End the pools but the first one, which is shared with other tests."""
        for pool in self.pools[1:]:
            pool.close()


def stopped_by(file):
    """Return a seam that stops a group of one rank as soon as a file exists, which it deletes."""
    return inject.at("forward", partial(stop_by, file))


def stop_by(file):
    """Stop this process if a file exists."""
    if file.exists():
        file.unlink()
        inject.send(signal.SIGTERM)
