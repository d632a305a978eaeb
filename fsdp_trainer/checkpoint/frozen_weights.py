"""Frozen weights, which checkpoints do not hold: where they are, and whether they have changed."""

import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_trainer.base.distributed import (
    gather,
    local_part,
    local_slice,
    run_on_all_ranks,
    whole_slice,
)
from fsdp_trainer.checkpoint.adapters.adapter_import import adapted_model, peft_adapter
from fsdp_trainer.checkpoint.adapters.merge import merged
from fsdp_trainer.checkpoint.formats.four_bit_encoding import as_trained_on, encoded
from fsdp_trainer.checkpoint.formats.stored_tensors import StoredTensors
from fsdp_trainer.checkpoint.formats.tensor_files import (
    TensorOnDisk,
    dtype_name,
    in_threads,
    piece_bytes,
    row_ranges,
)
from fsdp_trainer.checkpoint.huggingface import parameters_on_disk, read_parameters
from fsdp_trainer.checkpoint.origin import read_origin, refuse_merging_twice
from fsdp_trainer.checkpoint.state import WEIGHTS, plain
from fsdp_trainer.checkpoint.store import PROGRESS, load, read_progress
from fsdp_trainer.config.hub import fetch
from fsdp_trainer.config.paths import (
    ADAPTER_CONFIG,
    base_of_adapter,
    find_checkpoint,
    is_adapter,
    is_hub_id,
    model_folder,
)
from fsdp_trainer.config.schema import Precision
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.adapter_spec import NF4, AdapterSpec, frozen_dtype
from fsdp_trainer.models.adapters.adapters import is_adapted
from fsdp_trainer.models.config import AUTO, ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit import is_encoded
from fsdp_trainer.models.from_config.freeze import frozen_parameters
from fsdp_trainer.models.from_config.initialize import initialize_part
from fsdp_trainer.models.from_config.setup import WeightSource
from fsdp_trainer.models.hf.read_architecture import read_architecture
from fsdp_trainer.parallel.pipeline import stages_of

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# odd constants of splitmix64 (Steele et al. 2014), as signed numbers
GAMMA = -7046029254386353131
MIX_1 = -4658895280553007687
MIX_2 = -7723592293110705685
MAX_SHOWN_WEIGHTS = 3
CODES = f"{NF4}:"
"""Prefix of the digest of a weight kept in 4 bits."""


@dataclass
class Base:
    """The origin of a run's frozen weights: `frozen` in the trainer.json of its checkpoints.

    source: a Hugging Face folder or a checkpoint; "": the weights are random, from `seed`. hub_id:
    the name under which that folder was fetched, or "". dtype: number format of the frozen weights
    in training. digests: digest of each frozen weight in that format, or of its 4-bit codes, by
    name. adapters: the adapters trained on top of them. adapter_source: the PEFT folder or
    checkpoint from which frozen parts of the adapters were read; "": none.
    """

    source: str
    hub_id: str
    seed: int
    dtype: str
    digests: dict[str, str]
    adapters: AdapterSpec | None = None
    adapter_source: str = ""

    def at(self, source: str, hub_id: str) -> "Base":
        """Return the base as it is found in another folder; random weights are in none."""
        return replace(self, source=source, hub_id=hub_id) if self.source else self


@dataclass
class RandomWeight(TensorOnDisk):
    """A randomly initialised weight, which is drawn again instead of stored on disk."""

    config: ModelConfig
    name: str
    seed: int

    def fill(self, rows: Tensor, first: int, last: int) -> None:
        part = (slice(first, last), *whole_slice(self.shape[1:]))
        initialize_part(self.config, self.name, rows, part, self.shape, self.seed)


NOTHING_FROZEN = Base("", "", 0, "float32", {})


def read_base(checkpoint: Path) -> Base:
    stored = read_progress(checkpoint).get("frozen")
    if not stored:
        return NOTHING_FROZEN
    try:
        adapters = stored.get("adapters")
        return Base(**stored | {"adapters": AdapterSpec.from_json(adapters) if adapters else None})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "the checkpoint cannot be read",
            str(checkpoint / PROGRESS),
            f"frozen cannot be read: {error}",
        ) from None


