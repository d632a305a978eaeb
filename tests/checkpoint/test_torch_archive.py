"""Files of torch.save: what torch.load reads is read, or one message says why not."""

import zipfile

import pytest
import torch
from foreign import make_other, require_equal, why_refused
from stored import tensors

from fsdp_trainer.checkpoint.formats.tensor_files import Chunk, TensorOnDisk, read_whole

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def saved(tmp_path):
    """Return `saved(**changes)`: two folders with the same weights, the second of torch.save.

    whole: a function of all weights; embedding: of one of them.
    """

    def save(whole=dict, embedding=None):
        folder, other = make_other(tmp_path)
        weights = tensors(folder)
        if embedding:
            weights[EMBEDDING] = embedding(weights[EMBEDDING])
        torch.save(whole(weights), other / "pytorch_model.bin")
        return folder, other

    return save


def zipped_again(other, method=zipfile.ZIP_STORED, content=lambda name, held: held, order=list):
    """Write the archive of a folder anew, as another program might.

    content: of a member of a name, None for no member. order: of the members.
    """
    file = other / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name in order(members):
            held = content(name.partition("/")[2], members[name])
            if held is not None:
                archive.writestr(name, held, method)


def without_version(name, held):
    """Leave away what says that torch may compute the places of all members."""
    return None if name == ".format_version" else held


def test_members_in_another_order_are_read_where_they_are(saved):
    folder, other = saved()
    zipped_again(other, content=without_version, order=reversed)
    require_equal(folder, other)


def test_an_archive_without_checksums_is_read(saved):
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        folder, other = saved()
    finally:
        torch.serialization.set_crc32_options(computes)
    require_equal(folder, other)


ANOTHER = {
    "compressed": ({"method": zipfile.ZIP_DEFLATED}, "data.pkl in it is compressed"),
    "moved": ({"order": reversed}, "is not where torch.save puts it"),
    "big-endian": (
        {"content": lambda name, held: b"big" if name == "byteorder" else held},
        "only this computer's order is read",
    ),
    "alignment": (
        {"content": lambda name, held: b"0" if name == ".storage_alignment" else held},
        ".storage_alignment says",
    ),
    "short": (
        {"content": lambda name, held: without_version(name, held[:-8] if "/" in name else held)},
        "ends before",
    ),
    "missing": (
        {"content": lambda name, held: None if name == "data/2" else without_version(name, held)},
        "is no file of torch.save",
    ),
}


@pytest.mark.parametrize("case", ANOTHER)
def test_an_archive_of_another_form_is_refused(saved, case):
    changes, reason = ANOTHER[case]
    _, other = saved()
    zipped_again(other, **changes)
    assert reason in why_refused(other)


@pytest.mark.parametrize(
    "change",
    [lambda t: t.to("meta"), torch.Tensor.to_sparse, lambda t: torch._neg_view(-t)],
)
def test_a_tensor_without_numbers_of_its_own_is_refused(saved, change):
    _, other = saved(embedding=change)
    assert f"{EMBEDDING} is no plain tensor" in why_refused(other)


BYTES = b"c_codecs\nencode\nq\x00X\x04\x00\x00\x00aaaaX\x06\x00\x00\x00latin1\x86Rq\x02"
BOMBS = {
    "doubled": BYTES + b"h\x00h\x02X\x03\x00\x00\x00hex\x86Rq\x02" * 36,
    "counted": b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85Rq\x00"
    b"ccollections\nCounter\nh\x00\x85R",
    "nested": b"]" * 100_000,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_of_a_few_bytes_does_not_become_a_large_value(saved, bomb):
    _, other = saved()
    pickled = b"\x80\x02" + BOMBS[bomb] + b"."
    zipped_again(other, content=lambda name, held: pickled if name == "data.pkl" else held)
    reason = "holds no weights" if bomb == "nested" else "is no file of torch.save"
    assert reason in why_refused(other)


def test_what_else_torch_saves_beside_tensors_is_no_obstacle(saved):
    others = {
        "seed": b"\xff" * 5000,
        "steps": {1, 2},
        "done": bytearray(b"x"),
        "size": torch.Size([1]),
    }
    require_equal(*saved(lambda weights: {"model": weights, **others}))


def test_a_name_with_and_without_a_wrapper_is_refused(saved):
    _, other = saved(lambda weights: weights | {f"module.{EMBEDDING}": torch.zeros(1)})
    assert "without the names of torch's wrappers too" in why_refused(other)


def test_a_part_that_no_chunk_has_is_not_read_as_what_memory_holds(tmp_path):
    (tmp_path / "file").write_bytes(bytes(8))
    first_row = Chunk(tmp_path / "file", 0, (slice(0, 1), slice(0, 2)))
    tensor = TensorOnDisk(torch.float32, (2, 2), [first_row])
    with pytest.raises(OSError, match="its parts are not the whole of a tensor"):
        read_whole(tensor, 0, 2)


def test_a_tensor_in_two_files_is_not_chosen_by_their_names(saved):
    _, other = saved()
    (other / "pytorch_model.bin").rename(other / "step-1.pt")
    torch.save({EMBEDDING: torch.zeros(1)}, other / "step-2.pt")
    assert f"has {EMBEDDING} too" in why_refused(other)
