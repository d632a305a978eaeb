"""Import of PEFT folders: the stored tensors that each parameter of an adapter is read from."""

from pathlib import Path

import torch

from fsdp_trainer.checkpoint.adapters.expert_tensors import OurB
from fsdp_trainer.checkpoint.formats.derived import Columns, PartCache, Stacked, rows_of, stack_of
from fsdp_trainer.checkpoint.formats.headers import read_header
from fsdp_trainer.checkpoint.formats.placed_tensors import stacked
from fsdp_trainer.checkpoint.formats.tensor_files import DTYPES, HuggingFaceTensor, TensorOnDisk
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import AdapterSpec
from fsdp_trainer.models.adapters.adapter_targets import model_layout
from fsdp_trainer.models.adapters.adapters import add_adapters
from fsdp_trainer.models.adapters.peft_config import WEIGHTS_FILE, plain_name, read_folder
from fsdp_trainer.models.adapters.peft_experts import SeparateTensors, StackedRows, StackedTensor
from fsdp_trainer.models.adapters.peft_names import Source, resolve
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.new_model import meta_decoder

CACHED_TENSORS = 8
"""Number of complete tensors in the cache: enough for those that threads read at a time."""


def adapted_model(config: ModelConfig, spec: AdapterSpec | None) -> Decoder:
    model = meta_decoder(config)
    if spec:
        add_adapters(model, spec, torch.float32)
    return model


def peft_adapter(
    config: ModelConfig, folder: Path, base: str
) -> tuple[AdapterSpec, dict[str, TensorOnDisk]]:
    """Return the specification of a PEFT folder's adapters, and their tensors by parameter name.

    Raises UserError with everything that does not fit the model.
    """
    peft = read_folder(folder)
    resolved = resolve(peft, model_layout(config), base)
    tensors = read_header(folder / WEIGHTS_FILE)
    stored = {plain_name(name): tensor for name, tensor in tensors.items()}
    problems = [
        Problem(name, f"is stored as {tensor.number_format}; read are {', '.join(DTYPES)}")
        for name, tensor in stored.items()
        if tensor.number_format not in DTYPES
    ]
    for first, second in resolved.same:
        if not equal(stored[first], stored[second]):
            text = f"differs from {second}, though config.json says tie_word_embeddings=true"
            problems.append(Problem(first, text))
    if problems:
        raise UserError(f"the adapter in {folder} cannot be read", problems)
    cache = PartCache(CACHED_TENSORS)
    sources = {
        name: parameter_from(stored, source, cache) for name, source in resolved.sources.items()
    }
    return resolved.spec, sources


def parameter_from(
    stored: dict[str, HuggingFaceTensor], source: Source, cache: PartCache
) -> TensorOnDisk:
    """Return one of our parameters, read from PEFT's tensors.

    cache: holds complete tensors of all experts' B, of which several parameters read a part.
    """
    if isinstance(source, SeparateTensors):
        matrices = [stored[f"{name}.weight"] for name in source.tensors]
        return stacked(source.tensors[0], list(matrices))
    whole = stored.get(source.tensor) or stored[f"{source.tensor}.weight"]
    if isinstance(source, StackedTensor):
        return stacked_matrices(whole, source, cache)
    if isinstance(source, StackedRows):
        count, height, _ = whole.shape
        matrix = whole.as_matrix()
        starts = [expert * height + source.row for expert in range(count)]
        return stack_of([rows_of(matrix, start, source.rows) for start in starts])
    rows = whole.whole_rows(source.first, source.rows)
    if source.columns is None:
        return rows
    first, last = source.columns
    return Columns(rows.dtype, (source.rows, last - first), [], rows, first)


def stacked_matrices(
    whole: HuggingFaceTensor, source: StackedTensor, cache: PartCache
) -> TensorOnDisk:
    """Return A or B of all experts of one matrix, stacked, as part of PEFT's tensor."""
    if not source.is_b:
        starts = [expert * source.whole + source.first for expert in range(source.experts)]
        return stacked(source.tensor, [whole.whole_rows(start, source.rank) for start in starts])
    shape = (source.experts * source.rows, source.rank)
    span = (source.experts, source.row, source.first, source.whole)
    matrix = OurB(whole.dtype, shape, whole.chunks, whole, *span, cache)
    return Stacked(whole.dtype, (source.experts, source.rows, source.rank), whole.chunks, matrix)


def equal(a: TensorOnDisk, b: TensorOnDisk) -> bool:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return all(map(torch.equal, a.pieces(), b.pieces()))
