"""The content of checkpoints and exports, read without the trainer."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from named_runs import RUNS
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader


def stored(checkpoint):
    """Return every tensor of a checkpoint by name: weights, moments, step counts."""
    metadata = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def checkpoint(run, step):
    return run.folder / "checkpoints" / f"step-{step:08d}"


def newest(run):
    return sorted((run.folder / "checkpoints").glob("step-*"))[-1]


def assert_bitwise_equal(a, b):
    """Raise AssertionError if two checkpoints differ, or if they have no optimizer states."""
    assert any("exp_avg_sq" in name for name in a)
    assert_byte_equal(a, b)


def assert_same_end(run, other):
    """Raise AssertionError if two runs differ in a loss, or their newest checkpoints in a bit."""
    state = stored(newest(run))
    assert any(name.startswith("optimizer/") for name in state)
    assert_byte_equal(state, stored(newest(other)))


def assert_columns(run, other, *names):
    """Raise AssertionError if columns of two runs differ."""
    for name in names:
        assert run[name] == other[name], name


def assert_near(run, other, *names, rel=None, abs=None, **limits):
    """Raise AssertionError if columns of two runs differ by more than a limit.

    rel, abs: limits of the columns `names`; limits: relative ones by the name of a column.
    """
    for name, limit in (dict.fromkeys(names, rel) | limits).items():
        assert run[name] == pytest.approx(other[name], rel=limit, abs=abs), name


def assert_undisturbed(run, whole):
    """Raise AssertionError if a run differs in a step or a bit from one that nothing disturbed."""
    last = run.metrics[-1]["step"]
    assert run["step"] == list(range(1, last + 1))
    assert run["loss"] == whole["loss"][:last]
    assert_bitwise_equal(stored(newest(run)), stored(checkpoint(whole, last)))


def go_on(ledger, name, folder, *words, **options):
    """Train on in a copy of a run of the ledger, which is made if `folder` is not there yet."""
    if not folder.exists():
        ledger.copy(name, folder)
    return ledger.world.train(folder, *ledger.words_of(RUNS[name]), *words, base=[], **options)


def bytes_of(tensor):
    return tensor.flatten().view(torch.uint8)


def end_of(run):
    return run.events[-1]["event"], run.events[-1]["exit_code"]


def tensors(folder):
    """Return every tensor of an export by name."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def save_tensors(folder, state):
    """Write the tensors of a Hugging Face folder, in one file."""
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def assert_byte_equal(a, b):
    """Raise AssertionError if two sets of tensors by name differ in any byte."""
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(bytes_of(a[name]), bytes_of(b[name])), name
