"""Rules between keys of the objective, its data and its reference. See config/rules/rules.py."""

from pathlib import Path

from fsdp_trainer.config.check import Report, Violations, unused_keys
from fsdp_trainer.config.paths import find_checkpoint, is_whole_model
from fsdp_trainer.config.schema import (
    DISTIL,
    PAIRED,
    PROMPTED,
    REFERENCED,
    SCORED,
    UNPAIRED,
    ObjectiveChoice,
    TrainConfig,
)

LIKELIHOODS = tuple(name for name in PAIRED if name not in SCORED)
"""Objectives on pairs that use log-probabilities."""
OBJECTIVE_KEYS = {
    "beta": (*LIKELIHOODS, *UNPAIRED),
    "label_smoothing": ("dpo", "simpo"),
    "sft_weight": LIKELIHOODS,
    "center_weight": SCORED,
    "gamma": ("simpo",),
    "desirable_weight": UNPAIRED,
    "undesirable_weight": UNPAIRED,
    "reference": (*REFERENCED, *PROMPTED),
    "samples": PROMPTED,
    "max_new_tokens": PROMPTED,
    "temperature": (*PROMPTED, DISTIL),
    "answer_rows": PROMPTED,
    "weighting": PROMPTED,
    "clip_low": PROMPTED,
    "clip_high": PROMPTED,
    "kl": PROMPTED,
    "updates": PROMPTED,
    "importance_cap": PROMPTED,
    "mask_truncated": PROMPTED,
    "teacher": (DISTIL,),
    "share": (DISTIL,),
    "divergence": (DISTIL,),
    "top_k": (DISTIL,),
    "server": PROMPTED,
    "server_folder": PROMPTED,
    "max_staleness": PROMPTED,
}
"""Keys that only some objectives use, and these objectives."""
REFERENCES = ("start", "none")
"""Values of objective.reference that are not paths."""


def objective_keys(cfg: TrainConfig, report: Report) -> Violations:
    """Check that keys of some objectives are set only with one of them."""
    yield from unused_keys(report, "objective", cfg.objective.name, OBJECTIVE_KEYS)


def preferences(cfg: TrainConfig, report: Report) -> Violations:
    """Check that objectives on complete answers can have them in one row, and no keys of sft."""
    if cfg.objective.name not in (*PAIRED, *UNPAIRED):
        return
    answers = "both answers of a pair" if cfg.objective.name in PAIRED else "whole answers"
    both = f"objective={cfg.objective.name} compares {answers}"
    if cfg.sharding.pipeline > 1:
        reason = f"{both} in one micro-batch at once: not in this version with stages.\n"
        more = "Use  sharding.pipeline=1  and share blocks and rows with  sharding.tensor  or"
        yield "sharding.pipeline", f"{reason}{more}  sharding.context"
    if cfg.data.streaming:
        reason = f"{both}, which streams do not keep in one row.\nUse  data.streaming=false"
        yield "data.streaming", reason
    if cfg.data.packing == "stream":
        reason = f"{both}, and a stream cuts documents where a row is full.\n"
        yield "data.packing", reason + "Use  data.packing=best_fit"
    if cfg.loss.label_smoothing:
        reason = "spreads targets over the vocabulary, for  objective=sft .\n"
        more = "Pairs have  objective.label_smoothing"
        yield "loss.label_smoothing", reason + (more if cfg.objective.name in PAIRED else "Use  0")
    if cfg.loss.z_loss:
        yield "loss.z_loss", "only counts with  objective=sft"


def reward_model(cfg: TrainConfig, report: Report) -> Violations:
    """Check that a reward model is not sharded by tensor, has no adapter and writes no text."""
    if cfg.objective.name not in SCORED:
        return
    name = f"objective={cfg.objective.name}"
    if cfg.sharding.tensor > 1:
        reason = f"together with {name} is not in this version.\nUse  sharding.tensor=1"
        yield "sharding.tensor", reason
    if cfg.adapter.name != "none":
        reason = f"together with {name} is not in this version: the head is trained whole.\n"
        yield "adapter", reason + "Use  adapter=none"
    if cfg.train.sample_prompts:
        yield "train.sample_prompts", f"{name} trains a model that writes no text: leave it out"
    if cfg.train.evaluate_every:
        reason = f"{name} trains a model that answers no tasks.\nUse  train.evaluate_every=null"
        yield "train.evaluate_every", reason


