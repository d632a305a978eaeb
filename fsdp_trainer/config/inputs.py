"""What must be there to be read: files, folders, optional packages. No torch."""

import glob
import importlib.util
from pathlib import Path
from typing import Any

from fsdp_trainer.config.check import Report
from fsdp_trainer.config.data_files import (
    data_files,
    entries,
    is_url,
    needs_arrow,
    why_url_unusable,
)
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.paths import (
    ADAPTER_CONFIG,
    base_of_adapter,
    find_checkpoint,
    has_tokenizer,
    is_adapter,
    is_hub_id,
    run_folder,
    tokenizer_folder,
)
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import ExportConfig, GenerateConfig, ReportConfig, VerifyConfig

DEMOS = {
    "data.path": ("demo:backwards",),
    "data.validation": ("demo:backwards/heldout",),
    "tokenizer.path": ("demo:bytes",),
}
NO_TOKENIZER = "has neither a tokenizer.json nor a SentencePiece .model"


def check_inputs(cfg: Any, report: Report, whole: bool = True) -> None:
    """Everything that will be read was named, and is there. whole: no recipe or group is missing that may have named it."""
    if isinstance(cfg, TrainConfig):
        if whole:
            require_training_inputs(cfg, report)
        _check_training_inputs(cfg, report)
    elif isinstance(cfg, ExportConfig | VerifyConfig | GenerateConfig | ReportConfig):
        what = (
            "a run, several, or a sweep"
            if isinstance(cfg, ReportConfig)
            else "a run or a checkpoint"
        )
        _require(
            "source",
            cfg.source or None,
            f"say what to read: {what}, e.g.  source=runs/quickstart",
            report,
        )
        _check_exists("source", cfg.source, report)
    if isinstance(cfg, GenerateConfig) and cfg.source and _lacks_tokenizer(cfg.source):
        report.add("source", cfg.source, f"{NO_TOKENIZER}: copy the model's into it")
    if isinstance(cfg, ExportConfig):
        _require("out", cfg.out, "say where to write, e.g.  out=hf", report)
    if isinstance(cfg, VerifyConfig):
        _check_exists("hf", cfg.hf, report)
        _check_exists("data", cfg.data, report)


def require_training_inputs(cfg: TrainConfig, report: Report) -> None:
    """Data and tokenizer are named."""
    why = "say what to train on, e.g.  data.path=chats.jsonl  or, to try it out,  data.path=demo:backwards"
    _require("data.path", cfg.data.path, why, report)
    if cfg.model.init_from is None:
        why = "say which tokenizer, e.g.  tokenizer.path=tokenizer.json  or  tokenizer.path=demo:bytes ; with model.init_from it is the model's"
        _require("tokenizer.path", cfg.tokenizer.path, why, report)
    elif _lacks_tokenizer(cfg.model.init_from):
        _require(
            "tokenizer.path",
            cfg.tokenizer.path,
            f"{cfg.model.init_from} {NO_TOKENIZER}. Say which, e.g.  tokenizer.path=tokenizer.json",
            report,
        )


def _check_training_inputs(cfg: TrainConfig, report: Report) -> None:
    for key in ("data.path", "data.validation", "tokenizer.path"):
        group, _, name = key.partition(".")
        value = getattr(getattr(cfg, group), name)
        paths = [entry.path for entry in entries(value)] if key not in report.settled else []
        if wrong := [(path, why) for path in paths if (why := _unreadable(key, path))]:
            report.add(
                key,
                value,
                "\n".join(f"{path}: {why}" if len(paths) > 1 else why for path, why in wrong),
            )
    goes_on = cfg.checkpoint.resume == "auto" and find_checkpoint(
        run_folder(cfg)
    )  # and has weights of its own
    init_from = cfg.model.init_from if not goes_on else None
    if init_from and (
        not is_hub_id(init_from) or init_from.startswith(f"{cfg.run.root}/")
    ):  # runs/NAME before any run
        _check_weights(init_from, report)
    if cfg.data.template and cfg.data.template.endswith((".jinja", ".j2")):
        _check_exists("data.template", cfg.data.template, report)
    if isinstance(cfg.launch.hosts, str) and not Path(cfg.launch.hosts).expanduser().exists():
        file = cfg.launch.hosts
        why = f"there is no such file. One host is written  launch.hosts=[{file}]{_near(file)}"
        report.add("launch.hosts", file, why)
    if cfg.logging.tensorboard and importlib.util.find_spec("tensorboard") is None:
        report.add(
            "logging.tensorboard",
            True,
            "TensorBoard is not installed:  pip install 'fsdp_trainer[tensorboard]'",
        )
    if cfg.logging.mlflow and importlib.util.find_spec("mlflow") is None:
        report.add(
            "logging.mlflow",
            True,
            "MLflow is not installed:  pip install 'fsdp_trainer[mlflow]'",
        )
    if cfg.precision.float8 and importlib.util.find_spec("torchao") is None:
        report.add(
            "precision.float8",
            cfg.precision.float8,
            "torchao is not installed:  pip install 'fsdp_trainer[ao]'",
        )
    if (
        cfg.checkpoint.resume not in ("auto", "never")
        and find_checkpoint(cfg.checkpoint.resume) is None
    ):
        report.add(
            "checkpoint.resume",
            cfg.checkpoint.resume,
            "is neither auto nor never, nor a run or checkpoint that was committed",
        )


