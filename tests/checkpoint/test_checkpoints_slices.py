"""A checkpoint reads the same whatever part of a parameter each rank held: rows, columns, both."""

import inject
import pytest
import torch
import torch.distributed as dist
from stored import assert_byte_equal, stored, tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from world import write_json

from fsdp_trainer import load_model
from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.checkpoint.exports.hf_folder import export_checkpoint
from fsdp_trainer.checkpoint.formats.stored_tensors import StoredTensors
from fsdp_trainer.checkpoint.huggingface import import_weights
from fsdp_trainer.checkpoint.state import weights
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.config.schema import Checkpoint
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights

CONFIG = ModelConfig(
    family="phi3",  # whose projections are fused in a Hugging Face folder
    vocab_size=29,
    hidden_size=12,
    head_dim=4,
    intermediate_size=10,
    num_hidden_layers=1,
    tie_word_embeddings=False,
)
CODES = "optimizer/model.embed_tokens.weight/exp_avg_codes"
OTHERS = {
    CODES: torch.arange(29 * 12).remainder(251).to(torch.uint8).view(29, 12),
    "optimizer/uneven": torch.arange(21).bfloat16().view(3, 7),
    "optimizer/one row": torch.arange(4.0).view(1, 4),
    "optimizer/vector": torch.arange(9.0),
    "optimizer/step": torch.tensor(3.0),
    "optimizer/larger": torch.arange(64.0 * 64).view(64, 64),
}
"""Tensors of all formats and shapes, beside the weights."""
SHARDED = {
    "columns": ((2,), [Shard(1)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "columns and rows": ((2, 2), [Shard(1), Shard(0)]),
    "copied columns": ((2, 2), [Replicate(), Shard(1)]),
}


def drawn_model():
    model = Decoder(CONFIG)
    initialize_weights(model, 0)
    return model


def distribute(tensor, mesh, placements):
    """Distribute a tensor that is no scalar. Where it has no columns it is copied."""
    if not tensor.ndim:
        return tensor
    fitting = [p if p == Replicate() or p.dim < tensor.ndim else Replicate() for p in placements]
    return distribute_tensor(tensor, mesh, fitting)


def write_assets(folder, _progress):
    (folder / "hf").mkdir()
    write_json(folder / "hf/config.json", CONFIG.to_hf("float32"))


def write_checkpoint(run, shape=(), placements=()):
    """Each rank's part of a checkpoint of weights and other tensors, in several windows."""
    dist.init_process_group("gloo")
    state = weights(drawn_model()) | OTHERS
    if shape:
        mesh = init_device_mesh("cpu", shape)
        state = {name: distribute(tensor, mesh, placements) for name, tensor in state.items()}
    store = CheckpointStore(run, Checkpoint(), 60, write_assets, lambda event: None)
    progress = {"data": {}, "dtypes": {"default": "bfloat16"}, "best_step": None}
    with inject.setting("checkpoint_window_bytes", 6000):
        for step in (1, 2):  # the second by the plan of the first
            store.save(step, state, progress, 0.0)


def imported_is_right(folder, shape, placements):
    """Return whether this rank's part of every imported parameter is that part of the whole."""
    mesh, model = init_device_mesh("cpu", shape), Decoder(CONFIG)
    for name, parameter in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        part = distribute(torch.zeros_like(parameter), mesh, placements)
        setattr(model.get_submodule(owner), key, torch.nn.Parameter(part))
    import_weights(model, folder)
    drawn = dict(drawn_model().named_parameters())
    right = [
        torch.equal(local_part(p), drawn[name][local_slice(p)].bfloat16().float())
        for name, p in model.named_parameters()
    ]
    return len(right) > len(tensors(folder)) and all(right)


def write_and_import(run, folder, shape, placements):
    """Write a checkpoint on all ranks, and import a folder on them."""
    write_checkpoint(run, shape, placements)
    return imported_is_right(folder, shape, placements)


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """Return a checkpoint that one rank has written, and a folder with its exports."""
    folder = tmp_path_factory.mktemp("whole")
    world.call(1, write_checkpoint, folder)
    checkpoint = folder / "checkpoints/step-00000002"
    for dtype in DTYPES:
        export_checkpoint(checkpoint, folder / str(dtype), dtype=dtype)
    return checkpoint, folder


DTYPES = [None, "float32"]


def test_torch_reads_what_was_saved(whole):
    state = {name: weight.detach() for name, weight in weights(drawn_model()).items()}
    assert_byte_equal(stored(whole[0]), state | OTHERS)


@pytest.mark.parametrize("shape, placements", SHARDED.values(), ids=SHARDED)
def test_a_checkpoint_and_a_folder_read_the_same_whatever_part_each_rank_holds(
    world, whole, tmp_path, shape, placements
):
    expected, exports = whole
    ranks = torch.Size(shape).numel()
    right = world.call(ranks, write_and_import, tmp_path, exports / "None", shape, placements)
    assert right == [True] * ranks
    checkpoint = tmp_path / "checkpoints/step-00000002"
    for dtype, piece_bytes in zip(DTYPES, (72, 2**22), strict=True):
        out = str(dtype), "model.safetensors"
        with inject.setting("tensor_piece_bytes", piece_bytes):
            export_checkpoint(checkpoint, tmp_path / out[0], dtype=dtype)
        assert tmp_path.joinpath(*out).read_bytes() == exports.joinpath(*out).read_bytes()
    assert weights_digest(checkpoint) == weights_digest(expected)
    assert_byte_equal(*(load_model(path).state_dict() for path in (checkpoint, expected)))
    assert_byte_equal(stored(checkpoint), stored(expected))
    codes = StoredTensors(checkpoint).tensor(CODES)
    buffer = torch.empty(12 * 29, dtype=torch.uint8)
    assert torch.equal(codes.read_rows(3, 23, buffer), OTHERS[CODES][3:23])
    tensors = StoredTensors(checkpoint)
    tensors.entries[CODES].parts.pop()
    with pytest.raises(UserError, match=f"of 29 rows of {CODES}"):
        tensors.tensor(CODES)
