"""Checks of a run's inputs: files, folders and optional packages. Imports no torch."""

import glob
import importlib.util
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from fsdp_trainer.config.check import Report, value_of
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
    model_folder,
    run_folder,
    tokenizer_folder,
)
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import (
    ChainConfig,
    ChatConfig,
    ConvertConfig,
    ExportConfig,
    GenerateConfig,
    LighthouseConfig,
    ProveConfig,
    ReportConfig,
    RewardsConfig,
    TokenizerConfig,
    VerifyConfig,
)
from fsdp_trainer.errors import Problem
from fsdp_trainer.interop.folders.other_states import place_of_states
from fsdp_trainer.interop.folders.other_weights import described_at, is_described

TOKENIZER = "tokenizer.path"
DEMOS = {
    "data.path": ("demo:backwards", "demo:sums", "demo:sums/half-wrong"),
    "data.validation": ("demo:backwards/heldout",),
    TOKENIZER: ("demo:bytes",),
    "chats": ("demo:backwards",),
}
NAME_DATA = (
    "say what to train on, e.g.  data.path=chats.jsonl"
    "  or, to try it out,  data.path=demo:backwards"
)
NAME_TEXT = "say what to learn from, e.g.  data.path=text/  or  data.path=chats.jsonl"
NAME_QUESTIONS = "name the prompts that were answered, e.g.  data.path=questions.jsonl"
NAME_TOKENIZER = (
    "name a tokenizer, e.g.  tokenizer.path=tokenizer.json  or  tokenizer.path=demo:bytes ;"
    " with model.init_from it is the model's"
)
NOT_INSTALLED = {
    "logging.tensorboard": (
        "tensorboard",
        "TensorBoard is not installed:  pip install 'fsdp_trainer[tensorboard]'",
    ),
    "logging.mlflow": ("mlflow", "MLflow is not installed:  pip install 'fsdp_trainer[mlflow]'"),
    "logging.trackio": (
        "trackio",
        "Trackio is not installed:  pip install 'fsdp_trainer[trackio]'",
    ),
    "logging.comet": ("comet_ml", "Comet is not installed:  pip install 'fsdp_trainer[comet]'"),
    "logging.swanlab": (
        "swanlab",
        "SwanLab is not installed:  pip install 'fsdp_trainer[swanlab]'",
    ),
    "replicas.method": (
        "torchft",
        "torchft is not installed:  pip install 'fsdp_trainer[replicas]'",
    ),
    "precision.float8": ("torchao", "torchao is not installed:  pip install 'fsdp_trainer[ao]'"),
}
"""By key, the optional package that it needs, and the message if that is not installed."""
READ_SOURCE = (
    ExportConfig, VerifyConfig, GenerateConfig, ChatConfig, ReportConfig, ConvertConfig,
)  # fmt: skip
"""Configurations of verbs that read `source`."""
A_RUN = "a run or a checkpoint, e.g.  source=runs/quickstart"
SOURCES = {
    ReportConfig: "a run, several, or a sweep, e.g.  source=runs/quickstart",
    ConvertConfig: "another trainer's configuration file, e.g.  source=axolotl.yml",
}
IS_READ = "is for reading: name a bucket, such as  s3://bucket/runs,  or a folder"
NO_TOKENIZER = "has neither a tokenizer.json nor a SentencePiece .model"


def check_inputs(cfg: Any, report: Report, complete: bool = True) -> None:
    """Check that all inputs are named and exist.

    complete: True if no recipe or group option is missing that may have named an input.
    """
    if isinstance(cfg, TrainConfig):
        _check_inputs_of_groups(cfg, report, complete)
    elif isinstance(cfg, READ_SOURCE):
        reason = f"say what to read: {SOURCES.get(type(cfg), A_RUN)}"
        _require("source", cfg.source or None, reason, report)
        if isinstance(cfg, ReportConfig):
            _check_exists("source", cfg.source, report)
        elif not isinstance(cfg, ConvertConfig):  # reads command lines and standard input too
            _check_source(cfg.source, report)
    elif isinstance(cfg, ChainConfig):
        _check_chain(cfg, report)
    is_speaking = isinstance(cfg, GenerateConfig | ChatConfig) and cfg.source
    if is_speaking and not is_url(cfg.source) and _lacks_tokenizer(cfg.source):
        report.add("source", cfg.source, f"{NO_TOKENIZER}: copy the model's there")
    _check_own_inputs(cfg, report)


