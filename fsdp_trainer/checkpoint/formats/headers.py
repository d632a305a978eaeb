"""The headers of safetensors files: where a folder's tensors lie."""

import json
import re
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fsdp_trainer.base.distributed import whole_slice
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.checkpoint.formats.float8_blocks import FLOAT8, SCALES, Float8Matrix
from fsdp_trainer.checkpoint.formats.mxfp4 import join_mxfp4
from fsdp_trainer.checkpoint.formats.tensor_files import DTYPES, Chunk, HuggingFaceTensor
from fsdp_trainer.config.weight_files import weight_files
from fsdp_trainer.errors import Problem, UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# a folder for text and images holds its language model under another name, next to other parts
NOT_LANGUAGE = re.compile(r"__metadata__$|(model\.)?(vision_tower|multi_modal_projector)\.")
LANGUAGE_MODEL = re.compile(r"^(model\.)?language_model\.")
WRAPPED = re.compile(r"^((module|_orig_mod)\.)+|(?<=\.)_orig_mod\.")
"""What torch.compile and DistributedDataParallel put before the names of all tensors.

Torch.compile does so within names too, if parts of a model are compiled."""


def read_headers(
    folder: Path, all_parts: bool = False
) -> tuple[dict[str, HuggingFaceTensor], list[Problem]]:
    """Return every tensor of a Hugging Face folder, and a Problem for each missing or broken file.

    all_parts: False: only those of the language model, in a folder for text and images. Raises
    UserError if there are no weights.
    """
    tensors: dict[str, HuggingFaceTensor] = {}
    problems = []
    for path in _weight_files(folder):
        try:
            tensors |= read_header(path, all_parts)
        except FileNotFoundError:
            missing = f"is not there, and {INDEX} names it: copy or download it again"
            problems.append(Problem(str(path), missing))
        except (OSError, SafetensorError) as error:
            problems.append(Problem(str(path), _why_unreadable(path, error)))
    return join_mxfp4(with_scales(tensors)), problems


def with_scales(tensors: Json) -> Json:
    """Return the tensors, with each float8 matrix and its scales joined into one."""
    joined = dict(tensors)
    for name, tensor in tensors.items():
        scales = tensors.get(name + SCALES)
        if tensor.number_format == FLOAT8 and scales is not None:
            shape, chunks = tensor.shape, tensor.chunks
            joined[name] = Float8Matrix(torch.bfloat16, shape, chunks, tensor, scales)
            del joined[name + SCALES]
    return joined


def _why_unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error)
    size = path.stat().st_size
    nonsense = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
    with suppress(*nonsense):
        begin, header = _read_json(path)
        header.pop("__metadata__", None)
        end = begin + max(entry["data_offsets"][1] for entry in header.values())
        if end != size:
            return (
                f"has {size:,} bytes; its header says {end:,}: copied or downloaded in part, "
                "do it again"
            )
    broken = "is no safetensors file, or was copied or downloaded in part"
    return f"{broken}: do it again ({size:,} bytes; {error})"


def _weight_files(folder: Path) -> list[Path]:
    if files := weight_files(folder, SINGLE, INDEX):
        return files
    reason = f"has neither {SINGLE} nor {INDEX}, nor weights of another tool that are read"
    raise UserError("there are no weights", str(folder), reason)


def read_header(path: Path, all_parts: bool = False) -> dict[str, HuggingFaceTensor]:
    """Return the tensors of a safetensors file that belong to a language model, by name.

    all_parts: see read_headers. Raises OSError, SafetensorError, and UserError for a tensor that is
    there twice.
    """
    _check_header(path)
    begin, header = _read_json(path)
    header.pop("__metadata__", None)
    if all(map(WRAPPED.match, header)):
        plain = {WRAPPED.sub("", name): entry for name, entry in header.items()}
        if len(plain) < len(header):
            raise UserError(
                "the weights are not clear",
                str(path),
                "has a tensor twice, with torch.compile's names or others",
            )
        header = plain
    tensors = {}
    for name, entry in header.items():
        if all_parts or not NOT_LANGUAGE.match(name):
            number_format = entry["dtype"]
            shape = tuple(entry["shape"])
            first, last = entry["data_offsets"]
            chunk = Chunk(path, begin + first, whole_slice(shape))
            dtype = DTYPES.get(number_format, torch.uint8)
            name = name if all_parts else LANGUAGE_MODEL.sub(r"\1", name)
            tensor = HuggingFaceTensor(dtype, shape, [chunk], number_format, size=last - first)
            tensors[name] = tensor
    return tensors


def _check_header(path: Path) -> None:
    """Raise SafetensorError for an inconsistent header, or a file of another size than it says."""
    with safe_open(path, "np"):
        pass


def _read_json(path: Path) -> tuple[int, Json]:
    """Return the offset in bytes of the numbers in a safetensors file, and its header."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(min(length, path.stat().st_size)))
