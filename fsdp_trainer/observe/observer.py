"""Watches the step loop: collects scalars on the device, reads them when a write is due, and tells files, trackers and the console."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer import phases
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.console import Console, progress_line, shortened
from fsdp_trainer.observe.flops import causal_flops, palm_flops
from fsdp_trainer.observe.records import Records
from fsdp_trainer.observe.trackers import Trackers
from fsdp_trainer.plan.devices import peak_flops


class Observer:
    """Collective where it says so; only rank 0 has records and trackers."""

    def __init__(
        self,
        run: Path,
        main: bool,
        device: torch.device,
        config: ModelConfig,
        seq_len: int,
        every: int,
        total_steps: int,
        source_names: list[str] | None = None,
        more_than_loss: bool = False,
    ):
        """more_than_loss: whether what is minimised is another figure than the loss."""
        self.device, self.config, self.seq_len, self.every, self.total_steps = (
            device,
            config,
            seq_len,
            every,
            total_steps,
        )
        self.source_names, self.more_than_loss = source_names or [], more_than_loss
        self.console = Console(quiet=not main)
        self.records = Records(run, self.console.say) if main else None
        self.trackers: Trackers | None = None
        self.peak = (
            peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        )
        self.about: list[str] = []
        """What was told of model, world and data at the start."""
        self.skipped_in_a_row = 0
        """Steps without an update for a number that was not finite, as of the last write."""
        self.spike: Any = None
        """The first step that stood out since this was last None, as its plan; as of the last write."""
        self.on_spike = "warn"
        self.suspects: Callable[[Any, list[float], list[float]], dict[str, Any]] = (
            lambda plan, worst, which: {}
        )
        """Whose numbers were bad in a step: see Batches.suspects."""
        self.longest_write = 0.0
        """Seconds between two writes, but for the first, in which things are compiled."""
        self._writes = 0
        self._pending: list[tuple[dict[str, Any], Tensor]] = []
        self._started = time.perf_counter()
        self._step_seconds: list[float] = []

    def step(
        self,
        plan: Any,
        progress: Any,
        lr: float,
        loss: Tensor,
        objective: Tensor,
        judged: Tensor,
        worst: Tensor,
        sums: Tensor,
    ) -> None:
        """Take note of a step; loss, objective, judged (the gradient norm and what a Verdict has), worst and the sums by source stay on the device."""
        line = {
            "step": plan.step,
            "lr": lr,
            "tokens": progress.tokens,
            "supervised_tokens": progress.supervised_tokens,
            "_plan": plan,
        }
        line["time"] = round(time.time(), 3)
        self._pending.append(
            (line, torch.cat([torch.stack([loss, objective]).double(), judged, worst, sums]))
        )

    def validated(
        self, step: int, loss: float, losses: dict[str, float | None], seconds: float
    ) -> None:
        """The validation loss belongs to the line of the step it followed, which is not yet written. losses: of several sources, each.

        A run that was stopped amid the validation wrote that line before.
        """
        said = finite_or_none(loss)
        self.event(
            "evaluation",
            step=step,
            loss=said,
            **({"losses": losses} if losses else {}),
            seconds=round(seconds, 3),
        )
        more = {"validation_loss": said} | ({"validation_loss_by_source": losses} if losses else {})
        if self._pending:
            self._pending[-1][0].update(more)
        elif self.records and (line := self.records.amend(step, more)) and self.trackers:
            self.trackers.log(line)

    def sampled(self, step: int, answers: list[tuple[str, str]]) -> None:
        """What the model said to each prompt; the first is shown."""
        if self.records:
            self.records.samples_of(step, answers)
        if self.trackers:
            self.trackers.texts(
                {f"samples/{i}": f"{prompt} → {text}" for i, (prompt, text) in enumerate(answers)},
                step,
            )
        prompt, text = (" ".join(part.split()) for part in answers[0])
        self.console.say(f"sample {shortened(prompt, 40)} → {shortened(text, 100)}")

    def event(self, name: str, **details: Any) -> None:
        """Into events.jsonl."""
        if self.records:
            self.records.event(name, **details)

    @contextmanager
    def apart(self, what: str) -> Iterator[Callable[[], float]]:
        """Time that is not training's: not counted in step_seconds. Gives what tells how many seconds have passed."""
        started = time.perf_counter()
        yield lambda: time.perf_counter() - started
        self._started += time.perf_counter() - started

    def write_if_due(self, step: int, last: bool = False, whole: bool = True) -> None:
        """At a logging step, read the device and write all lines since the last time. Collective. whole: whether the last lacks nothing."""
        if not self._pending or not (last or step % self.every == 0):
            return
        phases.enter("read")
        values = torch.stack(
            [scalars for _, scalars in self._pending]
        ).cpu()  # the only wait for the device
        phases.enter("log")
        seconds = (time.perf_counter() - self._started) / len(self._pending)
        memory = self._memory()
        lines = [
            self._line(line, scalars, seconds, memory)
            for (line, _), scalars in zip(self._pending, values.tolist(), strict=True)
        ]
        lines[-1] |= {"time": round(time.time(), 3), "phases": phases.lately()}
        if self._writes:
            self.longest_write = max(self.longest_write, seconds * len(lines))
        self._writes += 1
        self._pending.clear()
        if self.records:
            self.records.write(lines)
        for line in lines:
            self._tell(
                line, shown=line is lines[-1], last=last, tracked=whole or line is not lines[-1]
            )
        self._started = time.perf_counter()

    def _line(
        self, line: dict[str, Any], scalars: list[float], seconds: float, memory: float
    ) -> dict[str, Any]:
        plan = line.pop("_plan")
        loss, objective, grad_norm, not_finite, spike, loss_score, norm_score, _, *rest = scalars
        ranks = dist.get_world_size()
        worst, which, sums = rest[:ranks], rest[ranks : 2 * ranks], rest[2 * ranks :]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if not_finite else 0
        if not_finite:
            whose = (
                self.suspects(plan, worst, which) if math.isinf(max(worst)) else {}
            )  # else each rank's were finite, and their sum was not
            self.event(
                "skipped",
                step=plan.step,
                rows=[plan.start, plan.stop],
                loss=repr(loss),
                grad_norm=repr(grad_norm),
                **whose,
            )
        if spike:
            self.spike = self.spike or plan
            self._tell_spike(
                plan,
                loss,
                grad_norm,
                round(loss_score, 2),
                round(norm_score, 2),
                self.suspects(plan, worst, which),
            )
        rates = {
            "tokens_per_second": plan.tokens / seconds,
            "step_seconds": seconds,
            "memory_gib": memory,
        }
        if self.peak:
            world = dist.get_world_size() * self.peak * seconds
            rates["mfu_palm"] = palm_flops(self.config, plan.tokens, self.seq_len) / world
            rates["mfu_causal"] = causal_flops(self.config, plan.tokens, plan.squares) / world
        # JSON has no NaN: null is a step that was skipped for it
        ordered = {"step": plan.step, "loss": finite_or_none(loss)}
        if self.more_than_loss:
            ordered["objective"] = finite_or_none(objective)
        ordered["grad_norm"] = finite_or_none(grad_norm)
        if sums:
            ordered["loss_by_source"] = losses(self.source_names, sums)
        return ordered | line | {name: round(value, 6) for name, value in rates.items()}

    def _tell_spike(
        self,
        plan: Any,
        loss: float,
        grad_norm: float,
        loss_score: float,
        norm_score: float,
        whose: dict[str, Any],
    ) -> None:
        scores = {
            "loss": loss,
            "grad_norm": grad_norm,
            "loss_score": loss_score,
            "grad_norm_score": norm_score,
        }
        self.event(
            "spike",
            step=plan.step,
            rows=[plan.start, plan.stop],
            **scores,
            policy=self.on_spike,
            **whose,
        )
        done = {"warn": "", "skip": "; no update", "rewind": "; no update"}[self.on_spike]
        self.console.say(
            f"spike in step {plan.step:,}: loss {loss:.4f} (score {loss_score:.1f}), |g| {grad_norm:.2f} (score {norm_score:.1f}), highest loss on "
            f"rank {', '.join(map(str, whose['ranks']))}: {', '.join(whose['samples'][:3])}{' …' if len(whose['samples']) > 3 else ''}{done}"
        )

    def _tell(self, line: dict[str, Any], shown: bool, last: bool, tracked: bool) -> None:
        if self.trackers and tracked:
            self.trackers.log(line)
        self._step_seconds = [*self._step_seconds[-49:], line["step_seconds"]]
        if shown:
            left = (
                (self.total_steps - line["step"])
                * sum(self._step_seconds)
                / len(self._step_seconds)
            )
            self.console.progress(progress_line(line, self.total_steps, left), last)

    def _memory(self) -> float:
        """GiB at the peak so far, the largest over the ranks: allocated on the GPU, resident on the CPU."""
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self.device)
        else:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
                1 if sys.platform == "darwin" else 1024
            )
        largest = torch.tensor(used / 2**30, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()


def losses(names: list[str], sums: list[float]) -> dict[str, float | None]:
    """Mean loss of each source that was there. sums: of every source Σ weight · loss, then of every source Σ weight; {} if empty."""
    return {
        name: finite_or_none(sums[i] / sums[len(names) + i])
        for i, name in enumerate(names)
        if sums and sums[len(names) + i]
    }


def finite_or_none(value: float) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if math.isfinite(value) else None
