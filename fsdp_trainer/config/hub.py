"""Download of models from the Hugging Face hub."""

from pathlib import Path

from fsdp_trainer.base.remote_code import remote_code_is_allowed
from fsdp_trainer.config.paths import base_of_adapter, is_adapter, is_hub_id
from fsdp_trainer.errors import UserError

TEXTS = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHTS = ["*.safetensors"]
CODE = ["*.py"]
"""Only with trust_remote_code=true."""


def fetch(name: str, weights: bool = True, key: str = "model.init_from") -> Path:
    """Return the local folder of a model; a hub id is downloaded into the hub's own cache.

    For an adapter, its base model is downloaded too, and the adapter's folder is returned.
    weights: False for configuration and tokenizer only. key: configuration key that names the
    model, for messages. Raises UserError.
    """
    folder = download(name, weights, key) if is_hub_id(name) else Path(name).expanduser()
    if is_adapter(folder) and is_hub_id(base_of_adapter(folder)):
        download(base_of_adapter(folder), weights, key)
    return folder


def download(name: str, weights: bool, key: str) -> Path:
    """Download a model from the hub and return its folder. Raises UserError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        reason = (
            "looks like a hub id; to fetch it:  pip install 'fsdp_trainer[hub]'.  "
            "Or give a folder that exists"
        )
        raise UserError("cannot fetch the model", f"{key}={name}", reason) from None
    patterns = [*TEXTS, *(WEIGHTS if weights else []), *(CODE if remote_code_is_allowed() else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # network, rights, a name that does not exist
        reason = (
            f"{type(error).__name__}: {str(error).splitlines()[0]}\n"
            "Is the name right, and has this machine a network?\n"
            f"Where there is one:  hf download {name} --local-dir DIR  , "
            f"then here  {key}=DIR"
        )
        raise UserError("cannot fetch the model", f"{key}={name}", reason) from None
