"""The checkpoint that a run resumes from, and the changes allowed since then."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.recorded import as_recorded_earlier, as_written, recorded
from fsdp_trainer.checkpoint.atomic_files import read_manifest
from fsdp_trainer.checkpoint.store import CheckpointStore, read_progress, require_whole
from fsdp_trainer.config.check import as_text
from fsdp_trainer.config.paths import (
    checkpoint_configuration,
    checkpoint_folders,
    find_checkpoint,
    is_hub_id,
    step_of,
)
from fsdp_trainer.config.schema import COMPARED_GROUPS, TrainConfig
from fsdp_trainer.data.files.file_changes import describe_changed_files
from fsdp_trainer.data.order.mixture import Component
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.methods.reference_model import REFERENCE_ARCHITECTURE, architecture_digest
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.read_architecture import read_architecture
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.training.data_source import Order
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.setup.run_setup import RunSetup
from fsdp_trainer.training.weights import stored_config

FREE = {
    "adapter.init_from",
    "batch.micro_rows",
    "data.cache",
    "data.max_lost",
    "data.pad_to_multiple",
    "data.path",
    "data.prefetch",
    "data.validation",
    "data.workers",
    "loss.chunk_mib",
    "model.attention",
    "model.attention_kernel",
    "objective.teacher",
    "objective.answer_rows",
    "objective.server",
    "objective.server_folder",
    "optim.implementation",
    "optim.init_from",
    "optim.offload",
    "optim.offload_path",
    "tokenizer.path",
}
"""Keys of the compared groups that may change, since they affect how something is read or computed
and not its content. The content of data and tokenizer is compared by data.fingerprint, a teacher by
its weights. Losses and gradients do not depend on batch.micro_rows, but for rounding."""
DECIDE_TOKENS = {
    "data.format",
    "data.loss_on",
    "data.on_error",
    "data.template",
    "data.template_args",
    "data.template_date",
}
"""Keys that only decide tokens and their weights: they may change if data.fingerprint does not."""
MODELS = {"model.init_from", "objective.reference"}
"""Keys that name folders of models: they may change if these hold the same models as before."""
WARM_UP = {"schedule.warmup", "schedule.warmup_steps"}
NOT_COMPARABLE = "the checkpoint has no digest of the reference's weights to compare these with"
NOT_COMPARED = {"checkpoint.resume", "checkpoint.allow_changes", "run.overwrite"}
OLDER = "the checkpoint is from a version that named data otherwise: it may be the same"
NEW_STREAM = (
    "another list of files, other content, or another tokenizer: a stream starts again with them"
)
STREAMS_BEGIN_ANEW = "the streams begin anew: samples may be seen a second time"
OTHER_CONTENT, NEW, LEFT_OUT = "has other content", "is new", "is left out"
REORDERED = "the same sources are in another order, or mixed otherwise"


def find_start(
    resume: str,
    store: CheckpointStore,
    observer: Observer,
    fetch: Callable[[int], None] | None = None,
) -> Path | None:
    """Return the checkpoint to resume from; None: start at the beginning. Collective.

    It is the one that `resume` (checkpoint.resume) names, else the newest undamaged one of the run.
    A path outside the run's folder is only used for the start: once the run has checkpoints of its
    own, it resumes from those. fetch: brings a checkpoint of a later step than the given one from
    the mirror, in place of damaged ones; None: there is no mirror.
    """
    if resume == "never":
        return None
    if resume != "auto":
        named = named_checkpoint(resume)
        if named.resolve().is_relative_to(store.run.resolve()) or not store.listed():
            require_whole(named)
            return named
    good = store.newest_good(partial(report_damaged, observer))
    newest = store.listed(checkpoint_folders)[-1:]
    if fetch and newest and newest != [good]:
        fetch(step_of(good) if good else -1)
        good = store.newest_good(partial(report_damaged, observer))
    if good is None and store.listed(checkpoint_folders):
        observer.say("no checkpoint of this run is intact: it starts from the beginning")
    return good


def report_damaged(observer: Observer, checkpoint: Path, problems: list[Problem]) -> None:
    texts = [f"{problem.what} {problem.reason}" for problem in problems]
    observer.event("damaged", path=str(checkpoint), problems=texts)
    observer.say(f"{checkpoint} is damaged and not used: {texts[0]}")


def named_checkpoint(path: str) -> Path:
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        raise UserError(
            "there is no checkpoint to resume from",
            f"checkpoint.resume={path}",
            "is neither a checkpoint nor a run with one",
        )
    return checkpoint


def check_unchanged(setup: RunSetup, order: Order, checkpoint: Path) -> dict[str, list[Any]]:
    """Return every key that has changed since the checkpoint, with its values then and now.

    Raises UserError with the changed keys that affect the training result and are not in
    allow_changes.
    """
    cfg, stored = setup.cfg, read_progress(checkpoint)
    then = {
        # a key added after the checkpoint was written had its default value
        **DEFAULTS,
        **flatten(as_written(checkpoint_configuration(checkpoint))),
        "data.fingerprint": stored.get("data"),
        "world_size": read_manifest(checkpoint).get("world_size"),
    }
    now = {
        **flatten(recorded(cfg)),
        "data.fingerprint": order.fingerprint,
        "world_size": dist.get_world_size(),
    }
    changes = {
        key: [then.get(key), value]
        for key, value in now.items()
        if then.get(key) != value and key not in NOT_COMPARED
    }
    # records of earlier versions have the environment's values
    real = flatten(as_recorded_earlier(asdict(cfg)))
    changes = {key: pair for key, pair in changes.items() if pair[0] != real.get(key, pair[1])}
    allowed = set(cfg.checkpoint.allow_changes)
    if "data.path" in allowed:
        allowed.add("data.fingerprint")
    if "data.fingerprint" not in changes:
        allowed |= DECIDE_TOKENS
    if changes.get("schedule.warmup", [1])[0] == 0:
        allowed |= WARM_UP  # recipes had steps in earlier versions: see warm_up_of_checkpoint
    other_models = models_that_differ(setup, changes, checkpoint, stored)
    allowed |= MODELS - other_models.keys()
    refused = sorted(
        key for key in changes.keys() & COMPARED if not allowed & {key, key.split(".")[0]}
    )
    if not refused:
        return changes
    problems = []
    for key in refused:
        lines = [f"the checkpoint was trained with {as_text(changes[key][0])}"]
        if key == "data.fingerprint":
            lines += describe_data_change(order, stored.get("segments"))
        lines += other_models.get(key, [])
        problems.append(Problem(f"{key}={as_text(changes[key][1])}", "\n".join(lines)))
    problems[-1].reason += (
        "\nStart another run with  run.name=NEW  or resume anyway with  "
        f"'checkpoint.allow_changes=[{','.join(refused)}]'"
    )
    raise UserError(f"this is not the run that {checkpoint} belongs to", problems)


def warm_up_of_checkpoint(
    setup: RunSetup, changes: dict[str, list[Any]], progress: Progress
) -> int | None:
    """Return the number of warm-up steps of the checkpoint, which a resumed run keeps.

    None if allow_changes names one of their keys: the keys decide again. progress: that of the
    checkpoint, without the number if it is from an earlier version.
    """
    if {"schedule", *WARM_UP} & {*setup.cfg.checkpoint.allow_changes}:
        return None
    if progress.warmup_steps is not None:
        return progress.warmup_steps
    then, _ = changes.get("schedule.warmup_steps", [setup.cfg.schedule.warmup_steps, None])
    return int(then)


def models_that_differ(
    setup: RunSetup, changes: dict[str, list[Any]], checkpoint: Path, stored: Json
) -> dict[str, list[str]]:
    """Return lines on why a key of `MODELS` may not change, for each that may not.

    A folder may be elsewhere if it holds the same architecture. Its weights are compared when they
    are read: frozen ones and those of a reference by digest, and all others are in the checkpoint.
    stored: the checkpoint's progress.
    """
    reasons = {}
    known = stored if "precision.param_dtype" not in changes else {}
    if "model.init_from" in changes:
        then, now = changes["model.init_from"]
        lines = architecture_changes(read_architecture(checkpoint / "hf"), setup.config)
        lines += [NOT_COMPARABLE] * (starts_as_reference(setup) and not known.get("reference"))
        if lines or then is None or not is_there(now):
            reasons["model.init_from"] = lines
    if "objective.reference" in changes:
        named = {"start", "none"} & {*changes["objective.reference"]}
        if named or not is_known(setup, known):
            reasons["objective.reference"] = []
    return reasons


def starts_as_reference(setup: RunSetup) -> bool:
    """Return True if the run's first weights are a reference, and not its frozen base."""
    second = setup.cfg.second_model
    if second is None or second.role != "reference":
        return False
    return second.mode != "base" and second.is_start


