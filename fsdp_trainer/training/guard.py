"""Detection of steps whose loss or gradient norm is an outlier or not finite.

Each step is judged on the device; the host reviews the verdicts when it reads the metrics.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.config.schema import Train
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.training.batches import StepPlan
from fsdp_trainer.training.progress import Progress

MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution, divided by its median absolute deviation."""
MIN_SPREAD = (0.02, 0.0), (0.01, 0.1)
"""Lower bounds of the spread, each for the loss and for the logarithm of the norm: first relative
to the median, then absolute. Without them any ripple of a smooth curve would be a spike."""
NEW_LEVEL = 5
"""Number of spikes in a row that count as a new level of the run: the window is then reset."""


class StepVerdict(NamedTuple):
    """Scalars on the device: float64 scores, else bool. skip: True if no rank makes the update."""

    not_finite: Tensor
    spike: Tensor
    loss_score: Tensor
    norm_score: Tensor
    skip: Tensor


class Guard:
    """Judges each step by comparing it with the steps before it.

    All ranks pass the same numbers and get the same verdict.

    The loss and the logarithm of the gradient norm each get a score: the distance above the median
    of the last train.spike_window steps, in robust standard deviations (median absolute deviation;
    Huber 1981, §5.1). The window contains neither spikes nor values that are not finite.
    """

    def __init__(self, cfg: Train, device: torch.device, progress: Progress):
        self.cfg, self.device = cfg, device
        self.min_share, self.min_spread = (
            torch.tensor(floor, dtype=torch.float64).to(device) for floor in MIN_SPREAD
        )
        self.load(progress)

    def load(self, progress: Progress) -> None:
        """Restore what `state` has returned; a window that is now smaller keeps the newest."""
        width = self.cfg.spike_window
        rows = [
            [torch.nan] * (width - len(row[-width:])) + list(row[-width:])
            for row in progress.recent
        ]
        self.recent = torch.tensor(rows, dtype=torch.float64).to(self.device)
        """The window, [2, window], newest last; NaN: not filled yet."""
        self.spikes_in_a_row = torch.tensor(progress.spikes_in_a_row).to(self.device)
        self.skipped = progress.skipped
        """Number of steps, up to the last review, that changed no weight."""
        self.skipped_in_a_row = 0
        """Number of steps in a row, up to the last review, that were skipped as not finite."""

    def state(self) -> dict[str, Any]:
        """Return the fields of Progress that the guard continues from. Waits for the device."""
        return {
            "recent": [row[~row.isnan()].tolist() for row in self.recent.cpu()],
            "spikes_in_a_row": int(self.spikes_in_a_row),
            "skipped": self.skipped,
        }

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> StepVerdict:
        """Judge this step's loss and gradient norm, scalars on the gradients' device."""
        not_finite = ~torch.isfinite(torch.stack([loss.float(), grad_norm.float()])).all()
        if self.cfg.on_spike == "ignore":
            no_score = torch.zeros_like(loss)
            return StepVerdict(
                not_finite, torch.zeros_like(not_finite), no_score, no_score, not_finite
            )
        now = torch.stack([loss.double(), grad_norm.double().log()])
        usable = torch.isfinite(now).all()  # a step without a target has a norm of 0
        median = nanmedian(self.recent)
        spread = nanmedian((self.recent - median[:, None]).abs()) * MAD_TO_SIGMA
        floor = (median.abs() * self.min_share).maximum(self.min_spread)
        scores = (now - median) / spread.maximum(floor)
        half_full = self.recent[0, self.cfg.spike_window // 2].isfinite()  # filled from the end
        high = usable & half_full & (scores > self.cfg.spike_score).any()
        in_a_row = torch.where(high, self.spikes_in_a_row + 1, 0)
        in_a_row = torch.where(usable, in_a_row, self.spikes_in_a_row)
        new_level = in_a_row >= NEW_LEVEL
        spike = high & ~new_level
        window = torch.where(new_level, torch.nan, self.recent)
        shifted = torch.cat([window[:, 1:], now[:, None]], 1)
        self.recent = torch.where(usable & ~spike, shifted, window)
        self.spikes_in_a_row = torch.where(new_level, 0, in_a_row)
        skip = not_finite | spike if self.cfg.on_spike in ("skip", "rewind") else not_finite
        loss_score, norm_score = torch.where(half_full, scores, 0.0)
        return StepVerdict(not_finite, spike, loss_score, norm_score, skip)

    def review(
        self,
        reports: list[StepReport],
        losses: list[float],
        suspects: Callable[[StepReport], dict[str, Any]],
        observer: Observer,
    ) -> StepPlan | None:
        """Record every skipped step and every spike; return the plan of the first spike, if any.

        suspects: function from a report to the ranks and samples that may have caused a bad step.
        Collective.
        """
        first_spike: StepPlan | None = None
        skips_spikes = self.cfg.on_spike in ("skip", "rewind")
        for report, loss in zip(reports, losses, strict=True):
            self.skipped += report.not_finite or (report.spike and skips_spikes)
            if report.not_finite:
                self.skipped_in_a_row += 1
                # if every rank's own loss was finite and only the sum was not, no rank is suspect
                own = torch.inf in report.worst_losses
                observer.skipped(report, loss, suspects(report) if own else {})
            else:
                self.skipped_in_a_row = 0
            if report.spike:
                first_spike = first_spike or report.plan
                observer.spike(report, loss, suspects(report), self.cfg.on_spike)
        return first_spike


class EmbeddingGradProbe:
    """Captures the gradient of the embedding's output in each backward.

    It is computed last in backward and never reduced over ranks, so a NaN in it comes from this
    rank's own micro-batch. Gradients of parameters are available only after they were summed over
    ranks.
    """

    def __init__(self, model: Decoder):
        self._gradient: Tensor | None = None
        if model.embedding is not None:  # only the first stage of a pipeline has it
            model.embedding.register_forward_hook(self._hook_output)

    def _hook_output(self, _module: object, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._keep)

    def _keep(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def pop(self) -> Tensor | None:
        """Return the gradient of the last backward, [rows, seq_len, hidden], and forget it.

        None if the embedding's output needs no gradient: nothing before the first block is trained.
        """
        gradient, self._gradient = self._gradient, None
        return gradient


def nanmedian(rows: Tensor) -> Tensor:
    """Return the lower median of each row's numbers, [rows]; NaN for a row without numbers.

    torch.nanmedian also returns an index, which is not deterministic on a GPU, so that
    train.deterministic does not allow it.
    """
    ordered = rows.sort(1).values  # NaN last
    numbers = rows.isnan().logical_not().sum(1, keepdim=True)
    return ordered.gather(1, (numbers - 1).clamp(min=0) // 2).squeeze(1)
