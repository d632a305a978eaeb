"""The run that is proved in place of a planned one: the same in all but its sizes.

Kept are architecture, tokenizer, template, data, method, adapters and the layout's dimensions.
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fsdp_trainer.apps.prove.certificate import NotProved
from fsdp_trainer.apps.prove.folding import FOLDED, folded, folded_batch, planned_layout
from fsdp_trainer.apps.prove.records import STEPS
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.other_tools.other_weights import is_described
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.config.pipeline_schedules import Stages
from fsdp_trainer.config.schema import (
    ActivationCheckpoint,
    Checkpoint,
    Compile,
    Evaluation,
    Launch,
    Logging,
    Model,
    Precision,
    Profile,
    Replicas,
    Sharding,
    TrainConfig,
)
from fsdp_trainer.config.verbs import ProveConfig
from fsdp_trainer.data.prepared_data import build_data, build_tokenizer, tokenizer_path
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.store.data_statistics import length_for_most, lost_share
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.read_architecture import read_architecture
from fsdp_trainer.plan.plan_inputs import architecture

SMALL = 4_000_000
"""Weights of a model that is proved as it is."""
ROW, MOST_LOST = 256, 0.5
"""Tokens of a row if that is enough for this share of the data's."""
LEAST_RATE, LEAST_EPS = 1e-3, 1e-3
"""With a lower rate float32 would round updates away; with a lower eps of Adam gradients that are
only rounding would move weights as far as others."""
DEVIATION = 0.1
OF_THE_MACHINE = ("run", "launch", "logging", "checkpoint", "evaluation", "profile", "plan")
"""Groups of keys that decide no numbers."""


@dataclass
class SmallRun:
    """A run as it is proved.

    planned: in the planned layout; plain: in one process. about: sentences on what differs from the
    run that is planned. not_proved: what the small one leaves out.
    """

    planned: TrainConfig
    plain: TrainConfig
    about: list[str]
    not_proved: list[NotProved]

    @property
    def ranks(self) -> int:
        """The number of ranks of the planned layout."""
        return int(self.planned.launch.nproc_per_node)


def narrow(cfg: ProveConfig, scratch: Path) -> SmallRun:
    """Return the small run. scratch: a folder for its model and its runs. Raises UserError."""
    layout = planned_layout(cfg, world_of(cfg))
    sharding, ranks = folded(layout)
    small = plain_numbers(cfg)
    small = replace(small, sharding=sharding, batch=folded_batch(layout, sharding, ranks))
    small = with_small_model(small, sharding, scratch)
    small = replace(small, batch=replace(small.batch, seq_len=row_length(small)))
    small = replace(small, **of_the_machine(cfg, ranks, scratch))
    one = {"pipeline": 1, "context": 1, "tensor": 1, "expert": 1, "replicas": 1}
    plain = replace(
        small,
        sharding=Sharding(**one),
        activation_checkpoint=ActivationCheckpoint(),
        optim=replace(small.optim, offload="none", implementation="foreach"),
        batch=replace(small.batch, micro_rows=small.batch.rows),
        launch=replace(small.launch, nproc_per_node=1),
        run=replace(small.run, name="plain"),
    )
    about = [f"the layout: {in_words(layout)}, on {in_words(Layout(sharding, ranks, small.batch))}"]
    if changed := changes(cfg, small):
        about.append(f"computed with {', '.join(changed)}")
    return SmallRun(small, plain, about, left_out(cfg))


def world_of(cfg: ProveConfig) -> int:
    """Return the number of ranks that is planned, at least 2. Raises UserError for several."""
    world = cfg.plan.world_size
    if isinstance(world, list):
        problem = Problem(f"plan.world_size={as_text(world)}", "one world is proved at a time")
        raise UserError("which of the worlds?", [problem])
    if world:
        return world
    own = cfg.launch.nproc_per_node
    return max(FOLDED, cfg.launch.nodes * (1 if own == "auto" else own))


