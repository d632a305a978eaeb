"""The independent formula of each method: a new method is a file beside this one, and a line."""

from collections.abc import Callable, Iterator
from functools import partial

from torch import Tensor

from fsdp_trainer.apps.prove.twins.of_answers import labelled_losses, sampled_losses
from fsdp_trainer.apps.prove.twins.of_embeddings import embedding_losses
from fsdp_trainer.apps.prove.twins.of_labels import class_losses, ranking_losses, tag_losses
from fsdp_trainer.apps.prove.twins.of_pairs import (
    of_dpo,
    of_ipo,
    of_orpo,
    of_simpo,
    pair_losses,
    reward_losses,
)
from fsdp_trainer.apps.prove.twins.of_tokens import distillation_losses, token_losses
from fsdp_trainer.apps.prove.twins.twin_step import TwinStep

FORMULAS: dict[str, Callable[[TwinStep], Iterator[Tensor]]] = {
    "sft": token_losses,
    "dpo": partial(pair_losses, paper=of_dpo),
    "ipo": partial(pair_losses, paper=of_ipo),
    "simpo": partial(pair_losses, paper=of_simpo),
    "orpo": partial(pair_losses, paper=of_orpo),
    "reward": reward_losses,
    "kto": labelled_losses,
    "distil": distillation_losses,
    "grpo": sampled_losses,
    "classify": class_losses,
    "tag": tag_losses,
    "rerank": ranking_losses,
    "embed": embedding_losses,
}
"""Functions that yield the parts of a step's loss, whose sum it is, by the name of the method."""
