"""States of AdamW that other tools have written, for a run that continues theirs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_trainer.base.distributed import run_on_all_ranks
from fsdp_trainer.checkpoint.formats.tensor_files import TensorOnDisk
from fsdp_trainer.checkpoint.huggingface import (
    check_tensors,
    parameters_of,
    read_tensors,
    tensor_parts,
)
from fsdp_trainer.checkpoint.state import (
    OPTIMIZER,
    optimizer_state,
    prepare_optimizer,
    stored_parameters,
)
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.interop.folders.other_states import place_of_states
from fsdp_trainer.interop.weights.foreign_states import MOMENTS, STEP, StatesByName, unusable_states
from fsdp_trainer.interop.weights.foreign_tensors import ForeignTensor
from fsdp_trainer.interop.weights.sharded_state import sharded_states
from fsdp_trainer.interop.weights.torch_files import torch_states
from fsdp_trainer.interop.weights.translated_names import huggingface_names
from fsdp_trainer.interop.weights.zero_partitions import zero_states
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.hf.new_model import meta_decoder
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer

MAX_SHOWN = 10
READERS: dict[str, Callable[[Path], StatesByName]] = {
    "sharded": sharded_states,
    "torch": torch_states,
    "zero": zero_states,
}
"""By the kinds of place_of_states: a function from the place to the states."""


@dataclass(frozen=True)
class OtherStates:
    """States of another tool, whose numbers are not read yet.

    step: number of the last step. moments: of each moment the tensors, by the names that weights
    have in a Hugging Face folder. options: known ones of the optimizer, such as lr.
    """

    place: Path
    step: int
    moments: dict[str, dict[str, ForeignTensor]]
    options: dict[str, Any]


def read_states(path: Path, config: ModelConfig) -> OtherStates:
    """Return the states at a path, which has some. Raises UserError."""
    found = place_of_states(path)
    assert found is not None
    kind, place = found
    states = READERS[kind](place)
    by_name = states.by_name
    numbered = next((name for name in by_name if name.isdecimal()), None)
    if not by_name:
        raise unusable_states(place, "holds no states of AdamW")
    if numbered is not None:
        raise unusable_states(place, f"has numbers for its parameters ({numbered}), not names")
    try:
        steps = sorted({int(state[STEP]) for state in by_name.values() if STEP in state})
    except (TypeError, ValueError, OverflowError) as error:
        raise unusable_states(place, f"has no number of steps ({error})") from None
    if len(steps) != 1:
        counts = ", ".join(map(str, steps)) or "none"
        raise unusable_states(place, f"has not one number of steps for all parameters: {counts}")
    moments = {
        moment: huggingface_names(
            {
                name: state[moment]
                for name, state in by_name.items()
                if isinstance(state.get(moment), TensorOnDisk)
            },
            config,
        )
        for moment in MOMENTS
    }
    return OtherStates(place, steps[0], moments, states.options)


def load_states(
    model: Decoder, optimizer: TrainerOptimizer, states: OtherStates, vocab_size: int
) -> None:
    """Let a new AdamW continue from these states. Collective.

    vocab_size: rows of their embedding. Raises UserError if they do not fit the parameters.
    """
    sources = _by_state(model, states, vocab_size)
    steps = [f"{OPTIMIZER}{name}/{STEP}" for name in stored_parameters(model)]
    prepare_optimizer(model, optimizer, [*sources, *steps], str(states.place))
    own = optimizer_state(model, optimizer)
    for name in steps:
        own[name].fill_(states.step)
    run_on_all_ranks("read the optimizer's states", lambda: read_tensors(own, sources))


def _by_state(trained: Decoder, states: OtherStates, vocab_size: int) -> dict[str, TensorOnDisk]:
    """Return the moments of all trained parameters, by their names in our own checkpoints.

    Raises UserError if one is missing or misfits.
    """
    model, names = meta_decoder(trained.config), stored_parameters(trained.whole)
    parts = tensor_parts(model, vocab_size)
    needed = dict.fromkeys(part.tensor for part in parts if part.parameter in names)
    problems: list[Problem] = []
    sources: dict[str, TensorOnDisk] = {}
    for moment, tensors in states.moments.items():
        own = {name: tensors[name] for name in needed if name in tensors}
        missing = [name for name in needed if name not in own]
        problems += [Problem(name, f"has no {moment}") for name in missing]
        misfits = [p for p in check_tensors(model, own, vocab_size) if p.what in own]
        problems += [Problem(f"{p.what} {moment}", p.reason) for p in misfits]
        if not problems:
            for name, tensor in parameters_of(model, own, vocab_size).items():
                sources[f"{OPTIMIZER}{name}/{moment}"] = tensor
    if problems:
        more = len(problems) - MAX_SHOWN
        shown = problems[:MAX_SHOWN] + [Problem("…", f"and {more} more")] * (more > 0)
        advice = Problem("optim.init_from", "to begin with the weights alone, drop it")
        title = f"the optimizer's states in {states.place} are not this model's"
        raise UserError(title, [*shown, advice])
    return sources
