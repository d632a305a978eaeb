"""A checkpoint is whole or is not taken for one, and two that hold the same say so."""

import json
import os
import pickle
import re
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import inject
import pytest
import torch
import yaml
from foreign import Evil
from refused import refusal
from stored import assert_byte_equal, assert_undisturbed, checkpoint, go_on, newest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from world import command, flip_bit, read_json, verify, write_json

from fsdp_trainer.base.torch_private import storage_info
from fsdp_trainer.checkpoint.atomic_files import (
    commit,
    damage,
    describe,
    files_below,
    manifest_text,
    read_manifest,
    replaced,
)
from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.checkpoint.formats.description import read_description
from fsdp_trainer.checkpoint.frozen_weights import read_base
from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.checkpoint.shards import host_memory
from fsdp_trainer.checkpoint.store import load, read_progress
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.training.progress import Progress

NAME = "plain on two"
"""A run of two ranks with checkpoints of steps 2 and 4."""


def test_learning_changes_the_digest_of_weights(ledger):
    folders = [checkpoint(ledger.run(NAME), step) for step in (2, 4)]
    printed = [re.search(r"weights digest (\w{16})\n", verify(f"source={f}"))[1] for f in folders]
    assert printed == [weights_digest(folder) for folder in folders]
    assert printed[0] != printed[1]


# --- the manifest -------------------------------------------------------------------------------


def test_the_manifest_says_what_wrote_it_and_lists_every_file(ledger):
    folder = newest(ledger.run(NAME))
    manifest = read_json(folder / "MANIFEST.json")
    assert manifest["step"] == 4
    assert manifest["world_size"] == 2
    assert manifest["data"] == read_json(folder / "trainer.json")["data"]
    assert manifest["versions"].keys() == {"fsdp_trainer", "torch", "python"}
    assert manifest["configuration"] in manifest["files"]
    assert manifest["files"].keys() >= {"config.yaml", "tensors.json", "hf/config.json"}
    assert manifest["files"] == {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "crc32": zlib.crc32(path.read_bytes()),
        }
        for path in folder.rglob("*")
        if path.is_file() and path.name != "MANIFEST.json"
    }


def test_no_bit_of_a_manifest_can_flip_unnoticed(ledger, tmp_path):
    """Every one of the first and last entries', and a sample of the others'.

    In the checksum's own name it changes nothing that is trusted.
    """
    text = (newest(ledger.run(NAME)) / "MANIFEST.json").read_bytes()
    last = 8 * len(text)
    for bit in [*range(600), *range(600, last - 600, 101), *range(last - 600, last)]:
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "MANIFEST.json").write_bytes(flipped)
        if b'"crc32"' in flipped.splitlines()[-2]:
            with pytest.raises(ValueError):
                read_manifest(tmp_path)


def test_a_checkpoint_of_an_earlier_version_whose_manifest_has_no_checksum_is_gone_on_from(
    ledger, tmp_path
):
    last = newest(ledger.copy(NAME, tmp_path / "run"))
    manifest = read_json(last / "MANIFEST.json")
    del manifest["crc32"]
    (last / "MANIFEST.json").write_text(json.dumps(manifest, indent=1))
    run = go_on(ledger, NAME, tmp_path / "run", "train.steps=5")
    assert run.event("resume")[0]["step"] == 4
    flip_bit(last / "trainer.json")
    assert "trainer.json" in verify(f"source={last}", code=3), "its files have theirs"


# --- what describes the tensors -----------------------------------------------------------------


def signed_again(folder):
    """Write the manifest anew for the files as they are, as anyone can."""
    manifest = read_manifest(folder)
    names = [name for name in files_below(folder) if name != "MANIFEST.json"]
    manifest["files"] = describe(folder, names)
    (folder / "MANIFEST.json").write_text(manifest_text(manifest))
    return folder


def weights_of(folder):
    return dict(load_model(folder).named_weights())


def test_a_checkpoint_of_an_earlier_version_which_torch_alone_describes_is_read(ledger, tmp_path):
    whole = newest(ledger.run(NAME))
    earlier = newest(ledger.copy(NAME, tmp_path / "run"))
    (earlier / "tensors.json").unlink()
    assert "all checksums correct" in verify(f"source={signed_again(earlier)}")
    assert read_description(earlier) == read_description(whole)
    assert weights_digest(earlier) == weights_digest(whole)
    assert_byte_equal(weights_of(earlier), weights_of(whole))


