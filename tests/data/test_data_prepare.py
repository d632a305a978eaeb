"""Prepared by any number of processes and machines, interrupted anywhere, the same bytes lie in the
cache; nothing stale or damaged is taken from it."""

import errno
import gzip
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import inject
import pytest
from folders import REPO
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refusal, refused
from texts import BYTES
from world import alive, flip_bit, wait_until

from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.store import fingerprint
from fsdp_trainer.data.store.token_cache import component_stores
from fsdp_trainer.errors import RunFailed, UserError


@pytest.fixture
def many_parts():
    """Little data is as much work as much is."""
    with inject.setting("smallest_part", 3000), inject.setting("worth_processes", 0):
        yield


@pytest.fixture
def data(tmp_path):
    """Chats in a folder: a large file, small ones, and one that is compressed; 600 rows in all."""
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "a.jsonl", 0, 300)
    for i in range(5):
        write(folder / f"b{i}.jsonl", 300 + 10 * i, 310 + 10 * i)
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.writelines(rows(350, 600))
    return folder


def rows(start, stop):
    return [
        json.dumps({"prompt": f"q{i}", "completion": "a" * (i % 7) + str(i)}) + "\n"
        for i in range(start, stop)
    ]


def write(path, start, stop):
    path.write_text("".join(rows(start, stop)))
    return str(path)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "c"


@pytest.fixture
def stored(prepared_in, cache, data):
    """Return `made(root, *paths, ...)`, which prepares the data."""

    def make(root=cache, *paths, **options):
        return prepared_in(root, *(paths or [data]), **options)

    return make


@pytest.fixture
def shard(how, cache, data):
    """Return `shard(i, count)`, which prepares only the parts of one of several machines."""
    return lambda *which: component_stores(*how(cache, data, workers=1))[0].shard(*which)


def content(prepared):
    """Return the content of every column, and what is known of them."""
    folders = {store.folder.parent for store in [*prepared.train, prepared.validation] if store}
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file()
    }


def visible(root):
    return sorted(p.name for p in root.iterdir() if p.name != "hashes.json")


def test_any_number_of_processes_writes_the_same_bytes(
    tmp_path, data, cache, stored, many_parts, monkeypatch
):
    (tmp_path / "heapq.py").write_text("raise SystemExit(1)")  # no module of the processes
    monkeypatch.chdir(tmp_path)
    one = stored(tmp_path / "one", workers=1, validation=0.2)
    several = stored(workers=3, validation=0.2)
    assert content(one) == content(several)
    assert len(content(one)) == 19
    assert len(one.train[0]) + len(one.validation) == 600
    assert visible(cache) == [one.train[0].folder.parent.name]
    places = [several.train[0].where(i) for i in range(len(several.train[0]))]
    line = places.index(f"{data}/a.jsonl:200")
    assert "q199" in BYTES.decode(several.train[0].read(line)[0].tolist())


def test_processes_that_read_data_import_no_torch():
    what = (
        "import sys, fsdp_trainer.data.store.component_store,"
        " fsdp_trainer.data.stream.stream_readers; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pyarrow', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", what], timeout=600).returncode == 0


def test_the_first_bad_rows_are_told_whichever_process_finds_them(data, cache, stored, many_parts):
    lines = rows(0, 300)
    for bad in (60, 130, 131, 200, 201, 202, 290):
        lines[bad] = "{broken\n"
    (data / "a.jsonl").write_text("".join(lines))
    (data / "b0.jsonl").write_text("{broken")
    for count in (1, 3):
        problems = refused(stored, workers=count).problems
        messages = [problem.what.removeprefix(f"{data}/") for problem in problems]
        assert messages == [f"a.jsonl:{n}" for n in (61, 131, 132, 201, 202)]
        assert visible(cache) == []
    skipped = stored(workers=1, on_error="skip").train[0]
    assert skipped.counts["unreadable"] == 8
    assert skipped.examples["unreadable"][0].endswith("a.jsonl:61")


LINES = st.lists(
    st.sampled_from(["", "a", "ü\r", "你好", "\u2028", "x" * 90]) | st.text("ab \t", max_size=30),
    max_size=12,
)


def write_files(folder, contents):
    """Texts as JSONL, as chats, and packed."""
    files = []
    for i, texts in enumerate(contents):
        chats = [{"prompt": text, "completion": text * 2} for text in texts]
        rows = [{"text": text} for text in texts] if i % 2 else chats
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        content = ("\n" * (i % 3) + "".join(lines)).encode()
        files.append(folder / f"{i}.jsonl{'.gz' if i % 4 == 3 else ''}")
        files[-1].write_bytes(gzip.compress(content) if i % 4 == 3 else content)
    return files


