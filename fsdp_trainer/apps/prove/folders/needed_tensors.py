"""A folder has every tensor that its architecture needs, in its shape, and no others."""

from collections.abc import Iterator

from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import Checked, NotProved, counted_wrong
from fsdp_trainer.checkpoint.formats.headers import read_headers
from fsdp_trainer.checkpoint.formats.tensor_files import HuggingFaceTensor
from fsdp_trainer.checkpoint.frozen_weights import weights_on_disk
from fsdp_trainer.checkpoint.huggingface import TIED_HEAD, tensor_parts, tensor_shapes
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.hf.new_model import meta_decoder

NAME = "tensors"
ADVICE = "export the folder anew: a program gives what is missing random numbers, or refuses it"
PACKED = "_packed"
"""What follows the name of a matrix in 4 bits."""
BESIDE = ("_scale", "_shape", "_zero_point", "_g_idx", "_global_scale", PACKED)
"""What follows it in the names of the tensors that decode a matrix in few bits."""


def check(proof: ProvedFolder) -> Iterator[Checked | NotProved]:
    """Compare names, shapes and formats with the architecture that config.json describes."""
    if proof.is_adapter:
        return
    try:
        config = proof.config
    except UserError as error:
        name = f"read by this program: {reasons(error)[0]}"
        yield NotProved(name, f"{proof.command} model.implementation=transformers")
        return
    if proof.is_compressed:
        wrong = [*misplaced(proof)]
    else:
        try:
            weights_on_disk(config, proof.source)
            wrong = []
        except UserError as error:
            wrong = reasons(error)
    right = "each that config.json needs is there in its shape, and no other"
    yield counted_wrong(NAME, wrong, right, ADVICE)


def misplaced(proof: ProvedFolder) -> Iterator[str]:
    """Yield what is wrong with the tensors of a folder in few bits."""
    model = meta_decoder(proof.config)
    shapes = tensor_shapes(model, tensor_parts(model, proof.config.vocab_size))
    stored, _ = read_headers(proof.source, all_parts=True)
    for name, shape in shapes.items():
        if reason := why_not_decoded(name, shape, stored):
            yield f"{name} {reason}"
    known = {*shapes, *(name + ending for name in shapes for ending in BESIDE)}
    if model.config.tie_word_embeddings:
        known.add(TIED_HEAD)
    others = [name for name in stored if name not in known and not name.endswith("input_scale")]
    yield from (f"{name} is not part of this model" for name in others)


def why_not_decoded(name: str, shape: tuple[int, ...], stored: dict[str, HuggingFaceTensor]) -> str:
    tensor = stored.get(name)
    if tensor is None and name + PACKED not in stored:
        return "is missing"
    if tensor is not None and tensor.shape != shape:
        return f"has shape {list(tensor.shape)}; the model has {list(shape)}"
    in_few_bits = tensor is None or tensor.dtype.itemsize == 1
    return "has no scale" if in_few_bits and f"{name}_scale" not in stored else ""
