"""A checkpoint is whole or is not taken for one, and two that hold the same say so."""

import json
import os
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import inject
import pytest
import torch
from stored import stored

from fsdp_trainer.checkpoint.atomic_files import commit, read_manifest, replaced
from fsdp_trainer.checkpoint.shards import host_memory


@pytest.fixture(scope="module")
def two_checkpoints(world, inputs, tmp_path_factory):
    """A run of two ranks, to be copied and broken."""
    where = tmp_path_factory.mktemp("broken") / "run"
    return world.train(
        where,
        *(f"{k}={v}" for k, v in inputs.items()),
        "train.steps=4",
        "schedule=constant",
        "checkpoint.every=2",
        ranks=2,
    )


def checkpoints(run):
    return sorted((run.folder / "checkpoints").glob("step-*"))


# --- the digest ---------------------------------------------------------------------------------


def digest_of(world, run):
    output = world.command("verify", f"source={run.folder}")[0].out
    return next(
        line.split()[-1] for line in output.splitlines() if line.startswith("weights digest ")
    )


@pytest.mark.slow
def test_the_digest_of_weights_does_not_depend_on_who_wrote_them(train, world):
    """The digest is equal on 2 ranks, on 1, and sharded otherwise; learning changes it."""
    how = ["schedule=constant", "optim.lr=0"]
    digests = [
        digest_of(world, train("two", *how, "train.steps=1", ranks=2)),
        digest_of(world, train("one", *how, "train.steps=2")),
        digest_of(world, train("ddp", *how, "train.steps=1", "sharding=ddp", ranks=2)),
    ]
    assert len(set(digests)) == 1
    assert len(digests[0]) == 16
    assert digest_of(world, train("other", "schedule=constant", "train.steps=1")) != digests[0]


# --- the manifest -------------------------------------------------------------------------------


def test_the_manifest_says_what_wrote_it_and_lists_every_file(two_checkpoints):
    for folder in checkpoints(two_checkpoints):
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        assert manifest["step"] == int(folder.name[5:])
        assert manifest["world_size"] == 2
        assert manifest["data"] == json.loads((folder / "trainer.json").read_text())["data"]
        assert manifest["versions"].keys() == {"fsdp_trainer", "torch", "python"}
        assert manifest["configuration"] in manifest["files"]
        damaged = {
            str(p.relative_to(folder)): p
            for p in folder.rglob("*")
            if p.is_file() and p.name != "MANIFEST.json"
        }
        assert manifest["files"].keys() == damaged.keys()
        assert {"config.yaml", "trainer.json", "hf/config.json"} <= damaged.keys()
        for name, path in damaged.items():
            assert manifest["files"][name] == {
                "bytes": path.stat().st_size,
                "crc32": zlib.crc32(path.read_bytes()),
            }


