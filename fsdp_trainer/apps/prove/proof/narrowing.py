"""The run that is proved in place of a planned one: the same in all but its sizes.

Kept are architecture, tokenizer, template, data, method, adapters and the layout's dimensions.
"""

from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_trainer.apps.prove.proof.certificate import NotProved
from fsdp_trainer.apps.prove.proof.fewer_rows import fewer_rows
from fsdp_trainer.apps.prove.proof.folding import FOLDED, folded, folded_batch, possible
from fsdp_trainer.apps.prove.proof.recordings import STEPS
from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.recorded import flat
from fsdp_trainer.base.round_up import round_up
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.layout import Layout
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
from fsdp_trainer.data.prepared_data import build_data, build_tokenizer, cache_root, tokenizer_path
from fsdp_trainer.data.records.labelled_texts import LABELLED, TAGGED
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.errors import UserError
from fsdp_trainer.interop.folders.other_weights import is_described
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.read_architecture import read_architecture
from fsdp_trainer.planning.plan.plan_inputs import architecture

SMALL = 4_000_000
"""Weights of a model that is proved as it is."""
ROW, LONG_ROW = 256, 1024
"""Tokens of a row at least; and at most, unless documents are longer."""
DOCUMENTS = 2
"""Documents of the median length in a row; one, if they are long."""
LEAST_RATE, LEAST_EPS = 1e-3, 1e-3
"""With a lower rate float32 would round updates away; with a lower eps of Adam gradients that are
only rounding would move weights as far as others."""
DEVIATION = 0.1
"""Of random weights: with the usual 0.02 a narrow model hardly looks at its input."""
BIAS_SPEED = 1e-6
"""Largest move of a router's bias in a step. One token more or less turns its sign, and a larger
move would have other tokens choose other experts from then on."""
GRADED = {"name": "length", "unit": "characters", "max": 400, "buffer": 400}
"""A reward that differs between the answers of a small random model, which earn no other."""
OF_THE_MACHINE = ("run", "launch", "logging", "checkpoint", "evaluation", "profile")
"""Groups of keys that decide no numbers."""
BETWEEN_STEPS: dict[str, dict[str, Any]] = {
    "data": {"validation": None, "max_lost": 1.0, "prefetch": 0},
    "train": {
        "steps": STEPS, "epochs": None, "validate_every": None, "validate_first": False,
        "evaluate_every": None, "sample_prompts": [], "time_limit": None, "early_stop": None,
        "check_every": None, "on_spike": "ignore",
    },
}  # fmt: skip
"""Values of the keys that decide what happens between steps, and how many there are."""
NOT_SAID = {"data.path", "data.cache"} | {
    f"{group}.{key}" for group, keys in BETWEEN_STEPS.items() for key in keys
}
"""Keys of whose other values a certificate says nothing, or that in its own words."""
OF_THE_MODEL = ("implementation", "trust_remote_code", "vocab_multiple")
"""Keys of the model that its small copy has too."""


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
        return int(self.planned.launch.nproc_per_node)


