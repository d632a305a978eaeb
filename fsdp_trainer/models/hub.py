"""Models by their name on the hub."""

from pathlib import Path

from fsdp_trainer.config.paths import is_hub_id
from fsdp_trainer.errors import Problem, UserError

TEXTS = ["*.json", "*.jinja", "tokenizer.model"]
WEIGHTS = ["*.safetensors"]


def fetch(name: str, weights: bool = True) -> Path:
    """The local folder of a model: a path as it is, a hub id downloaded into the hub's own cache. Raises UserError.

    weights=False: configuration and tokenizer only.
    """
    if not is_hub_id(name):
        return Path(name).expanduser()
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        why = "looks like a hub id; to fetch it:  pip install 'fsdp_trainer[hub]'.  Or give a folder that exists"
        raise UserError(
            "cannot fetch the model", [Problem(f"model.init_from={name}", why)]
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=TEXTS + (WEIGHTS if weights else [])))
    except (
        Exception
    ) as error:  # network, rights, a name that does not exist: all are the caller's to mend
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}\nIs the name right, and has this machine a network?"
        why += f"\nWhere there is one:  hf download {name} --local-dir DIR  , then here  model.init_from=DIR"
        raise UserError(
            "cannot fetch the model", [Problem(f"model.init_from={name}", why)]
        ) from None
