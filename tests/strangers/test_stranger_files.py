"""Changed files of every format give the right value or one message; nothing else happens."""

import subprocess

import file_formats
import fuzz_files
import mutations
import pytest
from file_formats import FileFormat
from world import World

from fsdp_trainer.errors import UserError

pytestmark = pytest.mark.slow
MUTANTS = 200
VALID = bytes(range(200)) * 2


def read_all(home):
    tallies = fuzz_files.run_all(home, 1, MUTANTS, file_formats.FORMATS, lambda text: None)
    return {name: (tally.counts, tally.bad) for name, tally in tallies.items()}


def test_two_hundred_changed_files_are_read_rightly_or_refused(tmp_path):
    pool = World()  # a rank without threads, which has imported and composed what readers need
    [tallies] = pool.call(1, read_all, tmp_path)
    pool.close()
    assert [bad for _, bads in tallies.values() for bad in bads] == []
    assert len(tallies) == len(file_formats.FORMATS)
    counts = [counts for counts, _ in tallies.values()]
    assert sum(sum(count.values()) for count in counts) == MUTANTS
    assert {kind for count in counts for kind in count} == set(fuzz_files.GOOD)


def numbers_in(folder):
    return {"numbers": (folder / "a").read_bytes()}


def refuse(folder):
    raise UserError("a file")


def fill(_folder):
    return {"numbers": bytes(2**40)}


def loop(_folder):
    while True:
        pass


def start_something(folder):
    subprocess.run(["true"])
    return numbers_in(folder)


@pytest.mark.parametrize(
    "read, kinds",
    [
        (numbers_in, {"right value", "same value"}),
        (refuse, {"refused"}),
        (lambda folder: {"numbers": VALID}, {"a flipped bit is lost", "same value"}),
        (lambda folder: {"numbers": numbers_in(folder)["numbers"][::-1]}, {"another value"}),
        (lambda folder: 1 / 0, {"traceback"}),
        (fill, {"memory"}),
        (loop, {"hang"}),
        (start_something, {"starts something"}),
    ],
)
def test_a_reader_that_is_wrong_is_reported(tmp_path, monkeypatch, read, kinds):
    monkeypatch.setattr(fuzz_files, "CPU_SECONDS", 1)

    def right_at_first(folder):
        return numbers_in(folder) if numbers_in(folder)["numbers"] == VALID else read(folder)

    form = FileFormat(
        "numbers", lambda folder: (folder / "a").write_bytes(VALID), right_at_first, "a",
        changes=[mutations.flip_bits], right=numbers_in, numbers=True,
    )  # fmt: skip
    count = 1 if read is loop else 6
    tallies = fuzz_files.run_all(tmp_path, 1, count, [form], lambda text: None)
    assert set(tallies["numbers"].counts) <= kinds
    assert bool(tallies["numbers"].bad) == (not kinds <= set(fuzz_files.GOOD))
