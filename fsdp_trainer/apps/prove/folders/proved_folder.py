"""A folder of any tool that is to be proved, and the model that it was made from."""

import json
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fsdp_trainer.apps.prove.folders.compressed_numbers import decoded, decoder_of, steps_of
from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.checkpoint.formats.headers import read_headers
from fsdp_trainer.checkpoint.formats.tensor_files import HuggingFaceTensor, TensorOnDisk
from fsdp_trainer.checkpoint.frozen_weights import base_folder, model_config, weights_on_disk
from fsdp_trainer.checkpoint.huggingface import parameters_on_disk
from fsdp_trainer.config.paths import (
    ADAPTER_CONFIG,
    find_checkpoint,
    has_weights,
    is_adapter,
    is_whole_model,
    model_folder,
)
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.peft_config import WEIGHTS_FILE
from fsdp_trainer.models.config import Json, ModelConfig, read_config_file
from fsdp_trainer.models.from_config.resolve import with_trained_head
from fsdp_trainer.models.hf.further_blocks import is_further
from fsdp_trainer.models.hf.mtp_architecture import why_no_head
from fsdp_trainer.parallel.memory_check import gib, host_bytes

TEXTS, LENGTH = 2, 64
"""Of the random tokens on which models are compared: any show whether they are the same."""
LOADED = 1.5
"""Memory that a model in float32 needs, as a multiple of its numbers."""
WITH_BLOCKS = "compressed-tensors"
"""quant_method of folders with matrices in few bits, which `export form=compressed` writes."""


@dataclass
class ProvedFolder:
    """A folder that is proved. reference: the model that it was made from, if that is known.

    words: of the command line. scratch: an empty folder. say: shows progress.
    """

    source: Path
    reference: Path | None
    words: list[str]
    scratch: Path
    say: Callable[[str], None]

    def require_model(self) -> None:
        if reason := self.why_no_model:
            raise UserError("this is no folder of a model", str(self.source), reason)
        if self.is_adapter:
            read_object(self.source / ADAPTER_CONFIG, "cannot read the adapter's configuration")
        else:
            read_config_file(self.described / "config.json")
        if self.reference:
            read_config_file(model_folder(self.reference) / "config.json")

    @property
    def why_no_model(self) -> str:
        if find_checkpoint(self.source):
            return (
                "is a run or a checkpoint: prove what it exports:"
                f"\nfsdp-trainer export {self.source} out=hf"
                f"\nfsdp-trainer prove source=hf reference={self.source}"
            )
        if self.is_adapter:
            return ""
        if not has_weights(self.source):
            return f"has no weights that are read, and no {ADAPTER_CONFIG}"
        if self.is_safetensors and not (self.source / "config.json").is_file():
            return "has weights and no config.json: copy the one of the model that was trained"
        return ""

    @property
    def command(self) -> str:
        return shlex.join(["fsdp-trainer", "prove", *self.words])

    @cached_property
    def is_adapter(self) -> bool:
        """True for an adapter of PEFT's, which needs its base."""
        return is_adapter(self.source)

    @cached_property
    def is_safetensors(self) -> bool:
        """True for a whole model in Hugging Face's format."""
        return is_whole_model(self.source)

    @cached_property
    def described(self) -> Path:
        return model_folder(self.based if self.is_adapter else self.source)

    @cached_property
    def content(self) -> Json:
        return read_config_file(self.described / "config.json")

    @cached_property
    def is_compressed(self) -> bool:
        """True for matrices in few bits, which training does not read."""
        return self.quantization.get("quant_method") == WITH_BLOCKS

    @property
    def quantization(self) -> Json:
        """What config.json says of numbers in few bits; {}: nothing."""
        stored = self.content.get("quantization_config")
        return stored if isinstance(stored, dict) else {}

    @cached_property
    def config(self) -> ModelConfig:
        """The architecture. Raises UserError for one that is not computed here."""
        config = self.config_of_blocks
        names = read_headers(self.source)[0] if self.is_safetensors else ()
        has_head = any(is_further(name, config) for name in names)
        return config if not has_head or why_no_head(config, "") else with_trained_head(config, 1.0)

    @property
    def config_of_blocks(self) -> ModelConfig:
        """The architecture without a head for further tokens. Raises UserError."""
        if not self.is_compressed:
            return model_config(self.based if self.is_adapter else self.source)
        plain = self.scratch / "uncompressed"
        plain.mkdir(exist_ok=True)
        rest = {name: v for name, v in self.content.items() if name != "quantization_config"}
        (plain / "config.json").write_text(json.dumps(rest))
        return model_config(plain)

    @cached_property
    def weights(self) -> dict[str, TensorOnDisk]:
        """Every weight by name, decoded. Raises UserError if the folder does not fit the model."""
        if not self.is_compressed:
            return weights_on_disk(self.config, self.based)
        return parameters_on_disk(self.config, self.source, self.decoded)

    @cached_property
    def why_not_decoded(self) -> str:
        """The reason why matrices in few bits are not decoded here; "" if they are."""
        try:
            if self.is_compressed:
                decoder_of(self.quantization)
        except UserError as error:
            return error.title
        return ""

    @cached_property
    def steps(self) -> dict[str, TensorOnDisk]:
        """The steps of each weight, see compressed_numbers.Steps."""
        return parameters_on_disk(
            self.config, self.source, lambda stored: steps_of(self.decoded(stored))
        )

    @property
    def has_float8(self) -> bool:
        """True if matrices in few bits are float8."""
        return decoder_of(self.quantization)[1].weights.type == "float"

    def decoded(self, stored: dict[str, HuggingFaceTensor]) -> dict[str, HuggingFaceTensor]:
        """Return the tensors with those of each matrix in few bits joined. Raises UserError."""
        return decoded(stored, self.quantization)

    @cached_property
    def based(self) -> Path:
        if not self.is_adapter or not self.reference:
            return self.source
        copy = self.scratch / "adapter"
        copy.mkdir()
        title = "cannot read the adapter's configuration"
        content = read_object(self.source / ADAPTER_CONFIG, title)
        content["base_model_name_or_path"] = str(self.reference.resolve())
        (copy / ADAPTER_CONFIG).write_text(json.dumps(content))
        for file in self.source.resolve().iterdir():
            if file.is_file() and file.name not in (ADAPTER_CONFIG, "README.md"):
                (copy / file.name).symlink_to(file)
        return copy

    @property
    def base(self) -> Path:
        """The base model of an adapter. Raises UserError if it is not there."""
        return base_folder(self.based)

    @property
    def adapter_file(self) -> Path:
        return self.source / WEIGHTS_FILE

    @property
    def lacking_memory(self) -> str:
        """A sentence if this machine has too little memory for the model in float32, else ""."""
        needed, free = 4 * LOADED * self.config.parameters(), host_bytes(os.environ)
        if needed <= free:
            return ""
        return f"the model in float32 needs {gib(needed)}, and this machine has {gib(free)} free"

    @property
    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.config.vocab_size, (TEXTS, LENGTH), generator=generator)


def reasons(error: UserError) -> list[str]:
    """Return what an error says as sentences for a certificate: first lines alone."""
    problems = [f"{one.what} {one.reason.splitlines()[0]}" for one in error.problems if one.reason]
    return problems or [error.title]
