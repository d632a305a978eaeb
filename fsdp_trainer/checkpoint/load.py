"""Loading of a complete model in one process, for inference and comparison."""

from pathlib import Path

import torch

from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.checkpoint.atomic_files import require_undamaged
from fsdp_trainer.checkpoint.frozen_weights import (
    load_weights,
    model_config,
    read_base,
    require_unchanged,
    require_unchanged_on_ranks,
    weights_on_disk,
)
from fsdp_trainer.checkpoint.huggingface import read_parameters
from fsdp_trainer.config.paths import ADAPTER_CONFIG, find_checkpoint, is_adapter
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.models.config import AUTO, ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.mtp_architecture import with_mtp_head
from fsdp_trainer.models.hf.new_model import meta_decoder

WRONG_HEAD = "the model has another head"
OF_OTHER_HEADS = ("SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION")
"""PEFT's names of what an adapter is for if its model writes no text."""


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    merge_into: str = "trained",
    scores: bool = False,
    implementation: str = AUTO,
    mtp: bool = False,
) -> Decoder:
    """Return a decoder from a Hugging Face folder, a checkpoint or a run, ready for `logits`.

    The adapter of a run or of a PEFT folder is merged into its base model. merge_into: for a base
    kept in 4 bits, `trained` merges into the rounded weights that it was trained on, `original`
    into those before rounding. scores: True for a reward model, whose only logit is a score.
    implementation: as model.implementation. mtp: True: with the MTP head. Raises UserError, also if
    the model has no such head, or if `scores` does not fit it, and RunFailed.
    """
    config = whole_config(path, implementation)
    if not (config.scores == 1 if scores else config.predicts):
        kind = "a language model"
        use = "one trained with  objective=reward" if scores else "the model that it began with"
        if not config.predicts:
            kind = "a model of scores or embeddings, which writes no text"
            if not config.tags:
                use += f", or  fsdp-trainer chat {path}  , which answers {endpoint_of(config)}"
        raise UserError(WRONG_HEAD, str(path), f"is {kind}.\nUse  {use}")
    return read_model(path, device, dtype, merge_into, implementation=implementation, mtp=mtp)


def load_reader(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    implementation: str = AUTO,
) -> Decoder:
    """Return a model whose head gives texts numbers, as `load_model` does. Raises UserError."""
    config = whole_config(path, implementation)
    if config.predicts or config.tags:
        kind = "a language model" if config.predicts else "a model of words' labels"
        reason = f"is {kind}.\nUse  one trained with  objective=embed, rerank or classify"
        if config.tags:
            reason += ", or transformers' pipeline('token-classification') with its export"
        raise UserError(WRONG_HEAD, str(path), reason)
    return read_model(path, device, dtype, implementation=implementation)


def whole_config(path: str | Path, implementation: str) -> ModelConfig:
    """Return the architecture of a folder, a run or a checkpoint. Raises UserError for damage."""
    checkpoint = find_checkpoint(path)
    if checkpoint:
        require_undamaged(checkpoint)
    source = Path(path).expanduser()
    config = model_config(source, implementation)
    title = "cannot read the adapter"
    described = read_object(source / ADAPTER_CONFIG, title) if is_adapter(source) else {}
    kind = described.get("task_type")
    if kind in OF_OTHER_HEADS and not (config.scores or config.pooling):
        reason = f"is an adapter of {kind}, and PEFT's folder does not describe the head.\n"
        reason += "Use  the run that wrote it"
        raise UserError(WRONG_HEAD, str(path), reason)
    return config


def endpoint_of(config: ModelConfig) -> str:
    """Return the address at which the server of `chat` answers by this head."""
    if config.predicts:
        return "/v1/chat/completions"
    if config.pooling:
        return "/v1/embeddings"
    return "/v1/rerank" if config.scores == 1 and not config.problem else "/v1/classify"


def read_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    merge_into: str = "trained",
    is_checked: bool = False,
    implementation: str = AUTO,
    mtp: bool = False,
) -> Decoder:
    """Return a decoder as `load_model` does, without checking the files and the kind of model.

    is_checked: frozen weights are not compared with their digests either.
    """
    path = Path(path).expanduser()
    config = model_config(path, implementation)
    model = empty_model(with_stored_head(config, path) if mtp else config, device, dtype)
    read_into(model, path, merge_into, alone=True, is_checked=is_checked)
    return model


def empty_model(
    config: ModelConfig, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Decoder:
    model = meta_decoder(config).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    model.fill_buffers()
    return model.eval().requires_grad_(False)


def with_stored_head(config: ModelConfig, path: Path) -> ModelConfig:
    """Return the architecture of a source of weights with its MTP head. Raises UserError."""
    if find_checkpoint(path) and not config.mtp_heads:
        reason = f"{path} was trained without its MTP head.\nUse an export of it"
        raise UserError("there is no MTP head", "mtp=true", reason)
    return with_mtp_head(config, "mtp=true", "mtp=false")


def read_into(
    model: Decoder,
    path: Path,
    merge_into: str = "trained",
    alone: bool = False,
    is_checked: bool = False,
) -> None:
    """Fill a model, sharded or not, with the weights of a folder, a checkpoint or a run.

    Collective, unless this process is `alone` in it. is_checked: see read_model. Raises UserError
    and RunFailed.
    """
    checkpoint = find_checkpoint(path)
    try:
        if checkpoint and not read_base(checkpoint).adapters:
            load_weights(model, checkpoint, {}, alone, is_checked)
        else:
            if (checkpoint or is_adapter(path)) and not is_checked:
                require = require_unchanged if alone else require_unchanged_on_ranks
                require(model.config, checkpoint or path)
            read_parameters(model, weights_on_disk(model.config, checkpoint or path, merge_into))
    except OSError as error:
        raise RunFailed(f"cannot read the weights: {error}") from None
