"""The weights and optimizer state with which a run starts or resumes."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import run_on_all_ranks
from fsdp_trainer.checkpoint.formats.stored_tensors import StoredTensors
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk
from fsdp_trainer.checkpoint.frozen_weights import (
    Base,
    adapter_on_disk,
    digests,
    load_weights,
    names_in_base,
    number_formats,
    random_weights,
    read_base,
    require_trained_rows,
    require_unchanged_on_ranks,
    weights_on_disk,
    with_default,
)
from fsdp_trainer.checkpoint.huggingface import import_weights, read_parameters
from fsdp_trainer.checkpoint.state import (
    WEIGHTS,
    optimizer_state,
    prepare_optimizer,
    stored_weights,
)
from fsdp_trainer.checkpoint.store import read_progress, require_whole
from fsdp_trainer.config.paths import find_checkpoint, is_adapter, model_folder
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.models.adapters.adapter_spec import MAGNITUDE
from fsdp_trainer.models.adapters.adapters import adapter_parameters, is_adapted
from fsdp_trainer.models.balance import Balance
from fsdp_trainer.models.config import AUTO, TRANSFORMERS, ModelConfig
from fsdp_trainer.models.decoder import Decoder, stored_buffers
from fsdp_trainer.models.four_bit import is_encoded
from fsdp_trainer.models.from_config.freeze import frozen_parameters
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.models.from_config.setup import ModelSetup, WeightSource
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.models.hf.read_architecture import read_architecture
from fsdp_trainer.optim.offload.weight_copies import weights_changed
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.optim.outer_step import OuterStep
from fsdp_trainer.parallel.materialize import grow_vocabulary, initialize_magnitudes
from fsdp_trainer.training.loss_scale import LossScale

MAX_SHOWN_PARAMETERS = 5


def fill(model: Decoder, source: WeightSource, drawn_dtype: str) -> dict[str, str]:
    """Initialise or read the model's weights for the start of a run. Collective.

    Returns the number formats for an export, by parameter; `default` is that of all others.
    drawn_dtype: the default if all weights are drawn.
    """
    if source.folder is None:
        draw_weights(model, source.seed)
        buffers = dict.fromkeys(stored_buffers(model.whole), "float32")
        formats = {"default": drawn_dtype} | buffers
    else:
        drawn = {name: p for name, p in model.named_parameters() if name in model.head_names}
        initialize_weights(model, source.seed, adapter_parameters(model) | drawn)
        formats = read_weights(model, source.folder)
    if source.adapter:
        read_adapter(model, source.adapter)
    else:
        initialize_magnitudes(model)
    weights_changed(model)
    return formats


def digest_of_weights(model: Decoder) -> str:
    """Return a digest of all weights, the same for every sharding. Collective."""
    names = sorted(dict(model.whole.named_parameters()))
    each = digests(model, names, "float32")
    return hashlib.blake2b(json.dumps(each).encode(), digest_size=10).hexdigest()


def require_kept(setup: ModelSetup) -> None:
    """Raise UserError for frozen magnitudes of DoRA that no file holds.

    A resume reads frozen parameters where the run began, not from its checkpoints.
    """
    if setup.source.adapter:
        return
    reason = (
        "is made when the run starts, and frozen parameters are not stored in checkpoints: "
        "a resume would not find it.\nLeave it out of  train.freeze"
    )
    frozen = [name for name in frozen_parameters(setup.model) if name.endswith(MAGNITUDE)]
    problems = [Problem(name, reason) for name in frozen]
    if problems:
        raise UserError("new parameters cannot be frozen", problems[:MAX_SHOWN_PARAMETERS])


def draw_weights(model: Decoder, seed: int) -> None:
    """Draw random weights; those stored in 4 bits are encoded a few rows at a time."""
    parameters = dict(model.named_parameters())
    encoded = [name for name, p in parameters.items() if is_encoded(p)]
    if encoded:
        read_parameters(model, random_weights(meta_decoder(model.config), encoded, seed))
    others = {name: p for name, p in parameters.items() if name not in encoded}
    initialize_weights(model, seed, others)


def read_adapter(model: Decoder, source: Path) -> None:
    """Read an adapter's matrices, and the parameters trained in full along with it. Collective."""
    checkpoint = find_checkpoint(source)
    if checkpoint:
        require_whole(checkpoint)

    def read() -> None:
        _, tensors = adapter_on_disk(model.config, source, "auto")
        read_parameters(model, tensors)

    run_on_all_ranks("read the adapter", read)


def read_weights(model: Decoder, init_from: Path) -> dict[str, str]:
    """Read all weights except those of adapters. Collective. Returns formats, see `fill`."""
    checkpoint = find_checkpoint(init_from)
    if checkpoint:
        require_whole(checkpoint)
    stored = stored_config(init_from, model.config)
    has_other_head = model.config.scores != stored.scores
    has_other_head |= model.config.predicts != stored.predicts
    is_whole = not is_adapted(model) and not has_other_head
    if checkpoint and is_whole and not read_base(checkpoint).adapters:
        load_weights(model, checkpoint, {})
        formats = read_progress(checkpoint)["dtypes"]
    else:
        formats = read_merged(model, checkpoint or init_from)
    require_trained_rows(model, stored.vocab_size)
    if model.config.embedding_rows > stored.vocab_size:
        grow_vocabulary(model, stored.vocab_size)
    return formats