def is_known(setup: RunSetup, stored: Json) -> bool:
    known = stored.get(REFERENCE_ARCHITECTURE)
    return bool(stored.get("reference")) and has_architecture(setup, known)


def has_architecture(setup: RunSetup, digest: str | None) -> bool:
    """Return True if a reference in memory has this digest, and for one that is stored.

    A stored one has only weights of its own, in the architecture of the model in training.
    """
    folder = setup.inputs.second_folder
    return folder is None or architecture_digest(stored_config(folder)) == digest


def is_there(path: str | None) -> bool:
    return path is not None and (is_hub_id(path) or Path(path).expanduser().exists())


OF_LABELS = ("config.json: id2label", "config.json: label2id", "config.json: problem_type")
"""Keys of an export that the folder of the first weights may lack: the labels are fields, too."""


def architecture_changes(then: ModelConfig, now: ModelConfig) -> list[str]:
    before, after = then.decisive, now.decisive
    return [
        f"{name} was {as_text(value)} in its config.json, and is {as_text(after.get(name))}"
        for name, value in before.items()
        if value != after.get(name) and not name.endswith(OF_LABELS)
    ]


def describe_data_change(order: Order, segments: list[Json] | None) -> list[str]:
    if not segments:
        return [OLDER if order.components else NEW_STREAM]
    matches = match_components(order.components, segments)
    lines = [f"{m.name} {m.change}" for m in matches if m.change] or [REORDERED]
    if not order.components:
        lines = [NEW_STREAM]
    return lines + changed_files(matches, segments, order)


