"""Measures the disk on which optim.offload=disk keeps states, as an update uses it."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fsdp_trainer.apps.doctor import speed
from fsdp_trainer.apps.doctor.machines import HostFacts
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.disk_space import reserve
from fsdp_trainer.checkpoint.shards import host_memory
from fsdp_trainer.config.paths import run_folder
from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.launch.facts import Check, gigabytes, host_name, judge, who
from fsdp_trainer.launch.world import World
from fsdp_trainer.optim.offload.state_files import Span, Transfers, open_for_update
from fsdp_trainer.run.offload_states import states_folder

SLOW = 1e9
"""Bytes per second below which a node's disk makes most of a step."""


def state_disk(
    cfg: DoctorConfig, world: World, everyone: Sequence[HostFacts], timeout: float
) -> Iterator[Check]:
    """Check how fast the ranks of a node read and write files of states, all at the same time.

    Nothing without optim.offload=disk. Collective, but only rank 0 gets the findings.
    """
    if cfg.optim.offload != "disk" or not cfg.doctor.measure:
        return
    # all begin at the same time, when the check of the run's folder has removed its files
    world.from_main("before the disk of states", lambda: None, timeout)
    wanted = states_folder(run_folder(cfg), cfg.optim.offload_path).absolute()
    folder = next(path for path in wanted.parents if path.is_dir())
    own: float | str
    try:
        own = rate(
            folder / f".doctor-{world.attempt}-{world.rank}", cfg.doctor.file_mib * speed.MIB
        )
    except OSError as error:
        own = str(error)
    rates = world.to_main("disk of states", own, timeout)
    if not world.main:
        return
    nodes: dict[str, float] = {}
    for rank, value in enumerate(rates):
        if isinstance(value, str):
            advice = "Name a folder on a local disk:  optim.offload_path=FOLDER"
            yield Check("problem", "disk of states", f"{who([rank], everyone)}: {value}", advice)
            return
        name = host_name(everyone[rank].node, everyone)
        nodes[name] = nodes.get(name, 0.0) + value
    if len(nodes) > 1:
        yield from judge("read and write", nodes, cfg.doctor.slow, world.device.type, gigabytes)
    slowest, free = min(nodes.values()), shutil.disk_usage(folder).free
    text = f"{gigabytes(slowest)} by {counted(world.size // world.nodes, 'rank')} of a node, "
    text += f"{free / 2**30:,.0f} GiB free in {folder}"
    advice = f"for  fsdp-trainer plan:  plan.offload_disk={slowest / 1e9:.3g}"
    yield Check("warning" if slowest < SLOW else "ok", "disk of states", text, advice)


def rate(file: Path, size: int) -> float:
    """Return the bytes per second of reading one file and writing another, both counted.

    Raises OSError.
    """
    spans = [Span(0, size, 0)]
    paths = [file.with_name(f"{file.name}-{name}") for name in ("read", "written")]
    transfers, buffers = Transfers(), [host_memory(size, pinned=False) for _ in paths]
    opened: list[int] = []
    try:
        for path, buffer in zip(paths, buffers, strict=True):
            with path.open("wb") as made:
                reserve(made.fileno(), size)
            opened.append(open_for_update(path))
            for job in transfers.begin(os.pwritev, opened[-1], spans, buffer):
                job.result()
            os.fsync(opened[-1])
        started = time.perf_counter()
        jobs = transfers.begin(os.preadv, opened[0], spans, buffers[0])
        jobs += transfers.begin(os.pwritev, opened[1], spans, buffers[1])
        for job in jobs:
            job.result()
        return 2 * size / (time.perf_counter() - started)
    finally:
        transfers.close()
        for descriptor in opened:
            os.close(descriptor)
        for path in paths:
            path.unlink(missing_ok=True)
