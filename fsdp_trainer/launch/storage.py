"""The run's folder and what is read: shared, alike on all nodes, fast, and with room."""

import contextlib
import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fsdp_trainer.config.data_files import is_url
from fsdp_trainer.config.paths import LAG_SECONDS, find_checkpoint, is_hub_id, run_folder
from fsdp_trainer.config.verbs import DoctorConfig
from fsdp_trainer.data import demo
from fsdp_trainer.data.build import build_tokenizer
from fsdp_trainer.data.remote import list_files
from fsdp_trainer.data.sources import find_sources
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch import speed
from fsdp_trainer.launch.doctor_report import counted
from fsdp_trainer.launch.facts import (
    Check,
    by_value,
    gigabytes,
    host_name,
    judge,
    room,
    who,
)
from fsdp_trainer.launch.machines import Looked
from fsdp_trainer.launch.world import World
from fsdp_trainer.models.resolve import resolve_model
from fsdp_trainer.observe.console import short
from fsdp_trainer.parallel.memory_check import checkpoint_bytes

UNREADABLE = "cannot be read"
EDGE = 64 * 1024  # bytes at each end of a file that tell whether two are the same


def storage(
    cfg: DoctorConfig, world: World, everyone: Sequence[Looked], timeout: float
) -> list[Check]:
    """The folder that holds the run: shared, fast, and with room."""
    run = run_folder(cfg)
    folder = run if run.is_dir() else Path(cfg.run.root)
    mark = folder / f".doctor-{world.attempt}"
    missing = (
        [place for place in (folder, *folder.parents) if not place.exists()] if world.main else []
    )
    with contextlib.ExitStack() as held:
        why = leave_mark(mark, world.attempt, held) if world.main else ""
        if why := world.from_main("mark", lambda: why, timeout):
            return [
                Check(
                    "problem",
                    f"run.root={cfg.run.root}",
                    why,
                    "Name a folder that can be written to:  run.root=FOLDER",
                )
            ]
        why = see_mark(mark, world, timeout / 2)
        told = world.to_main(
            "storage", (why, None if why else speed_of_disk(cfg, mark, world)), timeout
        )
    for place in missing:
        with contextlib.suppress(OSError):  # a run has begun there meanwhile
            place.rmdir()
    return (
        [*sharing(folder, told, everyone), *disks(told, everyone, cfg, world), *space(cfg, run)]
        if world.main
        else []
    )


def leave_mark(mark: Path, launch: str, held: contextlib.ExitStack) -> str:
    """Write and lock a file that others look for, until `held` is closed. Returns why it cannot be."""
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


def see_mark(mark: Path, world: World, timeout: float) -> str:
    """Why this rank does not see what rank 0 wrote; empty if it does."""
    deadline = time.monotonic() + min(LAG_SECONDS, timeout)
    while True:
        try:
            if mark.read_text() == world.attempt:
                return ""
            why = "a file of that name holds something else"
        except OSError as error:
            why = str(error)
        if time.monotonic() > deadline:
            return why
        time.sleep(0.1)


def speed_of_disk(cfg: DoctorConfig, mark: Path, world: World) -> tuple[float, float] | str | None:
    """What the first rank of each node measures, all at once: bytes a second of writing and of reading, or why there are none."""
    if world.local_rank or not cfg.doctor.measure:
        return None
    try:
        return speed.disk(
            mark.with_name(f"{mark.name}-{world.node}"), cfg.doctor.file_mib * speed.MIB
        )
    except OSError as error:
        return str(error)


def sharing(folder: Path, told: Sequence[tuple], everyone: Sequence[Looked]) -> Iterator[Check]:
    """Whether all see one folder."""
    blind = by_value([why for why, _ in told])
    for why, ranks in blind:
        if why:
            advice = "Every rank writes its part of a checkpoint there:  run.root=FOLDER  on storage that all nodes share"
            yield Check("problem", "not shared", f"{who(ranks, everyone)}: {why}", advice)
    if len(blind) == 1 and not blind[0][0]:
        yield Check("ok", "shared", f"{folder.absolute()}: all ranks read what rank 0 wrote")


def disks(
    told: Sequence[tuple], everyone: Sequence[Looked], cfg: DoctorConfig, world: World
) -> Iterator[Check]:
    """How fast each node writes and reads, all at once."""
    for rank, (_, rates) in enumerate(told):
        if isinstance(rates, str):
            yield Check("problem", "disk", f"{who([rank], everyone)}: {rates}")
    measured = {
        host_name(everyone[rank].node, everyone): rates
        for rank, (_, rates) in enumerate(told)
        if isinstance(rates, tuple)
    }
    for what, i in (("write and fsync", 0), ("read", 1)):
        if measured:
            together = (
                f"{gigabytes(sum(rates[i] for rates in measured.values()))} together; a node "
                if len(measured) > 1
                else ""
            )
            yield from judge(
                what,
                {host: rates[i] for host, rates in measured.items()},
                cfg.doctor.slow,
                world.device.type,
                gigabytes,
                together,
            )


