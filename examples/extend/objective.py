"""An objective: focal loss (Lin et al. 2017), which looks less at tokens that are known.

    fsdp-trainer --import objective +recipe=quickstart objective.name=focal

from this folder. `loss` stays the negative log-likelihood; `objective` is what was minimised.
"""

import fsdp_trainer

GAMMA = 2.0


@fsdp_trainer.register("objective", "focal")
def focal(scores, weights):
    """Return Σ weight · (1 - p)^γ · -log p over some tokens: a scalar, differentiable in scores.

    scores.log_probability: [tokens] float32, of the target; weights: [tokens] float32, divided
    already by the whole step's Σ weight.
    """
    unsure = 1 - scores.log_probability.exp()
    return -(weights * unsure.pow(GAMMA) * scores.log_probability).sum()
