"""A checkpoint reads the same whatever part of a parameter each rank held: rows, columns, both."""

import json

import inject
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from stored import stored
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_trainer import load_model
from fsdp_trainer.base.distributed import local_part, local_slice
from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.checkpoint.export import export_checkpoint
from fsdp_trainer.checkpoint.formats.huggingface import import_weights
from fsdp_trainer.checkpoint.state import weights
from fsdp_trainer.checkpoint.store import CheckpointStore
from fsdp_trainer.checkpoint.stored_tensors import StoredTensors
from fsdp_trainer.config.schema import Checkpoint
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import initialize_weights

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
    """Norms have no columns: on that dimension of the mesh they are copied."""
    fitting = [p if p == Replicate() or p.dim < tensor.ndim else Replicate() for p in placements]
    return distribute_tensor(tensor, mesh, fitting)


def write_assets(folder, _progress):
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(CONFIG.to_hf("float32")))


def write_checkpoint(run, shape=(), placements=()):
    """Each rank's part of a checkpoint of weights and 8-bit moments."""
    dist.init_process_group("gloo")
    codes = torch.arange(29 * 12).remainder(251).to(torch.uint8).view(29, 12)
    state = weights(drawn_model()) | {CODES: codes}
    if shape:
        mesh = init_device_mesh("cpu", shape)
        state = {name: distribute(tensor, mesh, placements) for name, tensor in state.items()}
    store = CheckpointStore(run, Checkpoint(), 60, write_assets, lambda event: None)
    progress = {"data": {}, "dtypes": {"default": "bfloat16"}, "best_step": None}
    store.save(1, state, progress, 0.0)
    dist.destroy_process_group()


def checkpoint_of(run):
    return run / "checkpoints" / "step-00000001"


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole")
    world.call(1, write_checkpoint, run)
    return checkpoint_of(run)


@pytest.fixture(scope="module", params=SHARDED)
def sharded(request, world, tmp_path_factory):
    run = tmp_path_factory.mktemp("sharded")
    shape, placements = SHARDED[request.param]
    world.call(torch.Size(shape).numel(), write_checkpoint, run, shape, placements)
    return checkpoint_of(run)


def exported(checkpoint, out, **options):
    export_checkpoint(checkpoint, out, **options)
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


@pytest.mark.parametrize("piece_bytes", [2**22, 72], ids=["one piece", "pieces"])
@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.grid(8)
def test_the_export_has_the_same_bytes(whole, sharded, tmp_path, enter, dtype, piece_bytes):
    enter(inject.setting("tensor_piece_bytes", piece_bytes))
    assert exported(sharded, tmp_path / "sharded", dtype=dtype) == exported(
        whole, tmp_path / "whole", dtype=dtype
    )


def test_the_digest_is_the_same(whole, sharded):
    assert weights_digest(sharded) == weights_digest(whole)


def test_a_model_loads_the_same_weights(whole, sharded):
    ours, theirs = (load_model(path).state_dict() for path in (sharded, whole))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_rows_of_any_tensor_come_with_all_their_columns(whole, sharded):
    codes = StoredTensors(sharded).tensor(CODES)
    buffer = torch.empty(12 * 29, dtype=torch.uint8)
    assert torch.equal(codes.read_rows(3, 23, buffer), stored(whole)[CODES][3:23])


def test_a_checkpoint_that_lacks_a_chunk_is_not_read(sharded):
    tensors = StoredTensors(sharded)
    tensors.entries[CODES].chunks.pop()
    with pytest.raises(RunFailed, match=f"of 29 rows of {CODES}"):
        tensors.tensor(CODES)


def imported_is_right(folder, shape, placements):
    """Return whether this rank's part of every imported parameter is that part of the whole."""
    dist.init_process_group("gloo")
    mesh, whole, model = init_device_mesh("cpu", shape), load_file(folder), Decoder(CONFIG)
    for name, parameter in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        part = distribute(torch.zeros_like(parameter), mesh, placements)
        setattr(model.get_submodule(owner), key, torch.nn.Parameter(part))
    import_weights(model, folder.parent)
    drawn = dict(drawn_model().named_parameters())
    right = [
        torch.equal(local_part(p), drawn[name][local_slice(p)].bfloat16().float())
        for name, p in model.named_parameters()
    ]
    dist.destroy_process_group()
    return len(right) > len(whole) and all(right)


@pytest.mark.slow
@pytest.mark.parametrize("layout", SHARDED)
def test_every_rank_imports_its_own_part(world, whole, tmp_path, layout):
    export_checkpoint(whole, tmp_path / "hf")
    shape, placements = SHARDED[layout]
    ranks = torch.Size(shape).numel()
    file = tmp_path / "hf" / "model.safetensors"
    assert world.call(ranks, imported_is_right, file, shape, placements) == [True] * ranks