@pytest.mark.parametrize("is_earlier", [False, True])
def test_what_torch_would_run_of_a_checkpoint_is_not_run_and_verify_names_it(
    ledger, tmp_path, capsys, is_earlier
):
    folder = newest(ledger.copy(NAME, tmp_path / "run"))
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    if is_earlier:
        (folder / "tensors.json").unlink()
    signed_again(folder)
    assert "it names builtins.print" in command(["verify", f"source={folder}"], None).err
    if is_earlier:
        assert "it names builtins.print" in refusal(load_model, folder)
    else:
        assert_byte_equal(weights_of(folder), weights_of(newest(ledger.run(NAME))))
    assert "code of others" not in capsys.readouterr().out


def test_a_weight_that_is_described_as_another_value_is_not_unpickled(ledger, tmp_path, capsys):
    folder = newest(ledger.copy(NAME, tmp_path / "run"))
    (folder / "tensors.json").unlink()
    described = pickle.loads((folder / ".metadata").read_bytes())
    name = next(name for name in described.state_dict_metadata if name.startswith("weights/"))
    described.state_dict_metadata[name] = BytesStorageMetadata()
    torch.save(Evil(), folder / "evil")
    size = (folder / "evil").stat().st_size
    described.storage_data[MetadataIndex(name)] = storage_info("evil", 0, size)
    (folder / ".metadata").write_bytes(pickle.dumps(described))
    with pytest.raises(UserError, match=f"Missing key in checkpoint state_dict: {name}"):
        load_model(signed_again(folder))
    assert "code of others" not in capsys.readouterr().out


# --- damage -------------------------------------------------------------------------------------


def with_parts(change):
    """Return a change of tensors.json: `change` of the list of an embedding's parts."""

    def changed(described):
        change(described["tensors"]["weights/model.embed_tokens.weight"]["parts"])

    return changed


@pytest.mark.parametrize(
    "change, reason",
    [
        (with_parts(lambda parts: parts.append(parts[0])), "some of them twice"),
        (with_parts(lambda parts: parts[0].__setitem__(4, 2**47)), "the end of the file"),
        (with_parts(lambda parts: parts[0].__setitem__(3, parts[0][3] + 1)), "is damaged"),
        (lambda described: described["tensors"].clear(), "does not hold"),
    ],
)
def test_places_that_are_not_those_of_the_tensors_are_one_message(ledger, tmp_path, change, reason):
    folder = newest(ledger.copy(NAME, tmp_path / "run"))
    described = read_json(folder / "tensors.json")
    change(described)
    write_json(folder / "tensors.json", described)
    with pytest.raises(UserError, match=reason):
        weights_digest(signed_again(folder))
    with pytest.raises(UserError, match=r"embed_tokens|is damaged|would end at byte"):
        load_model(folder)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, "[]", '{"files": []}', '{"files": {"a": 1}}',
        '{"files": {"../a": {"bytes": 1, "crc32": 1}}}', '{"files": {"a": {"bytes": "1"}}}',
    ],
)  # fmt: skip
def test_a_manifest_of_another_form_is_damaged(tmp_path, text):
    (tmp_path / "MANIFEST.json").write_text(text)
    (problem,) = damage(tmp_path)
    assert "MANIFEST.json cannot be read" in f"{problem.what} {problem.reason}"


@pytest.mark.parametrize(
    "changed",
    yaml.safe_load("""
- {step: '2'}
- {step: -1}
- {rows: 1.5}
- {best_loss: low}
- {recent: {}}
- {best_before: [1]}
- {cut_short: x}
- {cut_short: [1]}
"""),
)  # fmt: skip
def test_progress_of_another_form_is_one_message(tmp_path, changed):
    progress = asdict(Progress(step=2))
    write_json(tmp_path / "trainer.json", progress)
    assert Progress.from_stored(read_progress(tmp_path)).step == 2
    write_json(tmp_path / "trainer.json", progress | changed)
    with pytest.raises(UserError, match=next(iter(changed))):
        Progress.from_stored(read_progress(tmp_path))
    write_json(tmp_path / "trainer.json", progress | {"frozen": 1e308})
    assert "frozen cannot be read" in refusal(read_base, tmp_path)


def test_a_description_that_the_disk_has_lost_ends_the_run_with_that_message(tmp_path):
    with pytest.raises(RunFailed, match="cannot read the checkpoint"):
        load(tmp_path, {}, (), alone=True)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = [
    ("MANIFEST.json", flip_bit), ("MANIFEST.json", os.remove), ("__1_0.distcp", flip_bit),
    ("__0_0.distcp", cut), (".metadata", os.remove), ("hf/config.json", cut),
]  # fmt: skip


