"""Steps whose loss or gradient norm stands out, and whose micro-batch it was. Everything stays on the device: nobody waits for it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_trainer.config.schema import Train
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.training.gradients import any_not_finite

TO_SIGMA = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
LEAST_SPREAD = (0.02, 0.0), (0.01, 0.1)
"""Of loss and of the norm's logarithm: as a share of the median, and at all. A curve as smooth as this has no spikes to measure others by."""
NEW_LEVEL = 5
"""Spikes in a row that are none: where the run is now, what was before is no measure any more."""


class Verdict(NamedTuple):
    """Of a step: bool scalars on the device, but for the scores (float64). skip: whether no rank makes the update."""

    not_finite: Tensor
    spike: Tensor
    loss_score: Tensor
    norm_score: Tensor
    skip: Tensor


class Guard:
    """Judges each step by the ones before it. All ranks are given the same numbers, to the last bit, and judge alike.

    A score is the distance above the median of the last train.spike_window steps, in robust standard deviations (median absolute deviation;
    Huber 1981, §5.1), of the loss and of the logarithm of the gradient norm. The window holds neither what is not finite nor spikes.
    """

    def __init__(self, cfg: Train, device: torch.device):
        """device: where gradients lie."""
        self.cfg, self.device = cfg, device
        self.share, self.least = (
            torch.tensor(floor, dtype=torch.float64).to(device) for floor in LEAST_SPREAD
        )
        self.load([[], []], 0)

    def load(self, recent: Sequence[Sequence[float]], in_a_row: int) -> None:
        """Go on from what `state` gave; a window that has become smaller keeps the newest."""
        width = self.cfg.spike_window
        rows = [[torch.nan] * (width - len(row[-width:])) + list(row[-width:]) for row in recent]
        self.recent = torch.tensor(rows, dtype=torch.float64).to(
            self.device
        )  # [2, window], newest last; NaN: not yet filled
        self.in_a_row = torch.tensor(in_a_row).to(self.device)

    def state(self) -> tuple[list[list[float]], int]:
        """The window, and how many spikes came in a row. Waits for the device."""
        return [row[~row.isnan()].tolist() for row in self.recent.cpu()], int(self.in_a_row)

    @torch.no_grad()
    def judge(self, loss: Tensor, grad_norm: Tensor) -> Verdict:
        """Of this step's loss and gradient norm, scalars on the device where gradients lie."""
        not_finite = any_not_finite(loss, grad_norm)
        if self.cfg.on_spike == "ignore":
            return Verdict(
                not_finite,
                torch.zeros_like(not_finite),
                torch.zeros_like(loss),
                torch.zeros_like(loss),
                not_finite,
            )
        now = torch.stack([loss.double(), grad_norm.double().log()])
        usable = torch.isfinite(now).all()  # a step without a target has a norm of 0
        median = self.recent.nanmedian(1).values
        spread = (self.recent - median[:, None]).abs().nanmedian(1).values * TO_SIGMA
        scores = (now - median) / spread.maximum(median.abs() * self.share).maximum(self.least)
        known = self.recent[
            0, self.cfg.spike_window // 2
        ].isfinite()  # the window fills from its end
        stands_out = usable & known & (scores > self.cfg.spike_score).any()
        in_a_row = torch.where(usable, torch.where(stands_out, self.in_a_row + 1, 0), self.in_a_row)
        anew = in_a_row >= NEW_LEVEL
        spike = stands_out & ~anew
        window = torch.where(anew, torch.nan, self.recent)
        self.recent = torch.where(
            usable & ~spike, torch.cat([window[:, 1:], now[:, None]], 1), window
        )
        self.in_a_row = torch.where(anew, 0, in_a_row)
        skip = not_finite | spike if self.cfg.on_spike in ("skip", "rewind") else not_finite
        loss_score, norm_score = torch.where(known, scores, 0.0)
        return Verdict(not_finite, spike, loss_score, norm_score, skip)


class Stream:
    """Takes the gradient of the embedding's output from each backward: what comes last of it, and holds this rank's own numbers alone.

    What goes wrong in a block's activations reaches it; parameters' gradients are summed over the ranks before anyone sees them.
    """

    def __init__(self, model: Decoder):
        self._gradient: Tensor | None = None
        model.model.embed_tokens.register_forward_hook(self._listen)

    def _listen(self, _module: object, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._keep)

    def _keep(self, gradient: Tensor) -> None:
        self._gradient = gradient

    def take(self) -> Tensor:
        """[rows, seq_len, hidden], of the last backward."""
        assert self._gradient is not None
        gradient, self._gradient = self._gradient, None
        return gradient


def own_loss(loss: Tensor, gradient: Tensor) -> Tensor:
    """A micro-batch's mean loss, float64; inf if that or the gradient of its activations is not finite."""
    return (loss.double() + 0 * gradient.sum(dtype=torch.float32)).nan_to_num(
        torch.inf, torch.inf, torch.inf
    )
