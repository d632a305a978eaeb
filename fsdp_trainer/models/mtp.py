"""A head that predicts the token after the next one (DeepSeek-V3, 2024, §2.2), and its loss.

It joins a token's last states with the embedding of the next token, computes one more block, and
shares embedding and output head with the model. Documents of a row do not see each other in it, and
a target is in the document of the token that predicts it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_trainer.models.head import Scores

LOGPROBS = "mtp"
"""Name among the auxiliary values: the log-probabilities of the head's targets."""


class MtpBlock(nn.Module):
    """Base class put before the class of a block, which then is such a head.

    Names are as in the folders of DeepSeek-V3 and GLM-4.5.
    """

    def add_parts(self, width: int, new_norm: Callable[[], nn.Module]) -> None:
        """Add the modules beside the block. width: of states and embeddings."""
        self.enorm, self.hnorm = new_norm(), new_norm()
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.ModuleDict({"norm": new_norm()})

    def forward(self, embedded: Tensor, states: Tensor, *args: Any, **named: Any) -> Tensor:
        """Return the states for the output head, [rows, length, hidden].

        embedded: of the next token of each. states: of the model, after its last norm. Further
        arguments: those of the block.
        """
        joined = torch.cat((self.enorm(embedded), self.hnorm(states)), -1)
        result = super().forward(self.eh_proj(joined), *args, **named)
        return self.shared_head["norm"](result if isinstance(result, Tensor) else result[0])


def of_next_tokens(embedded: Tensor) -> Tensor:
    """Return the embedding of each token's next one in its row; zeros after the last.

    embedded: [rows, length, hidden]. After a document's last token it is another document's, and no
    target is predicted from there.
    """
    return F.pad(embedded[:, 1:], (0, 0, 0, 1))


def scores_with_mtp(
    model: Any, batch: Any, objective: Any, token_share: Tensor | None
) -> tuple[Tensor, Scores, dict[str, Tensor]]:
    """Return the objective with that of the MTP head, the scores without it, auxiliary values.

    model: a Decoder; batch: a MicroBatch; objective: one with weights. Added is model.mtp_weight ·
    Σ weight · (loss of the head's prediction of the same targets, made one token earlier). As in
    the paper's equation 24 the divisor is that of the model's own loss. The output head is called
    once.
    """
    states, drafted, auxiliary = model.states_with_mtp(batch, token_share)
    index, weights = batch.index, objective.weights
    # the first token of a document is before its first target
    has_target = batch.positions.flatten().index_select(0, index) > 0
    earlier = (index - 1).clamp_min(0)
    own = states.flatten(0, 1).index_select(0, index)
    ahead = drafted.flatten(0, 1).index_select(0, earlier)
    both = torch.cat([weights, model.mtp_weight * weights * has_target])
    value, scores = model.lm_head(
        torch.cat([own, ahead]), batch.targets.repeat(2), replace(objective, weights=both)
    )
    count = len(index)
    of_model = Scores._make(None if each is None else each[:count] for each in scores)
    logprobs = torch.where(has_target, scores.log_probability[count:], 0.0)
    return value, of_model, auxiliary | {LOGPROBS: logprobs}
