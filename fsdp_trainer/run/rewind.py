"""Rewinding: resume from the checkpoint before a spike and skip the rows around it.

PaLM (Chowdhery et al. 2022), §5.1.
"""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import run_on_rank_0
from fsdp_trainer.checkpoint.frozen_weights import read_base
from fsdp_trainer.checkpoint.store import read_progress
from fsdp_trainer.config.paths import step_of
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.parallel.convert import precompute_float8_scales
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.run.resume import report_damaged
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.trainer import Trainer
from fsdp_trainer.training.weights import restore


def rewind(trainer: Trainer, spike: StepPlan) -> None:
    """Restore the trainer, in place, to the checkpoint before the spike that ended `fit`.

    Training then continues like a run resumed from that checkpoint, but skips the rows around the
    spike. If there is no such checkpoint, it continues from the current state. Collective. Raises
    RunFailed after train.max_rewinds.
    """
    observer, store = trainer.observer, trainer.checkpoints.store
    trainer.profiler.close()
    phases.enter("rewind")
    began = time.monotonic()
    trainer.checkpoints.settle(trainer.progress)
    checkpoint = checkpoint_before(trainer, spike)
    if checkpoint is None:
        trainer.checkpoints.state.capture(trainer.progress)
        observer.say(
            f"there is no checkpoint before step {spike.step:,} to rewind to: "
            "its update was left out instead"
        )
        if trainer.checkpoints.due(trainer.progress):  # the spike was found just before it
            trainer.checkpoints.run(trainer.progress)
        return
    progress = progress_to_go_on(trainer, spike, checkpoint)
    step = step_of(checkpoint)

    def cut_records() -> None:
        assert observer.records
        observer.records.cut_after(step)
        store.clear_up(step)

    if trainer.runner.groups.leads:
        run_on_rank_0("take the run's records back", cut_records)
    progress.forget_missing_best([step_of(path) for path in store.listed()])
    loss_scale = trainer.runner.forward_backward.loss_scale
    base = read_base(checkpoint)
    if now := trainer.checkpoints.state.base:  # the base may have moved since that checkpoint
        base = base.at(now.source, now.hub_id)
    restore(trainer.runner.model, trainer.runner.optimizer, checkpoint, loss_scale, base)
    precompute_float8_scales(trainer.runner.model, trainer.runner.cfg.precision)
    reshard(trainer.runner.model)
    trainer.continue_from(progress)
    first, stop = progress.skipped_row_ranges[-1]
    seconds = round(time.monotonic() - began, 3)
    observer.event("rewind", step=spike.step, to=step, left_out=[first, stop], seconds=seconds)
    observer.say(f"rewind: back to step {step:,}, and on without rows {first:,} to {stop - 1:,}")


def checkpoint_before(trainer: Trainer, spike: StepPlan) -> Path | None:
    """Return the checkpoint to rewind to; None if there is none for the current data. Collective.

    The cause may precede the spike by some steps, so a checkpoint at least train.rewind_margin
    steps before it is preferred.
    """
    good = partial(trainer.checkpoints.store.newest_good, partial(report_damaged, trainer.observer))
    for before in (spike.step - trainer.runner.cfg.train.rewind_margin, spike.step):
        checkpoint = good(before)
        # a checkpoint from before a change of the data has other row numbers
        if checkpoint and read_progress(checkpoint)["rows"] >= trainer.data.first_row:
            return checkpoint
    return None


def progress_to_go_on(trainer: Trainer, spike: StepPlan, checkpoint: Path) -> Progress:
    """Return the checkpoint's progress, changed to skip the rows around the spike.

    Raises RunFailed after train.max_rewinds.
    """
    cfg, now = trainer.runner.cfg.train, trainer.progress
    if now.rewinds >= cfg.max_rewinds:
        raise RunFailed(
            f"a spike in step {spike.step:,}, after the run was taken back {cfg.max_rewinds} times "
            f"already (train.max_rewinds).\nThe last good checkpoint before it is {checkpoint}. "
            "Try a lower optim.lr, a larger train.rewind_margin, or look at the rows that "
            "events.jsonl names"
        )
    margin = cfg.rewind_margin * trainer.runner.cfg.batch.rows
    around = [max(0, spike.start - margin), spike.stop + margin]
    validation = trainer.checkpoints.state.validation_fingerprint
    progress = Progress.for_data(read_progress(checkpoint), trainer.data.fingerprint, validation)
    return replace(
        progress,
        # the checkpoint may be from before a change of the schedule, or of the data
        warmup_steps=now.warmup_steps,
        segments=now.segments,
        skipped_row_ranges=[*now.skipped_row_ranges, around],
        rewinds=now.rewinds + 1,
        taken_back=now.steps_done - progress.step,
    )