@dataclass
class Narrowing:
    """Makes the small run of a planned one. scratch: folder for its model and its runs."""

    cfg: ProveConfig
    scratch: Path

    @cached_property
    def layout(self) -> Layout:
        """The planned layout. Raises UserError if its ranks cannot be arranged so."""
        return possible(Layout(self.cfg.sharding, world_of(self.cfg), self.cfg.batch))

    @cached_property
    def folded(self) -> tuple[Sharding, int]:
        """The layout's keys, and its ranks, on this machine."""
        return folded(self.layout)

    def small_run(self) -> SmallRun:
        """Return the small run. Raises UserError."""
        cfg, (sharding, ranks) = self.cfg, self.folded
        tokenizer = replace(cfg.tokenizer, path=tokenizer_path(cfg.tokenizer, cfg.model.init_from))
        model = self.model
        is_copy = model.init_from != cfg.model.init_from
        choice = replace(self.objective, **self.second)
        if is_copy and choice.widths:
            narrow = read_architecture(Path(str(model.init_from))).hidden_size
            widths = [max(1, w * narrow // self.config.hidden_size) for w in choice.widths]
            choice = replace(choice, widths=widths)
        given = {f.name: getattr(cfg, f.name) for f in fields(TrainConfig)} | self.numbers
        batch = folded_batch(self.layout, sharding, ranks)
        given |= {"model": model, "tokenizer": tokenizer, "objective": choice}
        given |= {"sharding": sharding, "batch": batch, **self.of_the_machine}
        small = TrainConfig(**given)
        small = replace(small, batch=replace(batch, seq_len=row_length(small, cfg)))
        plain = replace(
            small,
            sharding=Sharding(),
            activation_checkpoint=ActivationCheckpoint(),
            optim=replace(small.optim, offload="none", implementation="foreach"),
            batch=replace(small.batch, micro_rows=small.batch.rows),
            launch=replace(small.launch, nproc_per_node=1),
            run=replace(small.run, name="plain"),
        )
        on = in_words(Layout(sharding, ranks, small.batch))
        about = [f"the layout: {in_words(self.layout)}, here {on}"]
        if is_copy:
            about.append(f"the model: {cfg.model.init_from or cfg.model.name}, here a small copy")
        if self.fewer_rows[1]:
            about.append(f"the data: {'; '.join(self.fewer_rows[1])}, in an order of their own")
        if changed := changes(dict(flat(asdict(cfg))), dict(flat(asdict(small)))):
            about.append(f"computed with {', '.join(changed)}")
        return SmallRun(small, plain, about, left_out(cfg))

    @cached_property
    def fewer_rows(self) -> tuple[list[str | dict[str, Any]], list[str]]:
        """See `fewer_rows`. Labels that no key names are those of all rows."""
        cfg = self.cfg
        needs_all = cfg.objective.method.reads in (LABELLED, TAGGED) and not cfg.objective.labels
        if needs_all or cfg.data.streaming or self.config.reads_images:
            return [], []
        return fewer_rows(cfg.data.path, self.scratch / "data")

    # --- groups of keys

    @property
    def numbers(self) -> dict[str, Any]:
        """The groups that decide numbers: float32, and steps that are large enough to be seen."""
        cfg, few = self.cfg, self.fewer_rows[0]
        mode = cfg.activation_checkpoint.mode
        return {
            "precision": Precision("float32", "float32", "float32"),
            "compile": Compile(),
            "replicas": Replicas(),
            "loss": replace(
                cfg.loss, bias_update_speed=min(BIAS_SPEED, cfg.loss.bias_update_speed)
            ),
            "optim": replace(
                cfg.optim,
                lr=max(LEAST_RATE, cfg.optim.lr),
                eps=max(LEAST_EPS, cfg.optim.eps),
                ns_dtype="float32" if cfg.optim.spec.has_owners else cfg.optim.ns_dtype,
                state_dtype=None,
                lr_scaling=None,
                lr_batch_tokens=None,
                init_from=None,
            ),
            "schedule": replace(cfg.schedule, warmup_steps=min(1, cfg.schedule.warmup_steps)),
            "data": replace(
                cfg.data,
                **BETWEEN_STEPS["data"],
                path=few or cfg.data.path,
                cache=str(self.scratch / "cache" if few else cache_root(cfg.data, cfg.run)),
            ),
            "adapter": replace(
                cfg.adapter, init_from=None, base="nf4" if cfg.adapter.base == "nf4" else "auto"
            ),
            "activation_checkpoint": replace(
                cfg.activation_checkpoint, mode="full" if mode == "budget" else mode
            ),
            "train": replace(cfg.train, **BETWEEN_STEPS["train"]),
        }

    @property
    def objective(self) -> Any:
        """The method, with few and short answers if it samples some."""
        choice = self.cfg.objective
        if not choice.method.samples:
            return choice
        limits = {"samples": 4, "max_new_tokens": 16}
        fewer = {name: min(limit, getattr(choice, name)) for name, limit in limits.items()}
        rewards = [*choice.rewards, GRADED]
        return replace(choice, **fewer, rewards=rewards, server=None, ahead=0)

    @property
    def of_the_machine(self) -> dict[str, Any]:
        """The groups that say where and how ranks run."""
        cfg = self.cfg
        return {
            "run": replace(
                cfg.run, name="planned", root=str(self.scratch / "runs"), overwrite=False
            ),
            "launch": Launch(
                nproc_per_node=self.folded[1],
                device="cpu",
                timeout="10m",
                env=cfg.launch.env,
                watchdog=False,
            ),
            "logging": Logging(every=1, stragglers=None),
            "checkpoint": Checkpoint(every=STEPS // 2, mode=cfg.checkpoint.mode, export_hf=True),
            "evaluation": Evaluation(),
            "profile": Profile(),
        }

    # --- models

    @cached_property
    def config(self) -> ModelConfig:
        return architecture(self.cfg)[0]

    @property
    def model(self) -> Model:
        """The model's keys: of itself if it is small, else of a small copy. Raises UserError."""
        model = self.cfg.model
        source = model.init_from
        is_here = source is None or is_described(model_folder(source))
        if self.config.parameters() <= SMALL and is_here:
            is_random = source is None and not self.config.by_transformers
            more: dict[str, Any] = {"initializer_range": DEVIATION} if is_random else {}
            return replace(model, attention=self.attention, **more)
        folder = self.small_copy(self.config, self.scratch / "model")
        if source and is_here:
            from fsdp_trainer.apps.prove.proof.small_folder import copy_small_files

            copy_small_files(model_folder(source), folder)
        own = {name: getattr(model, name) for name in OF_THE_MODEL}
        return Model(init_from=str(folder), attention=self.attention, **own)

    @property
    def attention(self) -> str:
        """The way of attention: the planned one, if it is one of a CPU."""
        own = self.cfg.model.attention
        return own if own in ("documents", "mask") else "auto"

    @property
    def second(self) -> dict[str, str]:
        """The key of a second model, if a folder names a large one: its small copy."""
        second = self.cfg.second_model
        if second is None or second.source in ("start", "none"):
            return {}
        config = self.config
        if is_described(model_folder(second.source)):
            config = read_architecture(model_folder(second.source))
            if config.parameters() <= SMALL:
                return {}
        return {second.role: str(self.small_copy(config, self.scratch / "second", seed=1))}

    def small_copy(self, config: ModelConfig, out: Path, seed: int = 0) -> Path:
        """Write a small copy of an architecture and return its folder. Raises UserError."""
        tokens, source = self.cfg.tokenizer, self.cfg.model.init_from
        try:
            from fsdp_trainer.apps.prove.proof.small_folder import add_head, write_small_folder
        except ImportError:
            reason = "a small copy is made by transformers:  pip install 'fsdp_trainer[hf]'"
            what = f"model.init_from={source}"
            raise UserError("transformers is not installed", what, reason) from None
        tokenizer = build_tokenizer(tokens, source)
        vocabulary = tokenizer.vocab_size - len(tokenizer.new)
        blocks = max(FOLDED, Stages.of(self.folded[0]).count)
        write_small_folder(config, out, vocabulary, blocks, seed)
        if self.cfg.objective.mtp:
            add_head(out)
        return out


def world_of(cfg: ProveConfig) -> int:
    """Return the number of ranks that is planned, at least 2. Raises UserError for several."""
    world = cfg.plan.world_size
    if isinstance(world, list):
        what = f"plan.world_size={as_text(world)}"
        raise UserError("there are several worlds", what, "one world is proved at a time")
    if world:
        return world
    own = cfg.launch.nproc_per_node
    return max(FOLDED, cfg.launch.nodes * (1 if own == "auto" else own))


def row_length(small: Any, cfg: ProveConfig) -> int:
    """Return the tokens of a row: few, but enough for several documents. Raises UserError.

    small: the configuration of the small run, with the rows of `cfg`.
    """
    planned = cfg.batch.seq_len
    if planned <= ROW or cfg.objective.method.samples:
        return planned
    if cfg.data.streaming:
        return ROW
    prepared = build_data(small, Reporter(lambda line: None, lambda line: None))[2]
    lengths = np.concatenate([store.lengths for store in prepared.train])
    median = int(np.median(lengths))
    enough = max(ROW, min(DOCUMENTS * median, LONG_ROW), median)
    return min(planned, round_up(enough, ROW // 4))


# --- what is said about it ------------------------------------------------------------------------


def in_words(layout: Layout) -> str:
    sizes = {**layout.sizes, "expert": layout.sharding.expert}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    ranks = counted(layout.ranks, "rank")
    return f"{ranks} ({', '.join(parts)})" if parts else ranks


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    groups = {*OF_THE_MACHINE, "tokenizer"}
    if before["model.init_from"] != after["model.init_from"]:
        groups.add("model")  # a small copy, of which the folder says all
    return [
        f"{key}={as_text(value)} (planned: {as_text(before.get(key))})"
        for key, value in after.items()
        if before.get(key) != value and key.partition(".")[0] not in groups and key not in NOT_SAID
    ]


def left_out(cfg: ProveConfig) -> list[NotProved]:
    """Return what a small run in float32 on a CPU does not show."""
    parts = [
        (cfg.compile.enabled, "compiled blocks compute the same"),
        (cfg.precision.float8, "products in float8"),
        (cfg.sharding.quantize != "none", "messages in 8-bit numbers"),
        (cfg.optim.state_dtype == "8bit", "moments in 8 bits"),
        (cfg.replicas.method != "none", "groups that leave and come back"),
        (cfg.adapter.init_from, "the adapter that training starts from"),
        (cfg.objective.server, "answers of a server"),
        (cfg.objective.ahead, "answers that are generated while others are trained on"),
    ]
    first_gpu = "python -m benchmarks.first_gpu --part broken"
    return [
        NotProved("kernels of a GPU: attention, fused updates, bfloat16", first_gpu),
        NotProved("NCCL and the network", "torchrun … -m fsdp_trainer doctor …"),
        *(NotProved(name, first_gpu) for applies, name in parts if applies),
    ]
