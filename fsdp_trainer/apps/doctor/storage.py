"""Checks of the run's folder (shared, fast, with room) and of input files (equal on all nodes)."""

import contextlib
import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_trainer.apps.doctor import speed
from fsdp_trainer.apps.doctor.machines import HostFacts
from fsdp_trainer.base.counted import counted
from fsdp_trainer.config.data_files import is_url
from fsdp_trainer.config.paths import LAG_SECONDS, find_checkpoint, is_hub_id, run_folder
from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.data.files import quickstart_data
from fsdp_trainer.data.files.remote_files import list_files
from fsdp_trainer.data.files.sources import find_sources
from fsdp_trainer.data.prepared_data import build_tokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.facts import (
    SHARED_ROOT,
    Check,
    by_value,
    gigabytes,
    host_name,
    judge,
    room,
    who,
)
from fsdp_trainer.launch.world import World
from fsdp_trainer.models.from_config.resolve import resolve_model
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.observe.console import short
from fsdp_trainer.parallel.memory_check import CountedModel, checkpoint_bytes

UNREADABLE = "cannot be read"
EDGE = 64 * 1024  # bytes from each end of a file that are included in its digest


def storage(
    cfg: DoctorConfig, world: World, everyone: Sequence[HostFacts], timeout: float
) -> list[Check]:
    """Check that the run's folder is shared by all nodes and fast, and that its disk has room."""
    run = run_folder(cfg)
    folder = run if run.is_dir() else Path(cfg.run.root)
    mark = folder / f".doctor-{world.attempt}"
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    with contextlib.ExitStack() as held:
        error = write_mark(mark, world.attempt, held) if world.main else ""
        error = world.from_main("mark", lambda: error, timeout)
        if error:
            advice = "Name a folder that can be written to:  run.root=FOLDER"
            return [Check("problem", f"run.root={cfg.run.root}", error, advice)]
        unshared = read_mark(mark, world, timeout / 2)
        own = (unshared, None if unshared else speed_of_disk(cfg, mark, world))
        results = world.to_main("storage", own, timeout)
    if not world.main:
        return []
    for path in missing:
        with contextlib.suppress(OSError):  # not empty if a run has started there since
            path.rmdir()
    return [
        *sharing(folder, results, everyone),
        *disks(results, everyone, cfg, world),
        *space(cfg, run),
    ]


def write_mark(mark: Path, launch: str, held: contextlib.ExitStack) -> str:
    """Write and lock a file for the other ranks to read. Returns an error or "".

    launch: content of the file; held: removes the file when it is closed.
    """
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        file = held.enter_context(mark.open("w"))
        held.callback(mark.unlink, missing_ok=True)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write(launch)
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        return f"cannot be written to, or not locked, on {socket.gethostname()}: {error}"
    return ""


def read_mark(mark: Path, world: World, timeout: float) -> str:
    """Wait for the file that rank 0 wrote. Returns the reason if it cannot be read, else ""."""
    deadline = time.monotonic() + min(LAG_SECONDS, timeout)
    while True:
        try:
            if mark.read_text() == world.attempt:
                return ""
            reason = "a file of that name holds something else"
        except OSError as error:
            reason = str(error)
        if time.monotonic() > deadline:
            return reason
        time.sleep(0.1)


def speed_of_disk(cfg: DoctorConfig, mark: Path, world: World) -> tuple[float, float] | str | None:
    """Write and read a file on the first rank of each node, at the same time on all nodes.

    Returns the bytes per second of writing and of reading, or an error; None on other ranks.
    """
    if world.local_rank or not cfg.doctor.measure:
        return None
    try:
        file = mark.with_name(f"{mark.name}-{world.node}")
        return speed.disk(file, cfg.doctor.file_mib * speed.MIB)
    except OSError as error:
        return str(error)


def sharing(
    folder: Path, results: Sequence[tuple], everyone: Sequence[HostFacts]
) -> Iterator[Check]:
    """Check that all ranks see the same folder.

    results: for each rank, the reason why it does not see rank 0's file ("" if it does), and its
    disk's speeds.
    """
    reasons = by_value([unshared for unshared, _ in results])
    for reason, ranks in reasons:
        if reason:
            text = f"{who(ranks, everyone)}: {reason}"
            yield Check("problem", "not shared", text, SHARED_ROOT)
    if len(reasons) == 1 and not reasons[0][0]:
        yield Check("ok", "shared", f"{folder.absolute()}: all ranks read what rank 0 wrote")


