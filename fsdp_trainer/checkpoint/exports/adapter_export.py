"""Export of a run's adapter as a PEFT folder, which peft and vLLM load."""

import json
import math
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fsdp_trainer.base.json_files import Json
from fsdp_trainer.checkpoint.atomic_files import complete_folder, write_json
from fsdp_trainer.checkpoint.exports.expert_export import EXPERT_FORMS, PeftExperts, trained_experts
from fsdp_trainer.checkpoint.exports.model_card import write_model_card
from fsdp_trainer.checkpoint.formats.safetensors_file import ExportPiece, export_piece, write_header
from fsdp_trainer.checkpoint.formats.tensor_files import (
    TensorOnDisk,
    in_threads,
    piece_bytes,
    read_whole,
    row_ranges,
)
from fsdp_trainer.checkpoint.frozen_weights import (
    Base,
    is_of_adapter,
    read_base,
    unmerged_weights,
    weights_on_disk,
)
from fsdp_trainer.checkpoint.origin import ORIGIN, origin, read_origin
from fsdp_trainer.config.paths import ADAPTER_CONFIG, MANIFEST
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE, A, AdapterSpec, B
from fsdp_trainer.models.adapters.adapter_targets import model_layout
from fsdp_trainer.models.adapters.peft_config import BARE_PREFIX, FUSED_RANKS, PREFIX, WEIGHTS_FILE
from fsdp_trainer.models.adapters.peft_experts import STACKED_PARTS
from fsdp_trainer.models.adapters.peft_names import EMBEDDING, HEAD, ModelNames, Part
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.hf.read_architecture import read_architecture

STACKED_MATRICES = {matrix for parts in STACKED_PARTS.values() for matrix in parts}
NOT_COPIED = ("config.json", "generation_config.json")
CLASSIFIER = "classifier"
"""An encoder's head."""


@dataclass
class Placed:
    """A tensor's place in a larger one: its first row and column there, and a factor."""

    tensor: TensorOnDisk
    row: int
    column: int = 0
    factor: float = 1.0


@dataclass
class Assembled(TensorOnDisk):
    """A tensor assembled from smaller ones, with 0 in the gaps."""

    placed: list[Placed]

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        rows.zero_()
        for part in self.placed:
            begin = max(first, part.row)
            end = min(last, part.row + part.tensor.shape[0])
            if begin < end:
                numbers = read_whole(part.tensor, begin - part.row, end - part.row)
                columns = [slice(part.column, part.column + n) for n in numbers.shape[1:]]
                rows[(slice(begin - first, end - first), *columns)] = numbers * part.factor


@dataclass
class RowLengths(TensorOnDisk):
    """The L2 norm of each row of a matrix: [out] float32."""

    matrix: TensorOnDisk

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        whole = read_whole(self.matrix, first, last).double()
        rows.copy_(torch.linalg.vector_norm(whole, dim=1))


@dataclass
class PeftFiles:
    """The content of a PEFT folder: adapter_config.json, tensors by name, the file's metadata."""

    config: Json
    tensors: dict[str, TensorOnDisk]
    metadata: dict[str, str]


def export_adapter(
    checkpoint: Path, out: Path, dtype: str | None = None, experts: str = "stacked"
) -> None:
    """Write the adapter of a run under a temporary name and rename it when it is complete.

    dtype: number format of all tensors; None: as they were trained. experts: the form of the
    experts' adapters, `stacked` or `separate`, see models.peft_experts. Raises OSError, and
    UserError for an adapter that PEFT's format cannot hold.
    """
    config = read_architecture(checkpoint / "hf")
    base = read_base(checkpoint)
    files = peft_files(config, checkpoint, base, experts)
    tensors = {
        PREFIX + name: TensorOnDisk(getattr(torch, dtype) if dtype else t.dtype, t.shape, [])
        for name, t in files.tensors.items()
    }
    with complete_folder(out) as partial:
        for file in (checkpoint / "hf").iterdir():
            if file.name not in NOT_COPIED and file.is_file():
                shutil.copyfile(file, partial / file.name)
        write_json(partial / ADAPTER_CONFIG, files.config)
        of_base = {
            name: digest
            for name, digest in base.digests.items()
            if not is_of_adapter(name, base.adapters)
        }
        recorded = {"base": {"dtype": base.dtype, "digests": of_base}}
        write_json(partial / ORIGIN, origin(checkpoint, dtype) | recorded)
        write_model_card(partial, checkpoint, is_adapter=True)
        with (partial / WEIGHTS_FILE).open("wb", 0) as handle:
            places = write_header(handle, tensors, files.metadata)
            pieces = []
            for name, source in files.tensors.items():
                target = tensors[PREFIX + name]
                handle_number, start = places[PREFIX + name]
                row_bytes = max(source.row_bytes, target.row_bytes)
                for first, last in row_ranges(0, source.shape[0], row_bytes):
                    offset = start + first * target.row_bytes
                    piece = ExportPiece(source, first, last, target.dtype, handle_number, offset)
                    pieces.append(piece)
            largest = piece_bytes(2 * tensor.row_bytes for tensor in files.tensors.values())
            in_threads(export_piece, pieces, 2 * largest)


