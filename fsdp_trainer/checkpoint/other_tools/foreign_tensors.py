"""Tensors of another tool's files, under the names and in the order of Hugging Face's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.checkpoint.formats.derived import JoinedRows, SomeRows, rows_of
from fsdp_trainer.checkpoint.formats.tensor_files import (
    DTYPES,
    HuggingFaceTensor,
    TensorOnDisk,
    as_tensor,
    read_whole,
)
from fsdp_trainer.checkpoint.other_tools.tensor_names import META, TORCHTITAN, TensorNames
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import ModelConfig

NUMBER_FORMATS = {dtype: name for name, dtype in DTYPES.items()}
WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
"""Parts of names that torch's wrappers add."""

META_WEIGHT = re.compile(r"tok_embeddings\.|layers\.|norm\.|output\.|lm_head\.")
META_EMBEDDING, EMBEDDING = "tok_embeddings.weight", "model.embed_tokens.weight"
FUSED = ".wqkv."
"""Part of torchtitan's names of joined queries, keys and values."""
ROTATES_PAIRS = ("llama", "mistral")
"""Model types whose queries and keys Meta and llama.cpp rotate in pairs of neighbours."""


MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"
"""States that AdamW keeps of a parameter, as torch names them."""
OPTIONS = ("lr", "betas", "eps", "weight_decay")


@dataclass(frozen=True)
class StatesByName:
    """States of AdamW of each parameter, by the tool's name of it: tensors, and the step's number.

    options: those of the first group of parameters, as far as they can be read.
    """

    by_name: Mapping[str, dict[str, Any]]
    options: dict[str, Any]


def known_options(groups: Any) -> dict[str, Any]:
    """Return the options in torch's param_groups that are known here."""
    first = groups[0] if isinstance(groups, list) and groups else {}
    return {name: first[name] for name in OPTIONS if name in first}


def unusable_states(place: Path, reason: str) -> UserError:
    """Return the error about states that cannot be used."""
    problem = Problem(
        str(place), f"{reason}.\nTo begin with the weights alone, drop  optim.init_from"
    )
    return UserError("cannot read the optimizer's states", [problem])


