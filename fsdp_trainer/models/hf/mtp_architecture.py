"""The architecture of a model with its head for a further token, for either implementation."""

from dataclasses import replace

from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.further_blocks import HEADS, stored_heads


def with_mtp_head(config: ModelConfig, setting: str, without: str) -> ModelConfig:
    """Return this architecture with its head for a further token, if it has not got it already.

    setting: what asks for it, KEY=VALUE; without: the setting that does not. Raises UserError for a
    model that has no such head, or one that is not computed here.
    """
    if config.mtp_heads:
        return config
    if problem := why_no_head(config, f"Use  {without}"):
        raise UserError("there is no MTP head that is computed", setting, problem)
    config = replace(config, mtp_heads=1)
    if not config.by_transformers:
        return config
    # imports transformers
    from fsdp_trainer.models.hf.hf_config import build_hf_model, describe

    return replace(config, counted=describe(build_hf_model(config)).counted)


def why_no_head(config: ModelConfig, without: str) -> str:
    if config.family not in HEADS:
        return f"{config.family} has no head that is computed; {', '.join(HEADS)} have.\n{without}"
    count = stored_heads(config)
    if count != 1:
        reason = f"config.json counts {count} MTP heads, and one is computed"
        return f"{reason}.\n{without}" + ("  or a folder with its head" if count == 0 else "")
    if config.by_transformers and not (config.documents_attention and config.packs):
        return f"documents of a row cannot be kept apart in {config.family} here.\n{without}"
    return ""
