"""A metric: the share of supervised tokens that the model would have guessed with even odds.

    fsdp-trainer --import metric +recipe=quickstart

from this folder. It stands in metrics.jsonl, the trackers and the report.
"""

import torch

import fsdp_trainer


@fsdp_trainer.register("metric", "confident_share")
class ConfidentShare:
    """Two sums over micro-batches and ranks: tokens with a probability above 1/2, and all."""

    size = 2

    def part(self, result):
        """Return what a micro-batch adds: [2], on the device, without a wait for it."""
        supervised = result.batch.weights > 0
        confident = supervised & (result.scores.log_probability.exp() > 0.5)
        return torch.stack([confident.sum(), supervised.sum()]).double()

    def written(self, sums):
        """Return what metrics.jsonl says of the step's sums."""
        return {"confident_share": sums[0] / sums[1] if sums[1] else None}
