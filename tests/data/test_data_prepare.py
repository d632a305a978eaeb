"""Prepared by any number of processes and machines, interrupted anywhere, the same bytes lie in the
cache; nothing stale or damaged is taken from it."""

import errno
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import inject
import pytest
from world import alive, flip_bit, wait_until

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.store import fingerprint
from fsdp_trainer.data.store.component_store import Reporter
from fsdp_trainer.data.store.token_cache import component_stores, prepare
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import RunFailed, UserError

TOKENIZER = load_tokenizer("demo:bytes")


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


def made(path, root, said=None, template=None, **options):
    reporter = Reporter(say=said.append if said is not None else lambda line: None)
    return prepare(
        Data(path=path, **options),
        Batch(seq_len=64),
        TOKENIZER,
        load_template(template, TOKENIZER),
        root,
        reporter,
    )


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


@pytest.mark.slow
def test_any_number_of_processes_writes_the_same_bytes(tmp_path, data, many_parts):
    one, several = (made(str(data), tmp_path / f"c{n}", workers=n, validation=0.2) for n in (1, 3))
    assert content(one) == content(several)
    assert len(content(one)) == 19
    assert len(one.train[0]) + len(one.validation) == 600
    assert visible(tmp_path / "c3") == [one.train[0].folder.parent.name]
    places = [several.train[0].where(i) for i in range(len(several.train[0]))]
    line = places.index(f"{data}/a.jsonl:200")
    assert "q199" in TOKENIZER.decode(several.train[0].read(line)[0].tolist())


@pytest.mark.slow
def test_files_beside_the_user_are_no_modules_of_the_processes(
    tmp_path, data, many_parts, monkeypatch
):
    (tmp_path / "heapq.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert len(made(str(data), tmp_path / "c", workers=2).train[0]) == 600


@pytest.mark.slow
def test_processes_that_tokenize_import_no_torch():
    what = (
        "import sys, fsdp_trainer.data.store.component_store; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'pyarrow', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", what], timeout=600).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.grid(1)
def test_the_first_bad_rows_are_told_whichever_process_finds_them(
    tmp_path, data, many_parts, count
):
    lines = rows(0, 300)
    for bad in (60, 130, 131, 200, 201, 202, 290):
        lines[bad] = "{broken\n"
    (data / "a.jsonl").write_text("".join(lines))
    (data / "b0.jsonl").write_text("{broken")
    with pytest.raises(UserError) as raised:
        made(str(data), tmp_path / "c", workers=count)
    assert [p.what.rpartition("/")[2] for p in raised.value.problems] == [
        f"a.jsonl:{n}" for n in (61, 131, 132, 201, 202)
    ]
    assert visible(tmp_path / "c") == []
    skipped = made(str(data), tmp_path / "c", workers=count, on_error="skip").train[0]
    assert skipped.counts["unreadable"] == 8
    assert skipped.examples["unreadable"][0].endswith("a.jsonl:61")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted"])
@pytest.mark.grid(1)
def test_what_is_finished_when_a_process_dies_is_not_done_again(tmp_path, data, many_parts, how):
    whole = made(str(data), tmp_path / "whole")
    given = []

    def next_task(real, pool, worker, jobs):
        given.append(worker)
        if len(given) == 6 and how == "interrupted":
            raise KeyboardInterrupt
        if len(given) == 6:
            # all: of one alone the last answer may be on its way, and nothing more be asked of it
            for child in children(os.getpid()):
                os.kill(child, signal.SIGKILL)
        return real(pool, worker, jobs)

    error, says = (RunFailed, "memory") if how == "killed" else (KeyboardInterrupt, None)
    with inject.around("worker_task", next_task), pytest.raises(error, match=says):
        made(str(data), tmp_path / "c", workers=2)
    assert not children(os.getpid())
    assert [name[0] for name in visible(tmp_path / "c")] == ["."]
    said = []
    again = made(str(data), tmp_path / "c", said, workers=2)
    assert content(again) == content(whole)
    reused = int(re.search(r"(\d+) of \d+ parts are there", "\n".join(said))[1])
    assert reused >= 3
    assert visible(tmp_path / "c") == [again.train[0].folder.parent.name]