def stored_config(source: Path, trained: ModelConfig | None = None) -> ModelConfig:
    """Return the architecture of a Hugging Face folder, a run or a checkpoint.

    trained: the architecture that its weights are read into.
    """
    by_transformers = trained is not None and trained.by_transformers
    return read_architecture(model_folder(source), TRANSFORMERS if by_transformers else AUTO)


def read_merged(model: Decoder, source: Path) -> dict[str, str]:
    """Read the weights of a Hugging Face folder, a checkpoint or a PEFT folder; merge adapters.

    Collective. Returns formats, see `fill`.
    """
    formats: dict[str, str] = {}
    config, stored = model.config, stored_config(source, model.config)
    if config.by_transformers:
        config = replace(stored, vocab_size=config.vocab_size)
    elif stored.predicts and not config.predicts:
        tied = stored.tie_word_embeddings
        config = replace(config, labels=(), pooling="", tie_word_embeddings=tied)

    is_derived = is_adapter(source) or find_checkpoint(source)
    if is_derived:
        require_unchanged_on_ranks(config, source)

    def read() -> None:
        if is_derived:
            formats.update(number_formats(config, source))
            read_parameters(model, under_own_names(model, weights_on_disk(config, source)))
        else:
            formats.update(with_default(import_weights(model, source)))

    run_on_all_ranks("read the weights", read)
    return formats


def under_own_names(model: Decoder, tensors: dict[str, TensorOnDisk]) -> dict[str, TensorOnDisk]:
    """Return tensors of the same model with another head, or with none, by their names in this one.

    In transformers' classes the base has a name that a model without a head lacks.
    """
    base, names = model.config.names.base, {*model.named_weights()}

    def own(name: str) -> str:
        others = (name, name.removeprefix(base), base + name)
        return next((other for other in others if other in names), name)

    return {own(name): tensor for name, tensor in tensors.items()}


def extra_state(*parts: Balance | LossScale | OuterStep | None) -> dict[str, Tensor]:
    return {name: tensor for part in parts if part for name, tensor in part.state().items()}


def restore(
    model: Decoder,
    optimizer: TrainerOptimizer,
    checkpoint: Path,
    loss_scale: LossScale | None = None,
    base: Base | None = None,
    outer: OuterStep | None = None,
) -> None:
    """Load weights, states of optimizers, expert balance and loss scale from a checkpoint.

    The checkpoint may have been written by another number of ranks. base: see load_weights. Raises
    UserError for weights of other shapes.
    """
    require_shapes(model, checkpoint)
    stored = StoredTensors(checkpoint).shapes
    prepare_optimizer(model, optimizer, stored, str(checkpoint))
    state = optimizer_state(model, optimizer)
    extra = extra_state(model.balance, loss_scale, outer)
    own = {name: tensor for name, tensor in extra.items() if name in stored}
    load_weights(model, checkpoint, state | own, base=base)
    weights_changed(model)
    if outer and own.keys().isdisjoint(outer.state()):
        outer.begin()


def require_shapes(model: Decoder, checkpoint: Path) -> None:
    """Raise UserError unless the checkpoint holds exactly the model's parameters.

    Otherwise its optimizer state would not fit them. A vocabulary may be padded to another size.
    """
    stored = {
        name.removeprefix(WEIGHTS): shape
        for name, shape in StoredTensors(checkpoint).shapes.items()
        if name.startswith(WEIGHTS)
    }
    in_base = names_in_base(model, checkpoint, set(stored))
    ours = {
        name: parameter.shape
        for name, parameter in stored_weights(model.whole).items()
        if name not in in_base
    }
    if read_architecture(checkpoint / "hf").vocab_size == model.config.vocab_size:
        for name in {*model.config.names.vocabulary} & stored.keys() & ours.keys():
            ours[name] = torch.Size((stored[name][0], *ours[name][1:]))
    different = [name for name in sorted({*stored, *ours}) if stored.get(name) != ours.get(name)]
    if not different:
        return

    def shape_in(shapes: dict, name: str) -> str:
        return f"has shape {list(shapes[name])}" if name in shapes else "is not"

    problems = [
        Problem(
            name,
            f"{shape_in(ours, name)} in this model and {shape_in(stored, name)} in the checkpoint",
        )
        for name in different[:MAX_SHOWN_PARAMETERS]
    ]
    more = len(different) - MAX_SHOWN_PARAMETERS
    problems[-1].reason += (f"\n… and {more:,} more" if more > 0 else "") + (
        "\nA run cannot change its weights' shapes; a new one can:  "
        f"run.name=NEW model.init_from={checkpoint}"
    )
    raise UserError(f"the weights are not those of {checkpoint}", problems)
