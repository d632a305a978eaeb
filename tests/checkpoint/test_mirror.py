"""checkpoint.mirror: checkpoints are uploaded beside training, and a machine with none goes on."""

import functools
import signal
import threading
from collections import Counter
from pathlib import Path

import inject
import pytest
from stored import assert_undisturbed, checkpoint
from tables import rows
from world import RankFailed, cli, flip_bit, wait_for_step

from fsdp_trainer.checkpoint.atomic_files import describe, manifest_text
from fsdp_trainer.checkpoint.bucket import Bucket
from fsdp_trainer.config.paths import MANIFEST

HOW = "schedule=constant checkpoint.every=3 checkpoint.keep=1"
NEWEST = "step-00000006"


@pytest.fixture
def mirrored(train, tmp_path):
    """Return `train` with a mirror, and a function that lists the checkpoints there."""
    bucket = tmp_path / "bucket"

    def start(name, *words, **options):
        return train(name, HOW, f"checkpoint.mirror={bucket}", *words, **options)

    def listed():
        return sorted(path.name for path in (bucket / "run/checkpoints").glob("*"))

    return start, listed


def lines(run, text):
    return [line for line in run.out.splitlines() if text in line]


def hindered(put_counts, real, system, local, place, **how):
    """Upload a shard slowly, the first time half of it, and another one at the second attempt."""
    name = Path(place).name
    put_counts[name] += 1
    if put_counts["__0_0.distcp"] == 1 and name == "__0_0.distcp":
        wait_for_step(5, Path(local).parents[2])
        Path(place).write_bytes(Path(local).read_bytes()[:-1])
    elif name == "__1_0.distcp" and put_counts[name] == 1:
        raise OSError("connection lost")
    else:
        real(system, local, place, **how)


def half_read(read_counts, real, bucket, place, copy):
    """Yield a shard cut short when it is read for the first time."""
    read_counts[place] += 1
    is_torn = read_counts[place] == 1 and place.endswith("distcp")
    return (block[:-1] if is_torn else block for block in real(bucket, place, copy))


def test_uploads_hinder_no_step_and_a_machine_that_has_nothing_goes_on_from_them(mirrored, ledger):
    train, listed = mirrored
    fault = inject.around("mirror_put", functools.partial(hindered, Counter()))
    how = "checkpoint=async train.steps=6"
    run = train("run", how, ranks=2, seam=fault)
    assert listed() == run.checkpoints == [NEWEST]
    assert {e["step"] for e in run.event("mirrored")} <= {3, 6}
    assert run.event("mirror_failed")
    assert len(lines(run, "the upload is tried again")) == len(run.event("mirror_failed"))
    assert lines(run, "works again")
    torn = inject.around("mirror_read", functools.partial(half_read, Counter()))
    elsewhere = train("other/run", "train.steps=9", ranks=2, seam=torn)
    assert elsewhere.event("resume")[0]["step"] == 6
    assert_undisturbed(elsewhere, ledger.run("every step"))


def killed_in_second(real, system, local, place, **how):
    real(system, local, place, **how)
    if NEWEST in place:
        inject.kill()


def test_an_upload_that_was_cut_short_is_not_taken(mirrored):
    train, listed = mirrored
    with pytest.raises(RankFailed):
        train("run", "train.steps=7", seam=inject.around("mirror_put", killed_in_second))
    assert listed() == ["step-00000003", NEWEST]
    assert train("other/run", "train.steps=7").event("resume")[0]["step"] == 3
    assert listed() == ["step-00000007"]


def test_nothing_is_deleted_before_it_is_in_the_mirror_and_a_run_that_ends_before_says_so(mirrored):
    train, listed = mirrored
    broken = inject.fails("mirror_put", OSError("connection lost"))
    how = "train.steps=6 checkpoint.patience=1s"
    run = train("run", how, seam=broken, code=1)
    assert run.checkpoints == ["step-00000003", NEWEST]
    assert len(lines(run, "connection lost")) == len(run.event("mirror_failed")) == 1
    assert f"{NEWEST} is on this machine alone" in run.err
    assert "connection lost" in run.err
    again = train("run", how)
    assert "is already finished" in again.out
    assert listed() == again.checkpoints == [NEWEST]


def test_the_newest_whole_one_of_both_places_is_taken(mirrored, tmp_path):
    train, listed = mirrored
    run = train("run", "train.steps=6 checkpoint.keep=2")
    flip_bit(checkpoint(run, 6) / "__0_0.distcp")
    run = train("run", "train.steps=7 checkpoint.keep=2")
    assert run.event("damaged")
    assert run.event("resume")[0]["step"] == 6
    assert listed() == [NEWEST, "step-00000007"]
    flip_bit(tmp_path / "bucket/run/checkpoints/step-00000007/__0_0.distcp")
    elsewhere = train("other/run", "train.steps=7 checkpoint.keep=2")
    assert lines(elsewhere, "step-00000007 is damaged and not used: ")
    assert elsewhere.event("resume")[-1]["step"] == 6