@settings(max_examples=6)
@given(
    st.lists(LINES.filter(any), min_size=1, max_size=4),
    st.integers(40, 400),
    st.integers(1, 3),
    st.sampled_from([None, 0.4]),
    st.data(),
)
def test_any_cut_into_parts_shards_and_interruptions_gives_the_same_samples(
    how, tmp_path_factory, contents, smallest, shards, validation, draw
):
    folder = tmp_path_factory.mktemp("work")
    files = write_files(folder, contents)
    options = {"seq_len": 64, "too_long": "truncate", "on_error": "skip", "validation": validation}

    def columns(arguments):
        return {name: part for name, part in content(prepare(*arguments)).items() if ".bin" in name}

    try:
        whole = columns(how(folder / "whole", *files, **options))
    except UserError as error:  # nothing to learn is in it: however it is divided
        whole = type(error)
    parts = how(folder / "parts", *files, **options)
    with inject.setting("smallest_part", smallest), inject.setting("fewest_parts", 1 << 40):
        try:
            for i in draw.draw(st.permutations(range(shards)))[: draw.draw(st.integers(0, shards))]:
                component_stores(*parts)[0].shard(i, shards)
            again = columns(parts)
        except UserError as error:
            again = type(error)
    assert again == whole


def test_what_is_finished_when_a_process_dies_is_not_done_again(
    tmp_path, cache, stored, many_parts
):
    whole, pools = stored(tmp_path / "whole"), []

    def interrupted(real, pool, worker, jobs):
        pools.append(pool)
        if len(pools) == 5:
            raise KeyboardInterrupt
        return real(pool, worker, jobs)

    def killed(real, pool, worker, jobs):
        pools.append(pool)
        # all: of one alone the last answer may be on its way, and nothing more be asked of it
        for process in pool.processes.values():
            process.kill()
        return real(pool, worker, jobs)

    with inject.around("worker_task", interrupted), pytest.raises(KeyboardInterrupt):
        stored(workers=2)
    with inject.around("worker_task", killed), pytest.raises(RunFailed, match="memory"):
        stored(workers=2)
    processes = [process for pool in pools for process in pool.processes.values()]
    assert all(process.returncode is not None for process in processes)
    assert [name[0] for name in visible(cache)] == ["."]
    said = []
    again = stored(say=said.append, workers=2)
    assert content(again) == content(whole)
    reused = int(re.search(r"(\d+) of \d+ parts are there", "\n".join(said))[1])
    assert reused >= 3
    assert visible(cache) == [again.train[0].folder.parent.name]


BUSY = """
import busy, sys, time
from fsdp_trainer.data.store.tokenize_workers import WorkerPool

def work(task, report):
    report(task)
    time.sleep(600)

if __name__ == "__main__":
    pool = WorkerPool(busy.work, 2, print)
    for worker in pool.workers:
        pool.send(worker, "busy")
        pool.receive(worker)
    print(*(process.pid for process in pool.processes.values()), flush=True)
    sys.stdin.read()
"""


def test_processes_that_tokenize_end_with_the_one_that_started_them(tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    environment = os.environ | {"PYTHONPATH": f"{REPO}:{tmp_path}"}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    command = [sys.executable, tmp_path / "busy.py"]
    with subprocess.Popen(command, env=environment, **pipes) as process:
        messages = [process.stdout.readline() for _ in range(3)]
        process.kill()
    started = [int(pid) for pid in messages[-1].split()]
    assert len(started) == 2
    wait_until(lambda: not any(map(alive, started)))


def test_shards_of_several_machines_are_put_together_by_the_last(
    tmp_path, data, cache, stored, many_parts, program
):
    whole = stored(tmp_path / "whole", validation=0.2)
    command = ["prepare", f"data.path={data}", "tokenizer.path=demo:bytes", f"data.cache={cache}"]
    command += ["data.validation=0.2", "batch.seq_len=512", "data.workers=1"]
    lines = [program(*command, f"prepare.shard={number}") for number in ("0/3", "2/3", "1/3")]
    assert "prepare.shard=1/3 prepare.shard=2/3" in lines[0]
    assert "prepare.shard=1/3\n" in lines[1]
    assert f"{cache}/{whole.train[0].folder.parent.name}/train" in lines[2]
    assert content(stored(validation=0.2)) == content(whole)
    for wrong in ("3/3", "-1/2"):
        assert "prepare.shard=0/8" in program(*command, f"prepare.shard={wrong}", code=2)


def lost_in_a_crash(enter, part):
    os.truncate(part / "train/tokens.bin", 40)


def of_another_division(enter, part):
    enter(inject.setting("smallest_part", 2000))


@pytest.mark.parametrize("what", [lost_in_a_crash, of_another_division])
def test_a_part_that_is_damaged_or_of_other_rows_is_made_anew(
    tmp_path, cache, stored, shard, many_parts, enter, what
):
    whole = stored(tmp_path / "whole", workers=1)
    assert shard(0, 2) == [1]
    what(enter, next(cache.glob(".*/000002")))
    assert content(stored(workers=1)) == content(whole)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UserError("the data cannot be used", [])])
