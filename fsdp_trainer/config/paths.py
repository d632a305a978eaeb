"""Kinds of paths given as `source` or `model.init_from`.

Such a path is a Hugging Face folder, a checkpoint, or a run that holds checkpoints.
"""

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

from fsdp_trainer.base.folders import is_possible
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.gguf_description import gguf_files, open_gguf
from fsdp_trainer.interop.folders.other_weights import described_at, kind_of_weights

MANIFEST = "MANIFEST.json"
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
LAG_SECONDS = 60.0  # until other nodes see a new file: NFS caches its absence for so long
ADAPTER_CONFIG = "adapter_config.json"
TRAINER_STATE = "trainer.json"
CERTIFICATE = "prove.json"  # of a run, written by `prove` into its folder
MODEL_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
BEST = "best"  # link next to the checkpoints, to the one with the lowest validation loss


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_folders(run: str | Path) -> list[Path]:
    """Return the folders of a run that are named like checkpoints, oldest first.

    A folder without a manifest is a damaged checkpoint.
    """
    return sorted(
        f
        for f in (Path(run) / "checkpoints").glob("step-*")
        if re.fullmatch(r"step-\d+", f.name) and f.is_dir()
    )


def committed_checkpoints(run: str | Path) -> list[Path]:
    return [folder for folder in checkpoint_folders(run) if (folder / MANIFEST).is_file()]


def find_checkpoint(path: str | Path) -> Path | None:
    """Return the checkpoint at `path`, or the newest one of the run there; None if neither."""
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file():
        return path
    committed = committed_checkpoints(path)
    return committed[-1] if committed else None


def is_adapter(path: str | Path) -> bool:
    folder = Path(path).expanduser()
    whole = is_whole_model(folder) or (folder / MANIFEST).is_file()
    return (folder / ADAPTER_CONFIG).is_file() and not whole


def is_whole_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_WEIGHTS)


def has_weights(folder: Path) -> bool:
    return is_whole_model(folder) or kind_of_weights(folder) is not None


def checkpoint_configuration(checkpoint: Path) -> dict[str, Any]:
    """Return the resolved configuration of the run that wrote a checkpoint.

    Raises OSError, and UserError if its file holds no configuration.
    """
    file = checkpoint / "config.yaml"
    try:
        content = load_yaml(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it has no keys")
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(
            "the checkpoint cannot be read", str(file), f"is no configuration: {error}"
        ) from None
    return content


def checkpoint_frozen(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's record of its frozen weights and adapters; {} if it has none."""
    try:
        frozen = json.loads((checkpoint / TRAINER_STATE).read_text()).get("frozen")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
    return frozen if isinstance(frozen, dict) else {}


def base_of_adapter(folder: str | Path) -> str:
    """Return the base model that a PEFT folder names: a path or a hub id; "" if it names none.

    A relative path that does not exist is tried relative to the folder.
    """
    folder = Path(folder).expanduser()
    try:
        name = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    if not isinstance(name, str) or not name or not is_possible(name):
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

    For an adapter, this is the folder of its base model.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint:
        return checkpoint / "hf"
    if is_adapter(path):
        base = base_of_adapter(path)
        if base:
            return downloaded(base) if is_hub_id(base) else model_folder(base)
    return described_at(Path(path).expanduser())


def tokenizer_folder(path: str | Path) -> Path:
    """Return the folder with the tokenizer: an adapter's own, if it has one, else the model's.

    Without any in the folder of a GGUF file, the file itself, which may hold one.
    """
    folder = Path(path).expanduser()
    own = folder if is_adapter(folder) and has_tokenizer(folder) else model_folder(path)
    beside = own.parent if own.suffix == ".gguf" else own
    files = gguf_files(own)
    return files[0] if files and not has_tokenizer(beside) else beside


def has_tokenizer(folder: Path) -> bool:
    """Return True if a tokenizer's files are in a folder, or one in a GGUF file."""
    if folder.suffix == ".gguf" and folder.is_file():
        return "tokenizer.ggml.model" in open_gguf(folder).facts
    parts = (folder / "vocab.json", folder / "merges.txt")
    return (
        (folder / "tokenizer.json").is_file()
        or any(folder.glob("*.model"))
        or all(part.is_file() for part in parts)
    )


def downloaded(hub_id: str) -> Path:
    """Return the folder of a hub's model in this machine's cache, which `hub.fetch` fills."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, local_files_only=True))
    except Exception:  # not installed or not downloaded: the code that reads the folder reports it
        return Path(hub_id)


def is_hub_id(path: str) -> bool:
    """Return True if `path` can only be a model on the hub: `org/name`, without such a folder."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith((".", "~")):
        return False
    # if a folder `runs` exists, runs/typo is a missing folder, not a hub id
    return not Path(path).exists() and not Path(path).parent.is_dir()


def run_folder(cfg: TrainConfig) -> Path:
    return Path(cfg.run.root).expanduser() / str(cfg.run.name)


def compile_cache(cfg: TrainConfig) -> Path:
    """Return the folder of compiled code: compile.cache, the environment's, or run.root/.compile.

    A restart in a new container still finds the last one.
    """
    named = cfg.compile.cache or os.environ.get(COMPILE_CACHE)
    path = Path(named or "")
    if path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_"):
        named = cfg.compile.cache  # the variable holds torch's default, set by torch in notebooks
    return Path(named or Path(cfg.run.root) / ".compile").expanduser().resolve()
