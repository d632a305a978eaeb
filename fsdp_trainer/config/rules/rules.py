"""Rules between keys of the configuration. Imports no torch."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from fsdp_trainer.base.folders import ENDINGS, LONGEST_NAME, short_name
from fsdp_trainer.base.recorded import FromEnvironment
from fsdp_trainer.base.safe_text import has_password
from fsdp_trainer.config.check import Report, Violations, flatten, value_of
from fsdp_trainer.config.depth import settle_depth
from fsdp_trainer.config.devices import unknown_gpus
from fsdp_trainer.config.rules.rules_adapter import merging, settle_adapter
from fsdp_trainer.config.rules.rules_code import typed_code
from fsdp_trainer.config.rules.rules_computing import (
    activation_checkpointing,
    attention,
    collectives,
    compilation,
    dimensions,
    float8,
    float16,
    four_bits,
    moments,
    quantized_messages,
    replicas,
    second_copy,
    split_rows,
    stages,
)
from fsdp_trainer.config.rules.rules_data import (
    entries_of_a_list,
    padding,
    share_held_out,
    stream_packing,
    streaming,
    users_of_validation,
)
from fsdp_trainer.config.rules.rules_objective import (
    different_labels,
    divergence,
    environment_of_answers,
    mtp_head,
    prompts,
    prompts_of_texts,
    reference,
    refused,
    registered_objective,
    rewards,
    rollout_ranks,
    rounds_of_generation,
    stored_teacher,
)
from fsdp_trainer.config.rules.rules_replicas import groups_of_ranks
from fsdp_trainer.config.rules.rules_server import server
from fsdp_trainer.config.rules.rules_training import (
    adapters,
    allowed_changes,
    durations,
    environment,
    export_dtype,
    hosts,
    intervals,
    learning_rate_scaling,
    momentum,
    offloading,
    optimizer,
    overwriting,
    own_trackers,
    profiled_steps,
    rendezvous,
    rewinding,
    run_folder,
    shared_gpus,
    states_to_begin_with,
    width_of_heads,
)
from fsdp_trainer.config.schema import SELECTORS, Schedule, Train, TrainConfig
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.from_config.resolve import model_problems

Rule = Callable[[Any, Report], Violations]


def unused_keys(cfg: Any, report: Report) -> Violations:
    for group, selector in SELECTORS.items():
        settings = getattr(cfg, group)
        keys = {f.name: f.metadata for f in fields(settings)}
        chosen = getattr(settings, selector)
        if keys[selector]["part"] and chosen not in keys[selector]["choices"]:
            continue  # a part of the user's own may read any key
        for name, about in keys.items():
            key, options = f"{group}.{name}", about["used_by"]
            if key in report.typed and options and chosen not in options:
                ways = "  or  ".join(f"{group}={option}" for option in options)
                yield key, f"only counts with  {ways}"


RULES: tuple[Rule, ...] = (
    replicas,
    dimensions,
    split_rows,
    stages,
    second_copy,
    quantized_messages,
    collectives,
    activation_checkpointing,
    attention,
    compilation,
    learning_rate_scaling,
    adapters,
    moments,
    float8,
    float16,
    four_bits,
    run_folder,
    overwriting,
    width_of_heads,
    momentum,
    offloading,
    states_to_begin_with,
    optimizer,
    padding,
    stream_packing,
    streaming,
    share_held_out,
    entries_of_a_list,
    users_of_validation,
    registered_objective,
    unused_keys,
    refused,
    mtp_head,
    reference,
    environment_of_answers,
    rounds_of_generation,
    rollout_ranks,
    rewards,
    prompts,
    divergence,
    different_labels,
    prompts_of_texts,
    stored_teacher,
    server,
    own_trackers,
    intervals,
    rewinding,
    export_dtype,
    merging,
    environment,
    shared_gpus,
    rendezvous,
    hosts,
    allowed_changes,
    profiled_steps,
    durations,
    groups_of_ranks,
)
PATHS = (
    "run.root",
    "data.path",
    "data.validation",
    "data.template",
    "data.cache",
    "compile.cache",
    "tokenizer.path",
    "model.init_from",
    "adapter.init_from",
    "optim.init_from",
    "objective.reference",
    "objective.teacher",
    "objective.server_folder",
    "checkpoint.resume",
    "evaluation.core_data",
    "core_data",
    "text",
    "good",
    "chats",
    "questions",
    "source",
    "out",
    "hf",
    "compare",
    "answers",
    "data",
    "root",
)
"""Keys whose value is a path: `~` is expanded in it, and completion offers files."""


OF_DATA = ("data.path", "data.validation", "text", "good", "chats", "questions", "image", "data")
"""Keys of addresses that are read with the passwords of ~/.netrc."""


def check_rules(cfg: Any, report: Report) -> None:
    for key in PATHS:
        expand_home(cfg, key)
    if isinstance(cfg, TrainConfig):
        check_training(cfg, report)
    refuse_passwords(cfg, report)  # after rules that know another way
    out = value_of(cfg, "out")
    if out and short_name(Path(out).name) != Path(out).name:
        report.add("out", out, f"is too long: {LONGEST_NAME - ENDINGS} bytes are its most")


def check_training(cfg: TrainConfig, report: Report) -> None:
    if isinstance(cfg, PlanConfig):
        report.problems += unknown_gpus(cfg.plan.gpu)
    if code := [*typed_code(cfg, report)]:
        for key, reason in code:
            report.add(key, value_of(cfg, key), reason)
        report.close()  # the rules below may import what a key names
    settle_depth(cfg, report)
    settle_length(cfg.train, report)
    settle_warm_up(cfg.schedule, report)
    settle_adapter(cfg, report)
    for rule in RULES:
        for key, reason in rule(cfg, report):
            report.add(key, value_of(cfg, key), reason)
    # problems that may follow from a wrong key are not reported
    if not any(key.startswith(("model.", "batch.seq_len")) for key in report.settled):
        report.problems += model_problems(cfg)


def refuse_passwords(cfg: Any, report: Report) -> None:
    for key in flatten(type(cfg)):
        value = value_of(cfg, key)
        if any(map(has_password, texts_in(value))):
            netrc = "~/.netrc , or the address into " if key in OF_DATA else ""
            variable = "an environment variable, and write  ${oc.env:NAME}  in its place"
            reason = "has a password in it, which records would show.\nPut it into "
            report.add(key, value, f"{reason}{netrc}{variable}")


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from texts_in(part)
    elif isinstance(value, str) and not isinstance(value, FromEnvironment):
        yield value


def settle_length(train: Train, report: Report) -> None:
    """Keep only one of train.steps and train.epochs: a typed one replaces a recipe's."""
    if train.steps is None or train.epochs is None:
        return
    typed = [name for name in ("steps", "epochs") if f"train.{name}" in report.typed]
    if len(typed) == 1:
        setattr(train, "epochs" if typed == ["steps"] else "steps", None)
    else:
        reason = "train.steps and train.epochs are both set: keep one, as in  train.steps=null"
        report.add("train.epochs", train.epochs, reason)