def test_damage_is_named_and_all_ranks_go_on_from_the_newest_checkpoint_that_is_whole(
    ledger, tmp_path
):
    run = ledger.copy("every step", tmp_path / "run")
    steps = range(9, 3, -1)
    for step, (name, change) in zip(steps, DAMAGES, strict=True):
        change(checkpoint(run, step) / name)
        output = verify(f"source={checkpoint(run, step)}", code=3)
        assert "damaged" in output
        assert name in output
    run = go_on(ledger, "every step", run.folder, ranks=2)
    assert "damaged" in run.out
    events = run.event("damaged")
    assert [Path(e["path"]).name for e in events] == [f"step-{step:08d}" for step in steps]
    for event, (name, _) in zip(events, DAMAGES, strict=True):
        assert len(event["problems"]) == 1
        assert name in event["problems"][0]
    assert run.event("resume")[0]["step"] == 3
    assert_undisturbed(run, ledger.run("every step"))


def as_rank_1_reads(real, path):
    """Rank 1 has a bad copy of a file of step 9 in its cache, and cannot read the part of the disk
    with its shard of step 8. To the other rank all is right."""
    if path.parts[-2:] == ("step-00000009", "trainer.json"):
        return 1
    if path.parts[-2:] == ("step-00000008", "__1_0.distcp"):
        raise OSError(5, "Input/output error")
    return real(path)


def test_what_one_rank_alone_sees_as_damaged_is_so_to_all(ledger, tmp_path):
    seam = inject.around("checksum", as_rank_1_reads, rank=1)
    run = go_on(ledger, "every step", tmp_path / "run", ranks=2, seam=seam)
    assert [len(event["problems"]) for event in run.event("damaged")] == [1, 1]
    assert run.event("resume")[0]["step"] == 7


def is_manifest(path):
    return path.name == "MANIFEST.json"


def test_a_shared_disk_that_lags_is_waited_for(ledger, tmp_path):
    lags = inject.unseen("exists", is_manifest, rank=1, seconds=2)
    run = go_on(ledger, NAME, tmp_path / "run", "train.steps=5", ranks=2, seam=lags)
    assert not run.event("damaged")
    assert run.event("resume")[0]["step"] == 4


def is_own_manifest(path):
    return is_manifest(path) and path.parts[-4] == "own"


def test_a_run_goes_on_from_anothers_checkpoint_and_later_from_where_rank_0_sees_its_own(
    train, ledger
):
    whole = ledger.run("every step")
    how = f"schedule=constant checkpoint.resume={checkpoint(whole, 7)}"
    branch = train("own", how, "train.steps=9", ranks=2)
    assert branch["loss"] == whole["loss"][7:]
    assert branch.checkpoints == ["step-00000009"]
    lags = inject.unseen("is_file", is_own_manifest, rank=1)
    run = train("own", how, "train.steps=11", ranks=2, seam=lags)
    assert [e["step"] for e in run.event("resume")] == [7, 9]
    assert run["step"] == [8, 9, 10, 11]


# --- what is kept -------------------------------------------------------------------------------


def write_step_2_wrong(real, path, windows):
    """Write other bytes of step 2 than those to be read back."""
    written = real(path, windows)
    if "step-00000002" in str(path):
        flip_bit(path)
    return written


def test_the_only_other_checkpoint_goes_when_the_new_one_was_read_back(train):
    how = "schedule=constant checkpoint.every=1 checkpoint.keep=1 checkpoint.patience=1s"
    lies = inject.around("checkpoint_write", write_step_2_wrong, rank=1)
    run = train("run", how, "train.steps=2", ranks=2, seam=lies, code=1)
    assert "just written is damaged" in run.err
    assert "__1_0.distcp" in run.err
    assert run.checkpoints == ["step-00000001"]


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


@pytest.mark.parametrize("came", [False, True])
def test_a_run_that_was_killed_while_one_checkpoint_replaced_another_goes_on_from_either(
    ledger, tmp_path, came
):
    last = newest(ledger.copy(NAME, tmp_path / "run"))
    shutil.copytree(last, replaced(last))
    if not came:
        shutil.rmtree(last)
    run = go_on(ledger, NAME, tmp_path / "run", "train.steps=5")
    assert run.event("resume")[0]["step"] == 4
    assert not replaced(last).exists()


# --- the format ---------------------------------------------------------------------------------


def test_memory_that_the_system_does_not_pin_is_used_as_it_is(enter):
    refuses = SimpleNamespace(cudaHostRegister=lambda address, size, flags: 801)
    enter(inject.around("cuda_runtime", lambda _: refuses))
    with pytest.warns(UserWarning, match="cannot be pinned .CUDA error 801.*slower"):
        memory = host_memory(4096, pinned=True)
    memory.fill_(7)
    assert memory.sum() == 7 * 4096
