"""What must hold between keys. No torch."""

import re
from collections import Counter
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdp_trainer.config.check import Report, convert, flatten, show, wrong_type, wrong_with
from fsdp_trainer.config.data_files import Entry, entries, is_mixture
from fsdp_trainer.config.formats import is_compact, moments_format, rounds
from fsdp_trainer.config.names import ENTRY_SYNONYMS, nearest
from fsdp_trainer.config.schema import GROUPS, NEEDS_NCCL, Sharding, Train, TrainConfig
from fsdp_trainer.config.units import parse_duration, parse_steps
from fsdp_trainer.config.verbs import PlanConfig, PrepareConfig, PreviewConfig
from fsdp_trainer.devices import device
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.attention_choice import AttentionContext, attention_problems
from fsdp_trainer.models.resolve import model_problems

PATHS = (
    "run.root", "data.path", "data.validation", "data.template", "data.cache", "compile.cache", "tokenizer.path", "model.init_from", "checkpoint.resume",
    "source", "out", "hf", "root",
)  # fmt: skip
# what says which code a rank runs: the loader's, Python's, the compiler, plugins
RUNS_CODE = (
    "LD_", "DYLD_", "PYTHON", "BASH_ENV", "CC", "CXX", "CUDA_INJECTION", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN",
)  # fmt: skip
COMMUNICATION = {
    "messages": (2, 11),
    "separate_reduce_scatter": (2, 13),
    "reduce_scatter_buffers": (2, 13),
}
"""Options of FSDP2's collectives, and the first torch that has them."""
THE_LAUNCHERS = (
    "PATH",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def check_rules(cfg: Any, report: Report) -> None:
    """Keys that must agree with one another. Also expands `~` in paths."""
    for key in PATHS:
        _expand_home(cfg, key)
    if not isinstance(cfg, TrainConfig):
        return
    if isinstance(cfg, PlanConfig) and cfg.plan.gpu:
        try:
            device(cfg.plan.gpu)
        except UserError as error:
            report.problems += error.problems
    run, train, model, sharding = cfg.run, cfg.train, cfg.model, cfg.sharding
    _settle_length(train, report)
    if sharding.strategy == "hsdp" and sharding.replicas == 1:
        report.add(
            "sharding.replicas",
            1,
            "hsdp replicates across groups: say how many, e.g.  sharding.replicas=2",
        )
    if sharding.strategy != "hsdp" and sharding.replicas > 1:
        why = f"{sharding.strategy} has no replica groups.\nUse  sharding=hsdp  or  sharding.replicas=1"
        report.add("sharding.replicas", sharding.replicas, why)
    if sharding.strategy == "ddp" and sharding.cpu_offload:
        report.add(
            "sharding.cpu_offload",
            True,
            "ddp keeps everything on the device.\nUse  sharding=fsdp  or  sharding.cpu_offload=false",
        )
    _check_communication(cfg, report)
    _check_recomputation(cfg, report)
    _check_attention(cfg, report)
    _check_compile(cfg, report)
    if (cfg.optim.lr_scaling is None) != (cfg.optim.lr_batch_tokens is None):
        why = "lr_scaling and lr_batch_tokens belong together, e.g.  optim.lr_scaling=sqrt optim.lr_batch_tokens=524288 ; null: lr as it is"
        missing = "lr_scaling" if cfg.optim.lr_scaling is None else "lr_batch_tokens"
        report.add(f"optim.{missing}", None, why)
    _check_number_formats(cfg, report)
    if run.overwrite and cfg.checkpoint.resume != "never":
        report.add("run.overwrite", True, "only counts together with  checkpoint.resume=never")
    if (
        model.hidden_size
        and model.num_attention_heads
        and model.head_dim is None
        and model.hidden_size % model.num_attention_heads
    ):
        why = f"not a multiple of num_attention_heads={model.num_attention_heads}; else set model.head_dim"
        report.add("model.hidden_size", model.hidden_size, why)
    if len(cfg.optim.betas) != 2 or max(cfg.optim.betas) >= 1:
        report.add(
            "optim.betas", cfg.optim.betas, "two numbers below 1, e.g.  optim.betas=[0.9,0.95]"
        )
    if cfg.data.pad_to_multiple is not None and (cfg.data.packing != "none" or cfg.compile.enabled):
        compiled = "micro-batches of many lengths have compiled blocks compiled again and again.\nUse  compile=disabled"
        full = f"with data.packing={cfg.data.packing} rows are full.\nUse  data.packing=none"
        why = f"{full if cfg.data.packing != 'none' else compiled}  or leave it out"
        report.add("data.pad_to_multiple", cfg.data.pad_to_multiple, why)
    if cfg.data.packing == "stream" and cfg.data.too_long != "split":
        why = "a stream cuts documents where rows end, it leaves none out.\nUse  data.too_long=split  or  data.packing=best_fit"
        report.add("data.packing", "stream", why)
    if cfg.data.streaming:
        _check_streaming(cfg, report)
    if isinstance(cfg.data.validation, float) and not 0 < cfg.data.validation < 1:
        report.add(
            "data.validation",
            cfg.data.validation,
            "a share lies between 0 and 1, e.g.  data.validation=0.02 ; null: none",
        )
    for key in ("data.path", "data.validation"):
        _check_entries(cfg, key, report)
    _check_validation_users(cfg, report)
    if train.on_spike == "rewind" and cfg.checkpoint.every is None:
        why = "goes back to a checkpoint, and there is none before the end.\nUse  checkpoint.every=100  or  train.on_spike=skip"
        report.add("train.on_spike", "rewind", why)
    if cfg.checkpoint.export_dtype and not cfg.checkpoint.export_hf:
        report.add(
            "checkpoint.export_dtype",
            cfg.checkpoint.export_dtype,
            "only counts together with  checkpoint.export_hf=true",
        )
    known = {"data.fingerprint", *GROUPS, "batch", "loss", *flatten(TrainConfig)}
    if closed := [
        name for name in cfg.launch.env if name.startswith(RUNS_CODE) or name in THE_LAUNCHERS
    ]:
        why = f"{', '.join(closed)}: decides what code a rank runs, or which rank it is. Set it in the shell instead"
        for name in closed:
            report.add(
                key if (key := f"launch.env.{name}") in report.typed else "launch.env",
                cfg.launch.env,
                why,
            )
    if (where := cfg.launch.rendezvous) and not re.fullmatch(r".+:\d{1,5}", where):
        report.add(
            "launch.rendezvous", where, "is a host and a port, e.g.  launch.rendezvous=node0:29500"
        )
    elif where and cfg.launch.nodes == 1:
        report.add("launch.rendezvous", where, "is for several nodes: how many?  launch.nodes=2")
    for name in cfg.checkpoint.allow_changes:
        if name not in known:
            close = nearest(name, known)
            why = f"{name} is no key.{f' Did you mean  {close} ?' if close else ''}"
            report.add("checkpoint.allow_changes", cfg.checkpoint.allow_changes, why)
    if cfg.profile.steps:
        try:
            parse_steps(cfg.profile.steps)
        except ValueError as error:
            report.add("profile.steps", cfg.profile.steps, str(error))
    for key in (
        "train.time_limit",
        "launch.timeout",
        "launch.data_timeout",
        "launch.stall",
        "logging.stragglers",
    ):
        _check_duration(key, _get(cfg, key), report)
    if not any(
        key.startswith(("model.", "batch.seq_len")) for key in report.settled
    ):  # what follows from a wrong key is not told
        report.problems += model_problems(cfg)


def _check_entries(cfg: TrainConfig, key: str, report: Report) -> None:
    """Each mapping of a list is an entry, its values converted; what a mixture needs of all of them together."""
    listed = _get(cfg, key)
    if not isinstance(listed, list):
        return
    parts = {f.name: f for f in fields(Entry)}
    for item in (item for item in listed if isinstance(item, dict)):
        for name, value in item.items():
            why: str | None
            if name not in parts:
                why = f"is no part of an entry{_meant(name)}\nAn entry has: {' '.join(parts)}"
            else:
                try:
                    item[name] = convert(value, parts[name].type)
                    why = wrong_with(item[name], parts[name])
                except (ValueError, OverflowError):
                    why = wrong_type(name, value, parts[name])
            if why:
                report.add(key, listed, f"{name}: {show(value)}  {why}")
        if item.get("path") is None:
            report.add(
                key,
                listed,
                f"{show(item)}  lacks a path, as in  {{path: chats.jsonl, weight: 0.7}}",
            )
    if key in report.settled:
        return
    found = entries(listed)
    weights, repeats = (
        [e for e in found if e.weight is not None],
        [e for e in found if e.repeat is not None],
    )
    twice = [path for path, count in Counter(e.path for e in found).items() if count > 1]
    why = ""
    if (weights or repeats) and key == "data.validation":
        why = "validation reads everything once: a weight or a repeat is for data.path"
    elif weights and repeats:
        why = "has weights and repeats: a weight is a share of the tokens, a repeat a number of times per epoch. Keep one kind"
    elif weights and len(weights) < len(found):
        why = f"{next(e.path for e in found if e.weight is None)} has no weight, and others have one: give each its own"
    elif repeats and not any(e.repeat is None or e.repeat for e in found):
        why = "repeats nothing: one entry must be read more than 0 times"
    elif (weights or repeats) and twice:
        why = f"names {twice[0]} twice.\nUse  {{path: {twice[0]}, {'weight: SUM' if weights else 'repeat: 2'}}}"
    if why:
        report.add(key, listed, why)


def _meant(name: str) -> str:
    close = ENTRY_SYNONYMS.get(name) or nearest(name, (f.name for f in fields(Entry)))
    return f". Did you mean  {close} ?" if close else "."


def _check_validation_users(cfg: TrainConfig, report: Report) -> None:
    """What looks at validation losses needs some."""
    missing = [key for key in ("data.validation", "train.validate_every") if _get(cfg, key) is None]
    for key in ("checkpoint.best", "train.early_stop"):
        if (value := _get(cfg, key)) and missing:
            shown = {
                "data.validation": "data.validation=0.02",
                "train.validate_every": "train.validate_every=100",
            }
            report.add(
                key,
                value,
                f"goes by the validation loss: set  {'  '.join(shown[m] for m in missing)}",
            )
    if cfg.train.early_stop_delta and not cfg.train.early_stop:
        report.add(
            "train.early_stop_delta",
            cfg.train.early_stop_delta,
            "only counts together with  train.early_stop=N",
        )


def _check_streaming(cfg: TrainConfig, report: Report) -> None:
    """What takes more than one look at the data."""
    if isinstance(cfg, PrepareConfig):
        why = "a stream is tokenised while it is trained on: there is nothing to prepare.\nUse  data.streaming=false"
        report.add("data.streaming", True, why)
    elif cfg.train.steps is None and not isinstance(cfg, PreviewConfig):
        why = "nobody knows how long an epoch is before it has been read.\nUse  train.steps=1000  or  data.streaming=false"
        report.add("data.streaming", True, why)
    if isinstance(cfg.data.validation, float):
        why = "a share is not known before all has been read. Name what to hold out, e.g.  data.validation=heldout.jsonl"
        report.add("data.validation", cfg.data.validation, why)
    if is_mixture(cfg.data.path):
        why = "weights and repeats need all lengths before training.\nUse  data.streaming=false  or paths without weight and repeat"
        report.add("data.path", cfg.data.path, why)
    if cfg.data.prefetch == 0:
        report.add(
            "data.prefetch",
            0,
            "rows are made by a thread, ahead.\nUse  data.prefetch=1  or  data.streaming=false",
        )


def _check_recomputation(cfg: TrainConfig, report: Report) -> None:
    """Keys of activation checkpointing that would be left unread, and what budget needs."""
    asked = cfg.activation_checkpoint
    if asked.mode == "budget" and not cfg.compile.enabled:
        why = "the compiler decides what is computed again.\nUse  compile=enabled  or  activation_checkpoint=selective"
        report.add("activation_checkpoint.mode", "budget", why)
    for name, modes in {
        "every": ("full", "selective"),
        "save": ("selective",),
        "budget": ("budget",),
    }.items():
        if f"activation_checkpoint.{name}" in report.typed and asked.mode not in modes:
            why = f"only counts with  {'  or  '.join(f'activation_checkpoint={mode}' for mode in modes)}"
            report.add(f"activation_checkpoint.{name}", getattr(asked, name), why)
    if asked.mode == "selective" and not asked.save:
        report.add("activation_checkpoint.save", [], "nothing kept is  activation_checkpoint=full")


def _check_number_formats(cfg: TrainConfig, report: Report) -> None:
    """What the optimizer can and cannot do with the formats of weights and moments."""
    optim, master = cfg.optim, cfg.precision.master_dtype
    if optim.implementation != "auto" and is_compact(optim, master):
        nearest_would_do = not is_compact(replace(optim, rounding="nearest"), master)
        why = f"torch has no AdamW with {moments_format(optim, master)} moments over {master} weights, nor stochastic rounding.\nUse  optim.implementation=auto"
        report.add(
            "optim.implementation",
            optim.implementation,
            why + ("  or  optim.rounding=nearest" if nearest_would_do else ""),
        )
    if "optim.rounding" in report.typed and not rounds(optim, master):
        why = "only counts where something is kept in bfloat16, as with  precision=pure_bf16  or  optim=adamw_bf16"
        report.add("optim.rounding", optim.rounding, why)
    _check_float8(cfg, report)


def _check_float8(cfg: TrainConfig, report: Report) -> None:
    """What the hardware wants of float8 products."""
    recipe, tokens = cfg.precision.float8, cfg.batch.seq_len * cfg.batch.micro_rows
    if recipe is None:
        return
    if cfg.launch.device == "cpu":
        why = "needs a GPU of compute capability 8.9 or higher, not launch.device=cpu.\nUse  precision=bf16"
        report.add("precision.float8", recipe, why)
    if cfg.precision.param_dtype != "bfloat16":
        report.add(
            "precision.float8",
            recipe,
            "is faster than bfloat16 only: use  precision.param_dtype=bfloat16",
        )
    if tokens % 16:
        why = f"float8 products need a multiple of 16 tokens, not {tokens:,} (seq_len × micro_rows).\nUse  batch.seq_len={-(-cfg.batch.seq_len // 16) * 16}"
        report.add("batch.seq_len", cfg.batch.seq_len, why)


def _check_attention(cfg: TrainConfig, report: Report) -> None:
    """What is known before there is a device and a model; the rest is checked where attention is chosen."""
    context = AttentionContext(
        device=None if cfg.launch.device == "auto" else cfg.launch.device,
        dtype=cfg.precision.param_dtype,
        softcap=cfg.model.attn_logit_softcapping is not None,
        compiled=cfg.compile.enabled,
        selective=cfg.activation_checkpoint.mode == "selective",
    )
    for problem in attention_problems(cfg.model.attention, cfg.model.attention_kernel, context):
        key, _, value = problem.what.partition("=")
        report.add(key, value, problem.why)


def _check_communication(cfg: TrainConfig, report: Report) -> None:
    """Options of FSDP2's collectives: what the installed torch has, and what there is to communicate. The device is looked at later."""
    sharding = cfg.sharding
    torch = version("torch")
    for name, needed in COMMUNICATION.items():
        value = getattr(sharding, name)
        if value == getattr(Sharding(), name):
            continue
        needed = (2, 12) if value == "symmetric" else needed
        if sharding.strategy == "ddp":
            why = f"ddp gathers and scatters nothing.\nUse  sharding=fsdp  or  sharding.{name}={show(getattr(Sharding(), name))}"
            report.add(f"sharding.{name}", value, why)
        elif tuple(map(int, torch.split(".")[:2])) < needed:
            report.add(
                f"sharding.{name}",
                value,
                f"needs torch {needed[0]}.{needed[1]}; installed is {torch}",
            )
        elif name == "messages" and cfg.launch.device == "cpu":
            report.add(
                "sharding.messages", value, f"{NEEDS_NCCL}.\nUse  sharding.messages=ordinary"
            )
    if sharding.messages == "symmetric" and sharding.reduce_scatter_buffers > 1:
        why = "symmetric messages share one buffer.\nUse  sharding.reduce_scatter_buffers=1  or  sharding.messages=registered"
        report.add("sharding.reduce_scatter_buffers", sharding.reduce_scatter_buffers, why)


def _check_compile(cfg: TrainConfig, report: Report) -> None:
    """Modes that a sharded model cannot have, and keys that would be left unread."""
    if cfg.compile.mode in ("reduce-overhead", "max-autotune"):
        why = (
            "records CUDA graphs, which replay with weights where they lay; fully_shard gathers them anew, and all blocks share one graph.\n"
            f"Use  compile.mode={'default' if cfg.compile.mode == 'reduce-overhead' else 'max-autotune-no-cudagraphs'}"
        )
        report.add("compile.mode", cfg.compile.mode, why)
    for name in ("mode", "cache"):
        if f"compile.{name}" in report.typed and not cfg.compile.enabled:
            report.add(
                f"compile.{name}", getattr(cfg.compile, name), "only counts with  compile=enabled"
            )


def _settle_length(train: Train, report: Report) -> None:
    """Steps or epochs: what is typed wins over what a recipe says; both from one side is a mistake."""
    if train.steps is None or train.epochs is None:
        return
    typed = [name for name in ("steps", "epochs") if f"train.{name}" in report.typed]
    if len(typed) == 1:
        setattr(train, "epochs" if typed == ["steps"] else "steps", None)
    else:
        report.add(
            "train.epochs",
            train.epochs,
            "train.steps and train.epochs are both set: keep one, as in  train.steps=null",
        )


def _check_duration(key: str, text: str | None, report: Report) -> None:
    if text is None:
        return
    try:
        if parse_duration(text) <= 0:
            report.add(
                key,
                text,
                f"must be longer than nothing{'; null: no limit' if key == 'train.time_limit' else ''}",
            )
    except ValueError as error:
        report.add(key, text, str(error))


def _get(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def _expand_home(cfg: Any, key: str) -> None:
    *nodes, name = key.split(".")
    owner = _get(cfg, ".".join(nodes)) if nodes else cfg
    value = getattr(owner, name, None)
    if isinstance(value, str):
        setattr(owner, name, _home(value))
    elif isinstance(value, list):
        expanded = [
            {**v, "path": _home(v.get("path"))} if isinstance(v, dict) and "path" in v else _home(v)
            for v in value
        ]
        setattr(owner, name, expanded)


def _home(path: Any) -> Any:
    return str(Path(path).expanduser()) if isinstance(path, str) and path.startswith("~") else path
