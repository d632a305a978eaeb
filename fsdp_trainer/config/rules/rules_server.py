"""Rules for objective.server, and the folder of its weights. See config/rules/rules.py."""

from pathlib import Path
from urllib.parse import urlsplit

from fsdp_trainer.config.check import Report, Violations
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.paths import is_whole_model
from fsdp_trainer.config.schema import Adapter, TrainConfig

SERVED = ("server_folder", "max_staleness")
"""Keys of objective that only have an effect with a server."""


def server(cfg: TrainConfig, report: Report) -> Violations:
    choice = cfg.objective
    if not choice.method.samples:
        return
    if choice.server is None:
        for name in SERVED:
            if f"objective.{name}" in report.typed:
                yield f"objective.{name}", "only counts with  objective.server=URL"
        return
    parts = urlsplit(choice.server)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        yield "objective.server", "is no address, as  objective.server=http://localhost:8000"
    elif parts.username or parts.password:
        reason = "has a password in it, which the records of the run would show.\n"
        yield "objective.server", reason + "Set the environment variable VLLM_API_KEY"
    if cfg.model.init_from is None:
        reason = "answers with a model of its own, and random weights are on no disk.\n"
        yield "objective.server", reason + "Use  model.init_from=FOLDER"
    if not sends_adapter(cfg.adapter):
        yield from _folder_problems(cfg)


def _folder_problems(cfg: TrainConfig) -> Violations:
    given = cfg.objective.server_folder
    rule = "whole weights are sent as a folder that the server reads again"
    if given is None:
        use = "Use  objective.server_folder=FOLDER , a copy of the model, and  vllm serve FOLDER"
        lora = "  or  adapter=lora , whose adapters are small" if cfg.adapter.name == "none" else ""
        yield "objective.server_folder", f"{rule}.\n{use}{lora}"
        return
    folder = Path(given)
    if cfg.model.init_from and folder.resolve() == Path(cfg.model.init_from).resolve():
        reason = f"is what the run begins with, and {rule}: it would be overwritten.\n"
        yield "objective.server_folder", reason + "Use a copy of it"
    elif not is_replaceable(folder):
        reason = f"holds something else than a model, and {rule}: all of it would be replaced.\n"
        yield "objective.server_folder", reason + "Use a copy of the model in a folder of its own"


def is_replaceable(folder: Path) -> bool:
    """Return True for a folder that is missing, empty, or holds only a Hugging Face model."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    entries = list(folder.iterdir())
    return not entries or (is_whole_model(folder) and not any(one.is_dir() for one in entries))


def sends_adapter(adapter: Adapter) -> bool:
    """Return True if the server, which already has the base model, only receives a LoRA adapter.

    vLLM supports neither DoRA, nor modules that are trained in full, nor several adapter ranks.
    """
    uniform = not (adapter.also or adapter.rank_pattern or adapter.alpha_pattern)
    return adapter.name == "lora" and uniform


def server_folder(choice: ObjectiveChoice, run: Path) -> Path:
    return Path(choice.server_folder) if choice.server_folder else run / "server"
