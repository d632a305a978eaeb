"""Rules between keys of run, train, optim, checkpoint, profile and launch. See rules.py."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from fsdp_trainer.base.folders import LONGEST_NAME
from fsdp_trainer.config.check import Report, Violations, flatten, value_of
from fsdp_trainer.config.durations import parse_duration, parse_steps
from fsdp_trainer.config.host_list import read_hosts
from fsdp_trainer.config.names import nearest
from fsdp_trainer.config.parts.own_parts import why_no_part
from fsdp_trainer.config.schema import GROUPS, TrainConfig
from fsdp_trainer.errors import WHAT_GOES_TOGETHER
from fsdp_trainer.extensions import IMPORTS

# beginnings of variables that decide which code a rank runs: of loader, Python, compiler, plugins
RUNS_CODE = (
    "LD_",
    "DYLD_",
    "PYTHON",
    "BASH_ENV",
    "CC",
    "CXX",
    "CUDA_INJECTION",
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
    "NCCL_PROFILER_PLUGIN",
    IMPORTS,
)
SET_BY_LAUNCHER = (
    "PATH",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
DURATIONS = (
    "train.time_limit",
    "launch.timeout",
    "launch.data_timeout",
    "launch.stall",
    "logging.stragglers",
    "checkpoint.patience",
)


def learning_rate_scaling(cfg: TrainConfig, report: Report) -> Violations:
    missing = [name for name in ("lr_scaling", "lr_batch_tokens") if not getattr(cfg.optim, name)]
    if len(missing) == 1:
        yield (
            f"optim.{missing[0]}",
            "lr_scaling and lr_batch_tokens belong together, e.g.  optim.lr_scaling=sqrt "
            "optim.lr_batch_tokens=524288 ; null: lr is not scaled",
        )


def adapters(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.adapter.name != "none" or "adapter.init_from" in report.settled:
        return
    for key in report.typed:
        if key.startswith("adapter.") and key != "adapter.name":
            yield key, "only counts with  adapter=lora , adapter=dora  or  adapter=qlora"
    if cfg.checkpoint.merge:
        yield "checkpoint.merge", "merges an adapter, and there is none.\nUse  adapter=lora"


def overwriting(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.run.overwrite and cfg.checkpoint.resume != "never":
        yield "run.overwrite", "only counts together with  checkpoint.resume=never"


def width_of_heads(cfg: TrainConfig, report: Report) -> Violations:
    width, heads = cfg.model.hidden_size, cfg.model.num_attention_heads
    if width and heads and cfg.model.head_dim is None and width % heads:
        yield (
            "model.hidden_size",
            f"not a multiple of num_attention_heads={heads}; else set model.head_dim",
        )


def momentum(cfg: TrainConfig, report: Report) -> Violations:
    if len(cfg.optim.betas) != 2 or max(cfg.optim.betas) >= 1:
        yield "optim.betas", "two numbers below 1, e.g.  optim.betas=[0.9,0.95]"
    if cfg.optim.momentum >= 1:
        yield "optim.momentum", "a number below 1, e.g.  optim.momentum=0.95"


def optimizer(cfg: TrainConfig, report: Report) -> Violations:
    if not cfg.optim.spec.has_owners:
        return
    if "optim.normuon_beta" in report.typed and not cfg.optim.normuon:
        yield "optim.normuon_beta", "only counts with  optim.normuon=true"
    if cfg.adapter.name != "none":
        yield (
            "optim.name",
            f"{cfg.optim.name} is for matrices that are trained whole, not for the low-rank ones"
            f" of adapter={cfg.adapter.name}.\nUse  optim=adamw  or  adapter=none",
        )
    if cfg.sharding.cpu_offload:
        yield (
            "sharding.cpu_offload",
            f"the host would compute {cfg.optim.name}'s matrix products.\n"
            "Use  optim=adamw  or  sharding.cpu_offload=false",
        )


def states_to_begin_with(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.optim.init_from is None or not cfg.optim.spec.takes_states:
        return
    if cfg.model.init_from is None:
        reason = "its states belong to trained weights, and the run would begin with random ones"
        yield "optim.init_from", f"{reason}.\nAdd  model.init_from={cfg.optim.init_from}"
    if cfg.adapter.name != "none":
        reason = f"only the matrices of adapter={cfg.adapter.name} are trained, and it has others"
        yield "optim.init_from", f"{reason}.\nUse  adapter=none"
    if cfg.optim.state_dtype == "8bit":
        reason = "states of other tools are read as they are, not encoded in 8 bits"
        yield "optim.init_from", f"{reason}.\nUse  optim.state_dtype=float32  or  bfloat16"


def offloading(cfg: TrainConfig, report: Report) -> Violations:
    offload = cfg.optim.offload
    if "optim.offload_path" in report.typed and offload != "disk":
        yield "optim.offload_path", "only counts with  optim.offload=disk"
    if offload == "none":
        return
    key, sharding, spec = "optim.offload", cfg.sharding, cfg.optim.spec
    instead = f"Use  {key}=none"
    cannot = {
        "sharding=fsdp": ("ddp keeps everything on the device", sharding.strategy == "ddp"),
        "sharding.cpu_offload=false": (
            "sharding.cpu_offload has all states in host memory already",
            sharding.cpu_offload and offload == "cpu",
        ),
        "sharding.pipeline=1": (
            f"does not work with sharding.pipeline={sharding.pipeline}: {WHAT_GOES_TOGETHER}",
            sharding.pipeline > 1,
        ),
        "replicas.method=none": (
            "groups exchange weights that are on the device",
            cfg.replicas.method != "none",
        ),
        "precision=bf16": (
            "weights that are gathered in float8 are converted from those of the optimizer",
            cfg.precision.float8 is not None,
        ),
        "optim=adamw": (
            f"{cfg.optim.name} needs whole matrices or their norms, not parts of them",
            spec.has_owners or (spec.whole_matrices and offload == "disk"),
        ),
    }
    for other, (reason, holds) in cannot.items():
        if holds:
            yield key, f"{reason}.\n{instead}  or  {other}"


def own_trackers(cfg: TrainConfig, report: Report) -> Violations:
    command = cfg.logging.command
    if command and not shutil.which(shlex.split(command)[0]):
        yield "logging.command", f"there is no program {shlex.split(command)[0]}"
    for name in cfg.logging.trackers:
        if hasattr(cfg.logging, name):
            yield "logging.trackers", f"{name} has a key of its own:  logging.{name}"
        elif reason := why_no_part("tracker", name):
            yield "logging.trackers", reason


def run_folder(cfg: TrainConfig, report: Report) -> Violations:
    if max(len(part.encode()) for part in Path(f"./{cfg.run.name}").parts or ("",)) > LONGEST_NAME:
        yield "run.name", f"is too long: folders have names of at most {LONGEST_NAME} bytes"
        return
    root = Path(cfg.run.root).resolve()
    if cfg.run.name and root not in (root / cfg.run.name).resolve().parents:
        yield "run.name", f"is not inside run.root={cfg.run.root}: set run.root for another place"


def intervals(cfg: TrainConfig, report: Report) -> Violations:
    for key in ("train.validate_every", "checkpoint.every"):
        every = value_of(cfg, key)
        if isinstance(every, float) and every > 1 and not every.is_integer():
            reason = "counts whole steps; only below 1 it is a share of all steps.\nUse "
            yield key, f"{reason} {key}={round(every)}"


def rewinding(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.train.on_spike == "rewind" and cfg.checkpoint.every is None:
        yield (
            "train.on_spike",
            "goes back to a checkpoint, and there is none before the end.\n"
            "Use  checkpoint.every=100  or  train.on_spike=skip",
        )


def export_dtype(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.checkpoint.export_dtype and not cfg.checkpoint.export_hf:
        yield "checkpoint.export_dtype", "only counts together with  checkpoint.export_hf=true"


def environment(cfg: TrainConfig, report: Report) -> Violations:
    closed = [
        name for name in cfg.launch.env if name.startswith(RUNS_CODE) or name in SET_BY_LAUNCHER
    ]
    for name in closed:
        key = f"launch.env.{name}"
        yield (
            key if key in report.typed else "launch.env",
            f"{', '.join(closed)}: decides what code a rank runs, or which rank it is. "
            "Set it in the shell instead",
        )


def shared_gpus(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.launch.ranks_per_gpu > 1 and cfg.launch.device == "cpu":
        yield "launch.ranks_per_gpu", "is for GPUs. On the CPU:  launch.nproc_per_node=2"


def rendezvous(cfg: TrainConfig, report: Report) -> Violations:
    address = cfg.launch.rendezvous
    if not address:
        return
    if not re.fullmatch(r".+:\d{1,5}", address):
        yield "launch.rendezvous", "is a host and a port, e.g.  launch.rendezvous=node0:29500"
    elif cfg.launch.nodes == 1 and not cfg.launch.hosts:
        yield "launch.rendezvous", "is for several nodes: how many?  launch.nodes=2"


def hosts(cfg: TrainConfig, report: Report) -> Violations:
    hosts = cfg.launch.hosts
    if hosts is None or (isinstance(hosts, str) and not Path(hosts).expanduser().exists()):
        return  # a missing file is an error only if a command reads it
    try:
        count = len(read_hosts(hosts))
    except ValueError as error:
        yield "launch.hosts", str(error)
        return
    if cfg.launch.nodes > 1:
        yield "launch.nodes", f"is {count} as launch.hosts names them: leave launch.nodes out"


def allowed_changes(cfg: TrainConfig, report: Report) -> Violations:
    known = {"data.fingerprint", *GROUPS, "batch", "loss", *flatten(TrainConfig)}
    for name in cfg.checkpoint.allow_changes:
        if name not in known:
            close = nearest(name, known)
            meant = f" Did you mean  {close} ?" if close else ""
            yield "checkpoint.allow_changes", f"{name} is no key.{meant}"


def profiled_steps(cfg: TrainConfig, report: Report) -> Violations:
    if cfg.profile.steps:
        try:
            parse_steps(cfg.profile.steps)
        except ValueError as error:
            yield "profile.steps", str(error)


def durations(cfg: TrainConfig, report: Report) -> Violations:
    """Check that durations can be read and are longer than nothing."""
    for key in DURATIONS:
        reason = _wrong_duration(value_of(cfg, key))
        if reason:
            off = (
                "; null: no limit"
                if key == "train.time_limit" and reason.startswith("must")
                else ""
            )
            yield key, reason + off


def _wrong_duration(text: Any) -> str:
    if text is None:
        return ""
    try:
        return "" if parse_duration(text) > 0 else "must be longer than nothing"
    except ValueError as error:
        return str(error)