def peft_files(
    config: ModelConfig, checkpoint: Path, base: Base, experts: str = "stacked"
) -> PeftFiles:
    """Return a run's adapter in PEFT's terms. experts: see export_adapter."""
    spec = base.adapters
    assert spec
    layout = model_layout(config)
    # DoRA's norms of a fused matrix's parts without an adapter are those of the base
    weights = unmerged_weights(config, checkpoint, only_adapter=spec.kind != "dora")
    saved = saved_parameters(spec, layout)
    tensors: dict[str, TensorOnDisk] = {}
    ranks: dict[str, tuple[int, float]] = {}
    fused_ranks: dict[str, int] = {}
    for module, (shape, parts) in layout.linears.items():
        adapted = [part.layer for part in parts if part.layer in spec.layers]
        if not adapted or f"{module}.weight" in saved:
            continue
        if len(parts) > 1:
            fused_ranks |= {layer: spec.layers[layer][0] for layer in adapted}
        ranks[module] = module_rank(spec, adapted)
        tensors |= module_tensors(module, parts, shape, spec, weights)
    of_experts = EXPERT_FORMS[experts](spec, layout, weights)
    tensors |= of_experts.tensors
    fused_ranks |= of_experts.fused_ranks
    if spec.also:
        merged = weights_on_disk(config, checkpoint)
        tensors |= saved_tensors(saved, merged, layout.tied)
        tensors |= trained_experts(spec, layout, merged)
    if not ranks and not of_experts.ranks:
        text = "trains parts of all adapted matrices in full.\nUse  form=merged"
        raise UserError("the adapter cannot be written", "adapter.also", text)
    metadata = {FUSED_RANKS: json.dumps(fused_ranks)} if fused_ranks else {}
    described = adapter_config(spec, ranks, of_experts, tensors, layout, base)
    return of_task(PeftFiles(described, tensors, metadata), config)


def of_task(files: PeftFiles, config: ModelConfig) -> PeftFiles:
    if config.pooling:
        return of_bare_model(files)
    if config.scores:
        files.config["task_type"] = "TOKEN_CLS" if config.tags else "SEQ_CLS"
    return files


def of_bare_model(files: PeftFiles) -> PeftFiles:
    """Return an adapter under the names of a model without a head, which embeds texts."""

    def own(name: str) -> str:
        return name.removeprefix(BARE_PREFIX)

    config = files.config | {"task_type": "FEATURE_EXTRACTION"}
    for key in ("target_modules", "target_parameters", "modules_to_save"):
        config[key] = config[key] and [own(name) for name in config[key]]
    for key in ("rank_pattern", "alpha_pattern"):
        config[key] = {own(name): value for name, value in config[key].items()}
    tensors = {own(name): tensor for name, tensor in files.tensors.items()}
    return replace(files, config=config, tensors=tensors)


def saved_tensors(
    saved: dict[str, tuple[tuple[int, ...], list[Part]]],
    weights: dict[str, TensorOnDisk],
    tied: bool,
) -> dict[str, TensorOnDisk]:
    """Return parameters named as in the base model's folder, assembled from their parts' weights.

    tied: the model's head is its embedding.
    """
    tensors: dict[str, TensorOnDisk] = {}
    for name, (shape, parts) in saved.items():
        kind = name.rpartition(".")[2]
        placed = [Placed(weights[f"{part.layer}.{kind}"], part.first) for part in parts]
        tensors[name] = Assembled(placed[0].tensor.dtype, shape, [], placed)
    if tied and EMBEDDING in tensors:
        # PEFT copies both modules and reads a tensor for each
        tensors[HEAD] = tensors[EMBEDDING]
    return tensors