def plain_numbers(cfg: ProveConfig) -> TrainConfig:
    """Return the configuration in float32, with steps that are large enough to be seen."""
    given = {f.name: getattr(cfg, f.name) for f in fields(TrainConfig)}
    optim, choice = cfg.optim, cfg.objective
    limits = {"answer_rows": 64, "samples": 4, "max_new_tokens": 16}
    fewer = {name: min(most, getattr(choice, name)) for name, most in limits.items()}
    given |= {
        "precision": Precision("float32", "float32", "float32"),
        "compile": Compile(),
        "replicas": Replicas(),
        "optim": replace(
            optim,
            lr=max(LEAST_RATE, optim.lr),
            eps=max(LEAST_EPS, optim.eps),
            ns_dtype="float32",
            state_dtype=None,
            lr_scaling=None,
            lr_batch_tokens=None,
            init_from=None,
        ),
        "schedule": replace(cfg.schedule, warmup_steps=min(1, cfg.schedule.warmup_steps)),
        "objective": replace(choice, **fewer if choice.method.samples else {}, server=None),
        "data": replace(cfg.data, validation=None, max_lost=1.0, prefetch=0),
        "adapter": replace(cfg.adapter, init_from=None),
        "activation_checkpoint": uncompiled(cfg.activation_checkpoint),
        "train": replace(
            cfg.train,
            steps=STEPS,
            epochs=None,
            validate_every=None,
            validate_first=False,
            evaluate_every=None,
            sample_prompts=[],
            time_limit=None,
            early_stop=None,
            check_every=None,
            on_spike="ignore",
        ),
    }
    return TrainConfig(**given)


def uncompiled(chosen: ActivationCheckpoint) -> ActivationCheckpoint:
    """Return what backward computes again in blocks that are not compiled."""
    return replace(chosen, mode="full") if chosen.mode == "budget" else chosen