def base_of_new_run(
    model: Decoder, source: WeightSource, precision: Precision, adapters: AdapterSpec | None
) -> Base | None:
    """Return the origin of the frozen weights, just read or drawn; None if none is frozen.

    Collective. source: what they were read or drawn from.
    """
    frozen = list(frozen_parameters(model.whole))
    dtype = frozen_dtype(precision, adapters)
    if not frozen:
        return None
    folder = folder_of(source.folder) if source.folder else ""
    known = digests(model, frozen, dtype)
    base = Base(folder, source.hub_id, source.seed, dtype, known, adapters)
    if source.adapter:
        require_base_of_adapter(base, source.adapter)
        if any(is_of_adapter(name, adapters) for name in frozen):
            base.adapter_source = folder_of(source.adapter)
    return base


def folder_of(source: Path) -> str:
    return str((find_checkpoint(source) or source).resolve())


def require_base_of_adapter(base: Base, adapter: Path) -> None:
    """Raise UserError if an adapter to continue from was trained on another base model.

    An adapter written by another program has no digests, and digests of different formats cannot
    be compared: both are accepted.
    """
    if base.source:
        refuse_merging_twice(adapter, Path(base.source))
    checkpoint = find_checkpoint(adapter)
    recorded = read_base(checkpoint) if checkpoint else recorded_digests(adapter)
    if recorded.dtype != base.dtype:
        return
    ours, others = base.digests, recorded.digests
    both = [n for n in ours.keys() & others if is_of_codes(ours[n]) == is_of_codes(others[n])]
    different = [name for name in both if ours[name] != others[name]]
    if different:
        trained_beside = recorded.hub_id or recorded.source or "random weights"
        text = (
            f"was trained with other base weights: {len(different):,} of {len(both):,} differ,"
            f" such as {min(different)}.\nIts base model was {trained_beside}"
        )
        raise UserError("this is not the adapter's base model", str(adapter), text)


def base_to_resume(checkpoint: Path, named: WeightSource | None) -> Base:
    """Return the origin of a checkpoint's frozen weights.

    named: the first weights that the run names now, if these are elsewhere than before.
    """
    base = read_base(checkpoint)
    if named is None or named.folder is None:
        return base
    return base.at(folder_of(named.folder), named.hub_id)


def base_of_resumed_run(
    model: Decoder, precision: Precision, base: Base, adapters: AdapterSpec | None
) -> Base | None:
    """Return the origin of the frozen weights, just loaded; None if none is frozen. Collective.

    Weights that were frozen before may be trained now, in a run that allows that change. base: see
    base_to_resume. adapters: those of this start, perhaps with another scale than before.
    """
    frozen = list(frozen_parameters(model.whole))
    if not base.digests or not frozen:
        return None
    dtype = frozen_dtype(precision, adapters)
    now, before = (spec and spec.base for spec in (adapters, base.adapters))
    unchanged = (dtype, now) == (base.dtype, before)
    known = base.digests if unchanged else digests(model, frozen, dtype)
    known = {name: known[name] for name in frozen}
    return replace(base, dtype=dtype, digests=known, adapters=adapters)


def names_in_base(model: Decoder, checkpoint: Path, stored: set[str]) -> set[str]:
    """Return the weights that a checkpoint does not hold because they were frozen.

    stored: names of the weights that it holds. Raises UserError if one of them is frozen now.
    """
    trained_before = [name for name in frozen_parameters(model.whole) if name in stored]
    if trained_before:
        text = (
            f"freezes what this run has trained before, such as {trained_before[0]}."
            f"\nA new run can do that:  run.name=NEW model.init_from={checkpoint}"
        )
        raise UserError("a run cannot freeze what it has trained", freezing_key(model), text)
    return set(read_base(checkpoint).digests)


def freezing_key(model: Decoder) -> str:
    return "adapter" if is_adapted(model) else "train.freeze"


def require_trained_rows(model: Decoder, known: int) -> None:
    """Raise UserError if embedding or head is frozen and has rows for new tokens.

    known: number of rows of the initial weights.
    """
    frozen = [
        name for name in model.config.names.vocabulary if name in frozen_parameters(model.whole)
    ]
    count = model.config.vocab_size - known
    if frozen and count > 0:
        text = (
            f"freezes {frozen[0]}, which has rows for {count:,} new tokens (tokenizer.add_tokens, "
            "or named beside the tokenizer's file):\n"
            "they would never be trained. Train it, or add no tokens"
        )
        if is_adapted(model):
            text += ".\nUse  adapter.also=[embedding,head]"
        raise UserError("new tokens would not be trained", freezing_key(model), text)


