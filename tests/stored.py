"""The content of checkpoints and exports, read without the trainer."""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
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


def assert_byte_equal(a, b):
    """Raise AssertionError if two sets of tensors by name differ in any byte."""
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(bytes_of(a[name]), bytes_of(b[name])), name
