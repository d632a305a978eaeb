"""Rules of groups of ranks that share a run's steps. See rules.py."""

import re

from fsdp_trainer.config.check import Report, Violations
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.verbs import LaunchFilesConfig, PlanConfig

DILOCO = ("every", "outer_lr", "outer_momentum", "fragments", "delay", "mixing", "quantize")
"""Keys of `replicas` that only count with outer steps."""


def groups_of_ranks(cfg: TrainConfig, report: Report) -> Violations:
    method = cfg.replicas.method
    yield from _unused(cfg, report)
    if method == "none":
        return
    yield from _lighthouse(cfg)
    yield from _started_here(cfg)
    if method == "diloco":
        yield from _outer_steps(cfg)
    if cfg.checkpoint.resume == "never":
        yield (
            "checkpoint.resume",
            "a group that comes back must not start the run again, or delete what it wrote.\n"
            "Use  checkpoint.resume=auto  with a new  run.name",
        )
    if cfg.data.streaming:
        yield (
            "data.streaming",
            "a group that comes back cannot find its place in streams that others read.\n"
            "Use  data.streaming=false  or  replicas.method=none",
        )


def _unused(cfg: TrainConfig, report: Report) -> Violations:
    method = cfg.replicas.method
    for key in report.typed:
        group, _, name = key.partition(".")
        if group != "replicas" or name == "method":
            continue
        if method == "none":
            yield key, "only counts with  replicas.method=sync  or  replicas.method=diloco"
        elif method == "sync" and name in DILOCO:
            yield key, "only counts with  replicas.method=diloco"
    if cfg.launch.groups > 1 and method == "none":
        yield (
            "launch.groups",
            "only counts with  replicas.method=sync  or  replicas.method=diloco",
        )


def _lighthouse(cfg: TrainConfig) -> Violations:
    lighthouse = cfg.replicas.lighthouse
    starts_one = cfg.launch.groups > 1 and not isinstance(cfg, LaunchFilesConfig)
    if lighthouse is None and not starts_one and not isinstance(cfg, PlanConfig):
        yield (
            "replicas.lighthouse",
            "say where the groups find each other: start  fsdp-trainer lighthouse  somewhere, and"
            " give its HOST:PORT.\nTo try groups on this machine:  launch.groups=2",
        )
    if lighthouse is not None and not re.fullmatch(r"[^\s/]+:\d+", lighthouse):
        host = re.sub(r"^\w+://|[/:].*$", "", lighthouse.strip()) or "node0"
        yield (
            "replicas.lighthouse",
            f"is not HOST:PORT.\nUse  replicas.lighthouse={host}:29510",
        )


def _outer_steps(cfg: TrainConfig) -> Violations:
    """Check that the parts of the model can take turns, and that nothing needs equal groups."""
    replicas = cfg.replicas
    if replicas.every % replicas.fragments:
        fitting = max(n for n in range(1, replicas.fragments) if replicas.every % n == 0)
        yield (
            "replicas.fragments",
            f"must divide replicas.every={replicas.every}, so that the parts take turns at equal"
            f" distances.\nUse  replicas.fragments={fitting}",
        )
    elif replicas.delay >= replicas.every // replicas.fragments:
        yield (
            "replicas.delay",
            f"must be less than the {replicas.every // replicas.fragments} steps between the"
            " averages of two parts (replicas.every ÷ replicas.fragments)",
        )
    if cfg.train.on_spike == "rewind":
        yield (
            "train.on_spike",
            "the groups' losses differ, so one would rewind alone.\nUse  train.on_spike=skip",
        )


def _started_here(cfg: TrainConfig) -> Violations:
    if cfg.launch.groups == 1 or isinstance(cfg, LaunchFilesConfig | PlanConfig):
        return
    if cfg.launch.nodes > 1 or cfg.launch.hosts:
        yield (
            "launch.groups",
            "starts groups on one machine. On several, start each group by a command of its own,"
            " with its  replicas.id",
        )
    if cfg.replicas.lighthouse is not None:
        yield "replicas.lighthouse", "launch.groups starts one itself. Leave one of them out"