def test_a_shard_that_fails_leaves_what_the_others_have_made(cache, shard, many_parts, error):
    assert shard(0, 2) == [1]
    parts = sorted(cache.glob(".*/[0-9]*"))
    with inject.fails("tokenize_part", error), pytest.raises(type(error)):
        shard(1, 2)
    assert sorted(cache.glob(".*/[0-9]*")) == parts != []


def test_the_same_tokens_of_another_version_are_the_same_data(stored, enter):
    before = stored().train[0]
    enter(inject.setting("tokens_version", 10_000))
    after = stored().train[0]
    assert after.folder != before.folder
    assert after.fingerprint == before.fingerprint
    weighted = stored(loss_on="all").train[0]
    assert weighted.fingerprint != before.fingerprint, "the same tokens, other weights"


DAMAGES = {
    "a column is cut": lambda folder: os.truncate(folder / "train/tokens.bin", 40),
    "the description is cut": lambda folder: os.truncate(folder / "meta.json", 50),
    "a column is missing": lambda folder: (folder / "train/weights.bin").unlink(),
    "a bit of a token": lambda folder: flip_bit(folder / "train/tokens.bin"),
    "a bit of the description": lambda folder: flip_bit(folder / "meta.json"),
}


def test_a_damaged_cache_is_made_anew_with_a_note(cache, stored):
    before = stored()
    expected, folder = content(before), before.train[0].folder.parent
    for name, damage in DAMAGES.items():
        damage(folder)
        said = []
        assert content(stored(say=said.append)) == expected, name
        assert "damaged" in said[0]
        assert str(folder) in said[0]
        assert visible(cache) == [folder.name]


def test_two_that_prepare_the_same_do_it_once(stored, many_parts, enter):
    tasks, said = [], []

    def slow(real, task, part, how, tick):
        tasks.append(part.name)
        wait_until(lambda: any("another process" in line for line in said))
        return real(task, part, how, tick)

    enter(inject.around("tokenize_part", slow))
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(stored, say=said.append, workers=1) for _ in range(2)]
    assert len(tasks) == len(set(tasks)) > 3
    assert both[0].result().fingerprint == both[1].result().fingerprint
    assert sum("another process" in line for line in said) == 1


def test_leftovers_of_a_crash_go_after_a_day(cache, stored):
    for name, age in {".old": 2, ".young": 0.5}.items():
        (cache / name).mkdir(parents=True)
        (cache / name / "lock").touch()
        os.utime(cache / name, (time.time() - age * 24 * 3600,) * 2)
    stored()
    assert visible(cache)[0] == ".young"


def test_a_full_disk_is_one_message_and_leaves_what_is_finished(stored, many_parts):
    full_disk = inject.fails("tokenize_part", inject.no_space(), nth=4)
    with full_disk, pytest.raises(RunFailed, match=r"No space left.*data\.cache=FOLDER"):
        stored(workers=1)
    said = []
    stored(say=said.append, workers=1)
    assert "3 of" in said[0]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, stored):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file/c", Path("/proc/nowhere")):
        assert "cannot be kept there" in refusal(stored, folder)


