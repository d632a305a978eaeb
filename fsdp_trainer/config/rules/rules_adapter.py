"""Settings that adapter.init_from decides, and rules for adapters' keys. See rules.py."""

from pathlib import Path

from fsdp_trainer.base.folders import is_possible
from fsdp_trainer.config.check import Report, Violations
from fsdp_trainer.config.paths import (
    base_of_adapter,
    checkpoint_configuration,
    checkpoint_frozen,
    find_checkpoint,
    is_adapter,
    is_hub_id,
    is_whole_model,
    run_folder,
)
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.peft_config import read_config

DECIDED = ("rank", "alpha", "scaling", "targets", "also", "rank_pattern", "alpha_pattern")


def merging(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.checkpoint.merge and cfg.adapter.name != "none" and not cfg.checkpoint.export_hf:
        yield "checkpoint.merge", "only counts together with  checkpoint.export_hf=true"


def settle_adapter(cfg: TrainConfig, report: Report) -> None:
    if not cfg.adapter.init_from:
        return
    own = find_checkpoint(run_folder(cfg))
    gone = not Path(cfg.adapter.init_from).exists()
    if gone and own and cfg.checkpoint.resume == "auto":
        cfg.adapter.init_from = str(own)  # the run resumes with its own adapters
    reason = unusable(cfg.adapter.init_from)
    if reason:
        report.add("adapter.init_from", cfg.adapter.init_from, reason)
        return
    try:
        kind, scaling, base = described(Path(cfg.adapter.init_from))
    except UserError as error:
        lines = [f"{problem.what} {problem.reason}" for problem in error.problems]
        text = "\n".join(["its adapter_config.json is not supported:", *lines])
        report.add("adapter.init_from", cfg.adapter.init_from, text)
        return
    for name in DECIDED:
        if f"adapter.{name}" in report.typed:
            text = f"{cfg.adapter.init_from} decides it: drop it"
            report.add(f"adapter.{name}", getattr(cfg.adapter, name), text)
    if cfg.adapter.name not in ("none", kind):
        text = f"{cfg.adapter.init_from} is {kind}: drop it, or write  adapter={kind}"
        report.add("adapter.name", cfg.adapter.name, text)
    cfg.adapter.name, cfg.adapter.scaling = kind, scaling
    if cfg.model.init_from is None:
        cfg.model.init_from = base or None
    if cfg.model.init_from is None:
        text = f"{cfg.adapter.init_from} names no base model: name the one that it was trained with"
        report.add("model.init_from", None, text)


def unusable(path: str) -> str:
    folder = Path(path)
    if is_hub_id(path):
        return f"there is no such folder. From the hub:  hf download {path} --local-dir DIR"
    if not folder.exists():
        return "there is no such folder"
    checkpoint = find_checkpoint(folder)
    if checkpoint and not checkpoint_frozen(checkpoint).get("adapters"):
        return "has no adapter: all of its weights were trained. Use  model.init_from"
    if checkpoint or is_adapter(folder):
        return ""
    if is_whole_model(folder):
        return "is a whole model, no adapter. Use  model.init_from"
    if is_adapter(folder / "adapter"):
        return f"is no adapter. Use  adapter.init_from={folder / 'adapter'}"
    return "is neither a PEFT folder (adapter_config.json) nor a run with an adapter"


def described(folder: Path) -> tuple[str, str, str]:
    """Return kind, scaling and base model of an adapter. Raises UserError if it is unsupported."""
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        config = read_config(folder)
        kind = "dora" if config.get("use_dora") else "lora"
        scaling = "rslora" if config.get("use_rslora") else "standard"
        return kind, scaling, base_of_adapter(folder)
    frozen = checkpoint_frozen(checkpoint)
    adapters = frozen["adapters"]
    base = frozen["hub_id"] or frozen["source"]
    return adapters["kind"], adapters["scaling"], typed_base(checkpoint) or base


def typed_base(checkpoint: Path) -> str:
    stored = checkpoint_configuration(checkpoint)
    model = stored.get("model")
    name = model.get("init_from") if isinstance(model, dict) else None
    if not isinstance(name, str) or not is_possible(name):
        return ""
    return name if is_hub_id(name) or Path(name).exists() else ""