def saved_parameters(
    spec: AdapterSpec, layout: ModelNames
) -> dict[str, tuple[tuple[int, ...], list[Part]]]:
    """Return shape and parts of the parameters in the base's folder that `adapter.also` replaces.

    A fused matrix is replaced completely if one part is trained in full: its other parts are
    unchanged, or have their adapters merged.
    """
    saved = {}
    for name, (shape, parts) in layout.parameters.items():
        kind = name.rpartition(".")[2]
        if name in layout.stacks and kind not in STACKED_PARTS:
            continue  # see trained_experts
        if any(f"{part.layer}.{kind}" in spec.also for part in parts):
            saved[name] = (shape, parts)
    return saved


def module_rank(spec: AdapterSpec, layers: list[str]) -> tuple[int, float]:
    if len(layers) == 1:
        return spec.layers[layers[0]]
    rank = sum(spec.layers[layer][0] for layer in layers)
    return rank, spec.alpha_for(spec.scale(layers[0]), rank)


def module_tensors(
    module: str,
    parts: list[Part],
    shape: tuple[int, ...],
    spec: AdapterSpec,
    weights: dict[str, TensorOnDisk],
) -> dict[str, TensorOnDisk]:
    """Return the tensors of one matrix's adapter.

    For a fused matrix, A is the concatenation of its parts' A, and B is block-diagonal, with zeros
    in the rows of a part without an adapter. weights: all weights, by parameter name.
    """
    adapted = [part for part in parts if part.layer in spec.layers]
    scale = spec.scale(adapted[0].layer)
    a: list[Placed] = []
    b: list[Placed] = []
    column = 0
    for part in adapted:
        factor = spec.scale(part.layer) / scale
        a.append(Placed(weights[f"{part.layer}.{A}.weight"], column))
        b.append(Placed(weights[f"{part.layer}.{B}.weight"], part.first, column, factor))
        column += spec.layers[part.layer][0]
    dtype = a[0].tensor.dtype
    tensors: dict[str, TensorOnDisk] = {
        f"{module}.{A}.weight": Assembled(dtype, (column, shape[1]), [], a),
        f"{module}.{B}.weight": Assembled(dtype, (shape[0], column), [], b),
    }
    if spec.kind == "dora":
        lengths = [Placed(magnitude(part, spec, weights), part.first) for part in parts]
        tensors[f"{module}.{MAGNITUDE}"] = Assembled(dtype, (shape[0],), [], lengths)
    return tensors


def magnitude(
    part: Part,
    spec: AdapterSpec,
    weights: dict[str, TensorOnDisk],
) -> TensorOnDisk:
    """Return DoRA's norms of a part's rows; of a part without an adapter, the base weight's."""
    if part.layer in spec.layers:
        return weights[f"{part.layer}.{MAGNITUDE}"]
    return RowLengths(torch.float32, (part.rows,), [], weights[f"{part.layer}.weight"])


# --- adapter_config.json --------------------------------------------------------------------------


