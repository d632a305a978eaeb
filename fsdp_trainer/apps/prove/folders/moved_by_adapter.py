"""An adapter belongs to its base, and moves what its configuration names."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fsdp_trainer.apps.prove.folders.proved_folder import ProvedFolder, reasons
from fsdp_trainer.apps.prove.proof.certificate import Checked, NotProved, counted_wrong
from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.checkpoint.adapters.adapter_import import peft_adapter
from fsdp_trainer.checkpoint.formats.headers import read_header
from fsdp_trainer.checkpoint.formats.tensor_files import HuggingFaceTensor
from fsdp_trainer.checkpoint.frozen_weights import require_unchanged
from fsdp_trainer.checkpoint.origin import read_origin
from fsdp_trainer.config.paths import ADAPTER_CONFIG, find_checkpoint, model_folder
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.adapter_targets import model_layout
from fsdp_trainer.models.adapters.peft_config import plain_name
from fsdp_trainer.models.adapters.peft_names import ModelNames, split_name

BASE, NAMES, MOVES = "adapter: base", "adapter: names", "adapter: moves"
WRONG_BASE = (
    "use it with the base that it was trained on; if this is the same model, write its folder into"
    f" base_model_name_or_path of {ADAPTER_CONFIG}"
)
WRONG_NAMES = "PEFT and vLLM leave such tensors out, or refuse them: save the adapter anew"
STILL = (
    "such an adapter changes nothing: it was saved before the training, or its gradients were lost"
)
CHANGED_BASE = "init_lora_weights"
"""The key of ways to begin an adapter of which some change the base, as PiSSA."""
OF_TENSOR = re.compile(r"(\.base_layer)*(\.(weight|bias))?$")
EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the names of the adapters of single experts, of which one may never have been chosen."""


def check(proof: ProvedFolder) -> Iterator[Checked | NotProved]:
    """Look at base, names and numbers of an adapter."""
    if not proof.is_adapter:
        return
    right = "the weights, or the name, of the base that it was trained on"
    yield counted_wrong(BASE, [*other_base(proof)], right, WRONG_BASE)
    tensors = read_header(proof.adapter_file, all_parts=True)
    dotted = [f".{name}" for name in (*modules_of(model_layout(proof.config)), "lm_head")]
    wrong = [*unmatched(proof, dotted, tensors)]
    try:
        peft_adapter(proof.config, proof.based, "auto")
    except UserError as error:  # PEFT, which is asked below, reads more kinds
        wrong += [*strangers(dotted, tensors)]
        if any(one.what.startswith(CHANGED_BASE) for one in error.problems):
            wrong += reasons(error)
        elif not wrong:
            yield NotProved(f"read by this program: {reasons(error)[0]}", proof.command)
    right = f"each tensor has its module in the base, and each module of {ADAPTER_CONFIG} has one"
    yield counted_wrong(NAMES, wrong, right, WRONG_NAMES)
    outputs = {
        name: t for name, t in tensors.items() if split_name(plain_name(name))[1] == "lora_B"
    }
    still = [name for name, tensor in outputs.items() if is_zero(tensor)]
    if len(still) < len(outputs):
        still = [name for name in still if not EXPERT.search(name)]
    yield counted_wrong(MOVES, still, f"no B of {len(outputs)} matrices is 0", STILL)


def other_base(proof: ProvedFolder) -> Iterator[str]:
    if read_origin(proof.source).get("base"):  # with digests of its weights
        try:
            require_unchanged(proof.config, proof.based)
        except UserError as error:
            yield from reasons(error)
        return
    if not proof.reference:
        return
    title = "cannot read the adapter's configuration"
    named = read_object(proof.source / ADAPTER_CONFIG, title).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return
    known = names_of(proof.reference)
    if Path(named).name.lower() not in known:
        yield f"the adapter was trained on {named}, and the reference is {proof.reference}"


def names_of(reference: Path) -> set[str]:
    """Return the last parts of the names under which a base model may be known, in small letters.

    The hub's cache has `models--ORG--NAME/snapshots/COMMIT`.
    """
    checkpoint = find_checkpoint(reference)
    own = checkpoint.parent.parent if checkpoint else reference.resolve()
    names = {reference.name, own.name, *(part.rpartition("--")[2] for part in own.parts[-3:])}
    described = read_object(model_folder(reference) / "config.json", "cannot read the model")
    names.add(Path(str(described.get("_name_or_path"))).name)
    return {name.lower() for name in names if name}


def modules_of(layout: ModelNames) -> Iterator[str]:
    """Yield the modules of a base that an adapter may name."""
    yield from (*layout.linears, *(n.removesuffix(".weight") for n in layout.parameters))
    for stack in layout.stacks.values():
        yield from (*stack.names, stack.experts)


def strangers(dotted: list[str], tensors: Iterable[str]) -> Iterator[str]:
    """Yield the tensors that belong to no module of the base. dotted: its modules, after a dot."""
    for name in map(plain_name, tensors):
        module = OF_TENSOR.sub("", split_name(name)[0] or name)
        if not any(one.endswith(f".{module}") for one in dotted):
            yield f"{name} belongs to no module of the base"


def unmatched(proof: ProvedFolder, dotted: list[str], tensors: Iterable[str]) -> Iterator[str]:
    """Yield the modules that the configuration names and the base or the adapter lacks."""
    config = read_object(proof.source / ADAPTER_CONFIG, "cannot read the adapter's configuration")
    targets = config.get("target_modules")
    for name in targets if isinstance(targets, list) else ():
        if not any(module.endswith(f".{name}") for module in dotted):
            yield f"target_modules={name} names no module of the base"
    for name in config.get("modules_to_save") or ():
        stored = [f".{plain_name(tensor)}" for tensor in tensors]
        if not any(f".{name}." in tensor for tensor in stored):
            yield f"modules_to_save={name}, and the adapter has no tensor of it"


def is_zero(tensor: HuggingFaceTensor) -> bool:
    """Return True if all numbers of a tensor are 0; it is read in pieces."""
    return not any(bool(piece.float().any()) for piece in tensor.pieces())
