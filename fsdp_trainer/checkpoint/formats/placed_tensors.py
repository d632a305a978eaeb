"""Weights that transformers' class has under other names or in other pieces than a folder.

A model here is a TransformersDecoder, whose `places` says which rows of which tensor are which rows
of a weight.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from fsdp_trainer.base.matrix_rows import matrix_rows
from fsdp_trainer.checkpoint.formats.derived import SomeRows, stack_of, transposed
from fsdp_trainer.checkpoint.formats.tensor_files import DTYPES, Chunk, TensorOnDisk, dtype_name
from fsdp_trainer.errors import Problem, UserError

Shape = tuple[int, ...]


def places_of(model: Any, stored: Mapping[str, Shape]) -> tuple[list[Any], list[str]]:
    """Return the places of tensors of these shapes, and the names of those without a place.

    Raises UserError for tensors that transformers changes in a way that is not done here.
    """
    try:
        return model.places(stored)
    except ValueError as error:
        raise UserError(
            "the model's weights cannot be converted", model.config.family, str(error)
        ) from None


def check_places(
    model: Any, stored: Mapping[str, Any], vocab_size: int, optional: Collection[str]
) -> list[Problem]:
    """Return a Problem for each tensor of a folder that does not fit, and each missing weight.

    optional: names of weights that may be missing.
    """
    places, unused = places_of(model, {name: tensor.shape for name, tensor in stored.items()})
    expected = model.transformers_shapes(vocab_size)
    rows: Counter[str] = Counter()
    for place in places:
        rows[place.parameter] += place.rows
    misfits = {p.tensor: misfit(stored[p.tensor], expected[p.parameter]) for p in places}
    problems = [Problem(name, text) for name, text in misfits.items() if text]
    for name, shape in expected.items():
        if name not in optional and rows[name] != matrix_rows(shape):
            held = f"has {rows[name]:,} rows" if rows[name] else "is missing"
            problems.append(Problem(name, f"{held}; the model has it with shape {list(shape)}"))
    for name in unused:
        file = stored[name].chunks[0].file.name
        problems.append(Problem(name, f"in {file} is not part of this model"))
    return problems


def misfit(tensor: Any, shape: Shape, is_whole: bool = False) -> str:
    """Return why a tensor cannot be a weight of this shape, or a part of it; "" if it can."""
    file = f"in {tensor.chunks[0].file.name}"
    is_part = tensor.shape[-1:] == shape[-1:] or len(shape) == 1
    if not is_part or (is_whole and tensor.shape != shape):
        return f"{file} has shape {list(tensor.shape)}; the model has {list(shape)}"
    if tensor.number_format not in DTYPES:
        return f"{file} is stored as {tensor.number_format}; read are {', '.join(DTYPES)}"
    return ""


def weights_in_places(model: Any, stored: Mapping[str, Any]) -> dict[str, TensorOnDisk]:
    places, _ = places_of(model, {name: tensor.shape for name, tensor in stored.items()})
    by_weight: dict[str, list[Any]] = {}
    for place in places:
        by_weight.setdefault(place.parameter, []).append(place)
    weights = model.named_weights()
    sources: dict[str, TensorOnDisk] = {}
    for name, own in by_weight.items():
        if len(own) > 1:
            sources[name] = joined(name, weights[name].shape, own, stored)
            continue
        source = some_rows(stored[own[0].tensor], own[0])
        sources[name] = transposed(source) if name in model.transposed_weights else source
    return sources


def some_rows(tensor: TensorOnDisk, place: Any) -> TensorOnDisk:
    if not tensor.shape:
        (chunk,) = tensor.chunks
        one = Chunk(chunk.file, chunk.offset, (slice(0, 1),))
        return TensorOnDisk(tensor.dtype, (1,), [one])
    is_whole = place.rows == matrix_rows(tensor.shape)
    return tensor if is_whole else tensor.whole_rows(place.tensor_row, place.rows)


def joined(name: str, shape: Shape, places: list[Any], stored: Mapping[str, Any]) -> TensorOnDisk:
    """Return a weight that is made of several tensors. Raises UserError as `one_dtype` does."""
    dtype = one_dtype(name, [stored[place.tensor] for place in places])
    chunks = [
        Chunk(chunk.file, chunk.offset, place_in(shape, place, chunk))
        for place in places
        for chunk in stored[place.tensor].chunks
    ]
    return TensorOnDisk(dtype, tuple(shape), chunks)


def place_in(shape: Shape, place: Any, chunk: Chunk) -> tuple[slice, ...]:
    """Return the position in a weight of this shape of a chunk that holds a whole tensor."""
    first, rows = place.parameter_row, place.rows
    if len(shape) < 3:
        return (slice(first, first + rows), *chunk.part[1:])
    if shape[1] == 1:
        return (slice(first, first + rows), slice(0, 1), chunk.part[-1])
    number, row = divmod(first, shape[1])
    return (slice(number, number + 1), slice(row, row + rows), chunk.part[-1])


def one_dtype(name: str, tensors: list[TensorOnDisk]) -> torch.dtype:
    """Return the number format of tensors that become one. Raises UserError if it differs."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        formats = " and ".join(sorted(map(dtype_name, dtypes)))
        raise UserError(
            "the experts of a block differ in their number format",
            name,
            f"has experts in {formats}: convert the folder to one format",
        )
    return next(iter(dtypes))


def as_exported(model: Any, sources: Mapping[str, TensorOnDisk]) -> dict[str, TensorOnDisk]:
    turned = getattr(model, "transposed_weights", ())
    return {n: transposed(source) if n in turned else source for n, source in sources.items()}


def stacked(name: str, matrices: list[TensorOnDisk]) -> TensorOnDisk:
    """Return matrices of one shape as one tensor, [matrices, rows, columns].

    Raises UserError if their number formats differ.
    """
    dtype = one_dtype(name, matrices)
    if any(isinstance(matrix, SomeRows) for matrix in matrices):
        return stack_of(matrices)
    shape = (len(matrices), *matrices[0].shape)
    chunks = [
        Chunk(chunk.file, chunk.offset, (slice(i, i + 1), *chunk.part))
        for i, matrix in enumerate(matrices)
        for chunk in matrix.chunks
    ]
    return TensorOnDisk(dtype, shape, chunks)