def children(pid):
    """Return the children of a process that tokenize."""
    pids = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread or a process that has ended
            for child in (task / "children").read_text().split():
                if (
                    "fsdp_trainer.data.tokens.tokenize_workers"
                    in Path(f"/proc/{child}/cmdline").read_text()
                ):
                    pids.append(int(child))
    return pids


@pytest.mark.slow
@pytest.mark.further
def test_processes_that_tokenize_end_with_the_one_that_started_them(tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        for _ in range(2):  # more than one process is worth, and not done before it is killed
            file.write("".join(rows(0, 1000)) * 200)
    command = [
        "prepare",
        f"data.path={tmp_path}/a.jsonl",
        "tokenizer.path=demo:bytes",
        f"data.cache={tmp_path}/c",
        "data.workers=2",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "fsdp_trainer", *command], stdout=subprocess.DEVNULL
    ) as process:
        started = wait_until(lambda: len(pids := children(process.pid)) == 2 and pids, process)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(alive, started)))


@pytest.mark.slow
@pytest.mark.further
def test_shards_of_several_machines_are_put_together_by_the_last(
    tmp_path, data, many_parts, capsys
):
    from fsdp_trainer.cli import main

    whole = made(str(data), tmp_path / "whole", validation=0.2)
    prepare = [
        "prepare",
        f"data.path={data}",
        "tokenizer.path=demo:bytes",
        f"data.cache={tmp_path}/c",
        "data.validation=0.2",
        "batch.seq_len=64",
    ]
    lines = []
    for shard in ("0/3", "2/3", "1/3"):
        assert main([*prepare, f"prepare.shard={shard}"]) == 0
        lines.append(capsys.readouterr().out)
    assert "prepare.shard=1/3 prepare.shard=2/3" in lines[0]
    assert "prepare.shard=1/3\n" in lines[1]
    assert f"{tmp_path}/c/{whole.train[0].folder.parent.name}/train" in lines[2]
    assert content(made(str(data), tmp_path / "c", validation=0.2)) == content(whole)
    for wrong in ("3/3", "-1/2"):
        assert main([*prepare, f"prepare.shard={wrong}"]) == 2
        assert "prepare.shard=0/8" in capsys.readouterr().err


def lost_in_a_crash(enter, part):
    os.truncate(part / "train" / "tokens.bin", 40)


def of_another_division(enter, part):
    enter(inject.setting("smallest_part", 2000))


@pytest.mark.slow
@pytest.mark.parametrize("what", [lost_in_a_crash, of_another_division])
def test_a_part_that_is_damaged_or_of_other_rows_is_made_anew(
    tmp_path, data, many_parts, enter, what
):
    whole = made(str(data), tmp_path / "whole", workers=1)
    how = (
        Data(path=str(data), workers=1),
        Batch(seq_len=64),
        TOKENIZER,
        load_template(None, TOKENIZER),
        tmp_path / "c",
        Reporter(),
    )
    assert component_stores(*how)[0].shard(0, 2) == [1]
    what(enter, next((tmp_path / "c").glob(".*/000002")))
    assert content(made(str(data), tmp_path / "c", workers=1)) == content(whole)


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("the data cannot be used", [])])
def test_a_shard_that_fails_leaves_what_the_others_have_made(tmp_path, data, many_parts, error):
    how = (
        Data(path=str(data), workers=1),
        Batch(seq_len=64),
        TOKENIZER,
        load_template(None, TOKENIZER),
        tmp_path / "c",
        Reporter(),
    )
    assert component_stores(*how)[0].shard(0, 2) == [1]
    parts = sorted((tmp_path / "c").glob(".*/[0-9]*"))
    with (
        inject.fails("tokenize_part", error),
        pytest.raises(type(error) if isinstance(error, UserError) else error),
    ):
        component_stores(*how)[0].shard(1, 2)
    assert sorted((tmp_path / "c").glob(".*/[0-9]*")) == parts != []


@pytest.mark.slow
def test_the_same_tokens_of_another_version_are_the_same_data(tmp_path, data, enter):
    before = made(str(data), tmp_path / "c").train[0]
    enter(inject.setting("tokens_version", 10_000))
    after = made(str(data), tmp_path / "c").train[0]
    assert after.folder != before.folder
    assert after.fingerprint == before.fingerprint
    weighted = made(str(data), tmp_path / "c", loss_on="all").train[0]
    assert weighted.fingerprint != before.fingerprint, "the same tokens, other weights"


