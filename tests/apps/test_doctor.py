"""The doctor names the odd rank out; train looks before its first collective."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from unittest import mock

import inject
import pytest
from world import write_chats

from fsdp_trainer.apps.doctor.machines import HostFacts, environment
from fsdp_trainer.launch import facts

QUICK = ["doctor.measure=false"]
SMALL_MESSAGES = inject.setting("collective_sizes", (2**20,))
QUICKLY = inject.together(SMALL_MESSAGES, inject.setting("measure_seconds", 0.01))


def rank():
    return int(os.environ["RANK"])


def two_nodes():
    """Pretend that the ranks are on two nodes, half of them on each."""
    node, local = divmod(rank(), int(os.environ["WORLD_SIZE"]) // 2)
    return mock.patch.dict(os.environ, {"GROUP_RANK": str(node), "LOCAL_RANK": str(local)})


def an_old_torch(versions, device):
    return versions(device) | {"torch": "2.11.0"}


AN_OLD_TORCH_ON_RANK_2 = inject.together(two_nodes, inject.around("versions", an_old_torch, rank=2))


@inject.fault
def another_command_on_rank_1():
    with two_nodes(), mock.patch.dict(os.environ, {"LR": "2e-5" if rank() == 1 else "1e-5"}):
        yield


@inject.fault
def a_clock_that_is_behind_on_node_1():
    real = time.time
    with (
        two_nodes(),
        mock.patch.object(time, "time", lambda: real() - 90 * int(os.environ["GROUP_RANK"])),
    ):
        yield


@inject.fault
def slow_device_link_and_disk():
    """Rates that are made up: what is measured depends on what else this machine does."""

    def products(_real, _device):
        return 1e6 if rank() == 1 else 1e9

    def there_and_back(real, *args):
        return real(*args) * 0 + (1e6 if 3 in args[1:3] else 1e9)

    def disk(real, *args):
        return tuple(rate * 0 + (1e6 if rank() == 2 else 1e9) for rate in real(*args))

    with (
        two_nodes(),
        inject.around("device_speed", products),
        inject.around("link_speed", there_and_back),
        inject.around("disk_speed", disk),
    ):
        yield


@inject.fault
def folders_of_their_own():
    before = os.getcwd()
    os.chdir(os.environ["PLACE"] + os.environ["RANK"])
    try:
        with two_nodes(), inject.setting("shared_folder_lag_seconds", 0.1):
            yield
    finally:
        os.chdir(before)


@inject.fault
def a_full_disk():
    with mock.patch.object(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 2**40 - 2**20, 2**20)
    ):
        yield


def findings(results):
    """Return the findings by (mark, what)."""
    lines = [json.loads(line) for line in results[0].out.splitlines()]
    assert all(not rank.out for rank in results[1:])
    return {(line["mark"], line["what"]): line for line in lines}


@pytest.fixture
def doctor(world, tmp_path):
    """`doctor("key=value", ranks=4, seam=…)` → findings by (mark, what).

    The run's folder is not there, and not left behind.
    """

    def look(*words, code=0, **options):
        place = (
            []
            if any(w.startswith("run.root") for w in words)
            else [f"run.root={tmp_path / 'runs' / 'deep'}"]
        )
        found_by_doctor = findings(
            world.command(
                "doctor",
                "doctor.format=json",
                "doctor.file_mib=1",
                *place,
                *words,
                code=code,
                **options,
            )
        )
        assert not (tmp_path / "runs").exists()
        return found_by_doctor

    return look


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.grid(1)
def test_a_sound_machine_passes_with_and_without_data_and_model(doctor, inputs, ranks):
    bare = doctor(ranks=ranks, seam=QUICKLY)
    assert not [what for mark, what in bare if mark == "problem"]
    assert "no model" in bare["note", "room"]["text"]
    assert ("note", "not looked at") in bare
    assert ("ok", "float32 products") in bare
    assert ("ok", "read") in bare
    assert (("ok", "all-reduce") in bare) == (("ok", "links in a node") in bare) == (ranks > 1)
    words = [
        f"data.path={inputs['data.path']}",
        "tokenizer.path=demo:bytes",
        "model=tiny",
        "precision=fp32",
    ]
    found_by_doctor = doctor(*words, *QUICK, ranks=ranks)
    assert "1 file" in found_by_doctor["ok", "data.path"]["text"]
    assert "771.7k parameters × 12 B" in found_by_doctor["ok", "room"]["text"]
    assert ("ok", "float32 products") not in found_by_doctor


@pytest.mark.slow
def test_text_is_for_people_and_says_at_the_end_what_was_found(world, tmp_path):
    out = world.command(
        "doctor", f"run.root={tmp_path}", *QUICK, "model=llama3_70b", code=3, seam=a_full_disk()
    )[0].out
    assert [line for line in out.splitlines() if line and line[0] != " "] == [
        "machines", "software", "environment", "network", "storage", "inputs", out.splitlines()[-1]
    ]  # fmt: skip
    assert out.splitlines()[-1].startswith("1 problem, ")
    assert "free for a checkpoint of 7" in out
    assert "without the embedding" in out


@pytest.mark.slow
@pytest.mark.further
def test_whoever_has_seen_enough_sees_no_traceback_of_other_ranks(tmp_path):
    words = [
        sys.executable,
        "-m",
        "fsdp_trainer",
        "doctor",
        "launch.nproc_per_node=2",
        "launch.device=cpu",
        f"run.root={tmp_path}",
        *QUICK,
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait() == 0, said
    assert "Traceback" not in said, said


@pytest.mark.slow
def test_another_version_on_one_rank_is_named(doctor):
    found_by_doctor = doctor(*QUICK, ranks=4, seam=AN_OLD_TORCH_ON_RANK_2, code=3)
    assert "2.11.0 on rank 2 (" in found_by_doctor["problem", "torch"]["text"]
    assert "node 1)" in found_by_doctor["problem", "torch"]["text"]
    assert [what for mark, what in found_by_doctor if mark == "problem"] == ["torch"]


@pytest.mark.slow
def test_another_configuration_on_one_rank_is_named_and_train_refuses_it(doctor, train):
    words = ["optim.lr=${oc.env:LR}", "launch.timeout=60s"]
    found_by_doctor = doctor(*QUICK, *words, ranks=2, seam=another_command_on_rank_1(), code=3)
    assert found_by_doctor["problem", "optim.lr"]["text"].startswith("2e-5 on rank 1 (")
    run = train("run", *words, ranks=2, seam=another_command_on_rank_1(), code=2)
    assert "optim.lr" in run.err
    assert "2e-5 on rank 1 (" in run.err
    assert not run.folder.exists()


@contextlib.contextmanager
def paths_of_its_own():
    with two_nodes(), mock.patch.dict(os.environ, {"MINE": f"{os.environ['PLACE']}{rank()}"}):
        yield


@pytest.mark.slow
def test_nodes_that_have_the_same_under_other_names_train(train, tmp_path):
    before = train("before", "train.steps=1")
    for i in (0, 1):
        (tmp_path / f"node{i}").symlink_to(tmp_path)
    how = {"seam": paths_of_its_own, "env": {"PLACE": str(tmp_path / "node")}, "ranks": 2}
    resume = f"checkpoint.resume=${{oc.env:MINE}}/before/checkpoints/{before.checkpoints[-1]}"
    run = train("run", "train.steps=2", resume, "run.root=${oc.env:MINE}", **how)
    assert run.column("step") == [2]
    assert "note   run.root: " in run.out
    assert "note   checkpoint.resume: " in run.out


@pytest.mark.slow
def test_a_clock_that_is_off_is_named_and_does_not_keep_train_from_training(doctor, train):
    found_by_doctor = doctor(*QUICK, ranks=2, seam=a_clock_that_is_behind_on_node_1())
    assert (
        0
        < float(re.search(r"([\d.]+) s behind", found_by_doctor["warning", "clock"]["text"])[1])
        <= 90
    )
    run = train("run", "train.steps=1", ranks=2, seam=a_clock_that_is_behind_on_node_1())
    assert "note   clock: " in run.out
    assert len(run.metrics) == 1


@pytest.mark.slow
def test_a_slow_device_a_slow_link_and_a_slow_disk_are_named(doctor):
    found_by_doctor = doctor(
        "doctor.slow=0.1",
        ranks=4,
        seam=inject.together(slow_device_link_and_disk(), SMALL_MESSAGES),
    )
    assert found_by_doctor["warning", "slow: float32 products"]["text"].startswith("rank 1 (")
    assert found_by_doctor["warning", "slow: links in a node"]["text"].startswith("rank 2 (")
    assert "↔ rank 3 (" in found_by_doctor["warning", "slow: links in a node"]["text"]
    assert "node 1: " in found_by_doctor["warning", "slow: read"]["text"]
    assert "node 1: " in found_by_doctor["warning", "slow: write and fsync"]["text"]
    assert ("ok", "links between nodes") in found_by_doctor
    assert ("ok", "all-reduce in a node") in found_by_doctor


@pytest.mark.slow
@pytest.mark.further
def test_each_dimension_is_measured_and_tensor_groups_across_nodes_are_named(doctor, train):
    parted = {"sharding.tensor": 4, "model.num_key_value_heads": 4}
    words = [f"{key}={value}" for key, value in parted.items()]
    found_by_doctor = doctor(*words, *QUICK, ranks=4, seam=two_nodes)
    warning = found_by_doctor["warning", "sharding.tensor=4"]
    assert "rank 0-1 (" in warning["text"]
    assert warning["advice"] == "sharding.tensor=2"
    run = train("run", "train.steps=1", *words, ranks=4, seam=two_nodes)
    assert "note   sharding.tensor=4: rank 0-1 (" in run.out

    on_two_nodes = inject.together(two_nodes, QUICKLY)
    found_by_doctor = doctor("sharding.tensor=2", "sharding.context=2", ranks=4, seam=on_two_nodes)
    assert ("warning", "sharding.tensor=2") not in found_by_doctor
    assert found_by_doctor["ok", "layout"]["text"] == "context 2, tensor 2"
    assert {
        ("ok", f"all-gather along {name}") for name in ("context", "tensor")
    } <= found_by_doctor.keys()


@pytest.mark.slow
def test_ranks_that_a_layout_does_not_divide_are_a_problem(doctor):
    found_by_doctor = doctor("sharding.tensor=2", *QUICK, ranks=3, code=3)
    assert found_by_doctor["problem", "sharding.tensor=2"]["advice"] == "Use  sharding.tensor=1"


@pytest.mark.slow
@pytest.mark.further
def test_a_folder_that_is_not_shared_and_other_data_are_named_and_train_refuses_both(
    doctor, train, tmp_path
):
    for i in (0, 1):
        (tmp_path / f"node{i}").mkdir()
        write_chats(tmp_path / f"node{i}" / "chats.jsonl", 40 + i)
    how = {"seam": folders_of_their_own, "env": {"PLACE": str(tmp_path / "node")}, "ranks": 2}
    words = [
        "run.root=runs",
        "data.path=chats.jsonl",
        "tokenizer.path=demo:bytes",
        "launch.timeout=12s",
    ]
    found_by_doctor = doctor(*QUICK, *words, code=3, **how)
    assert found_by_doctor["problem", "not shared"]["text"].startswith("rank 1 (")
    assert "2 on rank 1 (" not in found_by_doctor["problem", "data.path"]["text"]
    assert "1 file" in found_by_doctor["problem", "data.path"]["text"]
    run = train("run", "data.path=chats.jsonl", "data.cache=cache", code=2, **how)
    assert "prepared differently" in run.err
    assert "not shared" not in run.err
    run = train("run", "run.root=runs", "data.path=chats.jsonl", "data.cache=cache", code=2, **how)
    assert "is not shared. rank 1 (" in run.err


@inject.fault
def a_folder_that_is_seen_late():
    """Let NFS say on node 1, for two seconds, that rank 0's claim is not there."""
    began = time.monotonic()

    def late(real, run, group=None):
        return real.__self__([]) if rank() and time.monotonic() < began + 2 else real(run)

    with two_nodes(), inject.around("run_claim", late):
        yield


