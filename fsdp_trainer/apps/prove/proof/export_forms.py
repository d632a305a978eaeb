"""A checkpoint in each form of `export`, read back by other programs, on a few tokens."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fsdp_trainer.apps.prove.proof.trajectories import finite
from fsdp_trainer.apps.verify import peft_model
from fsdp_trainer.base.remote_code import remote_code_is_allowed
from fsdp_trainer.checkpoint.exports.hf_folder import export_checkpoint
from fsdp_trainer.checkpoint.load import read_model
from fsdp_trainer.models.adapters.peft_config import WEIGHTS_FILE
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.further_blocks import is_further

LENGTH, TEXTS = 96, 4
OF_MODULE = re.compile(r"(\.lora_(embedding_)?[AB]|\.lora_magnitude_vector)?(\.weight|\.bias)?$")
"""What follows a module's name in the names of an adapter's tensors."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what exports and other programs print out of the certificate."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class Original:
    """A checkpoint, its model in this program, and the texts on which others are compared.

    logits: of each text. folder: where forms of it are written.
    """

    checkpoint: Path
    config: ModelConfig
    model: Decoder
    texts: list[Tensor]
    logits: list[Tensor]
    folder: Path

    @classmethod
    @torch.no_grad()
    def of(cls, checkpoint: Path, texts: list[Tensor], folder: Path) -> "Original":
        folder.mkdir()
        model = read_model(checkpoint, merge_into="original", is_checked=True)
        if model.config.reads_images:  # texts alone are compared
            tower: Any = model
            texts = [torch.where(text == tower.tower.token, 0, text) for text in texts]
        predicts = model.config.predicts
        logits = [model.logits(text[None]) for text in texts] if predicts else []
        return cls(checkpoint, model.config, model, texts, logits, folder)

    @torch.no_grad()
    def difference(self, other: Any) -> float:
        """Return the largest difference of another model's logits, as a share of the largest."""
        given = (other(text[None]) for text in self.texts)
        logits = [getattr(one, "logits", one).float() for one in given]
        return max(map(share, logits, self.logits))

    def merged(self) -> Path:
        """Return a Hugging Face folder of the checkpoint, with adapters merged, in float32."""
        out = self.folder / "merged"
        if not out.exists():
            with quiet():
                export_checkpoint(self.checkpoint, out, "float32")
        return out


def share(given: Tensor, expected: Tensor, of_middle: bool = False) -> float:
    """Return the largest difference as a share of the largest number.

    of_middle: that of the middle token, since routers may choose other experts for some.
    """
    if given.shape != expected.shape:
        return float("inf")
    each = (given - expected).abs().amax(-1) / expected.abs().max().clamp_min(1e-20)
    return finite(float(each.median() if of_middle else each.max()))


def class_of(config: ModelConfig) -> Any:
    import transformers

    from fsdp_trainer.models.hf.hf_config import published_class

    transformers.utils.logging.disable_progress_bar()
    return published_class(config)


def misnamed(folder: Path, config: ModelConfig, **options: Any) -> tuple[Any, list[str]]:
    """Return transformers' model of a folder, and the tensors that it lacks or does not know.

    It computes no head for further tokens; a server that drafts by it does.
    """
    # imports transformers
    from fsdp_trainer.models.hf.hf_config import quiet_transformers

    auto, without = class_of(config), replace(config, mtp_heads=0)
    with quiet_transformers():
        model, info = auto.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=remote_code_is_allowed(),
            **options,
        )
    lacking = sorted(info["missing_keys"])
    if auto.__name__ == "AutoModel":  # no text is embedded by what follows the states
        lacking = [name for name in lacking if not name.startswith("pooler.")]
    wrong = [f"{name} is missing" for name in lacking]
    unknown = [name for name in sorted(info["unexpected_keys"]) if not is_further(name, without)]
    wrong += [f"{name} is not known" for name in unknown]
    wrong += [f"{each[0]} has another shape" for each in sorted(info["mismatched_keys"])]
    return model.eval(), wrong


def peft_with_misnamed(folder: Path, config: ModelConfig) -> tuple[Any, list[str]]:
    """Return PEFT's model of an adapter, and its tensors that name no module."""
    model = peft_model(class_of(config), folder, config.scores)
    modules = {name.replace(".base_layer", "") for name, _ in model.named_modules()}
    with safe_open(folder / WEIGHTS_FILE, "pt") as opened:
        names = [*opened.keys()]
    wrong = [n for n in names if OF_MODULE.sub("", n).replace(".base_layer", "") not in modules]
    return model, [f"{name} belongs to no module" for name in wrong]
