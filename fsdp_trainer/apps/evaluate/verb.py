"""The verb `evaluate`: start ranks, or evaluate as one of them. It imports torch only in a rank."""

import os
import sys
from pathlib import Path

from fsdp_trainer.config.evaluation_inputs import require_tasks
from fsdp_trainer.config.verbs import EvaluateConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.start import start_ranks, starts_ranks


def evaluate(cfg: EvaluateConfig, overrides: list[str]) -> int:
    """Evaluate a model on tasks, on as many ranks as cfg.launch asks for. Returns the exit code."""
    require_tasks(cfg, "")
    written = {"out": cfg.out, "mined": cfg.mined}
    problems = [
        Problem(f"{name}={file}", "its folder does not exist: create it, or name another")
        for name, file in written.items()
        if file and not Path(file).expanduser().parent.is_dir()
    ]
    if problems:
        raise UserError("the results could not be written", problems)
    if starts_ranks(cfg.launch, os.environ):
        return start_ranks(cfg, overrides, verb="evaluate")
    for name, value in cfg.launch.env.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():  # a file has no use for bars; libraries read both when imported
        os.environ.update(TQDM_DISABLE="1", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    from fsdp_trainer.apps.evaluate.rank import evaluate_as_rank

    return evaluate_as_rank(cfg)