def load_weights(
    model: Decoder,
    checkpoint: Path,
    optimizer: Mapping[str, Tensor],
    alone: bool = False,
    is_checked: bool = False,
    base: Base | None = None,
) -> None:
    """Fill every weight of a model, and the given optimizer state, from a verified checkpoint.

    Weights that it does not hold come from its base. Collective, unless this process is `alone` in
    it. is_checked: the base is known to be unchanged. base: the checkpoint's, where it is now; None
    if it has not moved. Raises UserError if it is gone or has changed, and RunFailed.
    """
    recorded = read_base(checkpoint)
    base = base or recorded
    state = {
        WEIGHTS + name: plain(weight.detach())
        for name, weight in model.named_weights().items()
        if name not in base.digests
    }
    load(checkpoint, state | dict(optimizer), model.config.names.vocabulary, alone)
    clear_padding(model)
    if not base.digests:
        return
    sources = base_weights(model.config, base)
    if alone:
        read_parameters(model, sources)
    else:
        run_on_all_ranks("read the frozen weights", lambda: read_parameters(model, sources))
    if is_checked:
        return
    exact = {getattr(torch, base.dtype), torch.float32}  # other formats have lost digits
    formats = {name: {torch.uint8} if is_of_codes(d) else exact for name, d in base.digests.items()}
    whole = dict(model.whole.named_parameters())
    names = [name for name in formats if whole[name].dtype in formats[name]]
    _require_same(base, digests(model, names, base.dtype, alone))
    if base.source != recorded.source:  # then nothing of it may stay unchecked
        rest = {name: sources[name] for name in base.digests if name not in names}
        _require_same(base, digests_on_disk(model.config, base, rest))


def weights_on_disk(
    config: ModelConfig, source: Path, merge_into: str = "original"
) -> dict[str, TensorOnDisk]:
    """Return every weight of a model by name, with the adapters of `source` merged into them.

    source: a Hugging Face folder, a run, a checkpoint or a PEFT folder. merge_into: for matrices
    kept in 4 bits, `original` uses their numbers before quantization, `trained` those after it.
    Raises UserError if a base is gone or an adapter does not fit it, and RunFailed for a checkpoint
    that lacks rows.
    """
    if is_adapter(source):
        spec, tensors = peft_adapter(config, source, "auto")
        weights = weights_on_disk(config, base_folder(source))
        if merge_into == "trained":
            weights = as_trained(weights, recorded_digests(source))
        return merged(weights | tensors, spec, config)
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        return parameters_on_disk(config, source)
    base = read_base(checkpoint)
    weights = unmerged_weights(config, checkpoint)
    if merge_into == "trained":
        weights = as_trained(weights, base)
    return merged(weights, base.adapters, config) if base.adapters else weights


def as_trained(weights: dict[str, TensorOnDisk], base: Base) -> dict[str, TensorOnDisk]:
    """Return the weights, with those that were kept in 4 bits rounded as in training."""
    names = [name for name, digest in base.digests.items() if is_of_codes(digest)]
    dtype = getattr(torch, base.dtype)
    return weights | {name: as_trained_on(weights[name], dtype) for name in names}


def kept_in_four_bits(source: Path) -> bool:
    """Return True for a checkpoint or a PEFT folder whose base was kept in 4 bits."""
    base = recorded_digests(source) if is_adapter(source) else read_base(source)
    return any(is_of_codes(digest) for digest in base.digests.values())


def unmerged_weights(
    config: ModelConfig, checkpoint: Path, only_adapter: bool = False
) -> dict[str, TensorOnDisk]:
    """Return every weight of a checkpoint and its base by name, adapters not merged.

    A language model's has no scores, which begin as new ones. only_adapter: only what an adapter's
    folder holds; the base may be gone then.
    """
    base = read_base(checkpoint)
    model = adapted_model(config, base.adapters)
    weights = model.named_weights()
    if only_adapter:
        weights = {name: w for name, w in weights.items() if is_of_adapter(name, base.adapters)}
    frozen = {name: digest for name, digest in base.digests.items() if name in weights}
    from_base = base_weights(config, replace(base, digests=frozen))
    stored = StoredTensors(checkpoint)
    new = {name for name in model.head_names if WEIGHTS + name not in stored.entries}
    weights = {name: weight for name, weight in weights.items() if name not in new}
    return from_base | {
        name: stored.tensor(WEIGHTS + name, _known_rows(config, name, weight))
        for name, weight in weights.items()
        if name not in from_base
    }