def test_a_source_that_is_added_to_a_mixture_tokenizes_no_other_anew(
    tmp_path, cache, stored, enter
):
    a, b, c = (write(tmp_path / f"{name}.jsonl", i, i + 40) for i, name in enumerate("abc"))
    entries = [{"path": a, "weight": 0.5}, {"path": b, "weight": 0.5}]
    two = stored(cache, *entries, validation=0.3)
    assert two.names == ["a", "b"]
    assert two.validation.source_names == ["a", "b"]
    assert sorted(set(two.validation.sources.tolist())) == [0, 1]
    assert sum(map(len, two.train)) + len(two.validation) == 80
    last = len(two.validation) - 1
    file, line = two.validation.where(last).rsplit(":", 1)
    assert file == b
    assert f"q{int(line)}" in BYTES.decode(two.validation.read(last)[0].tolist())
    tasks = []

    def tokenize(real, task, *rest):
        tasks.append(task[0].unit.file)
        return real(task, *rest)

    enter(inject.around("tokenize_part", tokenize))
    three = stored(cache, *entries, {"path": c, "weight": 1.0}, validation=0.3)
    assert tasks == [c]
    assert [store.folder for store in three.train[:2]] == [store.folder for store in two.train]


def test_a_file_is_hashed_again_when_it_has_changed_and_not_before(data, cache, stored, enter):
    read = []

    def content_hash(real, file, _):
        read.append(Path(file).name)
        return real(file)

    enter(inject.setting("settled_seconds", 0))
    enter(inject.around("file_hash", content_hash))
    folders = [stored().train[0].folder for _ in range(2)]
    assert len(read) == 7
    assert folders[0] == folders[1]
    file = data / "b1.jsonl"
    before = file.stat()
    file.write_text(file.read_text().replace("q31", "q30"))
    # the same inode, size and time, as rsync may leave it
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert stored().train[0].folder != folders[0]
    assert read[7:] == ["b1.jsonl"]
    for n, damaged in enumerate(["{half", "[1]", json.dumps({str(file): 5})]):
        (cache / "hashes.json").write_text(damaged)
        stored()
        assert len(read) == 15 + 7 * n


def test_a_stop_does_not_wait_until_a_large_file_is_hashed(tmp_path, cache, stored):
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.truncate(1 << 40)  # takes up no space

    def stopped(line):
        raise KeyboardInterrupt(line)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="hashing"):
        stored(cache, tmp_path / "a.jsonl", progress=stopped)
    assert time.monotonic() - start < 100, "of a quarter of an hour"


def test_a_file_that_is_gone_when_it_is_to_be_hashed_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl\n? *cannot be read: No such file"):
        fingerprint.contents([f"{tmp_path}/a.jsonl"], tmp_path)


def test_a_file_that_changes_between_hashing_and_reading_is_not_kept_under_the_name_of_what_it_was(
    data, cache, stored
):
    def change_and_list(real, self):
        write(data / "b0.jsonl", 5, 6)
        return real(self)

    messages = pytest.raises(UserError, match=r"b0\.jsonl:1\n? *was changed")
    with inject.around("list_tasks", change_and_list), messages:
        stored()
    assert visible(cache) == []


def test_without_locks_two_that_prepare_the_same_do_not_disturb_each_other(
    stored, many_parts, enter, monkeypatch
):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    results, meet = [], threading.Barrier(2, timeout=20)

    def in_step(real, task, part, how, tick):
        if not results:
            with suppress(threading.BrokenBarrierError):
                meet.wait()
        return real(task, part, how, tick)

    def prepare_it(late):
        time.sleep(late)
        results.append(stored(workers=1).fingerprint)
        meet.abort()

    monkeypatch.setattr("fcntl.flock", no_locks)
    enter(inject.around("tokenize_part", in_step))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(prepare_it, (0, 0.2)))
    assert len(results) == 2
    assert len(set(results)) == 1


# --- ranks that wait ----------------------------------------------------------------------------


def tokenize_slowly(patience, beats, real, task, part, how, tick):
    """Take longer than the others are told to wait, with a sign of life now and then, or none."""
    end = time.monotonic() + (1.2 if beats else 4) * patience
    while time.monotonic() < end:
        time.sleep(0.2)
        if beats:
            tick(0, 0)
    return real(task, part, how, tick)


@pytest.mark.parametrize("patience, beats", [(4, True), (1, False)])
def test_ranks_wait_for_as_long_as_there_are_signs_of_life(train, data, cache, patience, beats):
    slow = inject.around("tokenize_part", partial(tokenize_slowly, patience, beats))
    seam = inject.together(slow, inject.setting("beat_seconds", 0.1))
    given = [
        f"data.path={data}/b0.jsonl data.cache={cache}",
        f"launch.data_timeout={patience}s",
    ]
    run = train("run", *given, "train.steps=1", ranks=2, seam=seam, code=0 if beats else 1)
    if beats:
        assert run["step"] == [1]
    else:
        assert "launch.data_timeout" in run.ranks[1].err
