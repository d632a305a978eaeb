"""The same model by transformers, and PEFT's for adapters, with the weights of a run's start.

The names of tensors are those of a Hugging Face folder; of adapters this program's.
"""

import importlib.util
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fsdp_trainer.apps.prove.proof.export_forms import class_of
from fsdp_trainer.apps.prove.proof.runs import ProofRun
from fsdp_trainer.apps.prove.twins.of_further_tokens import FURTHER, HeadNames
from fsdp_trainer.apps.prove.twins.twin_step import NoTwin
from fsdp_trainer.base.remote_code import remote_code_is_allowed
from fsdp_trainer.checkpoint.assets import with_padding
from fsdp_trainer.checkpoint.formats.headers import SINGLE
from fsdp_trainer.checkpoint.huggingface import tensor_parts, tensor_shapes
from fsdp_trainer.config.paths import run_folder
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.four_bit import BLOCK_BYTES, LEVELS, SCALE
from fsdp_trainer.models.hf.further_blocks import copies_in_head, start_of_names
from fsdp_trainer.models.hf.new_model import meta_decoder

OF_ADAPTERS = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")


@dataclass
class Twin:
    """transformers' or PEFT's model, ready to train. names: of its trained parameters, by ours.

    prefix: what folders have before its names, for a model without a head. further: names of a
    head for further tokens.
    """

    model: Any
    names: dict[str, str] | None
    prefix: str = ""
    further: HeadNames | None = None

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

        revert = partial(revert_weight_conversion, self.model)
        of_head = {n: t for n, t in tensors.items() if self.further and n.startswith(FURTHER)}
        stored = revert({n: t for n, t in tensors.items() if n not in of_head})
        more = self.further.as_stored(of_head, revert) if self.further else {}
        return {self.prefix + name: tensor for name, tensor in {**stored, **more}.items()}


def open_twin(run: ProofRun, config: ModelConfig, folder: Path) -> Twin:
    """Return the twin of a run's model at its start. folder: a new one. Raises NoTwin."""
    if not importlib.util.find_spec("transformers"):
        raise NoTwin("transformers, which is not installed", "pip install 'fsdp_trainer[hf]' ; ")
    described = run.checkpoints[-1] / "hf" / "config.json"
    stored = stored_form(config, base_weights(run, config))
    start, of_head = start_of_names(config) if config.mtp_heads else "", {}
    if start:
        of_head = {name: stored.pop(name) for name in [*stored] if name.startswith(start)}

    def with_tensors(others: Mapping[str, Tensor], place: Path) -> Any:
        write_folder({**stored, **others}, config, described, place)
        return load(config, place)

    model = with_tensors({}, folder)
    if of_head:
        names = HeadNames.of(model, config)
        names.put_head(model, of_head, partial(with_tensors, place=folder.with_name("like")))
        return Twin(model, None, "", names)
    own = f"{model.base_model_prefix}."
    is_bare = model.base_model is model and all(name.startswith(own) for name in stored)
    prefix = own if is_bare else ""
    if run.cfg.adapter.name == "none":
        return Twin(model, None, prefix)
    return with_adapters(model, run, prefix)


def base_weights(run: ProofRun, config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a run's start without adapters, each as numbers."""
    base = {n: tensor for n, tensor in run.start.items() if not n.endswith(OF_ADAPTERS)}
    if run.cfg.adapter.base != "nf4":
        return base
    shapes = {name: p.shape for name, p in meta_decoder(config).named_parameters()}
    return {n: in_full(t, shapes[n]) if t.dtype == torch.uint8 else t for n, t in base.items()}


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
    repeated = copies_in_head(config)
    parts = [one for one in tensor_parts(model, config.vocab_size) if one.tensor not in repeated]
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
    tensors: Mapping[str, Tensor], config: ModelConfig, described: Path, out: Path
) -> None:
    """Write tensors as a Hugging Face folder. described: its config.json."""
    out.mkdir()
    stored = {n: t.contiguous().clone() for n, t in tensors.items()}
    save_file(stored, out / SINGLE, metadata={"format": "pt"})
    content = json.loads(described.read_text())
    # a token of padding may occur in texts: transformers would read no score there, and give its
    # row of the embedding no gradient, also where it computes this program's model
    has_none = not config.encoder and (config.scores or not config.by_transformers)
    content = with_padding(content, {"pad_token_id": None} if has_none else {})
    (out / "config.json").write_text(json.dumps(content))