def adapter_on_disk(
    config: ModelConfig, source: Path, base: str
) -> tuple[AdapterSpec, dict[str, TensorOnDisk]]:
    """Return the specification of adapters, and their tensors by parameter name.

    The tensors are their matrices and the parameters in `adapter.also`. source: a PEFT folder, a
    run with an adapter, or a checkpoint of one. base: as in AdapterSpec.
    """
    checkpoint = find_checkpoint(source)
    if checkpoint is None:
        return peft_adapter(config, source, base)
    spec = read_base(checkpoint).adapters
    assert spec
    return replace(spec, base=base), unmerged_weights(config, checkpoint, only_adapter=True)


def is_of_adapter(name: str, spec: AdapterSpec | None) -> bool:
    """Return True if an adapter's folder holds a parameter: its matrices and `adapter.also`."""
    return spec is not None and (".lora_" in name or name in spec.also)


def number_formats(config: ModelConfig, source: Path) -> dict[str, str]:
    """Return the number formats of a model's original weights.

    The key `default` has the format of all parameters that have no entry of their own. source: as
    for weights_on_disk; a PEFT folder has the formats of its base model.
    """
    if is_adapter(source):
        return number_formats(config, base_folder(source))
    checkpoint = find_checkpoint(source)
    if checkpoint:
        return read_progress(checkpoint)["dtypes"]
    tensors = parameters_on_disk(config, source)
    return with_default({name: dtype_name(tensor.dtype) for name, tensor in tensors.items()})


def with_default(formats: dict[str, str]) -> dict[str, str]:
    default, _ = Counter(formats.values()).most_common(1)[0]
    others = {name: dtype for name, dtype in formats.items() if dtype != default}
    return {"default": default} | others


def model_config(source: Path, implementation: str = AUTO) -> ModelConfig:
    """Return the architecture of a source of weights_on_disk.

    implementation: as model.implementation. Raises UserError if the base model of a PEFT folder is
    not found.
    """
    if is_adapter(source):
        base_folder(source)
    return read_architecture(model_folder(source), implementation)


def base_folder(adapter: Path) -> Path:
    """Return the folder, run or checkpoint of a PEFT folder's base model.

    Raises UserError if it is not found.
    """
    name = base_of_adapter(adapter)
    if is_hub_id(name):
        return fetch(name)
    if name and Path(name).is_dir():
        return Path(name)
    text = "names no base model" if not name else f"names a base model that is not there: {name}"
    text += f"\nWrite its folder into  {adapter / ADAPTER_CONFIG}  as  base_model_name_or_path"
    raise UserError("the adapter's base model is not there", str(adapter), text)


def base_weights(config: ModelConfig, base: Base) -> dict[str, TensorOnDisk]:
    """Return the frozen weights, by name, before any is encoded in 4 bits.

    Raises UserError if their folder is gone.
    """
    if not base.digests:
        return {}
    of_adapter = frozen_in_adapter(config, base)
    drawn = [name for name in base.digests if not base.source or ".lora_" in name]
    drawn = [name for name in drawn if name not in of_adapter]
    encoded_later = [name for name in drawn if is_of_codes(base.digests[name])]
    dense = adapted_model(config, base.adapters)
    weights = random_weights(dense, drawn, base.seed, getattr(torch, base.dtype))
    weights |= random_weights(dense, encoded_later, base.seed) | of_adapter
    of_source = [name for name in base.digests if name not in weights]
    if of_source:
        everything = weights_on_disk(config, _locate(base))
        weights |= {name: everything[name] for name in of_source}
    return weights


def frozen_in_adapter(config: ModelConfig, base: Base) -> dict[str, TensorOnDisk]:
    """Return the frozen weights that were read from an adapter (adapter.init_from), by name.

    Raises UserError if its folder is gone.
    """
    if not base.adapter_source or base.adapters is None:
        return {}
    source = Path(base.adapter_source)
    if not source.is_dir():
        text = (
            "is not there, and the checkpoint does not hold the frozen parts of the adapter "
            "(train.freeze)\nthat are in it. Put it back, or a symbolic link to where it is now"
        )
        raise UserError("the frozen weights are not there", str(source), text)
    _, tensors = adapter_on_disk(config, source, base.adapters.base)
    return {name: tensors[name] for name in base.digests if name in tensors}