def adapter_config(
    spec: AdapterSpec,
    ranks: dict[str, tuple[int, float]],
    of_experts: PeftExperts,
    tensors: dict[str, TensorOnDisk],
    layout: ModelNames,
    base: Base,
) -> Json:
    """Return the content of adapter_config.json.

    `r` is the largest rank, by which vLLM sizes its buffers; `lora_alpha` gives the most common
    scale at that rank. ranks: rank and alpha of each adapted matrix, without experts.
    """
    ranks = names_for_peft(spec, ranks, layout, of_experts.are_separate)
    modules, parameters = target_names(list(ranks), of_experts, layout)
    ranks = ranks | of_experts.ranks
    rank = max(rank for rank, _ in ranks.values())
    scales = Counter(
        round(replace(spec, layers={name: pair}).scale(name), 12) for name, pair in ranks.items()
    )
    exact = [alpha for own, alpha in ranks.values() if own == rank]
    alpha = spec.alpha_for(scales.most_common(1)[0][0], rank)
    alpha = next((value for value in exact if math.isclose(value, alpha)), alpha)
    other_ranks = {name: own for name, (own, _) in ranks.items() if own != rank}
    other_alphas = {name: own for name, (_, own) in ranks.items() if own != alpha}
    whole = {n.rpartition(".")[0] for n in tensors if ".lora_" not in n}
    # PEFT itself wraps a whole classifier, of one layer or more
    saved = sorted({CLASSIFIER if n.startswith(f"{CLASSIFIER}.") else n for n in whole})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name(base),
        "inference_mode": True,
        "r": rank,
        "lora_alpha": integral_as_int(alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": spec.scaling == "rslora",
        "use_dora": spec.kind == "dora",
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": by_name(other_ranks, list(ranks)),
        "alpha_pattern": by_name(
            {n: integral_as_int(a) for n, a in other_alphas.items()}, list(ranks)
        ),
        "modules_to_save": saved or None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def names_for_peft(spec: AdapterSpec, ranks: Json, layout: ModelNames, separate: bool) -> Json:
    """Return rank and alpha of each adapted matrix, by the name under which PEFT finds it.

    In a model with experts peft 0.21 takes names such as `gate_proj` for the experts'
    (`_convert_peft_config_moe`). The matrices of other feed-forwards are therefore named as
    parameters, except for DoRA, which PEFT does not support for parameters. ranks: by module.
    separate: True if each expert has its own adapter.
    """
    if not layout.stacks or separate or spec.kind == "dora":
        return ranks
    return {
        f"{name}.weight" if name.rpartition(".")[2] in STACKED_MATRICES else name: pair
        for name, pair in ranks.items()
    }


def target_names(
    names: list[str], of_experts: PeftExperts, layout: ModelNames
) -> tuple[list[str], list[str]]:
    """Return target_modules and target_parameters.

    names: names from names_for_peft, without experts.
    """
    linears = list(layout.linears)
    if of_experts.are_separate:
        every = [name for stack in layout.stacks.values() for name in stack.names]
        return module_names([*names, *of_experts.ranks], linears + every), []
    modules = module_names([name for name in names if name in layout.linears], linears)
    others = [name for name in names if name not in layout.linears]
    parameters = module_names(others, [f"{name}.weight" for name in linears])
    return modules, parameters + module_names(list(of_experts.ranks), of_experts.all_names)


def integral_as_int(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


def base_name(base: Base) -> str | None:
    """Return the base model's name on the hub, else its folder; None if it was random.

    The folder of a base that is a checkpoint is its run's hf/, if that was exported from it.
    """
    if not base.source:
        return None
    source = Path(base.source)
    exported = source.parent.parent / "hf"
    if (source / MANIFEST).is_file():
        expected = origin(source, None)["manifest_crc32"]
        if read_origin(exported).get("manifest_crc32") == expected:
            return str(exported)
    return base.hub_id or base.source


def module_names(adapted: list[str], linears: list[str]) -> list[str]:
    """Return the entries of target_modules: last parts of names, or full names.

    The last part stands for all modules that end in it; it is used if all of them are adapted.
    """
    all_of = Counter(map(last_name, set(linears)))
    adapted_of = Counter(map(last_name, set(linears) & set(adapted)))
    names: dict[str, None] = {}
    for module in adapted:
        leaf = last_name(module)
        names[leaf if adapted_of[leaf] == all_of[leaf] else module] = None
    return list(names)


def last_name(name: str) -> str:
    end = ".weight" if name.endswith(".weight") else ""
    return name.removesuffix(end).rpartition(".")[2] + end


def by_name(values: Json, adapted: list[str]) -> Json:
    """Return a rank_pattern or alpha_pattern.

    An entry is keyed by the last part of a name if all adapted modules that end in it have the
    same value, else by the full name.
    """
    values_of = defaultdict(set)
    for name in adapted:
        values_of[last_name(name)].add(values.get(name))
    pattern: Json = {}
    for module, value in values.items():
        leaf = last_name(module)
        pattern[leaf if values_of[leaf] <= {value} else module] = value
    return pattern