def space(cfg: DoctorConfig, run: Path) -> Iterator[Check]:
    """Room for the checkpoints of the model, as far as one is configured."""
    model = cfg.model
    if model.init_from is None and model.name == "auto":
        yield Check(
            "note",
            "room",
            "not judged: no model is configured, e.g.  model=llama3_8b  or  +recipe=NAME",
        )
        return
    if model.init_from and is_hub_id(model.init_from):
        yield Check("note", "room", f"not judged: {model.init_from} has not been fetched")
        return
    try:
        rows = build_tokenizer(cfg).vocab_size if cfg.tokenizer.path else None
        config = resolve_model(model, rows)
    except UserError as error:
        yield Check(
            "problem",
            "model",
            "\n".join(
                [error.title, *(f"{p.what}  {p.why.splitlines()[0]}" for p in error.problems)]
            ),
        )
        return
    parameters = config.parameters()
    size = checkpoint_bytes(parameters, cfg.precision, cfg.optim)
    for found in room(cfg, run, size):
        embedding = (
            "" if config.vocab_size else ", without the embedding: no tokenizer is configured"
        )
        found.text += f"\n{short(parameters)} parameters × {size / parameters:.3g} B{embedding}"
        yield found


def inputs(cfg: DoctorConfig, everyone: Sequence[Looked]) -> Iterator[Check]:
    """Whether all nodes read the same files."""
    firsts = [rank for rank, f in enumerate(everyone) if f.inputs]
    if not firsts:
        yield Check(
            "note",
            "not looked at",
            "no data, tokenizer or weights are configured, e.g.  data.path=chats.jsonl",
        )
    for key in everyone[firsts[0]].inputs if firsts else ():
        (usual, majority), *odd = by_value(
            [everyone[rank].inputs.get(key, "not set") for rank in firsts]
        )
        value = f"{key}={settings_of(cfg, key)}"
        if not odd:
            mark = "problem" if usual.startswith(UNREADABLE) else "ok"
            on_all = f" on {counted(len(firsts), 'node')}" if len(firsts) > 1 else ""
            yield Check(mark, key, f"{usual}{on_all if mark == 'ok' else ''}")
            continue
        text = "\n".join(
            f"{said} on {who([firsts[i] for i in places], everyone)}"
            for said, places in [(usual, majority), *odd]
        )
        yield Check("problem", key, f"{value} differs\n{text}", "Give all nodes the same files")


def what_is_read(cfg: DoctorConfig) -> Iterator[tuple[str, str]]:
    """(key, what this node has under it): the number of files, their size, and a digest of names, sizes, heads and tails."""
    for key in ("data.path", "data.validation", "tokenizer.path", "model.init_from"):
        value = settings_of(cfg, key)
        if (
            value is None
            or isinstance(value, int | float)
            or (key == "model.init_from" and is_hub_id(value))
        ):
            continue
        try:
            files = (
                [file for source in find_sources(value, key) for file in source.files]
                if key.startswith("data")
                else files_of(value)
            )
            yield key, digest_of(files)
        except UserError as error:
            yield key, f"{UNREADABLE}: {error.problems[0].why.splitlines()[0]}"
        except OSError as error:
            yield key, f"{UNREADABLE}: {error}"


def settings_of(cfg: DoctorConfig, key: str) -> Any:
    """The value of a dotted key."""
    group, name = key.split(".")
    return getattr(getattr(cfg, group), name)


def files_of(path: str) -> list[str]:
    """The files of a tokenizer, a Hugging Face folder, or a run's newest checkpoint."""
    if path.startswith("demo:"):
        return []
    place = find_checkpoint(path) or Path(path)
    return (
        sorted(str(file) for file in place.rglob("*") if file.is_file())
        if place.is_dir()
        else [str(place)]
    )


def digest_of(files: Sequence[str]) -> str:
    """Cheap, so that a terabyte takes seconds: whoever cuts a copy short, or has another version, has another size or edge."""
    digest, total = hashlib.blake2b(digest_size=4), 0
    real = [file for file in files if file not in demo.TASKS]
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
    return (
        f"{counted(len(real), 'file')}, {total:,} bytes, {digest.hexdigest()}"
        if real
        else "made here, alike everywhere"
    )
