"""Back to the checkpoint before a spike, and on past the rows around it (PaLM; Chowdhery et al. 2022, §5.1)."""

import time
from functools import partial

from fsdp_trainer import phases
from fsdp_trainer.checkpoint.store import everywhere, read_progress
from fsdp_trainer.config.paths import step_of
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.parallel.convert import scale
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.build import restore, take_up
from fsdp_trainer.training.resume import tell_damaged
from fsdp_trainer.training.trainer import Trainer


def rewind(trainer: Trainer) -> None:
    """Take the run back, in place, to before the spike that ended `fit`; where there is no checkpoint, it goes on from here. Collective.

    What follows is what a run does that is started again from that checkpoint, but for the rows left out. Raises RunFailed after
    train.max_rewinds.
    """
    cfg, observer, spike = trainer.cfg.train, trainer.observer, trainer.observer.spike
    assert spike
    phases.enter("rewind")
    began = time.monotonic()
    observer.spike = None
    trainer.saves.settle(trainer.progress, trainer.next_save)
    good = partial(trainer.saves.store.newest_good, partial(tell_damaged, observer))
    # the cause may be some steps older than the spike
    checkpoint = good(spike.step - cfg.rewind_margin) or good(spike.step)
    start = trainer.batches.order.start
    if (
        checkpoint is not None and read_progress(checkpoint)["rows"] < start
    ):  # before the data changed, its rows had other numbers
        checkpoint = good(spike.step)
    if checkpoint is None or read_progress(checkpoint)["rows"] < start:
        observer.console.say(
            f"there is no checkpoint before step {spike.step:,} to rewind to: its update was left out instead"
        )
        return
    rewinds = trainer.progress.rewinds + 1
    if rewinds > cfg.max_rewinds:
        raise RunFailed(
            f"a spike in step {spike.step:,}, after the run was taken back {cfg.max_rewinds} times already (train.max_rewinds).\n"
            f"The last good checkpoint before it is {checkpoint}. Try a lower optim.lr, a larger train.rewind_margin, or look at the rows that "
            "events.jsonl names"
        )
    margin = cfg.rewind_margin * trainer.cfg.batch.rows
    left_out = [*trainer.progress.left_out, [max(0, spike.start - margin), spike.stop + margin]]
    step = step_of(checkpoint)

    def cut() -> None:
        if observer.records:
            observer.records.cut_after(step)
            trainer.saves.store.clear_up(step)

    everywhere("take the run's records back", cut)
    restore(trainer, checkpoint)
    take_up(trainer, checkpoint)
    scale(trainer.model, trainer.cfg.precision)
    reshard(trainer.model)
    trainer.progress.left_out, trainer.progress.rewinds = left_out, rewinds
    trainer.count_steps()
    observer.skipped_in_a_row = 0
    observer.event(
        "rewind",
        step=spike.step,
        to=step,
        left_out=left_out[-1],
        seconds=round(time.monotonic() - began, 3),
    )
    observer.console.say(
        f"rewind: back to step {step:,}, and on without rows {left_out[-1][0]:,} to {left_out[-1][1] - 1:,}"
    )
