"""What a path given as `source` or `model.init_from` is: a Hugging Face folder, a checkpoint, or a run that holds checkpoints."""

import os
import re
import tempfile
from pathlib import Path

from fsdp_trainer.config.schema import TrainConfig

MANIFEST = "MANIFEST.json"
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
LAG_SECONDS = 60.0  # until what one node has written to shared storage is seen by the others: NFS keeps for so long that a file is not there
BEST = "best"  # beside the checkpoints: a link to the best one by validation loss


def checkpoint_name(step: int) -> str:
    """The folder of a checkpoint."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix("step-"))


def checkpoint_folders(run: str | Path) -> list[Path]:
    """The folders of a run that are named as checkpoints are, oldest first; one without a manifest has been damaged."""
    return sorted(
        f
        for f in (Path(run) / "checkpoints").glob("step-*")
        if re.fullmatch(r"step-\d+", f.name) and f.is_dir()
    )


def committed_checkpoints(run: str | Path) -> list[Path]:
    """The committed checkpoints of a run, oldest first."""
    return [folder for folder in checkpoint_folders(run) if (folder / MANIFEST).is_file()]


def find_checkpoint(path: str | Path) -> Path | None:
    """The checkpoint that `path` is, or the newest one of the run that it is; None if it is neither."""
    path = Path(path).expanduser()
    if (path / MANIFEST).is_file():
        return path
    committed = committed_checkpoints(path)
    return committed[-1] if committed else None


def model_folder(path: str | Path) -> Path:
    """The folder with config.json and tokenizer for a Hugging Face folder, a checkpoint or a run."""
    checkpoint = find_checkpoint(path)
    return checkpoint / "hf" if checkpoint else Path(path).expanduser()


def is_hub_id(path: str) -> bool:
    """Whether `path` can only be the name of a model on the hub: `org/name`, and no such folder here."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith((".", "~")):
        return False
    return (
        not Path(path).exists() and not Path(path).parent.is_dir()
    )  # runs/typo is a folder that is not there


def compile_cache(cfg: TrainConfig) -> Path:
    """compile.cache, else what the environment says, else a folder beside the runs, which a restart in a new container still finds."""
    named = cfg.compile.cache or os.environ.get(COMPILE_CACHE)
    if (
        named
        and Path(named).parent == Path(tempfile.gettempdir())
        and Path(named).name.startswith("torchinductor_")
    ):
        named = (
            cfg.compile.cache
        )  # torch's own default, which it puts into the environment of notebooks
    return Path(named or Path(cfg.run.root) / ".compile").expanduser().resolve()
