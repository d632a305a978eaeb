"""The files of a folder are whole, and agree with each other."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import Checked, counted_wrong
from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.checkpoint.formats.headers import INDEX, SINGLE, read_header, read_headers
from fsdp_trainer.checkpoint.formats.tensor_files import HuggingFaceTensor
from fsdp_trainer.config.weight_files import weight_files
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.peft_config import without_weights

NAME = "files"
ADVICE = "copy or download the folder again, or save it anew: programs read other files than others"
NOT_FINITE = "a training has broken these weights: go back to an earlier checkpoint"
PART = re.compile(r"model-\d+-of-\d+\.safetensors")


def check(proof: ProvedFolder) -> Iterator[Checked]:
    """Read every header, compare the index with the files, and look at every number."""
    if not proof.is_adapter and not proof.is_safetensors:
        return  # another tool's files, which are read as they are loaded
    try:
        wrong, tensors = unsound(proof)
    except UserError as error:
        wrong, tensors = reasons(error), {}
    right = f"{len(tensors)} tensors, as the headers and the index say"
    yield counted_wrong(NAME, wrong, right, ADVICE)
    if not wrong:
        broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
        right = "no number is infinite or undefined"
        yield counted_wrong("numbers", broken, right, NOT_FINITE)


def unsound(proof: ProvedFolder) -> tuple[list[str], dict[str, HuggingFaceTensor]]:
    """Return what is wrong with the files, and the tensors by name. Raises UserError."""
    if proof.is_adapter:
        try:
            return [], read_header(proof.adapter_file, all_parts=True)
        except FileNotFoundError:
            raise without_weights(proof.source) from None
        except (OSError, SafetensorError) as error:
            return [f"{proof.adapter_file.name} is not whole: {error}"], {}
    tensors, problems = read_headers(proof.source, all_parts=True)
    wrong = [f"{Path(one.what).name} {one.reason.splitlines()[0]}" for one in problems]
    return wrong or [*contradictions(proof.source)], tensors


def contradictions(folder: Path) -> Iterator[str]:
    places = defaultdict(list)
    files = weight_files(folder, SINGLE, INDEX)
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                places[name].append(file.name)
    yield from (f"{name} is in {' and in '.join(in_)}" for name, in_ in places.items() if in_[1:])
    yield from unnamed_files(folder, files)
    if not (folder / INDEX).is_file() or files == [folder / SINGLE]:
        return
    named = read_object(folder / INDEX, "cannot read the index of the weights")["weight_map"]
    for name, file in named.items():
        if file not in places.get(name, ()):
            yield f"{INDEX} says that {name} is in {file}, which lacks it"
    yield from (f"{INDEX} does not name {name}" for name in places if name not in named)


def unnamed_files(folder: Path, files: list[Path]) -> Iterator[str]:
    there = {file.name for file in folder.iterdir() if PART.fullmatch(file.name)}
    if (folder / SINGLE).is_file() and (folder / INDEX).is_file():
        there.add(SINGLE)
    yield from (f"{name} is there and is not read" for name in there - {f.name for f in files})


def is_finite(tensor: HuggingFaceTensor) -> bool:
    if not tensor.shape or not tensor.dtype.is_floating_point or not tensor.nbytes:
        return True
    return all(bool(torch.isfinite(piece.float()).all()) for piece in tensor.pieces())