def disks(
    results: Sequence[tuple], everyone: Sequence[HostFacts], cfg: DoctorConfig, world: World
) -> Iterator[Check]:
    for rank, (_, rates) in enumerate(results):
        if isinstance(rates, str):
            yield Check("problem", "disk", f"{who([rank], everyone)}: {rates}")
    measured = {
        host_name(everyone[rank].node, everyone): rates
        for rank, (_, rates) in enumerate(results)
        if isinstance(rates, tuple)
    }
    if not measured:
        return
    for what, i in (("write and fsync", 0), ("read", 1)):
        named = {host: rates[i] for host, rates in measured.items()}
        total = f"{gigabytes(sum(named.values()))} together; a node " if len(named) > 1 else ""
        yield from judge(what, named, cfg.doctor.slow, world.device.type, gigabytes, total)


def space(cfg: DoctorConfig, run: Path) -> Iterator[Check]:
    model = cfg.model
    if model.init_from is None and model.name == "auto":
        text = "not judged: no model is configured, e.g.  model=llama3_8b  or  +recipe=NAME"
        yield Check("note", "room", text)
        return
    if model.init_from and is_hub_id(model.init_from):
        yield Check("note", "room", f"not judged: {model.init_from} has not been fetched")
        return
    try:
        own = cfg.tokenizer
        rows = build_tokenizer(own, model.init_from).vocab_size if own.path else None
        config = resolve_model(model, rows)
    except UserError as error:
        problems = (f"{p.what}  {p.reason.splitlines()[0]}" for p in error.problems)
        yield Check("problem", "model", "\n".join([error.title, *problems]))
        return
    parameters = config.parameters()
    size = checkpoint_bytes(CountedModel.of(meta_decoder(config)), cfg.precision, cfg.optim)
    text = f"\n{short(parameters)} parameters × {size / parameters:.3g} B"
    if not config.vocab_size:
        text += ", without the embedding: no tokenizer is configured"
    for check in room(run, size, cfg.checkpoint.keep):
        check.text += text
        yield check


def inputs(cfg: DoctorConfig, everyone: Sequence[HostFacts]) -> Iterator[Check]:
    firsts = [rank for rank, f in enumerate(everyone) if f.inputs]
    if not firsts:
        text = "no data, tokenizer or weights are configured, e.g.  data.path=chats.jsonl"
        yield Check("note", "not looked at", text)
        return
    for key in everyone[firsts[0]].inputs:
        by_node = [everyone[rank].inputs.get(key, "not set") for rank in firsts]
        (usual, majority), *odd = by_value(by_node)
        value = f"{key}={settings_of(cfg, key)}"
        if not odd:
            mark = "problem" if usual.startswith(UNREADABLE) else "ok"
            on_all = f" on {counted(len(firsts), 'node')}" if len(firsts) > 1 else ""
            yield Check(mark, key, f"{usual}{on_all if mark == 'ok' else ''}")
            continue
        text = "\n".join(
            f"{digest} on {who([firsts[i] for i in nodes], everyone)}"
            for digest, nodes in [(usual, majority), *odd]
        )
        yield Check("problem", key, f"{value} differs\n{text}", "Give all nodes the same files")


def input_digests(cfg: DoctorConfig) -> Iterator[tuple[str, str]]:
    for key in ("data.path", "data.validation", "tokenizer.path", "model.init_from"):
        value = settings_of(cfg, key)
        if value is None or isinstance(value, int | float):
            continue
        if key == "model.init_from" and is_hub_id(value):
            continue
        try:
            if key.startswith("data"):
                files = [file for source in find_sources(value, key) for file in source.files]
            else:
                files = files_of(value)
            yield key, digest_of(files)
        except UserError as error:
            yield key, f"{UNREADABLE}: {error.problems[0].reason.splitlines()[0]}"
        except OSError as error:
            yield key, f"{UNREADABLE}: {error}"


def settings_of(cfg: DoctorConfig, key: str) -> Any:
    group, name = key.split(".")
    return getattr(getattr(cfg, group), name)


def files_of(path: str) -> list[str]:
    """Return the files of a tokenizer, a Hugging Face folder, or a run's newest checkpoint."""
    if path.startswith("demo:"):
        return []
    folder = find_checkpoint(path) or Path(path)
    if not folder.is_dir():
        return [str(folder)]
    return sorted(str(file) for file in folder.rglob("*") if file.is_file())


def digest_of(files: Sequence[str]) -> str:
    """Return the number and total size of files, and a digest of their names, sizes and ends.

    Takes only seconds for a terabyte, and still detects truncated copies and other versions.
    """
    digest, total = hashlib.blake2b(digest_size=4), 0
    real = [file for file in files if file not in quickstart_data.TASKS]
    for file in real:
        if is_url(file):
            (about,) = list_files(file, "data.path")
            digest.update(f"{file} {about.version}".encode())
            total += about.size or 0
            continue
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            digest.update(f"{Path(file).name} {size}".encode() + f.read(EDGE))
            f.seek(max(0, size - EDGE))
            digest.update(f.read(EDGE))
        total += size
    if not real:
        return "generated here, the same on all nodes"
    return f"{counted(len(real), 'file')}, {total:,} bytes, {digest.hexdigest()}"
