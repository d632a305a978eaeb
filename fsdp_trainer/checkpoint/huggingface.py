"""Hugging Face folders in: headers checked as a whole first, then every rank reads only its slices."""

import json
import math
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_trainer.checkpoint.stream import PIECE_BYTES, in_threads, read
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import VOCABULARY

SHOWN = 40  # problems in one message
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# Where a folder for text and images keeps its language model, and what of it is not one.
LANGUAGE_MODEL = (("language_model.", ""), ("model.language_model.", "model."))
NOT_LANGUAGE = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


@dataclass
class Stored:
    """One tensor of a safetensors file: dtype as safetensors spells it; offset of its first byte in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Of one index of the first dimension."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize


@dataclass
class Piece:
    """Rows of a stored tensor, from `first` on, whose `columns` belong `into` a part of a parameter."""

    stored: Stored
    first: int
    columns: tuple[slice, ...]
    into: Tensor


def read_headers(folder: Path) -> tuple[dict[str, Stored], list[Problem]]:
    """Every tensor of a Hugging Face folder, and every file of it that is missing or broken. Raises UserError if there are no weights."""
    found, problems = {}, []
    for path in _weight_files(folder):
        try:
            found.update(_read_header(path))
        except FileNotFoundError:
            problems.append(
                Problem(str(path), f"is not there, and {INDEX} names it: copy or download it again")
            )
        except (OSError, ValueError) as error:
            problems.append(Problem(str(path), str(error)))
        except (KeyError, TypeError, AttributeError, IndexError, RecursionError, struct.error):
            problems.append(
                Problem(str(path), "is no safetensors file, or was cut: copy or download it again")
            )
    return found, problems


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            return sorted(
                {
                    folder / name
                    for name in json.loads((folder / INDEX).read_text())["weight_map"].values()
                }
            )
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(
                "cannot read the index of the weights",
                [Problem(str(folder / INDEX), f"{type(error).__name__}: {error}")],
            ) from None
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise UserError(
        "there are no weights",
        [Problem(str(folder), f"has neither {SINGLE} nor {INDEX}; only safetensors are read")],
    )


def _read_header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size:
            raise ValueError("is no safetensors file, or was cut: copy or download it again")
        header: dict[str, Any] = json.loads(
            file.read(length), parse_float=str
        )  # sizes and places are whole numbers
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != end:
        raise ValueError(
            f"has {size:,} bytes; its header says {end:,}: copied or downloaded in part, do it again"
        )
    found = {}
    for name, entry in header.items():
        if not NOT_LANGUAGE.match(name):
            begin, end = entry["data_offsets"]
            tensor = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin)
            if tensor.dtype in DTYPES and (
                begin < 0 or end - begin != math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
            ):
                raise ValueError(
                    f"gives {name} {end - begin:,} bytes at {begin:,}, which is not what its shape and dtype say"
                )
            found[_of_language_model(name)] = tensor
    return found


def _of_language_model(name: str) -> str:
    return next(
        (
            ours + name.removeprefix(prefix)
            for prefix, ours in LANGUAGE_MODEL
            if name.startswith(prefix)
        ),
        name,
    )


def stored_parts(model: Decoder) -> dict[str, list[str]]:
    """Tensors of a Hugging Face folder → the parameters that are its rows, in order: one each, but for fused projections."""
    parts: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        parts.setdefault(model.config.form.stored_name(name), []).append(name)
    return parts


def check_tensors(model: Decoder, stored: dict[str, Stored], vocab_size: int) -> list[Problem]:
    """Missing, unexpected, mis-shaped and unreadable tensors, all together. vocab_size: that of the folder's config.json."""
    shapes = {
        name: (vocab_size if name in VOCABULARY else len(p), *p.shape[1:])
        for name, p in model.named_parameters()
    }
    wanted = {
        name: (sum(shapes[p][0] for p in parts), *shapes[parts[0]][1:])
        for name, parts in stored_parts(model).items()
    }
    ignored = {"lm_head.weight"} - set(wanted)  # a tied head that was stored all the same
    problems = [
        Problem(name, f"is missing; the model has it with shape {list(shape)}")
        for name, shape in wanted.items()
        if name not in stored
    ]
    for name, tensor in stored.items():
        if name not in wanted:
            if name not in ignored and not name.endswith(
                "rotary_emb.inv_freq"
            ):  # old exports stored this constant
                problems.append(Problem(name, f"in {tensor.file.name} is not part of this model"))
        elif tensor.shape != wanted[name]:
            problems.append(
                Problem(
                    name,
                    f"in {tensor.file.name} has shape {list(tensor.shape)}; the model has {list(wanted[name])}",
                )
            )
        elif tensor.dtype not in DTYPES:
            problems.append(
                Problem(
                    name,
                    f"in {tensor.file.name} is stored as {tensor.dtype}; read are {', '.join(DTYPES)}",
                )
            )
    return problems