def _check_own_inputs(cfg: Any, report: Report) -> None:
    if isinstance(cfg, ExportConfig):
        _require("out", cfg.out, "say where to write, e.g.  out=hf", report)
    if isinstance(cfg, VerifyConfig):
        _check_exists("hf", cfg.hf, report)
        _check_exists("data", cfg.data, report)
    if isinstance(cfg, LighthouseConfig) and (
        reason := _lacking(*NOT_INSTALLED["replicas.method"])
    ):
        report.problems.append(Problem("lighthouse", reason))


def _check_inputs_of_groups(cfg: TrainConfig, report: Report, complete: bool) -> None:
    if isinstance(cfg, TokenizerConfig):
        _check_text(cfg, report)
        return
    if isinstance(cfg, RewardsConfig):
        _check_trial(cfg, report)
        return
    if isinstance(cfg, ProveConfig) and cfg.source:
        _check_exists("source", cfg.source, report)
        _check_exists("reference", cfg.reference, report)
        return
    if complete:
        require_training_inputs(cfg, report)
    _check_training_inputs(cfg, report)


def _check_chain(cfg: ChainConfig, report: Report) -> None:
    """Check the training data of a chain's stages."""
    if cfg.demo:
        for key in ("text", "good", "chats"):
            if value_of(cfg, key):
                reason = "demo=true brings texts of its own: drop one of them"
                report.add(key, value_of(cfg, key), reason)
        return
    without = "or, to try it out,  demo=true"
    _require("text", cfg.text, f"say what to pretrain on, e.g.  text=text/  {without}", report)
    reason = f"say what to answer like, e.g.  chats=chats.jsonl  {without}"
    _require("chats", cfg.chats, reason, report)
    for key in ("text", "good", "chats"):
        if key not in report.settled:
            _check_paths(key, value_of(cfg, key), report)
    _check_exists("questions", cfg.questions, report)


def _check_text(cfg: TokenizerConfig, report: Report) -> None:
    _require("out", cfg.out, "say where to write, e.g.  out=tokenizer", report)
    _require("data.path", cfg.data.path, NAME_TEXT, report)
    for key in ("data.path", "data.validation"):
        if key not in report.settled:
            _check_paths(key, value_of(cfg, key), report)
    _check_exists("compare", [path for path in cfg.compare if path not in DEMOS[TOKENIZER]], report)


def _check_trial(cfg: RewardsConfig, report: Report) -> None:
    """Check the rewards, and the answers to score. A tokenizer is only needed to count tokens."""
    reason = "say what scores answers, e.g.  objective.rewards=[number]"
    if not cfg.objective.rewards:
        report.origins.pop("objective.rewards", None)
        report.add("objective.rewards", [], f"is required: {reason}")
    _require("data.path", cfg.data.path, NAME_QUESTIONS, report)
    for key in ("data.path", TOKENIZER):
        if key not in report.settled:
            _check_paths(key, value_of(cfg, key), report)
    _check_exists("answers", cfg.answers, report)


def require_training_inputs(cfg: TrainConfig, report: Report) -> None:
    _require("data.path", cfg.data.path, NAME_DATA, report)
    model = cfg.model.init_from
    if model is None:
        _require("tokenizer.path", cfg.tokenizer.path, NAME_TOKENIZER, report)
    elif _lacks_tokenizer(model):
        reason = f"{model} {NO_TOKENIZER}. Say which, e.g.  tokenizer.path=tokenizer.json"
        _require("tokenizer.path", cfg.tokenizer.path, reason, report)


def _check_training_inputs(cfg: TrainConfig, report: Report) -> None:
    for key in ("data.path", "data.validation", "tokenizer.path"):
        if key not in report.settled:
            _check_paths(key, value_of(cfg, key), report)
    _check_init_from(cfg, report)
    _check_states(cfg, report)
    _check_second_model(cfg, report)
    if cfg.data.template and cfg.data.template.endswith((".jinja", ".j2")):
        _check_exists("data.template", cfg.data.template, report)
    _check_hosts(cfg.launch.hosts, report)
    _check_packages(cfg, report)
    _check_bucket("checkpoint.mirror", cfg.checkpoint.mirror, IS_READ, report)
    resume = cfg.checkpoint.resume
    if resume not in ("auto", "never") and find_checkpoint(resume) is None:
        reason = "is neither auto nor never, nor a run or checkpoint that was committed"
        report.add("checkpoint.resume", resume, reason)