def test_the_best_one_stays_and_those_after_a_step_that_a_run_goes_back_to_do_not(mirrored):
    train, listed = mirrored
    how = "data.validation=0.1 train.validate_every=3 checkpoint.best=true optim.lr=0.5"
    run = train("run", how, "train.steps=9")
    assert listed() == run.checkpoints[1:] == [NEWEST, "step-00000009"], "the best and the newest"
    run = train("other/run", how, "train.steps=10")
    assert run.checkpoints[1:] == listed() == [NEWEST, "step-00000010"]
    back = f"checkpoint.resume={checkpoint(run, 6)}"
    run = train("other/run", how, back, "train.steps=7")
    assert listed() == run.checkpoints[1:] == ["step-00000007"], "that has a lower loss"


def test_a_stop_waits_for_the_upload(mirrored):
    train, listed = mirrored
    stopped = inject.at(None, functools.partial(inject.send, signal.SIGTERM), step=5)
    run = train("run", "train.steps=9", ranks=2, seam=stopped, code=75)
    (last,) = listed()
    assert [last] == run.checkpoints
    assert last != NEWEST[:-1] + "3"


@pytest.mark.parametrize(
    "mirror, reason",
    rows("""
nosuch://bucket → nosuch:// is not known
s3://bucket/runs → pip install 'fsdp_trainer[remote]'
https://host/runs → is for reading: name a bucket
/dev/null/runs → NotADirectoryError
"""),
)
def test_a_mirror_that_cannot_be_used_is_one_message_before_any_step(train, mirror, reason):
    run = train("run", f"checkpoint.mirror={mirror}", code=2)
    assert reason in run.err
    assert run.err.count("checkpoint.mirror=") == 1
    assert not run.folder.exists()


def test_no_record_shows_the_password_of_a_mirror(train):
    mirror = "checkpoint.mirror=${oc.env:MIRROR}"
    run = train("run", mirror, "train.steps=1", env={"MIRROR": "memory://me:hunter2@bucket"})
    assert run.event("mirrored")[0]["path"] == "memory://bucket/run/checkpoints/step-00000001"
    records = [path.read_bytes() for path in run.folder.rglob("*") if path.is_file()]
    assert not any(b"hunter2" in text for text in [*records, run.out.encode()])


def test_a_new_run_does_not_mix_with_an_earlier_one_in_its_mirror(mirrored):
    train, listed = mirrored
    train("run", "train.steps=3")
    never = "checkpoint.resume=never train.steps=1"
    assert "holds an earlier run" in train("other/run", never, code=2).err
    train("other/run", never, "run.overwrite=true")
    assert listed() == ["step-00000001"]


def test_verbs_read_a_run_at_its_address_and_fetch_what_has_changed(
    mirrored, tmp_path, monkeypatch
):
    train, _ = mirrored
    train("run", "train.steps=6 checkpoint.keep=2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    address = f"file://{tmp_path}/bucket/run"
    first = tmp_path / "bucket/run/checkpoints/step-00000003"

    def said_by(*words, code=0):
        result = cli(*words, code=code)
        return result.out + result.err

    assert f"fetching {address}/checkpoints/{NEWEST}" in said_by("verify", address)
    assert "fetching" not in said_by("generate", address, "prompt=1 max_tokens=1")
    assert "fetch it first" in said_by("report", address, code=2)
    flip_bit(first / "__0_0.distcp")
    assert "checksum" in said_by("verify", f"{address}/checkpoints/{first.name}", code=3)
    for wrong, reason in ((f"{address}s", "no such file"), ("file://run", "is no run in a mirror"),
                          (f"{address}/checkpoints/step-4", "there is no step-4"),
                          ("https://host/run", "is no bucket")):  # fmt: skip
        assert reason in said_by("verify", wrong, code=2)


def test_a_transfer_that_hangs_ends_when_it_is_cancelled(tmp_path):
    folder, go_on = tmp_path / "step-00000001", threading.Event()
    folder.mkdir()
    (folder / "weights").write_text("1")
    (folder / MANIFEST).write_text(manifest_text({"files": describe(folder, ["weights"])}))
    bucket = Bucket(str(tmp_path / "bucket"), "run")
    with inject.around("mirror_put", lambda *_, **__: go_on.wait(60)):
        threading.Timer(0.2, bucket.cancel).start()
        with pytest.raises(InterruptedError):
            bucket.upload(folder)
    go_on.set()