def changed_files(matches: Sequence["Match"], segments: list[Json], order: Order) -> list[str]:
    """Return lines with the names of files that have changed since the last of these segments."""
    # digests of streamed files cover only their ends
    streamed = not order.components
    if not segments or bool(segments[-1]["sources"]) == streamed:
        return []
    content_changes = {OTHER_CONTENT, NEW, LEFT_OUT}
    if not streamed and all(match.change not in content_changes for match in matches):
        return []  # only weights or the order have changed
    return describe_changed_files(segments[-1], order.digests)


class Match(NamedTuple):
    """A component of the data, and the point at which it continues after a resume."""

    name: str
    change: str
    """Text on the difference from the checkpoint's component; empty: none."""
    continuation: str
    """Text on the point at which it continues."""
    start: tuple[int, int] = (0, 0)
    """Number of rows of this component that were trained on before, and of tokens in them."""

    @property
    def note(self) -> str:
        return f"{self.name} " + ": ".join(filter(None, (self.change, self.continuation)))


def match_components(components: Sequence[Component], segments: list[Json]) -> list[Match]:
    """Return a match for each component, then for each source of the last segment that is left out.

    A component with the key of a source has the same rows and continues after those trained on,
    whichever segment the source is from. A component that shares only the name begins anew.
    segments: those of the checkpoint, see Mixture.state.
    """
    sources = list(segments[-1]["sources"]) if segments else []
    older = {source["key"]: source for segment in segments[:-1] for source in segment["sources"]}
    same = [take_first(sources, "key", component.key) for component in components]
    matches = []
    for component, source in zip(components, same, strict=True):
        if source := source or older.get(component.key):
            matches.append(continued(component, source))
        elif source := take_first(sources, "name", component.name):
            matches.append(replaced_content(component, source))
        else:
            matches.append(Match(component.name, NEW, "begins at its first row"))
    for source in sources:
        epochs = source["rows"] / source["rows_per_epoch"]
        matches.append(Match(source["name"], LEFT_OUT, f"was seen for {epochs:.2f} epochs"))
    return matches


def take_first(sources: list[Json], field: str, value: str) -> Json | None:
    for i, source in enumerate(sources):
        if source[field] == value:
            return sources.pop(i)
    return None


def continued(component: Component, source: Json) -> Match:
    change = ""
    if source["asked"] != component.requested:
        change = f"was requested with {source['asked']:g}, now with {component.requested:g}"
    rows_per_epoch = component.order.rows_per_epoch
    epoch, row = divmod(source["rows"], rows_per_epoch)
    where = f"continues at epoch {epoch + 1}, row {row:,} of {rows_per_epoch:,}"
    return Match(component.name, change, where, (source["rows"], source["tokens"]))


def replaced_content(component: Component, source: Json) -> Match:
    same_content = source["key"].split("/")[0] == component.key.split("/")[0]
    return Match(
        component.name,
        "is the same, in other rows or another order" if same_content else OTHER_CONTENT,
        "begins at the first row of what it is now; what was seen of it may come again",
    )


def resume_data(
    order: Order, progress: Progress, fingerprint: str | None
) -> tuple[Order, Progress, list[str]]:
    """Return data and progress that continue from a checkpoint, and lines about what has changed.

    progress: that of the checkpoint. fingerprint: hash of the checkpoint's data.
    """
    segments = progress.segments
    if segments and segments[-1]["key"] == order.key:
        starts = [(source["start"], source["start_tokens"]) for source in segments[-1]["sources"]]
        return order.started_at(segments[-1]["start"], starts), progress, []
    if not segments and fingerprint == order.fingerprint:
        return order, progress, []  # the checkpoint is from a version without segments
    matches = match_components(order.components, segments)
    notes = [match.note for match in matches] + changed_files(matches, segments, order)
    if not segments and progress.rows:
        segments = [{**order.state(0), "key": fingerprint, "start": 0, "sources": []}]
        notes = [f"{OLDER}: its rows begin anew, in another order; what was seen may come again"]
    if not order.components:
        notes.append(STREAMS_BEGIN_ANEW)
    starts = [match.start for match in matches[: len(order.components)]]
    order = order.started_at(progress.rows, starts)
    # only files of the last segment are ever compared, see describe_data_change
    earlier = [segment | {"files": {}} for segment in segments]
    # skipped ranges refer to row numbers of the earlier data
    progress = replace(
        progress, skipped_row_ranges=[], segments=[*earlier, order.state(progress.rows)]
    )
    return order, progress, [f"data   {note}" for note in notes]


def flatten(config: Json) -> Json:
    return {
        f"{group}.{key}": value for group, keys in config.items() for key, value in keys.items()
    }


DEFAULTS = flatten(asdict(TrainConfig()))
COMPARED = {key for key in DEFAULTS if key.split(".")[0] in COMPARED_GROUPS} - FREE
COMPARED |= {"data.fingerprint", "run.seed", "train.freeze"}
"""Keys that affect the training result: they may not change when a run resumes."""