def of_the_machine(cfg: TrainConfig, ranks: int, scratch: Path) -> dict[str, Any]:
    """Return the groups of keys that say where and how ranks run."""
    return {
        "run": replace(cfg.run, name="planned", root=str(scratch / "runs"), overwrite=False),
        "launch": Launch(
            nproc_per_node=ranks, device="cpu", timeout="10m", env=cfg.launch.env, watchdog=False
        ),
        "logging": Logging(every=1, stragglers=None),
        "checkpoint": Checkpoint(every=STEPS // 2, mode=cfg.checkpoint.mode, export_hf=True),
        "evaluation": Evaluation(),
        "profile": Profile(),
    }


# --- the model and its rows -----------------------------------------------------------------------


def with_small_model(cfg: TrainConfig, sharding: Sharding, scratch: Path) -> TrainConfig:
    """Return the configuration with a model of a few million weights, and a second one if any."""
    config, _ = architecture(cfg)
    source = cfg.model.init_from
    is_here = source is None or is_described(model_folder(source))
    tokens = replace(cfg.tokenizer, path=tokenizer_path(cfg.tokenizer, source))
    cfg = with_small_second(replace(cfg, tokenizer=tokens), config, sharding, scratch)
    if config.parameters() <= SMALL and is_here:
        if source is None and not config.by_transformers:
            return replace(cfg, model=replace(cfg.model, initializer_range=DEVIATION))
        return cfg
    folder = small_copy_of(config, cfg, sharding, scratch / "model")
    if source and is_here:
        from fsdp_trainer.apps.prove.small_folder import copy_small_files

        copy_small_files(model_folder(source), folder)
    kept = {
        name: getattr(cfg.model, name)
        for name in ("implementation", "trust_remote_code", "vocab_multiple", "attention")
    }
    return replace(cfg, model=Model(init_from=str(folder), **kept))


def with_small_second(
    cfg: TrainConfig, config: ModelConfig, sharding: Sharding, scratch: Path
) -> TrainConfig:
    """Return the configuration with a small teacher or reference, if a folder names a large one.

    config: of the model in training.
    """
    second = cfg.second_model
    if second is None or second.source in ("start", "none"):
        return cfg
    if is_described(model_folder(second.source)):
        config = read_architecture(model_folder(second.source))
        if config.parameters() <= SMALL:
            return cfg
    folder = small_copy_of(config, cfg, sharding, scratch / "second", seed=1)
    return replace(cfg, objective=replace(cfg.objective, **{second.role: str(folder)}))


def small_copy_of(
    config: ModelConfig, cfg: TrainConfig, sharding: Sharding, out: Path, seed: int = 0
) -> Path:
    """Write a small copy of an architecture and return its folder. Raises UserError."""
    try:
        from fsdp_trainer.apps.prove.small_folder import write_small_folder
    except ImportError:
        reason = "a small copy of it is made by transformers:  pip install 'fsdp_trainer[hf]'"
        what = f"model.init_from={cfg.model.init_from}"
        raise UserError("transformers is not installed", [Problem(what, reason)]) from None
    tokenizer = build_tokenizer(cfg.tokenizer, cfg.model.init_from)
    vocabulary = tokenizer.vocab_size - len(tokenizer.new)
    write_small_folder(config, out, vocabulary, max(FOLDED, Stages.of(sharding).count), seed)
    return out


def row_length(cfg: TrainConfig) -> int:
    """Return the tokens of a row: few, but enough for most of the data. Raises UserError."""
    planned = cfg.batch.seq_len
    if planned <= ROW or cfg.data.streaming or cfg.objective.method.samples:
        return min(planned, ROW) if cfg.data.streaming else planned
    small = replace(cfg, batch=replace(cfg.batch, seq_len=ROW))
    prepared = build_data(small, Reporter(lambda line: None, lambda line: None))[2]
    if lost_share(prepared) <= MOST_LOST:
        return ROW
    return min(planned, round_up(length_for_most(prepared), ROW))


# --- what is said about it ------------------------------------------------------------------------


def in_words(layout: Layout) -> str:
    """Return the sizes of a layout's dimensions."""
    sizes = {**layout.sizes, "expert": layout.sharding.expert}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    ranks = f"{layout.ranks} ranks" if layout.ranks > 1 else "1 rank"
    return f"{ranks} ({', '.join(parts)})" if parts else ranks


def changes(cfg: ProveConfig, small: TrainConfig) -> list[str]:
    """Return `key=value (planned: value)` for each key that decides numbers and has another one."""
    before, after = flat(cfg), flat(small)
    return [
        f"{key}={as_text(value)} (planned: {as_text(before[key])})"
        for key, value in after.items()
        if before[key] != value and key.partition(".")[0] not in OF_THE_MACHINE
    ]


def flat(cfg: TrainConfig) -> dict[str, Any]:
    """Return the values of all keys of training."""
    groups = {f.name: asdict(getattr(cfg, f.name)) for f in fields(TrainConfig)}
    return {f"{group}.{name}": v for group, keys in groups.items() for name, v in keys.items()}


def left_out(cfg: ProveConfig) -> list[NotProved]:
    """Return what a small run in float32 on a CPU does not show."""
    first_gpu = "python benchmarks/first_gpu.py"
    parts = [
        (cfg.compile.enabled, "compiled blocks compute the same", "train.steps=20"),
        (cfg.precision.float8, "products in float8", "train.steps=20"),
        (cfg.sharding.quantize != "none", "messages in 8-bit numbers", "train.steps=20"),
        (cfg.optim.state_dtype == "8bit", "moments in 8 bits", "train.steps=20"),
        (cfg.replicas.method != "none", "groups that leave and come back", "launch.groups=2"),
        (cfg.adapter.init_from, "the adapter that training starts from", "train.steps=1"),
    ]
    again = "fsdp-trainer train … "
    found = [NotProved(name, again + words) for applies, name, words in parts if applies]
    return [
        NotProved("kernels of a GPU: attention, fused updates, bfloat16", first_gpu),
        NotProved("NCCL and the network between the ranks", "torchrun … -m fsdp_trainer doctor …"),
        *found,
    ]
