"""The class of each training method, by objective.name."""

from pathlib import Path

from fsdp_trainer.methods.classification import LabelMethod
from fsdp_trainer.methods.distillation import DistillationMethod
from fsdp_trainer.methods.embedding import EmbeddingMethod
from fsdp_trainer.methods.kto import KtoMethod
from fsdp_trainer.methods.method import Method
from fsdp_trainer.methods.policy_gradient import PolicyGradientMethod
from fsdp_trainer.methods.preferences import PreferenceMethod
from fsdp_trainer.methods.reranking import RankingMethod
from fsdp_trainer.methods.stored_columns import RunRows
from fsdp_trainer.methods.tagging import TagMethod
from fsdp_trainer.training.setup.run_setup import RunSetup

CLASSES: dict[str, type[Method]] = {
    "sft": Method,
    "dpo": PreferenceMethod,
    "ipo": PreferenceMethod,
    "simpo": PreferenceMethod,
    "orpo": PreferenceMethod,
    "reward": PreferenceMethod,
    "kto": KtoMethod,
    "grpo": PolicyGradientMethod,
    "distil": DistillationMethod,
    "classify": LabelMethod,
    "embed": EmbeddingMethod,
    "rerank": RankingMethod,
    "tag": TagMethod,
}


def build_method(setup: RunSetup, rows: RunRows, checkpoint: Path | None) -> Method:
    """Return the run's training method; an objective of the user's own is one for tokens.

    See Method. Collective. Raises UserError.
    """
    choice = setup.cfg.objective
    return CLASSES.get(choice.name, Method)(setup, rows, checkpoint)