def random_weights(
    model: Decoder, names: Iterable[str], seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, TensorOnDisk]:
    shapes = {name: model.get_parameter(name).shape for name in names}
    return {
        name: RandomWeight(dtype, shape, [], model.config, name, seed)
        for name, shape in shapes.items()
    }


def require_unchanged(config: ModelConfig, source: Path) -> None:
    """Read the frozen weights of a checkpoint or a PEFT folder and compare their digests.

    Raises UserError if they are gone, if they differ from the recorded digests, or if the adapter
    is merged into them already. A PEFT folder of another program has no digests.
    """
    base, tensors = recorded_weights(config, source)
    _require_same(base, digests_on_disk(config, base, tensors))


def require_unchanged_on_ranks(config: ModelConfig, source: Path) -> None:
    """Do as `require_unchanged`, with the weights divided among the ranks of a host. Collective.

    Each host reads all of them: it may have a copy of its own.
    """
    hosts = gather(socket.gethostname())
    own = [rank for rank, host in enumerate(hosts) if host == hosts[dist.get_rank()]]
    number = own.index(dist.get_rank())

    def read() -> tuple[Base, dict[str, str]]:
        base, tensors = recorded_weights(config, source)
        largest_first = sorted(tensors, key=lambda name: -tensors[name].nbytes)
        part = {name: tensors[name] for name in largest_first[number :: len(own)]}
        return base, digests_on_disk(config, base, part)

    for base, actual in run_on_all_ranks("read the frozen weights", read):
        _require_same(base, actual)


def recorded_weights(config: ModelConfig, source: Path) -> tuple[Base, dict[str, TensorOnDisk]]:
    """Return what a checkpoint or a PEFT folder records of its frozen weights, and them by name.

    Raises UserError if they are gone, or if the adapter is merged into them already.
    """
    if is_adapter(source):
        # without digests if another program wrote the folder
        base = replace(recorded_digests(source), source=str(base_folder(source).resolve()))
        refuse_merging_twice(source, Path(base.source))
        tensors = weights_on_disk(config, Path(base.source)) if base.digests else {}
    else:
        base = read_base(source)
        if base.adapters and base.source:
            refuse_merging_twice(source, Path(base.source))
        tensors = base_weights(config, base)
    return base, {name: tensors[name] for name in base.digests}


def digests_on_disk(
    config: ModelConfig, base: Base, tensors: dict[str, TensorOnDisk]
) -> dict[str, str]:
    dtype = getattr(torch, base.dtype)
    actual = {}
    for name, stored in tensors.items():
        tensor = encoded(stored) if is_of_codes(base.digests[name]) else stored

        def digest(rows: tuple[int, int], buffer: Tensor, tensor: TensorOnDisk = tensor) -> Tensor:
            part = (slice(*rows), *whole_slice(tensor.shape[1:]))
            return _digest(tensor.read_rows(*rows, buffer), part, tensor.shape, dtype)

        is_vocabulary = name in config.names.vocabulary
        known = min(config.vocab_size, tensor.shape[0]) if is_vocabulary else tensor.shape[0]
        pieces = row_ranges(0, known, tensor.row_bytes)
        digests_of_pieces = in_threads(digest, pieces, piece_bytes([tensor.row_bytes]))
        total = torch.stack(digests_of_pieces).sum()
        actual[name] = _as_text(total, tensor.dtype == torch.uint8)
    return actual


def recorded_digests(folder: Path) -> Base:
    """Return the base model that a PEFT folder of ours records; NOTHING_FROZEN for any other."""
    base = read_origin(folder).get("base")
    if not base:
        return NOTHING_FROZEN
    return Base(base_of_adapter(folder), "", 0, base["dtype"], base["digests"])


def _locate(base: Base) -> Path:
    path = Path(base.source)
    if path.exists():
        return path
    if base.hub_id:
        return fetch(base.hub_id)
    text = (
        "is not there, and the checkpoint does not hold the frozen weights (train.freeze, adapter)"
        "\nthat are in it. Put it back, or a symbolic link to where it is now."
        "\nA run resumes with it in another folder:  model.init_from=FOLDER"
    )
    raise UserError("the frozen weights are not there", base.source, text)


