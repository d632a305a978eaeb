"""Import of Hugging Face folders: all headers are checked, then every rank reads its own slices."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.checkpoint.formats.four_bit_encoding import encoded
from fsdp_trainer.checkpoint.formats.headers import read_headers
from fsdp_trainer.checkpoint.formats.placed_tensors import (
    check_places,
    misfit,
    places_of,
    stacked,
    weights_in_places,
)
from fsdp_trainer.checkpoint.formats.tensor_files import (
    HuggingFaceTensor,
    TensorOnDisk,
    dtype_name,
    in_threads,
    piece_bytes,
    row_ranges,
)
from fsdp_trainer.config.parts.families import is_stacked
from fsdp_trainer.config.paths import is_whole_model
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.interop.folders.other_weights import described_at
from fsdp_trainer.interop.weights.known_weights import other_tensors
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit import is_encoded
from fsdp_trainer.models.hf.further_blocks import copies_in_head, is_unread
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.hf.read_architecture import stored_vocabulary

MAX_SHOWN_PROBLEMS = 40
TIED_HEAD = "lm_head.weight"
"""The name of a head that is stored although it repeats the embedding."""
Stored = dict[str, HuggingFaceTensor]


@dataclass
class TensorPart:
    """Rows of a parameter, and the rows of a Hugging Face folder's tensor that hold them.

    The tensor of a fused projection holds several parameters. The matrices of all experts are one
    parameter here; in the folder each is a tensor, or, with is_stack, all of them are one tensor.
    """

    parameter: str
    parameter_row: int
    tensor: str
    tensor_row: int
    rows: int
    is_stack: bool = False


@dataclass
class ImportPiece:
    """Rows of a tensor from `first` on, whose `columns` are copied `into` a part of a parameter."""

    source: TensorOnDisk
    first: int
    columns: tuple[slice, ...]
    into: Tensor


def tensor_parts(model: Decoder, vocab_size: int) -> list[TensorPart]:
    """Return the stored rows of every parameter, in the order of the parameters.

    Rows of stacked matrices are counted as in one matrix of all rows, in parameters and in tensors.
    vocab_size: rows of embedding and head in the folder; a sharded model's may be padded.
    """
    repeated = [
        TensorPart(weight, 0, tensor, 0, vocab_size)
        for tensor, weight in copies_in_head(model.config).items()
    ]
    if model.config.by_transformers:
        own: Any = model  # a TransformersDecoder
        places, _ = places_of(own, own.stored_shapes(vocab_size))
        return [TensorPart(*place) for place in places] + repeated
    family = model.config.family_spec
    parts: list[TensorPart] = []
    ends: Counter[str] = Counter()
    for name, parameter in model.named_weights().items():
        if is_stacked(name) and family.clamped_experts:
            rows = math.prod(parameter.shape[:-1])
            parts.append(TensorPart(name, 0, family.stored_name(name), 0, rows, is_stack=True))
            continue
        if is_stacked(name):
            rows = parameter.shape[1]
            parts += [
                TensorPart(name, expert * rows, family.stored_expert(name, expert), 0, rows)
                for expert in range(len(parameter))
            ]
            continue
        tensor = family.stored_name(name)
        rows = vocab_size if name in model.config.names.vocabulary else len(parameter)
        parts.append(TensorPart(name, 0, tensor, ends[tensor], rows))
        ends[tensor] += rows
    return parts + repeated


def tensor_shapes(model: Decoder, parts: list[TensorPart]) -> dict[str, tuple[int, ...]]:
    if model.config.by_transformers:
        own: Any = model  # a TransformersDecoder
        shapes = own.stored_shapes(model.config.vocab_size)
        copies = copies_in_head(model.config)
        return shapes | {tensor: shapes[weight] for tensor, weight in copies.items()}
    weights = model.named_weights()
    shapes = {}
    for part in parts:
        shape = weights[part.parameter].shape
        if part.is_stack:
            shapes[part.tensor] = tuple(shape)
            continue
        columns = shape[2:] if is_stacked(part.parameter) else shape[1:]
        shapes[part.tensor] = (part.tensor_row + part.rows, *columns)
    return shapes


def stored_tensors(
    folder: Path, config: ModelConfig
) -> tuple[dict[str, HuggingFaceTensor], list[Problem]]:
    if not is_whole_model(folder) and not config.by_transformers:
        others = other_tensors(folder, config)
        if others is not None:
            return dict(others), []
    tensors, problems = read_headers(folder, all_parts=config.by_transformers)
    return tensors if config.by_transformers else of_whole_model(tensors), problems


def of_whole_model(tensors: dict[str, HuggingFaceTensor]) -> dict[str, HuggingFaceTensor]:
    """Return tensors under the names of a model with a head.

    Transformers saves a bare model, as embedding models are, without the first part of its names.
    """
    if "embed_tokens.weight" not in tensors:
        return tensors
    parts = ("embed_tokens.", "layers.", "norm.")
    return {
        f"model.{name}" if name.startswith(parts) else name: tensor
        for name, tensor in tensors.items()
    }


def check_tensors(
    model: Decoder, stored: Mapping[str, HuggingFaceTensor], vocab_size: int
) -> list[Problem]:
    """Return a Problem for each missing, unexpected, mis-shaped or unreadable tensor.

    vocab_size: that of the folder's config.json.
    """
    if model.config.by_transformers:
        return check_places(model, stored, vocab_size, model.head_names)
    shapes = tensor_shapes(model, tensor_parts(model, vocab_size))
    missing = {
        name: f"is missing; the model has it with shape {list(shape)}"
        for name, shape in shapes.items()
        if name not in stored and name not in model.head_names | copies_in_head(model.config).keys()
    }
    # a folder may hold others although the model has no use for them
    others = {
        name: misfit(tensor, shapes[name], is_whole=True)
        if name in shapes
        else f"in {tensor.chunks[0].file.name} is not part of this model"
        for name, tensor in stored.items()
        if name in shapes or not (name == TIED_HEAD or is_unread(name, model.config))
    }
    return [Problem(name, text) for name, text in (missing | others).items() if text]


def check_repeated(model: Decoder, stored: dict[str, HuggingFaceTensor]) -> list[Problem]:
    """Return a Problem for each stored tensor that should repeat a weight and differs from it.

    These are a tied head, and what an MTP head shares with the model. Every rank reads both
    completely, a piece at a time.
    """
    names, repeated = model.config.names, copies_in_head(model.config)
    reasons = dict.fromkeys(repeated, "and an MTP head that shares it with the model is trained")
    if model.config.tie_word_embeddings:
        repeated = {names.head: names.embedding, **repeated}
        says = "though config.json says tie_word_embeddings=true: set it to false"
        reasons[names.head] = says
    return [
        Problem(tensor, f"in {stored[tensor].chunks[0].file.name} differs from {weight}, {reason}")
        for tensor, reason in reasons.items()
        if differ(stored.get(tensor), stored.get(weight := repeated[tensor]))
    ]


def differ(one: HuggingFaceTensor | None, other: HuggingFaceTensor | None) -> bool:
    if one is None or other is None:
        return False
    fits = (one.shape, one.dtype) == (other.shape, other.dtype)
    return not (fits and all(map(torch.equal, one.pieces(), other.pieces())))


def import_weights(model: Decoder, folder: Path) -> dict[str, str]:
    """Fill a materialised model, sharded or not, from a Hugging Face folder.

    Returns each parameter's stored dtype by torch's name. Vocabulary rows that the folder does not
    have are left unchanged. Host memory: the shard itself and a few pieces.
    Raises UserError before anything is read if the folder does not fit the model, and OSError when
    a file cannot be read.
    """
    sources = parameters_on_disk(model.config, folder)
    read_parameters(model, sources)
    return {name: dtype_name(source.dtype) for name, source in sources.items()}


def parameters_on_disk(
    config: ModelConfig, folder: Path, decoded: Callable[[Stored], Stored] = dict
) -> dict[str, TensorOnDisk]:
    """Return every parameter of a model without adapters in a Hugging Face folder, by name.

    Embedding and head have as many rows as in the folder. decoded: joins the tensors of a matrix in
    few bits. Raises UserError if the folder does not fit the model.
    """
    model = meta_decoder(config)
    vocab_size = stored_vocabulary(described_at(folder))
    stored, problems = stored_tensors(folder, config)
    stored = decoded(stored)
    _require_fitting(model, folder, vocab_size, stored, problems)
    return parameters_of(model, stored, vocab_size)


def parameters_of(
    model: Decoder, stored: Mapping[str, HuggingFaceTensor], vocab_size: int
) -> dict[str, TensorOnDisk]:
    """Return, by name, every parameter whose tensors are among these, which fit the model.

    model: a meta_decoder. vocab_size: rows of embedding and head among `stored`.
    """
    if model.config.by_transformers:
        return weights_in_places(model, stored)
    parts: dict[str, list[TensorOnDisk]] = {}
    whole: dict[str, TensorOnDisk] = {}
    for part in tensor_parts(model, vocab_size):
        if part.tensor not in stored:
            continue
        if part.is_stack:
            whole[part.parameter] = stored[part.tensor]
            continue
        rows = stored[part.tensor].whole_rows(part.tensor_row, part.rows)
        parts.setdefault(part.parameter, []).append(rows)
    return whole | {
        name: stacked(name, parts[name]) if is_stacked(name) else parts[name][0] for name in parts
    }


def read_parameters(model: Decoder, sources: dict[str, TensorOnDisk]) -> None:
    """Fill parameters, sharded or not. Rows that their source does not have are left unchanged.

    The source of a 4-bit parameter is the original matrix, which is encoded as it is read. In a
    pipeline only parameters of this rank's stages are read. Raises OSError when a file cannot be
    read.
    """
    read_tensors(model.named_weights(), sources)


@torch.no_grad()
def read_tensors(own: Mapping[str, Tensor], sources: Mapping[str, TensorOnDisk]) -> None:
    names = [name for name in sources if name in own]
    pieces = [piece for name in names for piece in _pieces(own[name], sources[name])]
    pieces.sort(key=lambda piece: (piece.source.chunks[:1], piece.first))
    buffer_bytes = piece_bytes(piece.source.row_bytes for piece in pieces)
    in_threads(_fill, pieces, buffer_bytes, pinned=any(piece.into.is_cuda for piece in pieces))


def _require_fitting(
    model: Decoder, folder: Path, vocab_size: int, stored: Stored, problems: list[Problem]
) -> None:
    misfits = check_tensors(model, stored, vocab_size)
    if problems:  # a tensor that is missing may be in a broken file
        misfits = [problem for problem in misfits if problem.what in stored]
    problems = problems + misfits or check_repeated(model, stored)
    if not problems:
        return
    more = len(problems) - MAX_SHOWN_PROBLEMS
    if more > 0:
        problems[MAX_SHOWN_PROBLEMS:] = [Problem("…", f"and {more} more")]
    raise UserError(f"the weights in {folder} do not fit the model", problems)


def _pieces(parameter: Tensor, source: TensorOnDisk) -> Iterator[ImportPiece]:
    if is_encoded(parameter):
        source = encoded(source)
    local = local_part(parameter)
    if parameter.ndim == 3 and parameter.shape[1] > 1:
        stack, rows, *columns = local_slice(parameter)
        matrices = source.as_matrix()
        for matrix, into in zip(range(stack.start, stack.stop), local, strict=True):
            first = matrix * parameter.shape[1]
            part = slice(first + rows.start, first + rows.stop)
            yield from _pieces_of_rows(matrices, part, columns, into)
        return
    rows, *columns = local_slice(parameter)
    yield from _pieces_of_rows(source, rows, columns, local)


def _pieces_of_rows(
    source: TensorOnDisk, rows: slice, columns: list[slice], into: Tensor
) -> Iterator[ImportPiece]:
    last = min(rows.stop, source.shape[0]) if into.numel() else rows.start
    for begin, end in row_ranges(rows.start, last, source.row_bytes):
        part = into[begin - rows.start : end - rows.start]
        yield ImportPiece(source, begin, tuple(columns), part)


def _fill(piece: ImportPiece, buffer: Tensor) -> None:
    rows = piece.source.read_rows(piece.first, piece.first + len(piece.into), buffer)
    piece.into.copy_(rows[(slice(None), *piece.columns)].to(piece.into.device))