def settle_warm_up(schedule: Schedule, report: Report) -> None:
    """Keep only one of schedule.warmup and .warmup_steps: a typed one replaces a recipe's."""
    names = ("warmup", "warmup_steps")
    typed = [name for name in names if f"schedule.{name}" in report.typed]
    if len(typed) == 1:
        (other,) = {*names} - {*typed}
        setattr(schedule, other, 0)
    elif schedule.warmup and schedule.warmup_steps:
        one = f"schedule.warmup_steps={schedule.warmup_steps}"
        reason = f"schedule.warmup, a share, is set as well: keep one, as in  {one}"
        report.add("schedule.warmup_steps", schedule.warmup_steps, reason)


def expand_home(cfg: Any, key: str) -> None:
    """Expand `~` in a key's value, which is a path or a list of paths or entries."""
    group, _, name = key.rpartition(".")
    owner = value_of(cfg, group) if group else cfg
    value = getattr(owner, name, None)
    if isinstance(value, str):
        setattr(owner, name, without_tilde(value))
    elif isinstance(value, list):
        setattr(owner, name, [_expand_entry(entry) for entry in value])


def _expand_entry(entry: Any) -> Any:
    if isinstance(entry, dict) and "path" in entry:
        return {**entry, "path": without_tilde(entry["path"])}
    return without_tilde(entry)


def without_tilde(path: Any) -> Any:
    if not isinstance(path, str) or not path.startswith("~"):
        return path
    whole = str(Path(path).expanduser())
    return FromEnvironment(whole, path.written) if isinstance(path, FromEnvironment) else whole
