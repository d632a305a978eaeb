"""Watches the step loop: collects scalars on the device, reads them when a write is due, and tells files, trackers and the console."""

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_trainer import phases
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.observe.console import Console, progress_line, shortened
from fsdp_trainer.observe.flops import causal_flops, palm_flops, peak_flops
from fsdp_trainer.observe.records import Records
from fsdp_trainer.observe.trackers import Trackers


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
        self.device, self.config, self.seq_len, self.every, self.total_steps = device, config, seq_len, every, total_steps
        self.source_names, self.more_than_loss = source_names or [], more_than_loss
        self.console = Console(quiet=not main)
        self.records = Records(run) if main else None
        self.trackers: Trackers | None = None
        self.peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.skipped_in_a_row = 0
        """Steps without an update, as of the last write."""
        self._pending: list[tuple[dict[str, Any], Tensor]] = []
        self._started = time.perf_counter()
        self._step_seconds: list[float] = []

    def step(
        self, plan: Any, progress: Any, lr: float, loss: Tensor, objective: Tensor, grad_norm: Tensor, not_finite: Tensor, sums: Tensor
    ) -> None:
        """Take note of a step; loss, objective, grad_norm, not_finite and the sums by source stay on the device."""
        line = {"step": plan.step, "lr": lr, "tokens": progress.tokens, "supervised_tokens": progress.supervised_tokens, "_plan": plan}
        scalars = torch.stack([value.double() for value in (loss, objective, grad_norm, not_finite)])
        self._pending.append((line, torch.cat([scalars, sums])))

    def validated(self, step: int, loss: float, losses: dict[str, float | None]) -> None:
        """The validation loss belongs to the line of the step it followed, which is not yet written. losses: of several sources, each."""
        said = finite_or_none(loss)
        self.event("evaluation", step=step, loss=said, **({"losses": losses} if losses else {}))
        self._pending[-1][0].update({"validation_loss": said} | ({"validation_loss_by_source": losses} if losses else {}))

    def sampled(self, step: int, answers: list[tuple[str, str]]) -> None:
        """What the model said to each prompt; the first is shown."""
        if self.records:
            self.records.samples_of(step, answers)
        if self.trackers:
            self.trackers.texts({f"samples/{i}": f"{prompt} → {text}" for i, (prompt, text) in enumerate(answers)}, step)
        prompt, text = (" ".join(part.split()) for part in answers[0])
        self.console.say(f"sample {shortened(prompt, 40)} → {shortened(text, 100)}")

    def event(self, name: str, **details: Any) -> None:
        """Into events.jsonl."""
        if self.records:
            self.records.event(name, **details)

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Time that is not training's: not counted in step_seconds."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def write_if_due(self, step: int, last: bool = False) -> None:
        """At a logging step, read the device and write all lines since the last time. Collective."""
        if not self._pending or not (last or step % self.every == 0):
            return
        phases.enter("read")
        values = torch.stack([scalars for _, scalars in self._pending]).cpu()  # the only wait for the device
        seconds = (time.perf_counter() - self._started) / len(self._pending)
        memory = self._memory()
        lines = [self._line(line, scalars, seconds, memory) for (line, _), scalars in zip(self._pending, values.tolist(), strict=True)]
        self._pending.clear()
        if self.records:
            self.records.write(lines)
        for line in lines:
            self._tell(line, shown=line is lines[-1], last=last)
        self._started = time.perf_counter()

    def _line(self, line: dict[str, Any], scalars: list[float], seconds: float, memory: float) -> dict[str, Any]:
        plan = line.pop("_plan")
        loss, objective, grad_norm, not_finite, *sums = scalars
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if not_finite else 0
        if not_finite:
            self.event("skipped", step=plan.step, rows=[plan.start, plan.stop], loss=repr(loss), grad_norm=repr(grad_norm))
        rates = {"tokens_per_second": plan.tokens / seconds, "step_seconds": seconds, "memory_gib": memory}
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

    def _tell(self, line: dict[str, Any], shown: bool, last: bool) -> None:
        if self.trackers:
            self.trackers.log(line)
        self._step_seconds = [*self._step_seconds[-49:], line["step_seconds"]]
        if shown:
            left = (self.total_steps - line["step"]) * sum(self._step_seconds) / len(self._step_seconds)
            self.console.progress(progress_line(line, self.total_steps, left), last)

    def _memory(self) -> float:
        """GiB at the peak so far, the largest over the ranks: allocated on the GPU, resident on the CPU."""
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self.device)
        else:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        largest = torch.tensor(used / 2**30, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.item()


def losses(names: list[str], sums: list[float]) -> dict[str, float | None]:
    """Mean loss of each source that was there. sums: of every source Σ weight · loss, then of every source Σ weight; {} if empty."""
    return {name: finite_or_none(sums[i] / sums[len(names) + i]) for i, name in enumerate(names) if sums and sums[len(names) + i]}


def finite_or_none(value: float) -> float | None:
    """JSON knows no NaN and no infinity."""
    return value if math.isfinite(value) else None