def cut(folder):
    os.truncate(folder / "train" / "tokens.bin", 40)


def half_a_file(folder):
    (folder / "meta.json").write_text((folder / "meta.json").read_text()[:50])


def one_is_missing(folder):
    (folder / "train" / "weights.bin").unlink()


def bit_of_a_token(folder):
    flip_bit(folder / "train" / "tokens.bin")


def bit_of_the_description(folder):
    flip_bit(folder / "meta.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", [cut, half_a_file, one_is_missing, bit_of_a_token, bit_of_the_description]
)
@pytest.mark.grid(2)
def test_a_damaged_cache_is_made_anew_with_a_note(tmp_path, data, damage):
    before = made(str(data), tmp_path / "c")
    expected, folder = content(before), before.train[0].folder.parent
    damage(folder)
    said = []
    assert content(made(str(data), tmp_path / "c", said)) == expected
    assert "damaged" in said[0]
    assert str(folder) in said[0]
    assert visible(tmp_path / "c") == [folder.name]


@pytest.mark.slow
def test_two_that_prepare_the_same_do_it_once(tmp_path, data, many_parts, enter):
    tasks = []

    def slow(real, task, part, how, tick):
        tasks.append(part.name)
        wait_until(lambda: any("another process" in line for line in said))
        return real(task, part, how, tick)

    enter(inject.around("tokenize_part", slow))
    said, results = [], []
    threads = [
        threading.Thread(
            target=lambda: results.append(made(str(data), tmp_path / "c", said, workers=1))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tasks) == len(set(tasks)) > 3
    assert results[0].fingerprint == results[1].fingerprint
    assert sum("another process" in line for line in said) == 1


def test_leftovers_of_a_crash_go_after_a_day(tmp_path, data):
    for name, age in {".old": 2, ".young": 0.5}.items():
        (tmp_path / "c" / name).mkdir(parents=True)
        (tmp_path / "c" / name / "lock").touch()
        os.utime(tmp_path / "c" / name, (time.time() - age * 24 * 3600,) * 2)
    made(str(data), tmp_path / "c")
    assert visible(tmp_path / "c")[0] == ".young"


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_leaves_what_is_finished(tmp_path, data, many_parts):
    full_disk = inject.fails("tokenize_part", inject.no_space(), nth=4)
    with full_disk, pytest.raises(RunFailed, match=r"No space left.*data\.cache=FOLDER"):
        made(str(data), tmp_path / "c", workers=1)
    said = []
    made(str(data), tmp_path / "c", said, workers=1)
    assert "3 of" in said[0]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, data):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "c", Path("/proc/nowhere")):
        with pytest.raises(UserError, match="cannot be kept there"):
            made(str(data), folder)


@pytest.mark.slow
def test_a_source_that_is_added_to_a_mixture_tokenizes_no_other_anew(tmp_path, enter):
    a, b, c = (write(tmp_path / f"{name}.jsonl", i, i + 40) for i, name in enumerate("abc"))
    entries = [{"path": a, "weight": 0.5}, {"path": b, "weight": 0.5}]
    two = made(entries, tmp_path / "c", validation=0.3)
    assert two.names == ["a", "b"]
    assert two.validation.source_names == ["a", "b"]
    assert sorted(set(two.validation.sources.tolist())) == [0, 1]
    assert sum(map(len, two.train)) + len(two.validation) == 80
    last = len(two.validation) - 1
    file, line = two.validation.where(last).rsplit(":", 1)
    assert file == b
    assert f"q{int(line)}" in TOKENIZER.decode(two.validation.read(last)[0].tolist())
    tasks = []

    def tokenize(real, task, *rest):
        tasks.append(task[0].unit.file)
        return real(task, *rest)

    enter(inject.around("tokenize_part", tokenize))
    three = made([*entries, {"path": c, "weight": 1.0}], tmp_path / "c", validation=0.3)
    assert tasks == [c]
    assert [store.folder for store in three.train[:2]] == [store.folder for store in two.train]


