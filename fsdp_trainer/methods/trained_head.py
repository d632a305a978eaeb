"""The head of the model in training, which its method decides."""

from collections.abc import Sequence

from fsdp_trainer.config.methods import MethodSpec, ObjectiveChoice
from fsdp_trainer.data.records.labelled_texts import LABELLED, QUERIES, TAGGED
from fsdp_trainer.data.records.record_formats import OF_HEADS
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.errors import UserError
from fsdp_trainer.methods.labels import labelled
from fsdp_trainer.models.config import CLASSIFIER, TAGGER, ModelConfig
from fsdp_trainer.models.from_config.resolve import with_trained_head


def with_head(
    config: ModelConfig, choice: ObjectiveChoice, source: str | None, stores: Sequence[TokenStore]
) -> ModelConfig:
    """Return the architecture with the head that the method trains.

    source: model.init_from. stores: that name the labels. Raises UserError for a model of scores if
    the method trains on text.
    """
    method, what = choice.method, f"model.init_from={source}"
    if reason := why_no_head(config, method):
        raise UserError("this model is not trained so", what, reason)
    if not method.scores:
        if reason := why_no_text(config):
            raise UserError("the model writes no text", what, reason)
        return with_trained_head(config, choice.mtp)
    if method.reads == QUERIES:
        own = config.pooling or ("mean" if config.encoder else "last")
        return config.with_pooling(own if choice.pooling == "auto" else choice.pooling)
    if reason := why_another_head(config, method):
        raise UserError("the model has another head", what, reason)
    if method.reads in (LABELLED, TAGGED):
        return labelled(config, choice, stores)
    return config.with_labels()


def why_no_text(config: ModelConfig) -> str:
    """Return why a model writes no text; "" if it does."""
    if config.encoder:
        uses = "objective=classify  tag  embed  or  rerank"
        return f"{config.family} is an encoder.\nUse  {uses}"
    if not config.is_causal:
        reason = f"has model.attention_direction={config.attention_direction}, which shows the "
        reason += "token that a language model learns to predict.\n"
        return reason + "Use  causal  or  objective=embed, rerank or classify"
    uses = "objective=reward  for one score,  classify  for labels,  embed  for embeddings"
    reason = f"is a model of scores or embeddings.\nUse  {uses}"
    return "" if config.predicts else reason


def why_another_head(config: ModelConfig, method: MethodSpec) -> str:
    """Return why a model's own head is not the one that a method trains; "" if it may be."""
    if config.scores and config.tags != (method.reads == TAGGED):
        use = "objective=tag" if config.tags else "objective=classify  or  rerank"
        return f"has labels of {'tokens' if config.tags else 'texts'}.\nUse  {use}"
    if config.scores > 1 and method.reads not in (LABELLED, TAGGED):
        return f"has {config.scores} labels, and a reward model one.\nUse  objective=classify"
    return ""


DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", CLASSIFIER, TAGGER)
"""Endings of the names of transformers' classes that read a text from its beginning to its end."""


WITHOUT_TAGGERS = ("gemma3_text", "olmo2", "olmoe")
"""Families of ours for which transformers has no class for labels of tokens."""


def why_no_head(config: ModelConfig, method: MethodSpec) -> str:
    """Return why transformers' class cannot have a method's head; "" if it can."""
    name = str((config.source.get("architectures") or [""])[0])
    if method.reads == TAGGED and config.family in WITHOUT_TAGGERS:
        return f"transformers has no class for labels of tokens by {config.family}, to read it"
    if not config.by_transformers or config.encoder or method.reads not in OF_HEADS:
        return ""
    if not name.endswith(DECODERS) and not config.pooling:
        return f"{name} neither writes nor fills gaps, and gets no head (docs/heads.md)"
    return ""