def _check_packages(cfg: TrainConfig, report: Report) -> None:
    for key, (package, reason) in NOT_INSTALLED.items():
        value = value_of(cfg, key)
        if value and value not in ("none", "disabled"):
            reason = _lacking(package, reason)
            if reason:
                report.add(key, value, reason)


def _check_source(source: str | None, report: Report) -> None:
    if source and is_url(source):
        _check_bucket("source", source, "is no bucket: fetch it, and name the folder", report)
    else:
        _check_exists("source", source, report)


def _check_bucket(key: str, place: str | None, of_another: str, report: Report) -> None:
    """Check the address of a mirror. of_another: the message for one that is no bucket's."""
    if place and is_url(place):
        is_bucket = not place.startswith(("http://", "https://", "hf://"))
        reason = why_url_unusable(place) if is_bucket else of_another
        if reason:
            report.add(key, place, reason)


def _lacking(package: str, reason: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return reason
    return _other_torchft(spec) if package == "torchft" else ""


def _other_torchft(spec: ModuleSpec) -> str:
    """Return why groups cannot use the torchft that is installed; "" if they can.

    Two packages bring it, and the last release of one is older than what groups ask of a quorum.
    """
    if "reconfigure_handles" in Path(spec.origin or "").with_name("manager.py").read_text():
        return ""
    installed = []
    for name in ("torchft", "torchft-nightly"):
        with suppress(metadata.PackageNotFoundError):
            installed.append(f"{name} {metadata.version(name)}")
    fix = "pip uninstall torchft torchft-nightly ; pip install 'fsdp_trainer[replicas]'"
    return f"{' with '.join(installed)} is too old, torchft-nightly is needed:\n{fix}"


def _check_hosts(hosts: str | list[str] | None, report: Report) -> None:
    if isinstance(hosts, str) and not Path(hosts).expanduser().exists():
        reason = f"there is no such file. One host is written  launch.hosts=[{hosts}]{_near(hosts)}"
        report.add("launch.hosts", hosts, reason)


def _check_paths(key: str, value: Any, report: Report) -> None:
    paths = [entry.path for entry in entries(value)]
    problems = [(path, _unreadable(key, path)) for path in paths]
    lines = [
        f"{path}: {reason}" if len(paths) > 1 else reason for path, reason in problems if reason
    ]
    if lines:
        report.add(key, value, "\n".join(lines))


def _check_init_from(cfg: TrainConfig, report: Report) -> None:
    """Check model.init_from, unless the run resumes from its own checkpoint."""
    path = cfg.model.init_from
    if not path or (cfg.checkpoint.resume == "auto" and find_checkpoint(run_folder(cfg))):
        return
    own_run = path.startswith(f"{cfg.run.root}/")  # runs/NAME looks like a hub id before any run
    if own_run or not is_hub_id(path):
        _check_weights("model.init_from", path, report)


def _check_states(cfg: TrainConfig, report: Report) -> None:
    """Check optim.init_from, unless the run resumes from its own checkpoint."""
    path = cfg.optim.init_from
    if not path or (cfg.checkpoint.resume == "auto" and find_checkpoint(run_folder(cfg))):
        return
    if find_checkpoint(path):
        reason = "is of this trainer, whose checkpoints hold all that a run continues from"
        report.add("optim.init_from", path, f"{reason}.\nUse  checkpoint.resume={path}")
    elif not Path(path).exists():
        report.add("optim.init_from", path, _missing(path))
    elif place_of_states(Path(path)) is None:
        reason = (
            "has no optimizer states: neither a distributed checkpoint (.metadata), nor"
            " optimizer.bin, nor DeepSpeed's files.\nTo begin with the weights alone, drop it"
        )
        report.add("optim.init_from", path, reason)


def _check_second_model(cfg: TrainConfig, report: Report) -> None:
    """Check the path of a teacher, or of a reference in memory.

    A resume needs it too, because checkpoints do not hold its weights.
    """
    second = cfg.second_model
    if not second or not second.is_separate or second.is_start or is_hub_id(second.source):
        return
    _check_weights(second.key, second.source, report)


def _check_weights(key: str, path: str, report: Report) -> None:
    problem = _wrong_weights(key, Path(path))
    if is_url(path):
        problem = (
            "is not on this machine. A run in its mirror is fetched by  "
            f"fsdp-trainer verify {path}  , which says where its copy is"
        )
    if problem:
        report.add(key, path, problem)


def _wrong_weights(key: str, folder: Path) -> str:
    """Return the reason why a folder has no weights to start from; "" if it has some."""
    if not folder.exists():
        what = "file" if folder.suffix == ".gguf" else "folder"
        return f"there is no such {what}{_near(str(folder))}"
    if is_adapter(folder):
        return _baseless(str(folder))
    if is_described(described_at(folder)) or find_checkpoint(folder):
        return ""
    if (folder / "events.jsonl").is_file():
        return "this run has not committed a checkpoint yet: wait for its first"
    advice = "Copy the model's config.json into it, or name a folder that has one"
    if find_checkpoint(folder.parent):
        advice = f"Use  {key}={folder.parent}"
    return (
        "has neither config.json (a Hugging Face folder) nor a committed checkpoint (a run)."
        f"\n{advice}"
    )


def _baseless(path: str) -> str:
    """Return the reason why the base model of a PEFT folder cannot be read; "" if it can."""
    base = base_of_adapter(path)
    if is_hub_id(base) or (base and Path(base).is_dir()):
        return ""
    reason = f"is an adapter, and its base model is not there: {base}"
    if not base:
        reason = "is an adapter, and names no base model"
    return f"{reason}\nWrite its folder into {path}/{ADAPTER_CONFIG} as base_model_name_or_path"


def _lacks_tokenizer(path: str) -> bool:
    described = is_described(model_folder(path)) and not find_checkpoint(path)
    return described and not has_tokenizer(tokenizer_folder(path))


def _unreadable(key: str, path: str) -> str | None:
    """Return the reason why a path of data or tokenizer cannot be read; None if it can."""
    if path.startswith("demo:"):
        demos = DEMOS.get(key, ())
        use = f" Use  {key}={demos[0]}" if demos else ""
        return None if path in demos else f"there is no such demo.{use}"
    return _unreadable_tokenizer(path) if key == "tokenizer.path" else _unreadable_data(path)


def _unreadable_tokenizer(path: str) -> str | None:
    if is_url(path):
        return "only local tokenizers are read: download it first"
    if is_hub_id(path):
        return (
            "there is no such file or folder."
            " The tokenizer of a model on the hub comes with  model.init_from"
        )
    return None if Path(path).exists() else _missing(path)


def _unreadable_data(path: str) -> str | None:
    if is_url(path):
        return why_url_unusable(path)
    if Path(path).exists() or glob.has_magic(path):
        return _unreadable_files(path)
    if is_hub_id(path):
        return f"{_missing(path)}\nA data set on the hub is named  hf://datasets/{path}"
    return _missing(path)


def _unreadable_files(path: str) -> str | None:
    try:
        files = data_files(path)
    except ValueError as error:
        return str(error)
    arrow = [Path(file).name for file in files if needs_arrow(file)]
    if arrow and importlib.util.find_spec("pyarrow") is None:
        return f"to read {arrow[0]}, pyarrow is needed:  pip install 'fsdp_trainer[arrow]'"
    return None


def _check_exists(key: str, value: str | list[str] | None, report: Report) -> None:
    paths = value if isinstance(value, list) else [value] if value else []
    missing = [path for path in paths if not Path(path).exists()]
    if missing:
        several = len(paths) > 1
        lines = [f"{path}: {_missing(path)}" if several else _missing(path) for path in missing]
        report.add(key, value, "\n".join(lines))


def _missing(path: str) -> str:
    if is_url(path):
        return "is not on this machine: fetch it first, such as with  aws s3 sync"
    if Path(path).is_symlink():
        return "is a broken or circular link"
    looked = "" if Path(path).is_absolute() else f" (looked in {Path.cwd()})"
    return f"there is no such file or folder{looked}{_near(path)}"


def _near(path: str) -> str:
    folder = Path(path).parent
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    close = nearest(Path(path).name, names)
    return f"\nDid you mean  {folder / close} ?" if close else ""


def _require(key: str, value: Any, reason: str, report: Report) -> None:
    if value is None:
        report.origins.pop(key, None)  # the file with the default null is not to blame
        report.add(key, value, f"is required: {reason}")
