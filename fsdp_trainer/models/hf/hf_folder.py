"""The architecture of a folder whose model transformers' own class computes."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fsdp_trainer.base.remote_code import remote_code_is_allowed
from fsdp_trainer.models.config import (
    COMPUTED_BY,
    POOLING,
    TRAINED_MTP,
    Json,
    ModelConfig,
    is_classifier,
    is_embedding,
    stored_labels,
    stored_pooling,
)
from fsdp_trainer.models.hf.hf_config import (
    bare_class,
    build_hf_model,
    config_object,
    describe,
    is_encoder,
    sizes_of,
)
from fsdp_trainer.models.hf.mtp_architecture import with_mtp_head
from fsdp_trainer.models.hf.probe import probe


def read_hf_config(folder: Path, raw: Json) -> ModelConfig:
    """Return the architecture of a folder. raw: the content of its config.json.

    Raises UserError if transformers does not know it, or if it needs code that is not allowed.
    """
    known = {name: v for name, v in raw.items() if name not in (COMPUTED_BY, TRAINED_MTP)}
    config = _read(str(folder), json.dumps(known), remote_code_is_allowed())
    if raw.get(TRAINED_MTP) == 1 and config.predicts:
        return with_mtp_head(config, f"{TRAINED_MTP}=1", f"{TRAINED_MTP}=0")
    return config


@lru_cache(maxsize=64)
def _read(folder: str, text: str, trusted: bool) -> ModelConfig:
    raw = json.loads(text)
    encoder = is_encoder(raw)
    if encoder and not raw.get("architectures"):
        raw["architectures"] = [bare_class(raw)]
    config = ModelConfig(
        encoder=encoder,
        family=str(raw.get("model_type")),
        by_transformers=True,
        source=raw,
        folder=folder if trusted and "auto_map" in raw else "",
        **sizes_of(config_object(raw, folder)),
    )
    described = describe(build_hf_model(config))
    config = replace(
        config,
        hidden_size=described.hidden_size,
        tie_word_embeddings=described.tied,
        names=described.names,
        counted=described.counted,
        expert_blocks=described.expert_blocks,
    )
    facts = probe(config)
    if encoder:
        config = replace(config, max_position_embeddings=described.positions)
    config = replace(
        config,
        documents_attention=facts.documents_attention,
        mixing=facts.mixing,
        logit_factor=facts.logit_factor,
        document_layers=facts.document_layers,
        autocast=facts.autocast,
    )
    return with_own_head(config, Path(folder), "mean" if encoder else "last")


def with_own_head(config: ModelConfig, folder: Path, pooling: str) -> ModelConfig:
    """Return an architecture with the head that the folder's weights have.

    pooling: of an embedding model that names no other.
    """
    if is_embedding(config.source) and (not config.encoder or (folder / POOLING).is_file()):
        return config.with_pooling(stored_pooling(folder, pooling))
    is_whole = is_classifier(config.source)
    return config.with_labels(*stored_labels(config.source)) if is_whole else config