@pytest.mark.slow
def test_a_file_is_hashed_again_when_it_has_changed_and_not_before(tmp_path, data, enter):
    read = []

    def content_hash(real, file, _):
        read.append(Path(file).name)
        return real(file)

    enter(inject.setting("settled_seconds", 0))
    enter(inject.around("file_hash", content_hash))
    folders = [made(str(data), tmp_path / "c").train[0].folder for _ in range(2)]
    assert len(read) == 7
    assert folders[0] == folders[1]
    before = (data / "b1.jsonl").stat()
    (data / "b1.jsonl").write_text((data / "b1.jsonl").read_text().replace("q31", "q30"))
    os.utime(
        data / "b1.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns)
    )  # the same inode, size and time, as rsync may leave it
    assert made(str(data), tmp_path / "c").train[0].folder != folders[0]
    assert read[7:] == ["b1.jsonl"]
    for n, damaged in enumerate(["{half", "[1]", json.dumps({str(data / "b1.jsonl"): 5})]):
        (tmp_path / "c" / "hashes.json").write_text(damaged)
        made(str(data), tmp_path / "c")
        assert len(read) == 15 + 7 * n


def test_a_stop_does_not_wait_until_a_large_file_is_hashed(tmp_path, monkeypatch):
    with open(tmp_path / "a.jsonl", "wb") as file:
        file.truncate(1 << 40)  # takes up no space

    def stopped(line):
        raise KeyboardInterrupt(line)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="hashing"):
        prepare(
            Data(path=str(tmp_path / "a.jsonl")),
            Batch(seq_len=64),
            TOKENIZER,
            load_template(None, TOKENIZER),
            tmp_path / "c",
            Reporter(stopped),
        )
    assert time.monotonic() - start < 100, "of a quarter of an hour"


def test_a_file_that_is_gone_when_it_is_to_be_hashed_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a\.jsonl\n? *cannot be read: No such file"):
        fingerprint.contents([str(tmp_path / "a.jsonl")], tmp_path)


def test_a_file_that_changes_between_hashing_and_reading_is_not_kept_under_the_name_of_what_it_was(
    tmp_path, data
):
    def change_and_list(real, self):
        write(data / "b0.jsonl", 5, 6)
        return real(self)

    with (
        inject.around("list_tasks", change_and_list),
        pytest.raises(UserError, match=r"b0\.jsonl:1\n? *was changed"),
    ):
        made(str(data), tmp_path / "c")
    assert visible(tmp_path / "c") == []


@pytest.mark.slow
def test_without_locks_two_that_prepare_the_same_do_not_disturb_each_other(
    tmp_path, data, many_parts, enter, monkeypatch
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
        results.append(made(str(data), tmp_path / "c", workers=1).fingerprint)
        meet.abort()

    monkeypatch.setattr("fcntl.flock", no_locks)
    enter(inject.around("tokenize_part", in_step))
    threads = [threading.Thread(target=prepare_it, args=(late,)) for late in (0, 0.2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert len(set(results)) == 1


# --- ranks that wait ----------------------------------------------------------------------------


def tokenize_slowly(beats, real, task, part, how, tick):
    """Take longer than the others are told to wait, with a sign of life now and then, or none."""
    for _ in range(16):
        time.sleep(0.3)
        if beats:
            tick(0, 0)
    return real(task, part, how, tick)


def waits(train, tmp_path, data, beats, code):
    how = [
        "train.steps=1",
        f"data.path={data}/b0.jsonl",
        f"data.cache={tmp_path / 'cache'}",
        "launch.data_timeout=4s",
    ]
    slow = inject.around("tokenize_part", partial(tokenize_slowly, beats))
    seam = inject.together(slow, inject.setting("beat_seconds", 0.1))
    return train("run", *how, ranks=2, seam=seam, code=code)


@pytest.mark.slow
@pytest.mark.further
def test_ranks_wait_for_as_long_as_there_are_signs_of_life(train, tmp_path, data):
    assert waits(train, tmp_path, data, beats=True, code=0).column("step") == [1]


@pytest.mark.slow
@pytest.mark.further
def test_ranks_that_hear_nothing_give_up(train, tmp_path, data):
    assert "launch.data_timeout" in waits(train, tmp_path, data, beats=False, code=1).ranks[1].err