def reference(cfg: TrainConfig, report: Report) -> Violations:
    """Check that a reference is given where it is needed, and that its path has a model."""
    given = cfg.objective.reference
    if given == "none" and cfg.objective.name in UNPAIRED:
        reason = f"objective={cfg.objective.name} compares with a reference.\nUse  start  or a path"
        yield "objective.reference", reason
    if cfg.objective.name not in REFERENCED or given in REFERENCES:
        return
    folder = Path(given)
    if not (find_checkpoint(folder) or is_whole_model(folder)):
        yield (
            "objective.reference",
            "is neither a run nor a Hugging Face folder with weights.\n"
            "Use a path to one,  start , the model that the run begins with, or  none",
        )


def teacher(cfg: TrainConfig, report: Report) -> Violations:
    """Check that a teacher is named, and that it can read the rows of its student's ranks."""
    choice = cfg.objective
    if choice.name != DISTIL:
        return
    if choice.teacher is None and "objective.teacher" not in report.settled:
        yield (
            "objective.teacher",
            "is required: name the model to learn from, e.g.  objective.teacher=runs/large",
        )
    if choice.top_k is not None:
        yield from stored_lists(cfg)
    if cfg.sharding.pipeline > 1:
        reason = "a teacher's blocks are not cut into stages in this version.\n"
        yield "sharding.pipeline", reason + "Use  sharding.pipeline=1"
    if cfg.sharding.expert > 1:
        reason = "a teacher's experts are not divided in this version.\n"
        yield "sharding.expert", reason + "Use  sharding.expert=1"
    for key in ("label_smoothing", "z_loss"):
        if getattr(cfg.loss, key):
            yield f"loss.{key}", "only counts with  objective=sft"


def stored_lists(cfg: TrainConfig) -> Violations:
    """Check that stored lists of a teacher belong to stored tokens with an unchanging context."""
    stored = f"objective.top_k={cfg.objective.top_k} stores a teacher's probabilities"
    online = "or, with the teacher in memory,  objective.top_k=null"
    if cfg.data.streaming:
        reason = f"{stored} next to the tokens, and a stream is not stored.\n"
        yield "data.streaming", f"{reason}Use  data.streaming=false  {online}"
    if cfg.data.packing == "stream":
        reason = f"{stored} once, and a stream cuts texts at other places in each epoch.\n"
        yield "data.packing", f"{reason}Use  data.packing=best_fit  {online}"


def has_stored_teacher(cfg: TrainConfig) -> bool:
    """Return True if a run trains on stored lists of a teacher that is not in memory."""
    return cfg.objective.name == DISTIL and cfg.objective.top_k is not None


def has_reference(cfg: ObjectiveChoice) -> bool:
    """Return True if the loss compares the model with a reference."""
    if cfg.name in PROMPTED:
        return cfg.kl > 0
    return cfg.name in REFERENCED and cfg.reference != "none"


def stores_reference(cfg: TrainConfig) -> bool:
    """Return True if a reference reads all rows once, before the first step."""
    is_stored = cfg.objective.name in REFERENCED and not base_is_reference(cfg)
    return is_stored and has_reference(cfg.objective)


def loads_reference(cfg: TrainConfig) -> bool:
    """Return True if a reference is a second model in memory, because it reads new answers."""
    is_loaded = cfg.objective.name in PROMPTED and not base_is_reference(cfg)
    return is_loaded and has_reference(cfg.objective)


def frozen_source(cfg: TrainConfig) -> tuple[str, str] | None:
    """Return the key that names a second, frozen model in memory, and its value; None without."""
    if cfg.objective.name == DISTIL and cfg.objective.teacher:
        return "objective.teacher", cfg.objective.teacher
    if loads_reference(cfg):
        return "objective.reference", cfg.objective.reference
    return None


def further_forwards(cfg: TrainConfig) -> int:
    """Return the number of additional forwards of a step's rows without gradients.

    There is one if the base of adapters is the reference, and one for the baseline of objectives
    on good and bad answers.
    """
    of_base = has_reference(cfg.objective) and base_is_reference(cfg)
    return of_base + (cfg.objective.name in UNPAIRED)


def base_is_reference(cfg: TrainConfig) -> bool:
    """Return True if the model without its adapters is the reference.

    That is not possible with DoRA's magnitudes, modules in adapter.also, and adapters that the run
    begins with: switching the adapters off does not undo them.
    """
    adapter = cfg.adapter
    is_plain = adapter.name == "lora" and not (adapter.also or adapter.init_from)
    return cfg.objective.reference == "start" and is_plain