def check_tied_head(model: Decoder, stored: dict[str, Stored]) -> list[Problem]:
    """A tied head may be stored all the same, but only as what it is tied to. Every rank reads both whole, a piece at a time."""
    name, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if name not in stored or name in dict(model.named_parameters()):
        return []
    head, tied = stored[name], stored[embedding]
    same = (head.shape, head.dtype) == (tied.shape, tied.dtype)
    if same:
        buffers = [
            torch.empty(max(PIECE_BYTES, head.row_bytes), dtype=torch.uint8) for _ in range(2)
        ]
        with head.file.open("rb", 0) as one, tied.file.open("rb", 0) as other:
            for first, last in _ranges(head, 0, head.shape[0]):
                a, b = (
                    _read_rows(file.fileno(), tensor, first, last, buffer)
                    for file, tensor, buffer in zip(
                        (one, other), (head, tied), buffers, strict=True
                    )
                )
                same = same and torch.equal(a, b)
    why = f"in {head.file.name} differs from {embedding}, though config.json says tie_word_embeddings=true: set it to false"
    return [] if same else [Problem(name, why)]


@torch.no_grad()
def import_weights(model: Decoder, folder: Path) -> dict[str, str]:
    """Fill a materialised model, sharded or not, from a Hugging Face folder; returns each parameter's stored dtype by torch's name.

    Rows of the vocabulary that the folder does not have stay as they are. Host memory: the shard itself and a few pieces.
    Raises UserError before anything is read if the folder does not fit the model, and OSError when a file cannot be read.
    """
    stored, problems = read_headers(folder)
    vocab_size = ModelConfig.from_hf(folder).vocab_size
    lost = bool(problems)  # what is missing may be in a broken file
    problems += [
        p
        for p in check_tensors(model, stored, vocab_size)
        if not (lost and p.why.startswith("is missing"))
    ]
    if not problems:
        problems = check_tied_head(model, stored)
    if problems:
        rest = [Problem("…", f"and {len(problems) - SHOWN} more")] if len(problems) > SHOWN else []
        raise UserError(f"the weights in {folder} do not fit the model", problems[:SHOWN] + rest)
    parameters, dtypes = dict(model.named_parameters()), {}
    pieces: list[Piece] = []
    for whole, parts in stored_parts(model).items():
        start = 0  # the parameter's first row in the stored tensor
        for name in parts:
            pieces += _pieces(parameters[name], stored[whole], start)
            start += len(parameters[name])
            dtypes[name] = str(DTYPES[stored[whole].dtype]).removeprefix("torch.")
    _fill(sorted(pieces, key=lambda piece: (piece.stored.file, piece.stored.offset, piece.first)))
    return dtypes


def _pieces(parameter: Tensor, stored: Stored, start: int) -> Iterator[Piece]:
    """This rank's part of a parameter whose first row is row `start` of a stored tensor."""
    local, (rows, *columns) = _local_part(parameter)
    begin, end = rows.start + start, min(rows.stop + start, stored.shape[0])
    if local.numel():
        for first, last in _ranges(stored, begin, end):
            yield Piece(stored, first, tuple(columns), local[first - begin : last - begin])


def _ranges(stored: Stored, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """The rows from `begin` to `end` by as many as are read at once."""
    at_once = max(1, PIECE_BYTES // stored.row_bytes)
    for first in range(begin, end, at_once):
        yield first, min(first + at_once, end)


def _fill(pieces: list[Piece]) -> None:
    """Read all pieces, in this order. Raises OSError."""

    def fill(piece: Piece, buffer: Tensor) -> None:
        rows = _read_rows(
            files[piece.stored.file],
            piece.stored,
            piece.first,
            piece.first + len(piece.into),
            buffer,
        )
        # sent as stored, converted over there
        piece.into.copy_(rows[(slice(None), *piece.columns)].to(piece.into.device))

    with ExitStack() as opened:
        files = {
            file: opened.enter_context(file.open("rb", 0)).fileno()
            for file in {piece.stored.file for piece in pieces}
        }
        size = max([PIECE_BYTES, *(piece.stored.row_bytes for piece in pieces)])
        in_threads(fill, pieces, size, pinned=any(piece.into.is_cuda for piece in pieces))


def _read_rows(file: int, stored: Stored, first: int, last: int, buffer: Tensor) -> Tensor:
    """Rows of a stored tensor, as they are stored, in `buffer`."""
    found = buffer[: (last - first) * stored.row_bytes]
    read(stored.file, file, stored.offset + first * stored.row_bytes, found)
    return found.view(DTYPES[stored.dtype]).view(last - first, *stored.shape[1:])


def _local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a parameter, and where in the whole it lies."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, n) for n in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local().detach(), tuple(
        slice(o, o + n) for n, o in zip(shape, offset, strict=True)
    )
