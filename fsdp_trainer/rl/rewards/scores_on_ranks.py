"""Scores of answers on every rank; an error on one rank is raised on all."""

from collections.abc import Sequence

import torch.distributed as dist

from fsdp_trainer.base.distributed import gather
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.rl.rewards.reward import Attempt, Reward, score


def score_on_ranks(
    rewards: Sequence[Reward], attempts: Sequence[Attempt], group: dist.ProcessGroup | None = None
) -> list[list[float]]:
    """Return, for each reward, the unweighted scores of this rank's attempts. Collective.

    If a rank fails, raises the error of the first such rank on all ranks: a UserError or RunFailed.
    """
    scores: list[list[float]] = []
    failure: UserError | RunFailed | None = None
    try:
        scores = score(rewards, attempts)
    except (UserError, RunFailed) as error:
        failure = error
    except Exception as error:  # from a user's reward; the other ranks would wait for this rank
        failure = RunFailed(f"a reward failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
    own_rank = dist.get_rank() if dist.is_initialized() else 0
    for rank, other in enumerate(gather(failure, group)):
        if other is not None:
            raise failure if rank == own_rank and failure else other
    return scores
