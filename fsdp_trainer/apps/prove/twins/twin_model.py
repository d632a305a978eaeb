"""The same model by transformers, and PEFT's for adapters, with the weights of a run's start.

The names of tensors are those of a Hugging Face folder; of adapters this program's.
"""

import importlib.util
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp_trainer.apps.prove.proof.export_forms import class_of
from fsdp_trainer.apps.prove.proof.runs import ProofRun
from fsdp_trainer.apps.prove.twins.twin_step import NoTwin
from fsdp_trainer.base.remote_code import remote_code_is_allowed
from fsdp_trainer.checkpoint.formats.headers import SINGLE
from fsdp_trainer.checkpoint.huggingface import tensor_parts, tensor_shapes
from fsdp_trainer.config.paths import run_folder
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.four_bit import BLOCK_BYTES, LEVELS, SCALE
from fsdp_trainer.models.hf.new_model import meta_decoder

OF_ADAPTERS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@dataclass
class Twin:
    """transformers' or PEFT's model, ready to train. names: of its trained parameters, by ours.

    prefix: what folders have before its names, for a model without a head.
    """

    model: Any
    names: dict[str, str] | None
    prefix: str = ""

    def trained(self, ours: Mapping[str, bool]) -> dict[str, nn.Parameter]:
        own = dict(self.model.named_parameters())
        if self.names is not None:
            return {name: own[name] for name in self.names.values()}
        return {n: p for n, p in own.items() if any(ours.get(s) for s in self.as_stored({n: p}))}

    def as_stored(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of its parameters under the names in which both trainings are compared."""
        if self.names is not None:
            return {ours: tensors[own] for ours, own in self.names.items() if own in tensors}
        # imports transformers
        from transformers.core_model_loading import revert_weight_conversion

        stored: dict[str, Tensor] = revert_weight_conversion(self.model, dict(tensors))
        return {self.prefix + name: tensor for name, tensor in stored.items()}


def open_twin(run: ProofRun, config: ModelConfig, folder: Path) -> Twin:
    """Return the twin of a run's model at its start. folder: a new one. Raises NoTwin."""
    adapted = {name for name in run.start if name.endswith(OF_ADAPTERS)}
    if not importlib.util.find_spec("transformers"):
        raise NoTwin("transformers, which is not installed", "pip install 'fsdp_trainer[hf]' ; ")
    base = {name: tensor for name, tensor in run.start.items() if name not in adapted}
    if run.cfg.adapter.base == "nf4":
        shapes = {name: p.shape for name, p in meta_decoder(config).named_parameters()}
        base = {n: in_full(t, shapes[n]) if t.dtype == torch.uint8 else t for n, t in base.items()}
    stored = write_folder(base, config, run.checkpoints[-1] / "hf" / "config.json", folder)
    model = load(config, folder)
    own = f"{model.base_model_prefix}."
    is_bare = model.base_model is model and all(name.startswith(own) for name in stored)
    prefix = own if is_bare else ""
    if run.cfg.adapter.name == "none":
        return Twin(model, None, prefix)
    return with_adapters(model, run, prefix)


def load(config: ModelConfig, folder: Path) -> Any:
    """Return transformers' model of a folder in float32, without what is random in training."""
    auto = class_of(config)
    options = {"attn_implementation": "eager", "trust_remote_code": remote_code_is_allowed()}
    return auto.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **options).eval()


def in_full(encoded: Tensor, shape: torch.Size) -> Tensor:
    """Return a matrix of NF4 (Dettmers et al. 2023): each block a bfloat16 scale, then codes."""
    blocks = F.pad(encoded, (0, -encoded.shape[1] % BLOCK_BYTES)).view(
        len(encoded), -1, BLOCK_BYTES
    )
    scales = blocks[..., :SCALE].contiguous().view(torch.bfloat16).float()
    codes = torch.stack([blocks[..., SCALE:] >> 4, blocks[..., SCALE:] & 15], -1).flatten(2)
    return (torch.tensor(LEVELS)[codes.long()] * scales).flatten(1)[:, : shape[1]].reshape(shape)


def with_adapters(model: Any, run: ProofRun, prefix: str) -> Twin:
    """Return PEFT's model with the adapters of a run's start. prefix: see Twin. Raises NoTwin."""
    try:
        from peft import PeftModel
    except ImportError:
        raise NoTwin("PEFT, which is not installed", "pip install peft ; ") from None
    adapter = run_folder(run.cfg) / "adapter"
    peft = PeftModel.from_pretrained(model, str(adapter), is_trainable=True).eval()
    own = dict(peft.named_parameters())
    names = {}
    for name in (name for name, trained in run.trained.items() if trained):
        path = name.removeprefix(prefix)
        module, _, kind = path.rpartition(".")
        in_full = f"base_model.model.{module}.modules_to_save.default.{kind}"
        of_peft = f"base_model.model.{module}.default.{kind}"
        if name.endswith("lora_magnitude_vector"):
            of_peft = f"base_model.model.{path}.default.weight"
        known = of_peft if name.endswith(OF_ADAPTERS) else in_full
        if known not in own or own[known].shape != run.start[name].shape:
            raise NoTwin("PEFT on stacked or fused matrices, gradient by gradient", "")
        with torch.no_grad():
            own[known].copy_(run.start[name])
        names[name] = known
    return Twin(peft, names)


# --- our weights under the names of a folder ------------------------------------------------------


def stored_form(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of our parameters under the names and in the shapes of a folder's."""
    model = meta_decoder(config)
    parts = tensor_parts(model, config.vocab_size)
    shapes = tensor_shapes(model, parts)
    turned = getattr(model, "transposed_weights", ())
    pieces: dict[str, list[Tensor]] = defaultdict(list)
    for part in parts:
        if part.parameter in tensors:
            tensor = tensors[part.parameter]
            tensor = tensor.T if part.parameter in turned else tensor
            rows = tensor.flatten(0, 1) if tensor.ndim > 2 else tensor
            pieces[part.tensor].append(rows[part.parameter_row :][: part.rows])
    return {name: torch.cat(parts).reshape(shapes[name]) for name, parts in pieces.items()}


def write_folder(
    weights: Mapping[str, Tensor], config: ModelConfig, described: Path, out: Path
) -> list[str]:
    """Write weights as a Hugging Face folder; return their names. described: its config.json."""
    out.mkdir()
    stored = {n: t.contiguous().clone() for n, t in stored_form(config, weights).items()}
    save_file(stored, out / SINGLE, metadata={"format": "pt"})
    content = json.loads(described.read_text())
    # one that is also an end of text would be taken for padding where a score is read
    content |= {"pad_token_id": None} if config.scores else {}
    (out / "config.json").write_text(json.dumps(content))
    return [*stored]