def _check_weights(path: str, report: Report) -> None:
    if not Path(path).exists():
        report.add("model.init_from", path, f"there is no such folder{_near(path)}")
    elif is_adapter(path):
        if why := _baseless(path):
            report.add("model.init_from", path, why)
    elif not (Path(path) / "config.json").is_file() and find_checkpoint(path) is None:
        way_out = "Copy the model's config.json into it, or name a folder that has one"
        if find_checkpoint(Path(path).parent):
            way_out = f"Use  model.init_from={Path(path).parent}"
        why = f"has neither config.json (a Hugging Face folder) nor a committed checkpoint (a run).\n{way_out}"
        started = (Path(path) / "events.jsonl").is_file()
        report.add(
            "model.init_from",
            path,
            "this run has not committed a checkpoint yet: wait for its first" if started else why,
        )


def _baseless(path: str) -> str:
    """Return why the base model of a PEFT folder cannot be read; "": it can."""
    base = base_of_adapter(path)
    if is_hub_id(base) or (base and Path(base).is_dir()):
        return ""
    why = f"is an adapter, and its base model is not there: {base}"
    if not base:
        why = "is an adapter, and names no base model"
    return f"{why}\nWrite its folder into {path}/{ADAPTER_CONFIG} as base_model_name_or_path"


def _lacks_tokenizer(path: str) -> bool:
    """Of a Hugging Face folder; a run's checkpoints always have one."""
    folder = tokenizer_folder(path)
    return (folder / "config.json").is_file() and not has_tokenizer(folder)


def _unreadable(key: str, path: str) -> str | None:
    """Why a path of data or tokenizer cannot be read."""
    if path.startswith("demo:"):
        return None if path in DEMOS[key] else f"there is no such demo. Use  {key}={DEMOS[key][0]}"
    if is_url(path):
        return (
            "only local tokenizers are read: download it first"
            if key == "tokenizer.path"
            else why_url_unusable(path)
        )
    if key == "tokenizer.path" and is_hub_id(path):
        return "there is no such file or folder. The tokenizer of a model on the hub comes with  model.init_from"
    if Path(path).exists():
        return None if key == "tokenizer.path" else _unreadable_files(path)
    if glob.has_magic(path):
        return _unreadable_files(path)
    if key != "tokenizer.path" and is_hub_id(path):
        return f"{_missing(path)}\nA data set on the hub is named  hf://datasets/{path}"
    return _missing(path)


def _unreadable_files(path: str) -> str | None:
    try:
        files = data_files(path)
    except ValueError as error:
        return str(error)
    if importlib.util.find_spec("pyarrow") is None and (
        needing := [file for file in files if needs_arrow(file)]
    ):
        return f"to read {Path(needing[0]).name}, pyarrow is needed:  pip install 'fsdp_trainer[arrow]'"
    return None


def _check_exists(key: str, value: str | list[str] | None, report: Report) -> None:
    paths = value if isinstance(value, list) else [value] if value else []
    if missing := [path for path in paths if not Path(path).exists()]:
        report.add(
            key,
            value,
            "\n".join(
                f"{path}: {_missing(path)}" if len(paths) > 1 else _missing(path)
                for path in missing
            ),
        )


def _missing(path: str) -> str:
    if Path(path).is_symlink():
        return "is a link that leads nowhere, or in a circle"
    looked = "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"
    return f"there is no such file or folder{looked}{_near(path)}"


def _near(path: str) -> str:
    folder = Path(path).parent
    close = (
        nearest(Path(path).name, (f.name for f in folder.iterdir())) if folder.is_dir() else None
    )
    return f"\nDid you mean  {folder / close} ?" if close else ""


def _require(key: str, value: Any, why: str, report: Report) -> None:
    if value is None:
        report.origins.pop(key, None)  # the null of the defaults
        report.add(key, value, f"is required: {why}")
