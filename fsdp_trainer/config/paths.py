"""Kinds of paths given as `source` or `model.init_from`.

A Hugging Face folder, a checkpoint, or a run that holds checkpoints.
"""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from fsdp_trainer.config.schema import TrainConfig

MANIFEST = "MANIFEST.json"
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
LAG_SECONDS = 60.0  # until other nodes see a new file: NFS caches for so long that it is absent
ADAPTER_CONFIG = "adapter_config.json"
TRAINER_STATE = "trainer.json"
MODEL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
BEST = "best"  # beside the checkpoints: a link to the best one by validation loss


def checkpoint_name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_folders(run: str | Path) -> list[Path]:
    """The folders of a run that are named as checkpoints, oldest first.

    One without a manifest has been damaged.
    """
    return sorted(
        f
        for f in (Path(run) / "checkpoints").glob("step-*")
        if re.fullmatch(r"step-\d+", f.name) and f.is_dir()
    )


def committed_checkpoints(run: str | Path) -> list[Path]:
    """The committed checkpoints of a run, oldest first."""
    return [folder for folder in checkpoint_folders(run) if (folder / MANIFEST).is_file()]


def find_checkpoint(path: str | Path) -> Path | None:
    """The checkpoint at `path`, or the newest one of the run there; None if it is neither."""
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file():
        return path
    committed = committed_checkpoints(path)
    return committed[-1] if committed else None


def is_adapter(path: str | Path) -> bool:
    """Return True for a folder with an adapter of PEFT's, and without a whole model."""
    folder = Path(path).expanduser()
    whole = is_whole_model(folder) or (folder / MANIFEST).is_file()
    return (folder / ADAPTER_CONFIG).is_file() and not whole


def is_whole_model(folder: Path) -> bool:
    """Return True for a Hugging Face folder with weights."""
    return any((folder / name).is_file() for name in MODEL_WEIGHTS)


def checkpoint_frozen(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint records of its frozen weights and adapters; {}: it has none."""
    try:
        return json.loads((checkpoint / TRAINER_STATE).read_text()).get("frozen") or {}
    except (OSError, ValueError, AttributeError):
        return {}


def base_of_adapter(folder: str | Path) -> str:
    """Return the base model that a PEFT folder names: a path or a hub id; "": it names none.

    A relative path that is not there is tried from the folder on.
    """
    folder = Path(folder).expanduser()
    try:
        name = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    if not isinstance(name, str) or not name:
        return ""
    path = Path(name).expanduser()
    if not path.is_dir() and (folder / path).is_dir():
        path = folder / path
    if path.resolve() == folder.resolve():
        return ""
    if path.is_dir():
        return str(path)
    return name if is_hub_id(name) else str(path)


def model_folder(path: str | Path) -> Path:
    """Return the folder with config.json for a Hugging Face folder, a checkpoint or a run.

    For an adapter that is its base model's.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint:
        return checkpoint / "hf"
    if is_adapter(path):
        base = base_of_adapter(path)
        if base:
            return downloaded(base) if is_hub_id(base) else model_folder(base)
    return Path(path).expanduser()


def tokenizer_folder(path: str | Path) -> Path:
    """Return the folder with the tokenizer: an adapter's own, if it has one, else the model's."""
    folder = Path(path).expanduser()
    return folder if is_adapter(folder) and has_tokenizer(folder) else model_folder(path)


def has_tokenizer(folder: Path) -> bool:
    """Return True if a tokenizer's files are in a folder."""
    parts = (folder / "vocab.json", folder / "merges.txt")
    return (
        (folder / "tokenizer.json").is_file()
        or any(folder.glob("*.model"))
        or all(part.is_file() for part in parts)
    )


def downloaded(hub_id: str) -> Path:
    """Return the folder of a model of the hub in this machine's cache; `hub.fetch` fills it."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, local_files_only=True))
    except Exception:  # not installed, or not there: what reads the folder says so
        return Path(hub_id)


def is_hub_id(path: str) -> bool:
    """Return True if `path` can only be a model on the hub: `org/name`, and no folder here."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith((".", "~")):
        return False
    # with a folder runs, runs/typo is a missing folder
    return not Path(path).exists() and not Path(path).parent.is_dir()


def run_folder(cfg: TrainConfig) -> Path:
    """Return the folder that the run lives in."""
    return Path(cfg.run.root).expanduser() / str(cfg.run.name)


def compile_cache(cfg: TrainConfig) -> Path:
    """The folder of compiled code: compile.cache, else the environment's, else one beside the runs.

    A restart in a new container still finds that one.
    """
    named = cfg.compile.cache or os.environ.get(COMPILE_CACHE)
    path = Path(named or "")
    if path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_"):
        named = cfg.compile.cache  # torch's own default, which it sets in notebooks
    return Path(named or Path(cfg.run.root) / ".compile").expanduser().resolve()