def _require_same(base: Base, actual: dict[str, str]) -> None:
    changed = [name for name, digest in actual.items() if digest != base.digests[name]]
    if not changed:
        return
    more = len(changed) - MAX_SHOWN_WEIGHTS
    names = ", ".join(changed[:MAX_SHOWN_WEIGHTS]) + (f" and {more:,} more" if more > 0 else "")
    text = (
        f"holds other numbers than when the run began, in {names}. The checkpoint does not hold"
        "\nthe frozen weights (train.freeze, adapter) and was trained with those. Put the folder"
        "\nback as it was, or begin a new run:  run.name=NEW"
    )
    what = base.source or f"random weights of run.seed={base.seed}"
    if base.adapter_source and is_of_adapter(changed[0], base.adapters):
        what = base.adapter_source
    raise UserError("the frozen weights have changed", what, text)


def _known_rows(config: ModelConfig, name: str, weight: Tensor) -> int:
    return config.vocab_size if name in config.names.vocabulary else len(weight)


@torch.no_grad()
def clear_padding(model: Decoder) -> None:
    """Zero the vocabulary's padding rows: another layout's checkpoint has fewer or none."""
    for name, parameter in model.named_parameters():
        if name in model.config.names.vocabulary:
            first = local_slice(parameter)[0].start
            local_part(parameter)[max(0, model.config.vocab_size - first) :] = 0


@torch.no_grad()
def digests(model: Decoder, names: list[str], dtype: str, alone: bool = False) -> dict[str, str]:
    """Return a digest of each parameter, rounded to `dtype`: the same for every sharding.

    A digest is the sum, modulo 2^64, of a hash of each number's bits and position; for a parameter
    in 4 bits, of each byte of its codes. Collective, unless this process is `alone` in it.
    """
    if not names:
        return {}
    own = held_first(model)
    device = local_part(next(model.parameters())).device
    none = torch.zeros((), dtype=torch.int64, device=device)
    totals = torch.stack(
        [
            _parameter_digest(model, name, getattr(torch, dtype)) if name in own else none
            for name in names
        ]
    )
    if not alone and dist.get_world_size() > 1:
        dist.all_reduce(totals)
    in_codes = [is_encoded(model.whole.get_parameter(name)) for name in names]
    texts = map(_as_text, totals, in_codes)
    return dict(zip(names, texts, strict=True))


def held_first(model: Decoder) -> set[str]:
    """Return the names of the parameters whose digest this rank's stage computes.

    Without a pipeline these are all. Of a tied embedding, which two stages hold, the first stage's
    copy counts.
    """
    own = {name for name, _ in model.named_parameters()}
    stages = stages_of(model)
    if model.config.tie_word_embeddings and stages and not stages[0].is_first:
        own -= set(model.config.names.vocabulary)
    return own


def is_of_codes(digest: str) -> bool:
    return digest.startswith(CODES)


def _parameter_digest(model: Decoder, name: str, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of the sum. Of several replicas only the first one contributes."""
    parameter = plain(model.get_parameter(name).detach())
    local = local_part(parameter)
    part = local_slice(parameter)
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if isinstance(parameter, DTensor):
        coordinates = parameter.device_mesh.get_coordinate()
        assert coordinates is not None
        replicas = zip(coordinates, parameter.placements, strict=True)
        if any(i and placement.is_replicate() for i, placement in replicas):
            return total
    rows = max(0, min(part[0].stop, _known_rows(model.config, name, parameter)) - part[0].start)
    for first, last in row_ranges(part[0].start, part[0].start + rows, max(1, local[:1].nbytes)):
        numbers = local[first - part[0].start : last - part[0].start]
        total += _digest(numbers, (slice(first, last), *part[1:]), parameter.shape, dtype)
    return total


def _digest(
    numbers: Tensor, part: tuple[slice, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return the sum of hashes of `numbers`, the part `part` of a tensor of shape `shape`.

    Numbers are hashed in `dtype`, 4-bit codes as bytes.
    """
    places = torch.zeros((), dtype=torch.int64, device=numbers.device)
    for size, span in zip(shape, part, strict=True):
        within = torch.arange(span.start, span.stop, device=numbers.device)
        places = places.unsqueeze(-1) * size + within
    if numbers.dtype != torch.uint8:
        numbers = numbers.to(dtype)
    bits = numbers.contiguous().view(BITS[numbers.dtype.itemsize])
    hashes = bits.long() + places * GAMMA
    hashes = (hashes ^ (hashes >> 30)) * MIX_1
    hashes = (hashes ^ (hashes >> 27)) * MIX_2
    return (hashes ^ (hashes >> 31)).sum()


def _as_text(total: Tensor, in_codes: bool) -> str:
    return f"{CODES if in_codes else ''}{int(total) % 2**64:016x}"