@dataclass
class ForeignTensor(HuggingFaceTensor):
    """A tensor that is read as its `source` is."""

    source: TensorOnDisk

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read rows `first` to `last` into `buffer`, uint8; return them."""
        return self.source.read_rows(first, last, buffer)

    def as_matrix(self) -> TensorOnDisk:
        """Return stacked matrices as one matrix of all their rows, any other tensor unchanged."""
        return self.source.as_matrix()

    def whole_rows(self, first: int, count: int) -> SomeRows:
        """Return `count` rows as a tensor of their own."""
        return rows_of(self.source, first, count)


def foreign(source: TensorOnDisk) -> ForeignTensor:
    """Return a tensor that a Hugging Face folder could hold."""
    number_format = NUMBER_FORMATS.get(source.dtype, str(source.dtype))
    return ForeignTensor(source.dtype, tuple(source.shape), source.chunks, number_format, source)


@dataclass
class HalvedHeads(TensorOnDisk):
    """Rows of heads that alternate between their two halves, put back one half after the other."""

    source: TensorOnDisk
    head_rows: int

    def read_rows(self, first: int, last: int, buffer: Tensor) -> Tensor:
        """Read rows `first` to `last` into `buffer`, uint8; return them."""
        begin = first // self.head_rows * self.head_rows
        end = -(-last // self.head_rows) * self.head_rows
        shape = (-1, self.head_rows // 2, 2, *self.shape[1:])
        pairs = read_whole(self.source, begin, end).view(shape)
        halves = pairs.transpose(1, 2).reshape(end - begin, *self.shape[1:])
        rows = as_tensor(buffer, self.dtype, (last - first, *self.shape[1:]))
        return rows.copy_(halves[first - begin : last - begin])


def huggingface_names(
    tensors: Mapping[str, TensorOnDisk], config: ModelConfig
) -> dict[str, ForeignTensor]:
    """Return the model's tensors among others, by Hugging Face's names.

    Names may have a common prefix and those of torch's wrappers; names of Meta's are translated. A
    name that is not known is kept, so that whoever checks the tensors reports it.
    """
    plain = {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    for embedding in (EMBEDDING, META_EMBEDDING):
        found = [name for name in plain if name == embedding or name.endswith(f".{embedding}")]
        if found:
            prefix = min(found, key=len).removesuffix(embedding)
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in plain.items()
                if name.startswith(prefix)
            }
            if embedding == META_EMBEDDING:
                # others are of the optimizer or the loader, or constants
                weights = {n: own[n] for n in own if META_WEIGHT.match(n)}
                return renamed(unfused(weights, config), (META, TORCHTITAN), config)
            return {name: foreign(t) for name, t in own.items() if _is_of_model(name)}
    return {name: foreign(tensor) for name, tensor in plain.items()}


def _is_of_model(name: str) -> bool:
    """Return True for a name below model. or of a head; a checkpoint may hold other states too."""
    return name.startswith(("model.", "lm_head.", "score."))


def renamed(
    tensors: Mapping[str, TensorOnDisk], tables: tuple[TensorNames, ...], config: ModelConfig
) -> dict[str, ForeignTensor]:
    """Return tensors by Hugging Face's names, queries and keys in its order.

    tables: the first that knows a name translates it; one that none knows is kept.
    """
    named = {}
    for name, tensor in tensors.items():
        translated = filter(None, (names.to_huggingface(name) for names in tables))
        new = next(translated, name)
        if config.family in ROTATES_PAIRS and re.search(r"\.[qk]_proj\.", new):
            chunks, shape = tensor.chunks, tuple(tensor.shape)
            tensor = HalvedHeads(tensor.dtype, shape, chunks, tensor, config.head_dim)
        named[new] = foreign(tensor)
    return named


def unfused(tensors: Mapping[str, TensorOnDisk], config: ModelConfig) -> dict[str, TensorOnDisk]:
    """Return tensors with torchtitan's joined queries, keys and values as three each.

    Rows of a joined tensor are, for each head of keys: its heads of queries, itself, its values.
    """
    heads, keys, rows = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    queries = heads // keys
    parts = {"wq": (0, queries), "wk": (queries, 1), "wv": (queries + 1, 1)}
    separate: dict[str, TensorOnDisk] = {}
    for name, tensor in tensors.items():
        if FUSED not in name:
            separate[name] = tensor
            continue
        for part, (first, count) in parts.items():
            starts = [(key * (queries + 2) + first) * rows for key in range(keys)]
            pieces: list[TensorOnDisk] = [rows_of(tensor, start, count * rows) for start in starts]
            shape = (keys * count * rows, *tensor.shape[1:])
            joined_rows = JoinedRows(tensor.dtype, shape, tensor.chunks, pieces)
            separate[name.replace(FUSED, f".{part}.")] = joined_rows
    return separate


def in_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Return rows such that the two halves of each head alternate, as HalvedHeads undoes it."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def joined(parts: list[TensorOnDisk], dimension: int) -> TensorOnDisk:
    """Return tensors as one that is cut into them along a dimension."""
    shape = list(parts[0].shape)
    shape[dimension] = sum(part.shape[dimension] for part in parts)
    chunks, start = [], 0
    for part in parts:
        for chunk in part.chunks:
            place = list(chunk.part)
            held = place[dimension]
            place[dimension] = slice(held.start + start, held.stop + start)
            chunks.append(replace(chunk, part=tuple(place)))
        start += part.shape[dimension]
    return TensorOnDisk(parts[0].dtype, tuple(shape), chunks)


def is_floating(tensor: TensorOnDisk) -> bool:
    """Return True for numbers that may be weights."""
    return torch.empty(0, dtype=tensor.dtype).is_floating_point()
