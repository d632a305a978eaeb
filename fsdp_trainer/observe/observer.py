"""Report of a run's progress to its files, trackers and console. It makes no decisions."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_trainer.base import phases
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.base.process import peak_resident_bytes
from fsdp_trainer.base.recorded import as_written
from fsdp_trainer.config.devices import peak_flops
from fsdp_trainer.config.schema import Logging
from fsdp_trainer.extensions import CALLBACKS, RunInfo
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.console import (
    Console,
    progress_line,
    shortened,
    tasks_line,
    validation_line,
)
from fsdp_trainer.observe.flops import TrainedWork, causal_flops, palm_flops
from fsdp_trainer.observe.records import Records
from fsdp_trainer.observe.step_log import StepReport, finite_or_none
from fsdp_trainer.observe.tracker_threads import Trackers

STEPS_OF_ETA = 50  # the last steps, whose mean time predicts the remaining time


@dataclass(eq=False)
class Observer:
    """The reporting of one rank. Only rank 0 has records and trackers.

    Methods that all ranks must call together are marked as collective. work: the arithmetic of a
    step.
    """

    console: Console
    records: Records | None
    device: torch.device
    config: ModelConfig
    seq_len: int
    work: TrainedWork

    def __post_init__(self) -> None:
        self.trackers: Trackers | None = None
        self.run: RunInfo | None = None
        """The run that is passed to callbacks; None as long as they are not called yet."""
        cuda = self.device.type == "cuda"
        self.peak = peak_flops(torch.cuda.get_device_name(self.device)) if cuda else None
        self.about: list[str] = []
        """Lines about model, world and data that were printed at the start."""
        self.last_loss: float | None = None
        """Loss of the last step whose line was written."""
        self._step_seconds: list[float] = []
        self._stands_by = False

    def call(self, method: str, *arguments: Any) -> None:
        if self.run:
            for callback in CALLBACKS.values():
                getattr(callback, method)(self.run, *arguments)

    def say(self, text: str) -> None:
        self.console.say(text)

    def introduce(self, lines: list[str]) -> None:
        self.about = lines
        for line in lines:
            self.say(line)

    def open_trackers(
        self, cfg: Logging, run: Path, resolved: Json, step: int, goes_back: bool
    ) -> None:
        """Start the configured trackers. Called on rank 0 only.

        resolved: the resolved configuration. step, goes_back: see Trackers.
        """
        self.trackers = Trackers(cfg, run, resolved, self.console.say, step, goes_back)

    def stand_by(self) -> None:
        """Leave files and trackers to another group of ranks, until they are opened again."""
        self._stands_by = True
        if self.records:
            self.records.stand_by()
        if self.trackers:
            self.trackers.close(0)
            self.trackers = None

    def take_up(self, step: int) -> None:
        """Begin to write the files, at the end of `step`. Called on rank 0 only."""
        self._stands_by = False
        assert self.records
        self.records.take_up(step)

    def event(self, name: str, **details: Any) -> None:
        if self.records:
            line = self.records.event(name, **as_written(details))
            if self.trackers:
                self.trackers.event(line)

    def write(
        self,
        reports: list[StepReport],
        metrics: list[Json],
        seconds: float,
        total_steps: int,
        last: bool,
        incomplete: bool,
    ) -> None:
        """Write the lines of these steps to metrics.jsonl, the trackers and the console.

        Collective.

        metrics: those of each step, by name. seconds: time of one step.
        last: whether the console's line stays. incomplete: whether the last line will be amended
        after a resume; trackers cannot amend a line, so they get it only then.
        """
        memory = self._memory()
        lines = [
            self._line(report, of_step, seconds, memory)
            for report, of_step in zip(reports, metrics, strict=True)
        ]
        lines[-1] |= {"time": round(time.time(), 3), "phases": phases.seconds_since_last_call()}
        if self.records:
            self.records.write(lines)
        tracked = lines[:-1] if incomplete else lines
        if self.trackers:
            for line in tracked:
                self.trackers.log(line)
        for line in lines:
            self.call("metrics", line)
        self._step_seconds = [*self._step_seconds, *[seconds] * len(lines)][-STEPS_OF_ETA:]
        steps_left = total_steps - lines[-1]["step"]
        seconds_left = steps_left * sum(self._step_seconds) / len(self._step_seconds)
        self.last_loss = lines[-1]["loss"]
        text = progress_line(lines[-1], total_steps, seconds_left, self.console.width)
        if not self._stands_by:
            self.console.progress(text, last)

    def _line(
        self,
        report: StepReport,
        metrics: Json,
        seconds: float,
        memory: float,
    ) -> Json:
        plan = report.plan.whole
        rates = {
            "tokens_per_second": plan.tokens / seconds,
            "step_seconds": seconds,
            "memory_gib": memory,
        }
        if self.peak:
            peak = dist.get_world_size() * self.peak * seconds
            config, tokens, cost = self.config, plan.tokens, plan.attention_cost
            rates["mfu_palm"] = palm_flops(config, tokens, self.seq_len, self.work) / peak
            rates["mfu_causal"] = causal_flops(config, tokens, cost, self.work) / peak
        first = {name: metrics[name] for name in ("loss", "objective") if name in metrics}
        return {
            "step": plan.step,
            **first,
            "grad_norm": finite_or_none(report.grad_norm),
            **{name: value for name, value in metrics.items() if name not in first},
            **plan.metrics,
            "lr": report.lr,
            **({"loss_scale": report.loss_scale} if report.loss_scale != 1 else {}),
            "tokens": report.tokens,
            "supervised_tokens": report.supervised_tokens,
            "time": report.time,
            **report.extra,
            **{name: round(value, 6) for name, value in rates.items()},
        }

    def _memory(self) -> float:
        """Return the peak memory so far in GiB, the largest of all ranks. Collective.

        On a GPU this is allocated memory, on a CPU resident memory.
        """
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self.device)
        else:
            used = peak_resident_bytes()
        largest = torch.tensor(used / 2**30, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()

    def skipped(self, report: StepReport, loss: float, suspects: Json) -> None:
        """Record a step whose update was skipped because of a number that was not finite.

        suspects: ranks and samples that may be the cause.
        """
        plan = report.plan
        metrics = {"loss": repr(loss), "grad_norm": repr(report.grad_norm)}
        self.event("skipped", step=plan.step, rows=[plan.start, plan.stop], **metrics, **suspects)

    def spike(self, report: StepReport, loss: float, suspects: Json, policy: str) -> None:
        """Record and print a spike.

        suspects: ranks and samples that may be the cause. policy: the value of train.on_spike.
        """
        plan = report.plan
        scores = round(report.loss_score, 2), round(report.grad_norm_score, 2)
        metrics = {"loss": loss, "grad_norm": report.grad_norm}
        metrics |= {"loss_score": scores[0], "grad_norm_score": scores[1]}
        rows = [plan.start, plan.stop]
        self.event("spike", step=plan.step, rows=rows, **metrics, policy=policy, **suspects)
        ranks, samples = suspects["ranks"], suspects["samples"]
        where = ", ".join(samples[:3]) + (" …" if len(samples) > 3 else "")
        update = "" if policy == "warn" else "; no update"
        self.console.say(
            f"spike in step {plan.step:,}: loss {loss:.4f} (score {scores[0]:.1f}), "
            f"|g| {report.grad_norm:.2f} (score {scores[1]:.1f}), highest loss on "
            f"rank {', '.join(map(str, ranks))}: {where}{update}"
        )

    def validated(
        self,
        step: int,
        loss: float | None,
        bits_per_byte: float | None,
        lowest: tuple[int | None, float | None],
        by_source: dict[str, float | None],
        seconds: float,
    ) -> None:
        """Record and print a validation. lowest: step and value of the lowest loss so far."""
        details: Json = {"loss": loss, "bits_per_byte": bits_per_byte}
        if by_source:
            details["losses"] = by_source
        self.event("evaluation", step=step, **details, seconds=round(seconds, 3))
        self.say(validation_line(step, loss, bits_per_byte, lowest, by_source))
        self.call("validation", step, loss)

    def evaluated(self, step: int, metrics: dict[str, dict[str, float]], seconds: float) -> None:
        self.event("tasks", step=step, tasks=metrics, seconds=round(seconds, 3))
        self.say(tasks_line(step, metrics))

    def checkpoint_committed(self, step: int, path: str, seconds: float, **details: Any) -> None:
        self.event("checkpoint", step=step, path=path, seconds=seconds, **details)
        self.say(f"saved  {path} in {seconds:.1f} s")
        self.call("checkpoint", step, Path(path))

    def amend(self, step: int, extra: Json) -> None:
        """Add entries to a line that is written already: that of the last step before a resume."""
        line = self.records.amend(step, extra) if self.records else None
        if line and self.trackers:
            self.trackers.log(line)

    def answered(self, step: int, answers: list[Json]) -> None:
        if self.records:
            self.records.answers_of(step, answers)

    def sampled(self, step: int, answers: list[tuple[str, str]]) -> None:
        """Record the model's answer to each prompt, and print the first one."""
        if self.records:
            self.records.samples_of(step, answers)
        if self.trackers:
            texts = enumerate(f"{prompt} → {text}" for prompt, text in answers)
            self.trackers.texts({f"samples/{i}": text for i, text in texts}, step)
        prompt, text = (" ".join(part.split()) for part in answers[0])
        self.console.say(f"sample {shortened(prompt, 40)} → {shortened(text, 100)}")
