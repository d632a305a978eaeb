"""The verb `chain`: train a model that answers from text, stage by stage, with a report card."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp_trainer.apps.chain.chain_record import ChainRecord, changes, settings_of
from fsdp_trainer.apps.chain.demo_texts import write_demo
from fsdp_trainer.apps.chain.stages import (
    DEMO_PROMPTS,
    STAGES,
    TINY_SIZES,
    Chain,
    ChainStage,
    by_stage,
)
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.process import STOPPED
from fsdp_trainer.base.recorded import as_written
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.config.verbs import ChainConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.launch.start import launcher, start_ranks

POLL_SECONDS = 0.5


def chain(cfg: ChainConfig, words: list[str], config_dir: str | None = None) -> int:
    """Run all stages that are not finished yet, and write the card. Returns the exit code.

    words: overrides for stages, such as `mid.optim.lr=1e-4`. config_dir: folder of the user's own
    groups and recipes. Under torchrun, every rank calls this.
    """
    planned = plan_chain(cfg, words)
    planned.config_dir = config_dir
    record = ChainRecord(planned.folder)
    composed = compose_all(planned)
    if cfg.again:
        start_again(planned, record)
    finished = {stage.name: record.finished(stage.name) for stage in planned.stages}
    refuse_changes(composed, finished)
    if cfg.demo and is_first() and not (planned.folder / "data").exists():
        write_demo(planned.folder / "data")
    for stage in planned.stages:
        if finished[stage.name] and not must_repeat(planned, stage, finished[stage.name]):
            say(f"{stage.name}: done before, {planned.folder_of(stage.name)}")
            continue
        code = do_stage(planned, stage, record, composed.get(stage.name))
        if code:
            again = "the same command resumes" if code == STOPPED else "once that is fixed"
            say(f"{stage.name}: ended with code {code}; {again}")
            return code
    return finish(planned, record)


def plan_chain(cfg: ChainConfig, words: list[str]) -> Chain:
    """Return the requested chain. Raises UserError for overrides of a stage that is left out."""
    folder = Path(cfg.root) / cfg.name
    of_stages = by_stage(words)
    if cfg.demo:
        cfg = as_demo(cfg, folder)
    if not cfg.good and of_stages.get("mid"):
        reason = "there is no mid-training without  good=PATH"
        raise UserError("a stage is left out", f"mid.{of_stages['mid'][0]}", reason)
    return Chain(cfg, folder, of_stages)


def as_demo(cfg: ChainConfig, folder: Path) -> ChainConfig:
    """Return the configuration changed to the generated texts and a tiny model."""
    names = ("text", "good", "chats", "questions")
    files = {name: str(folder / "data" / f"{name}.jsonl") for name in names}
    if cfg.questions:
        del files["questions"]
    defaults = ChainConfig()
    sizes = {
        name: size
        for name, size in TINY_SIZES.items()
        if getattr(cfg, name) == getattr(defaults, name)
    }
    changed: Json = {**files, **sizes, "prompts": cfg.prompts or DEMO_PROMPTS}
    return replace(cfg, **changed)


def compose_all(planned: Chain) -> Json:
    """Return the configuration of each stage that has one.

    Raises UserError for a mistake in any of them, before the first stage begins and not hours
    later.
    """
    composed = {}
    problems = []
    for stage in planned.stages:
        if not stage.verb:
            continue
        try:
            composed[stage.name] = planned.compose(stage, inputs=False)
        except UserError as error:
            problems += [Problem(f"{stage.name}.{p.what}", p.reason) for p in error.problems]
    several = [
        Problem(f"{name}.launch", "a chain starts ranks on one node; on several by torchrun")
        for name, cfg in composed.items()
        if launcher(os.environ) is None and (cfg.launch.hosts or cfg.launch.nodes > 1)
    ]
    if problems or several:
        raise UserError("the stages cannot be started like this", problems or several)
    return composed


def refuse_changes(composed: Json, finished: Json) -> None:
    """Raise UserError if the settings of a finished stage have changed since then."""
    problems = []
    for name, cfg in composed.items():
        done = finished[name]
        if not done:
            continue
        lines = changes(done["settings"], settings_of(cfg))
        if lines:
            advice = f"Use  again={name}  to do it and all after it again, or  name=NEW"
            problems.append(Problem(name, "\n".join([*lines, advice])))
    if problems:
        raise UserError("finished stages had other settings", problems)


def must_repeat(planned: Chain, stage: ChainStage, done: Json | None) -> bool:
    if stage.name != "evaluation" or not done:
        return False
    lines = changes(done["settings"], evaluation_settings(planned.cfg))
    if lines:
        say("\n".join([f"{stage.name}: is done again", *(f"  {line}" for line in lines)]))
    return bool(lines)


def evaluation_settings(cfg: ChainConfig) -> Json:
    tasks = {"tasks": cfg.tasks, "code": cfg.code, "limit": cfg.limit}
    return {**tasks, "questions": as_written(cfg.questions)}


def start_again(planned: Chain, record: ChainRecord) -> None:
    """Delete the output of stage `again` and of all later ones. Raises UserError under torchrun."""
    again = str(planned.cfg.again)
    if launcher(os.environ):
        reason = "deletes folders that other ranks may read: type it once without torchrun"
        raise UserError("a stage is not done again", f"again={again}", reason)
    names = [stage.name for stage in STAGES]
    for name in names[names.index(again) :]:
        shutil.rmtree(planned.folder_of(name), ignore_errors=True)
        if record.finished(name) or record.seconds(name):
            record.add(name, "forgotten")


def do_stage(planned: Chain, stage: ChainStage, record: ChainRecord, cfg: Any) -> int:
    settings = settings_of(cfg) if cfg else evaluation_settings(planned.cfg)
    line = shlex.join(["fsdp-trainer", stage.verb, *planned.line_of(stage)]) if stage.verb else ""
    say(f"\n{stage.name}: {line}".rstrip(": "))
    began = time.time()
    code = WORK[stage.verb](planned, stage, record)
    if is_first():
        seconds = round(time.time() - began, 3)
        record.add(stage.name, "end", exit_code=code, seconds=seconds, settings=settings)
    return code


def make_tokenizer(planned: Chain, stage: ChainStage, record: ChainRecord) -> int:
    """Train the tokenizer on rank 0 while the other ranks wait. Returns the exit code."""
    from fsdp_trainer.apps.tokenizers.verb import tokenizer

    if is_first():
        # an earlier attempt may have stopped after writing the folder, before recording it
        shutil.rmtree(planned.folder_of(stage.name), ignore_errors=True)
        return tokenizer(planned.compose(stage))
    while not record.finished(stage.name):
        time.sleep(POLL_SECONDS)
    return 0


def train_stage(planned: Chain, stage: ChainStage, record: ChainRecord) -> int:
    cfg, words = planned.compose(stage), planned.line_of(stage)
    if launcher(os.environ) is None:
        return start_ranks(cfg, words)
    from fsdp_trainer.run.verb import train

    return train(cfg, words)


def evaluate_stage(planned: Chain, stage: ChainStage, record: ChainRecord) -> int:
    """Evaluate the model of each training on the tasks, and ask the last model the questions."""
    from fsdp_trainer.apps.chain.evaluation import answer_questions, run_tasks

    if is_first():  # the folder may hold results of other tasks
        shutil.rmtree(planned.folder_of(stage.name), ignore_errors=True)
    for training in planned.trainings if planned.cfg.tasks else []:
        code = run_tasks(planned, training)
        if code:
            return code
    if planned.cfg.questions and is_first():
        answer_questions(planned)
    return 0


WORK: dict[str, Callable[[Chain, ChainStage, ChainRecord], int]] = {
    "tokenizer": make_tokenizer,
    "train": train_stage,
    "": evaluate_stage,
}
"""The function that runs a stage, by its verb."""


def finish(planned: Chain, record: ChainRecord) -> int:
    if not is_first():
        return 0
    from fsdp_trainer.apps.chain.card import write_card

    text = write_card(planned, record)
    say(f"\n{text}\n")
    last = planned.folder_of(planned.trainings[-1].name)
    say(f"card   {planned.folder}/card.html, card.md")
    say(f"chat   fsdp-trainer chat {last}")
    return 0


def is_first() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def say(text: str) -> None:
    if is_first():
        print(safe(text), file=sys.stdout, flush=True)
