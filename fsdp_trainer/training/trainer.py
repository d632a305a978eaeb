"""The step loop. It receives built parts; what the model is, how it is sharded and where files lie is not its business."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fsdp_trainer import phases
from fsdp_trainer.checkpoint.state import optimizer_state, weights
from fsdp_trainer.checkpoint.store import gather
from fsdp_trainer.config.paths import checkpoint_name
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.units import parse_duration
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.head import Scores
from fsdp_trainer.observe.observer import Observer, losses
from fsdp_trainer.observe.profiler import Profiler
from fsdp_trainer.optim.optimizers import set_learning_rate, step_unless
from fsdp_trainer.optim.schedules import learning_rate, peak_learning_rate
from fsdp_trainer.parallel.compile import Compilations
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.batches import Batches, StepPlan, row_ranges
from fsdp_trainer.training.corruption import Corruption
from fsdp_trainer.training.feed import Feed
from fsdp_trainer.training.garbage import collecting_garbage
from fsdp_trainer.training.gradients import GradientSync, beside, clip_gradients
from fsdp_trainer.training.guard import Guard, Stream, Verdict, own_loss
from fsdp_trainer.training.objective import CrossEntropy, by_source, negative_log_likelihood
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.samples import Samples
from fsdp_trainer.training.saving import Saves
from fsdp_trainer.training.stop import StopRequests
from fsdp_trainer.training.streaming import StreamBatches, StreamFeed

Outcome = tuple[str, int]
"""Why training ended, and the exit code."""
SLOW_DISK = 200e6  # bytes a second of each rank, before a checkpoint has shown it


@dataclass
class Trainer:
    """One rank's part of a run. total_steps: in all; last_row: where the data ends for a run counted in epochs."""

    cfg: TrainConfig
    model: Decoder
    optimizer: Optimizer
    guard: Guard
    stream: Stream
    corruption: Corruption
    gradient_sync: GradientSync
    batches: Batches
    validation: Batches | None
    samples: Samples
    progress: Progress
    total_steps: int
    last_row: int | None
    saves: Saves
    dtypes: dict[str, str]  # number formats in which the weights were imported, for the export
    observer: Observer
    profiler: Profiler
    stop: StopRequests
    changes: dict[
        str, list[Any]
    ]  # keys that are not as in the checkpoint it goes on from: [then, now]
    compilations: Compilations | None = None  # of a compiled run
    steps_compiled: int = 0  # in which blocks were
    stops: str | None = None  # why all ranks stop now

    def fit(self) -> Outcome | None:
        """Train until the last step, a signal or a time limit; None: until a spike that the run is to be taken back from."""
        self.guard.load(self.progress.recent, self.progress.spikes_in_a_row)
        with (
            self.feed(self.batches, self.plans()) as feed,
            collecting_garbage(self.cfg.train.gc_every) as collect,
        ):
            return self.train_on(feed, collect)

    def train_on(self, feed: Feed, collect: Callable[[int], None]) -> Outcome | None:
        """The loop of `fit`. Every line here happens in this order, once per step."""
        plans = self.plans()
        peak = peak_learning_rate(self.cfg.optim, self.cfg.batch)
        self.stop.margin = self.seconds_to_stop
        self.agree(limits=False)
        if self.progress.cut_short and not self.stops:
            self.conclude(collect)
        while not (self.finished or self.stops):
            self.profiler.before(self.progress.step + 1)
            phases.enter("data", self.progress.step + 1)
            plan = feed.complete(next(plans))
            lr = learning_rate(self.cfg.schedule, peak, plan.step, self.total_steps)
            loss, objective, sums, worst = self.forward_backward(plan, feed.of(plan))
            grad_norm = self.clip()
            verdict = self.update(lr, loss, grad_norm)
            if self.agree(
                keep=True
            ):  # that a rank had no data for this step, which changed nothing
                break
            self.progress.advance(plan)
            self.tell_compilations("training")
            judged = torch.stack([grad_norm.double(), *(value.double() for value in verdict)])
            self.observer.step(
                plan, self.progress, lr, loss, objective, beside(judged, loss), worst, sums
            )
            self.conclude(collect)
            self.profiler.after(self.progress.step)
            if self.stands_out:
                break
        self.profiler.close()
        if self.stands_out:
            self.remember()
            return None
        return self.stop_in_order() if self.stops else self.finish()

    def conclude(self, collect: Callable[[int], None]) -> None:
        """What follows a step besides the next one. A stop cuts it short."""
        step, left_over = self.progress.step, self.progress.cut_short
        self.progress.cut_short = None
        apart = self.due(self.cfg.train.validate_every)
        if apart and left_over != "samples":
            self.validate()
            self.tell_compilations("validation")
        if apart and not self.progress.cut_short:
            self.sample()
        if self.progress.cut_short:
            return
        # what a checkpoint holds must be on record before it is committed
        phases.enter("log")
        self.observer.write_if_due(step, last=self.worth_saving)
        collect(step)
        self.stop_if_nothing_is_learnt()
        if self.stands_out:
            return
        every = self.cfg.train.check_every
        if every and self.due(every) and not self.worth_saving:  # before a checkpoint, `save` looks
            self.check_replicas()
        if self.worth_saving:
            self.save(again=left_over is not None)  # what is stored knows of no conclusion
        if apart or self.worth_saving:  # which takes its time
            self.agree()

    @property
    def finished(self) -> str | None:
        """Why there is nothing more to train, if there is not: `finished` or `early_stop`."""
        patience = self.cfg.train.early_stop
        if patience is not None and self.progress.stale >= patience:
            return "early_stop"
        return "finished" if self.progress.step >= self.total_steps else None

    @property
    def stands_out(self) -> bool:
        """Whether the run is to be taken back from a spike."""
        return bool(self.observer.spike) and self.cfg.train.on_spike == "rewind"

    @property
    def worth_saving(self) -> bool:
        """Whether there is a checkpoint of this step."""
        best = self.cfg.checkpoint.best and self.progress.best_step == self.progress.step
        return best or bool(self.finished) or self.due(self.cfg.checkpoint.every)

    def plans(self) -> Iterator[StepPlan]:
        """Of the steps to come."""
        progress = self.progress
        steps = self.batches.steps(
            self.cfg.batch.rows, self.last_row, progress.step, progress.rows, progress.left_out
        )
        return islice(steps, max(0, self.total_steps - self.progress.step))

    def count_steps(self) -> None:
        """How many there will be in all, of a run counted in epochs: steps so far may have had other rows, and some rows are left out."""
        if self.last_row is not None:
            rows, left_out = self.progress.rows, self.progress.left_out
            changed = max(
                [rows, *(min(stop, self.last_row) for _, stop in left_out)]
            )  # from where on all steps are whole, but the last
            steps = sum(1 for _ in row_ranges(self.cfg.batch.rows, changed, rows, left_out))
            steps += max(0, math.ceil((self.last_row - changed) / self.cfg.batch.rows))
            self.total_steps = self.observer.total_steps = self.progress.step + steps

    def feed(self, batches: Batches, plans: Iterator[StepPlan]) -> Feed:
        """This rank's part of all plans."""
        if isinstance(batches, StreamBatches):
            patience, observer = parse_duration(self.cfg.launch.data_timeout), self.observer
            return StreamFeed(
                batches,
                plans,
                self.cfg.data.prefetch,
                self.stop,
                self.progress,
                patience,
                observer.event,
                observer.console.say,
            )
        return Feed(batches, plans, self.cfg.data.prefetch, self.stop)

    def agree(self, limits: bool = True, keep: bool = False) -> bool:
        """All ranks learn whether they stop, and whether a save in the background failed.

        Returns whether a rank had no data because of the stop. Raises RunFailed on all of them if one could not read its, UserError for what it read;
        keep: after a checkpoint of what was trained.
        """
        phases.enter("agree")
        agreement = self.stop.agreed(self.saves.store.failed, limits)
        self.stops = self.stops or agreement.reason
        if agreement.save_failed:
            phases.enter("staging")  # other ranks may yet write their part
            self.saves.settle(self.progress, self.next_save)
        if agreement.missing and (told := [why for why in gather(self.stop.missing) if why]):
            if keep and self.progress.step:
                self.observer.write_if_due(self.progress.step, last=True)
                self.save_last()
            self.stop.leaving = True
            raise next(
                (why for why in told if isinstance(why, UserError)),
                RunFailed("\n".join(map(str, told))),
            )
        return agreement.missing

    def must_stop(self, during: str) -> bool:
        """The same in a phase that can be cut short."""
        missing = not self.stops and self.agree()
        phases.enter(during)
        return bool(missing or self.stops)

    def seconds_to_stop(self) -> float:
        """From one boundary to the next, and to a committed checkpoint there: by the longest seen so far, with something to spare."""
        save = self.saves.store.longest_save
        if not save:
            save = (
                sum(p.numel() * p.element_size() for p in self.model.parameters())
                * 3
                / dist.get_world_size()
                / SLOW_DISK
            )
        saves = 2 if self.cfg.checkpoint.mode == "async" else 1  # one may be on its way
        return self.observer.longest_write + 1.25 * saves * save + 2.0

    def forward_backward(
        self, plan: StepPlan, batches: Iterator[MicroBatch]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All micro-batches of a step. Gradients end up sharded and summed; returns the step's loss and objective over all ranks, on the device.

        And, of several sources, the [2 × sources] sums of `by_source`, empty for one; and of every rank, [2, ranks], its highest `own_loss` and that micro-batch's place.
        """
        total = self.sums_of(self.batches)
        minimised, worst = total.new_zeros(1), total.new_zeros(2, self.batches.ranks)
        own: list[Tensor] = []
        count = self.batches.count(plan)
        for i, batch in enumerate(batches):
            weights = batch.weights / (plan.weight or 1.0)  # a step may have no target
            if (
                i == 0
                and self.cfg.train.check_every
                and plan.step % self.cfg.train.check_every == 0
            ):
                self.corruption.check_computation(
                    plan.step, partial(self.computed_apart, batch, weights)
                )
            self.gradient_sync.before(last=i == count - 1)
            objective, scores = self.compute(batch, weights)
            minimised += objective
            loss = negative_log_likelihood(scores, weights)
            self.add_to(total, loss, scores, batch)
            mean = (
                loss
                * (plan.weight or 1.0)
                / batch.weights.sum().clamp_min(torch.finfo(torch.float32).tiny)
            )
            own.append(own_loss(mean, self.stream.take()))
            phases.enter("data")
        phases.enter("backward")  # which ends with what the ranks have in common
        worst[0, self.batches.rank], worst[1, self.batches.rank] = torch.stack(own).max(0)
        if self.stop.missing is not None:
            total[0] = math.nan  # no rank updates its weights
        reduced = torch.cat([minimised, total, worst.flatten()])
        if dist.get_world_size() > 1:
            dist.all_reduce(reduced)
        end = len(reduced) - worst.numel()
        return reduced[1], reduced[0], reduced[2:end], reduced[end:]

    def compute(self, batch: MicroBatch, weights: Tensor) -> tuple[Tensor, Scores]:
        """Forward and backward of a micro-batch: the objective's value and the scores."""
        phases.enter("forward")
        objective, scores = self.model(
            batch, CrossEntropy(weights, self.cfg.loss.label_smoothing, self.cfg.loss.z_loss)
        )
        phases.enter("backward")
        objective.backward()
        return objective.detach(), scores

    def computed_apart(
        self, batch: MicroBatch, weights: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The objective's value, the gradient of the activations and those of the parameters; of the step's own gradients nothing is there yet."""
        self.gradient_sync.before(last=True)
        objective, _ = self.compute(batch, weights)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return objective, self.stream.take(), gradients

    def sums_of(self, batches: Batches) -> Tensor:
        """[1 + 2 × sources] float64 zeros: a loss, and the sums of `by_source` if there are several sources."""
        names = batches.source_names
        return torch.zeros(
            1 + 2 * len(names) * (len(names) > 1), device=batches.device, dtype=torch.float64
        )

    def add_to(self, sums: Tensor, loss: Tensor, scores: Scores, batch: MicroBatch) -> None:
        """A micro-batch's part, without a wait for the device."""
        sums[0] += loss
        if batch.sources is not None:
            sums[1:] += by_source(scores, batch.weights, batch.sources, len(sums) // 2).flatten()

    def clip(self) -> Tensor:
        """Clip the gradients; returns their global norm before, a scalar where they lie: on the device, or offloaded on the host."""
        phases.enter("clip")
        return clip_gradients(self.model, self.cfg.optim.grad_clip, self.cfg.optim.grad_clip_value)

    def update(self, lr: float, loss: Tensor, grad_norm: Tensor) -> Verdict:
        """One optimizer step, or none on any rank if a number is not finite, or stands out with train.on_spike=skip; returns which, beside `grad_norm`.

        The optimizer works there, so it must know there: offloaded, it would otherwise read a copy that is still on its way.
        """
        phases.enter("update")
        verdict = self.guard.judge(beside(loss, grad_norm), grad_norm)
        set_learning_rate(self.optimizer, lr)
        step_unless(self.optimizer, verdict.skip)
        self.optimizer.zero_grad(set_to_none=True)
        return verdict

    def tell_compilations(self, during: str) -> None:
        """On record what was compiled; blocks that are compiled again after the second step cost time that the user should hear of."""
        graphs, cached = self.compilations.new() if self.compilations else (0, 0)
        if not graphs:
            return
        self.observer.event(
            "compile", step=self.progress.step, during=during, graphs=graphs, cached=cached
        )
        self.steps_compiled += during == "training"
        if during == "training" and self.steps_compiled > 1:
            self.observer.console.say(
                f"compile: blocks were compiled again in step {self.progress.step:,}; TORCH_LOGS=recompiles in the environment says why"
            )

    def due(self, every: int | None) -> bool:
        """Whether something that happens every so many steps, and at the end, happens after this one."""
        return self.progress.step == self.total_steps or (
            every is not None and self.progress.step % every == 0
        )

    @torch.no_grad()
    def validate(self) -> None:
        """Mean loss over exactly the validation set: the same figure for every number of ranks."""
        if self.validation is None:
            return
        phases.enter("validation")
        with self.observer.apart("validation") as seconds:
            plan = next(self.validation.steps(self.validation.order.rows_per_epoch, None))
            total = self.sums_of(self.validation)
            with self.feed(self.validation, iter([plan])) as feed:
                for batch in feed.of(plan):
                    if self.must_stop("validation"):
                        self.progress.cut_short = "validation"
                        break
                    scores = self.model(batch)
                    self.add_to(
                        total, negative_log_likelihood(scores, batch.weights), scores, batch
                    )
            reshard(self.model)
            if self.progress.cut_short:
                return
            dist.all_reduce(total)
            dist.broadcast(total, 0)  # the ranks decide by it: it must be the same to the last bit
            total_loss, *sums = total.tolist()
            loss = total_loss / (plan.weight or math.nan)
            self.observer.validated(
                self.progress.step, loss, losses(self.validation.source_names, sums), seconds()
            )
            self.progress.validated(loss, self.cfg.train.early_stop_delta)

    def sample(self) -> None:
        """What the model says to train.sample_prompts now."""
        if self.samples.prompts:
            phases.enter("samples")
            with self.observer.apart("samples"):
                answers = self.samples.take(self.model, lambda: self.must_stop("samples"))
                reshard(self.model)
                if answers is None:
                    self.progress.cut_short = "samples"
                else:
                    self.observer.sampled(self.progress.step, answers)

    def save(self, again: bool = False) -> None:
        """A checkpoint of this step, unless there is one."""
        if self.saves.newest == self.progress.step and not again:
            return
        if self.cfg.train.check_every:
            with self.observer.apart("checkpoint"):
                self.check_replicas()
        phases.enter("staging")
        self.remember()
        self.tell_sources()
        self.saves.save(self.progress, self.tensors(), self.state, self.next_save)

    def tell_sources(self) -> None:
        """On record, what a mixture has given so far."""
        if self.observer.records and len(self.batches.order.components) > 1:
            self.observer.event(
                "data",
                step=self.progress.step,
                sources=self.batches.order.report(self.progress.rows),
            )

    def save_last(self) -> None:
        """A checkpoint of this step, whatever it takes. Raises RunFailed."""
        phases.enter("staging")  # as long as a save may take
        self.saves.insist(self.progress, self.save)
        self.stop.leaving = True

    @property
    def next_save(self) -> int | None:
        """After which step the next checkpoint is due; None where this is the last."""
        every, step = self.cfg.checkpoint.every or self.total_steps, self.progress.step
        return (
            None
            if self.stops or step == self.total_steps
            else min(self.total_steps, (step // every + 1) * every)
        )

    def remember(self) -> None:
        """What the coming steps are judged by, and what they read, is part of where the run stands. Collective."""
        self.progress.recent, self.progress.spikes_in_a_row = self.guard.state()
        if isinstance(self.batches, StreamBatches):
            self.progress.streams = self.batches.place(self.progress)

    def check_replicas(self) -> None:
        """Raise RunFailed if replicas no longer hold the same bits."""
        phases.enter("check")
        self.corruption.check_replicas(self.progress.step, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: weights and optimizer state."""
        return weights(self.model) | optimizer_state(self.model, self.optimizer)

    def state(self) -> dict[str, Any]:
        """What a checkpoint remembers besides tensors."""
        self.progress.segments = [
            *self.progress.segments[:-1],
            self.batches.order.state(self.progress.rows),
        ]
        return {
            **asdict(self.progress),
            "total_steps": self.total_steps,
            "dtypes": self.dtypes,
            **self.fingerprints(),
        }

    def fingerprints(self) -> dict[str, str | None]:
        """Of the data, and of what it is validated on."""
        return {
            "data": self.batches.order.fingerprint,
            "validation": self.validation.order.fingerprint if self.validation else None,
        }

    def stop_if_nothing_is_learnt(self) -> None:
        """Raise RunFailed after train.max_skipped skipped steps in a row; known where the observer has read the device."""
        if self.observer.skipped_in_a_row >= self.cfg.train.max_skipped:
            phases.enter("staging")
            self.saves.settle(self.progress, self.next_save)
            good = (
                self.saves.store.folder / checkpoint_name(self.saves.newest)
                if self.saves.newest >= 0
                else "none"
            )
            raise RunFailed(
                f"the loss or gradient was not finite for {self.observer.skipped_in_a_row} steps in a row, up to step {self.progress.step}.\n"
                f"Nothing was learnt from them. The last good checkpoint: {good}. Try a lower optim.lr, "
                "more schedule.warmup_steps, or look at the data with  fsdp-trainer preview"
            )

    def stop_in_order(self) -> Outcome | None:
        """Leave so that the same command goes on from here; None: not before the run was taken back. Raises RunFailed if no checkpoint can be written."""
        assert self.stops
        self.observer.write_if_due(self.progress.step, last=True, whole=not self.progress.cut_short)
        if self.stands_out:  # which is known only now: a resume from here would never hear of it
            self.remember()
            return None
        self.observer.event(
            "signal" if self.stops.startswith("SIG") else self.stops,
            step=self.progress.step,
            reason=self.stops,
        )
        if self.finished and not self.progress.cut_short:
            return self.finish()
        if self.progress.step:
            self.save_last()
        return self.stops, 75

    def finish(self) -> Outcome:
        """The end of the data, of the steps or of patience."""
        self.save_last()
        reason = self.finished
        assert reason
        if reason == "early_stop":
            self.observer.event(
                reason,
                step=self.progress.step,
                best_step=self.progress.best_step,
                best_loss=self.progress.best_loss,
            )
        return reason, 0