@pytest.mark.slow
def test_no_bit_of_a_manifest_can_flip_unnoticed(two_checkpoints, tmp_path):
    """Every one of the first and last entries', and a sample of the others'.

    In the checksum's own name it changes nothing that is trusted.
    """
    text = (checkpoints(two_checkpoints)[-1] / "MANIFEST.json").read_bytes()
    bits = [
        *range(600),
        *range(600, 8 * len(text) - 600, 31),
        *range(8 * len(text) - 600, 8 * len(text)),
    ]
    for bit in bits:
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "MANIFEST.json").write_bytes(flipped)
        if b'"crc32"' in flipped.splitlines()[-2]:
            with pytest.raises(ValueError):
                read_manifest(tmp_path)


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_whose_manifest_has_no_checksum_is_gone_on_from(
    train, world, two_checkpoints, tmp_path
):
    shutil.copytree(two_checkpoints.folder, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    manifest = json.loads((newest / "MANIFEST.json").read_text())
    del manifest["crc32"]
    (newest / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
    world.command("verify", f"source={newest}")
    assert (
        train("run", "train.steps=5", "schedule=constant", "checkpoint.every=2").event("resume")[0][
            "step"
        ]
        == 4
    )
    flip(newest / "trainer.json")
    assert "trainer.json" in world.command("verify", f"source={newest}", code=3)[0].out, (
        "its files have theirs"
    )


# --- damage -------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = [
    ("MANIFEST.json", flip), ("MANIFEST.json", os.remove), ("__1_0.distcp", flip),
    (".metadata", os.remove), ("hf/config.json", cut),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    DAMAGES,
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.grid(2)
def test_damage_is_named_and_all_ranks_go_on_from_the_checkpoint_before(
    train, world, two_checkpoints, tmp_path, name, damage
):
    shutil.copytree(two_checkpoints.folder, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    damage(newest / name)
    output = world.command("verify", f"source={newest}", code=3)[0].out
    assert "damaged" in output
    assert name in output
    run = train("run", "train.steps=6", "schedule=constant", "checkpoint.every=2", ranks=2)
    damaged = run.event("damaged")
    assert [Path(e["path"]).name for e in damaged] == [newest.name]
    assert len(damaged[0]["problems"]) == 1
    assert name in damaged[0]["problems"][0]
    assert run.event("resume")[0]["step"] == 2
    assert run.column("step") == [1, 2, 3, 4, 5, 6]
    assert "damaged" in run.out
    assert run.column("loss")[:4] == two_checkpoints.column("loss"), "the same steps again"


@pytest.mark.slow
def test_of_two_damaged_checkpoints_both_are_named_and_the_one_before_them_is_used(train, tmp_path):
    how = ["schedule=constant", "checkpoint.every=1", "checkpoint.keep=3"]
    whole = train("run", *how, "train.steps=3", ranks=2)
    cut(whole.folder / "checkpoints" / "step-00000003" / "__1_0.distcp")
    flip(whole.folder / "checkpoints" / "step-00000002" / ".metadata")
    run = train("run", *how, "train.steps=4", ranks=2)
    assert [Path(e["path"]).name for e in run.event("damaged")] == [
        "step-00000003",
        "step-00000002",
    ]
    assert run.event("resume")[0]["step"] == 1


def another_content(real, path):
    """Rank 1 has a bad copy of a file in its cache; on the disk, and to the other rank, all is
    right."""
    return 1 if path.parts[-2:] == ("step-00000004", "trainer.json") else real(path)


def a_lost_sector(real, path):
    """Fail as if the part of the disk that rank 1 reads could not be read any more."""
    if path.parts[-2:] == ("step-00000004", "__1_0.distcp"):
        raise OSError(5, "Input/output error")
    return real(path)


@pytest.mark.slow
@pytest.mark.parametrize("reads", [another_content, a_lost_sector])
def test_what_one_rank_alone_sees_as_damaged_is_so_to_all(train, two_checkpoints, tmp_path, reads):
    shutil.copytree(two_checkpoints.folder, tmp_path / "run")
    seam = inject.around("checksum", reads, rank=1)
    run = train("run", "train.steps=5", "schedule=constant", ranks=2, seam=seam)
    assert len(run.event("damaged")[0]["problems"]) == 1
    assert run.event("resume")[0]["step"] == 2


def is_manifest(path):
    return path.name == "MANIFEST.json"


@pytest.mark.slow
@pytest.mark.further
def test_a_shared_disk_that_lags_is_waited_for(train, two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints.folder, tmp_path / "run")
    lags = inject.unseen("exists", is_manifest, rank=1, seconds=3)
    run = train("run", "train.steps=5", "schedule=constant", ranks=2, seam=lags)
    assert not run.event("damaged")
    assert run.event("resume")[0]["step"] == 4


def is_own_manifest(path):
    return is_manifest(path) and path.parts[-4] == "own"


@pytest.mark.slow
def test_all_ranks_go_on_from_where_rank_0_sees_that_the_run_stands(train, two_checkpoints):
    how = ["schedule=constant", f"checkpoint.resume={two_checkpoints.folder}"]
    train("own", *how, "train.steps=5", ranks=2)
    lags = inject.unseen("is_file", is_own_manifest, rank=1)
    run = train("own", *how, "train.steps=6", ranks=2, seam=lags)
    assert [e["step"] for e in run.event("resume")] == [4, 5]
    assert len(run.metrics) == 6 - 4


# --- what is kept -------------------------------------------------------------------------------


def write_step_2_wrong(real, path, windows):
    """Write other bytes of step 2 than those to be read back."""
    written = real(path, windows)
    if "step-00000002" in str(path):
        flip(path)
    return written


@pytest.mark.slow
@pytest.mark.further
def test_the_only_other_checkpoint_goes_when_the_new_one_was_read_back(train):
    how = ["schedule=constant", "checkpoint.every=1", "checkpoint.keep=1", "checkpoint.patience=1s"]
    lies = inject.around("checkpoint_write", write_step_2_wrong, rank=1)
    run = train("run", *how, "train.steps=2", ranks=2, seam=lies, code=1)
    assert "just written is damaged" in run.err
    assert "__1_0.distcp" in run.err
    assert run.checkpoints == ["step-00000001"]
    assert train("run", *how, "train.steps=3", ranks=2).event("resume")[0]["step"] == 1


# --- a checkpoint of the same step again --------------------------------------------------------


def test_a_folder_that_another_replaces_is_on_disk_whenever_that_is_killed(tmp_path):
    old, new, rename = tmp_path / "it", tmp_path / ".it.partial", Path.rename
    for folder in (old, new):
        folder.mkdir()
        (folder / "file").write_text(folder.name)

    def killed(self, target):
        if self == new:
            held = [path.read_text() for path in tmp_path.glob("*/file")]
            assert sorted(held) == [".it.partial", "it"], "neither is gone yet"
            raise OSError("broken")
        return rename(self, target)

    with patch.object(Path, "rename", killed), pytest.raises(OSError):
        commit(new, old)
    assert (old / "file").read_text() == "it"
    assert not replaced(old).exists()
    commit(new, old)
    assert (old / "file").read_text() == ".it.partial"
    assert os.listdir(tmp_path) == ["it"]


@pytest.mark.slow
@pytest.mark.parametrize("came", [False, True])
def test_a_run_that_was_killed_while_one_checkpoint_replaced_another_goes_on_from_either(
    train, two_checkpoints, tmp_path, came
):
    shutil.copytree(two_checkpoints.folder, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    shutil.copytree(newest, replaced(newest))
    if not came:
        shutil.rmtree(newest)
    run = train("run", "train.steps=5", "schedule=constant", "checkpoint.every=2")
    assert run.event("resume")[0]["step"] == 4
    assert not replaced(newest).exists()


# --- the format ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_files_are_those_of_torch_distributed_checkpoint(tmp_path, world):
    """Files written by us and by dcp.save have the same tensors, of all formats and shapes, for a
    plain dcp.load; in one window and in several."""
    assert world.call(2, write_both_ways, tmp_path) == [None, None]
    plain = stored(tmp_path / "dcp")
    for way in ("whole", "windows"):
        ours = stored(tmp_path / way)
        assert ours.keys() == plain.keys()
        for name, tensor in plain.items():
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name


def write_both_ways(folder):
    """One rank's part."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from fsdp_trainer.checkpoint import shards

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    state = {
        "even": distribute_tensor(torch.randn(8, 5), mesh, [Shard(0)]),
        "uneven": distribute_tensor(torch.randn(3, 7).bfloat16(), mesh, [Shard(0)]),
        "one row": distribute_tensor(torch.randn(1, 4), mesh, [Shard(0)]),
        "bytes": distribute_tensor(torch.randint(255, (6, 3), dtype=torch.uint8), mesh, [Shard(0)]),
        "copied": distribute_tensor(torch.randn(9), mesh, [Replicate()]),
        "scalar": torch.tensor(3.0),
        "larger": distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]),
    }
    dcp.save(state, checkpoint_id=folder / "dcp")
    with inject.setting("checkpoint_window_bytes", 6000):
        for way in ("whole", "windows"):
            (folder / way).mkdir(exist_ok=True)
            shard = shards.ShardWriter(None, whole=way == "whole")
            for _ in range(2):  # the second time by the plan of the first
                shard.plan(state)
                shards.write_file(folder / way / shard.file, shard.windows(state))
            if dist.get_rank() == 0:
                (folder / way / ".metadata").write_bytes(shard.metadata)
    dist.barrier()


def test_memory_that_the_system_does_not_pin_is_used_as_it_is(enter):
    refuses = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 801)
    enter(inject.around("cuda_runtime", lambda _: refuses))
    with pytest.warns(UserWarning, match="cannot be pinned .CUDA error 801.*slower"):
        memory = host_memory(4096, pinned=True)
    memory.fill_(7)
    assert memory.sum() == 7 * 4096
