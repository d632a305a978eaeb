"""The architecture of a folder whose model transformers' own class computes."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fsdp_trainer.base.remote_code import remote_code_is_allowed
from fsdp_trainer.models.config import COMPUTED_BY, Json, ModelConfig, is_classifier, stored_labels
from fsdp_trainer.models.hf.hf_config import build_hf_model, config_object, describe, sizes_of
from fsdp_trainer.models.hf.probe import probe


def read_hf_config(folder: Path, raw: Json) -> ModelConfig:
    """Return the architecture of a folder. raw: the content of its config.json.

    Raises UserError if transformers does not know it, or if it needs code that is not allowed.
    """
    known = {name: value for name, value in raw.items() if name != COMPUTED_BY}
    return _read(str(folder), json.dumps(known), remote_code_is_allowed())


@lru_cache(maxsize=64)
def _read(folder: str, text: str, trusted: bool) -> ModelConfig:
    raw = json.loads(text)
    config = ModelConfig(
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
    found = probe(config)
    config = replace(
        config,
        documents_attention=found.documents_attention,
        mixing=found.mixing,
        logit_factor=found.logit_factor,
        document_layers=found.document_layers,
    )
    return config.with_labels(*stored_labels(raw)) if is_classifier(raw) else config