@pytest.mark.slow
@pytest.mark.further
def test_a_shared_folder_that_another_node_sees_late_is_shared(train):
    assert (
        len(train("run", "train.steps=1", ranks=2, seam=a_folder_that_is_seen_late()).metrics) == 1
    )


@pytest.mark.slow
def test_a_checkpoint_that_would_not_fit_is_told_when_training_begins(train):
    run = train(
        "run",
        "model.hidden_size=128",
        "model.intermediate_size=512",
        "train.steps=1",
        seam=a_full_disk(),
    )
    assert "note   room: 1.0 MiB free for a checkpoint of" in run.out
    assert len(run.metrics) == 1


def test_settings_that_cost_speed_come_with_advice(doctor):
    found_by_doctor = doctor(
        *QUICK, env={"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "nosuch"}, code=3
    )
    assert found_by_doctor["warning", "NCCL_P2P_DISABLE=1"]["advice"] == "unset NCCL_P2P_DISABLE"
    assert "no such interface" in found_by_doctor["problem", "NCCL_SOCKET_IFNAME=nosuch"]["text"]


@pytest.mark.slow
@pytest.mark.further
def test_a_rank_that_does_not_come_and_a_store_that_cannot_be_reached_are_told(world):
    (alone,) = world.command("doctor", *QUICK, "launch.timeout=1s", env={"WORLD_SIZE": "2"}, code=3)
    assert "waited 1 s for all 2 ranks" in alone.err
    (lost,) = world.command(
        "doctor", *QUICK, "launch.timeout=1s", env={"RANK": "1", "WORLD_SIZE": "2"}, code=3
    )
    assert lost.err.startswith("rank 1 (")
    assert "nobody listens on 127.0.0.1" in lost.err


def test_ranks_are_named_in_spans_by_host():
    everyone = [facts.RankFacts(node=i // 8, host=f"gpu{i // 8}") for i in range(64)]
    assert facts.who([3], everyone) == "rank 3 (gpu0)"
    assert facts.who(range(6, 20), everyone) == "rank 6-7 (gpu0), 8-15 (gpu1), 16-19 (gpu2)"
    assert facts.who(range(64), everyone).endswith("24-31 (gpu3) and those of 4 more nodes")


def test_names_and_interfaces_that_keep_hosts_apart_come_with_what_to_set():
    cards = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1"}
    a = HostFacts(node=0, host="a", address="127.0.1.1", interfaces=cards)
    b = HostFacts(node=1, host="b", address="10.0.0.2", interfaces=cards | {"ib0": "10.1.0.2"})
    by_name = {f.what: f for f in environment([a, b])}
    assert by_name["host name"].mark == "problem"
    assert by_name["host name"].advice.startswith("GLOO_SOCKET_IFNAME=eth0 ")
    assert "b has eth0 (10.0.0.1), ib0 (10.1.0.2)" in by_name["several interfaces"].text
    alone = {f.what for f in environment([a])}
    assert not alone & {"host name", "several interfaces"}


def test_dockers_shared_memory_and_too_few_open_files_are_problems():
    node = [facts.RankFacts(node=0, host="a", shm=2**26, files=1024) for _ in range(8)]
    (shm,) = facts.limits(node, "cuda")
    assert (shm.mark, shm.what) == ("problem", "/dev/shm")
    assert "64.0 MiB on rank 0-7 (a)" in shm.text
    assert not facts.limits(node, "cpu")
    (files,) = facts.limits(
        [facts.RankFacts(node=i, host=f"n{i}", shm=2**40, files=1024) for i in range(512)], "cpu"
    )
    assert files.what == "open files"
    assert "ulimit -n" in files.advice


@pytest.mark.slow
def test_the_disk_of_states_is_measured_and_its_rate_is_one_for_plan(doctor):
    listed = doctor("optim.offload=disk", ranks=2, seam=QUICKLY)
    (disk,) = [finding for (_, what), finding in listed.items() if what == "disk of states"]
    assert "by 2 ranks of a node" in disk["text"]
    assert "plan.offload_disk=" in disk["advice"]
