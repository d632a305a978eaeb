"""The doctor names the odd rank out; train looks before its first collective."""

import contextlib
import os
import re
import shutil
import time
from types import SimpleNamespace
from unittest import mock

import inject
import pytest
from world import lines_of, write_chats

from fsdp_trainer.apps.doctor.machines import HostFacts, environment
from fsdp_trainer.launch import facts
from fsdp_trainer.launch.facts import room

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


AN_OLD_TORCH_ON_RANK_2 = inject.around("versions", an_old_torch, rank=2)


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


def a_full_disk():
    usage = shutil._ntuple_diskusage(2**40, 2**40 - 2**20, 2**20)
    return mock.patch.object(shutil, "disk_usage", lambda _: usage)


def no_reader_of_rank_0():
    closed = mock.patch("builtins.print", side_effect=BrokenPipeError)
    return contextlib.nullcontext() if rank() else closed


@pytest.fixture
def doctor(world, tmp_path):
    """`doctor("key=value", ranks=4, seam=…)` → findings by (mark, what).

    The run's folder is not there, and not left behind.
    """

    def look(*words, **options):
        if not any(word.startswith("run.root") for word in words):
            words = (*words, f"run.root={tmp_path / 'runs' / 'deep'}")
        usual = "doctor.format=json doctor.file_mib=1"
        first, *others = world.command("doctor", usual, *words, **options)
        assert not any(other.out for other in others)
        assert not (tmp_path / "runs").exists()
        lines = lines_of(first.out)
        return {(line["mark"], line["what"]): line for line in lines}

    return look


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sound_machine_passes_with_and_without_data_and_model(doctor, inputs, ranks):
    bare = doctor("optim.offload=disk", ranks=ranks, seam=QUICKLY)
    assert not [what for mark, what in bare if mark == "problem"]
    assert "no model" in bare["note", "room"]["text"]
    assert {("note", "not looked at"), ("ok", "float32 products"), ("ok", "read")} <= bare.keys()
    assert (("ok", "all-reduce") in bare) == (("ok", "links in a node") in bare) == (ranks > 1)
    (disk,) = [finding for (_, what), finding in bare.items() if what == "disk of states"]
    assert ("by 2 ranks of a node" in disk["text"]) == (ranks > 1)
    assert "plan.offload_disk=" in disk["advice"]
    words = "tokenizer.path=demo:bytes model=tiny precision=fp32"
    outcome = doctor(f"data.path={inputs['data.path']}", words, *QUICK, ranks=ranks)
    assert "1 file" in outcome["ok", "data.path"]["text"]
    assert "771.7k parameters × 12 B" in outcome["ok", "room"]["text"]
    assert ("ok", "float32 products") not in outcome


def test_text_is_for_people_and_says_at_the_end_what_was_found(world, tmp_path):
    words = ["doctor", f"run.root={tmp_path}", *QUICK, "model=llama3_70b"]
    out = world.command(*words, code=3, seam=a_full_disk)[0].out
    *heads, last = [line for line in out.splitlines() if line and line[0] != " "]
    assert heads == ["machines", "software", "environment", "network", "storage", "inputs"]
    assert last.startswith("1 problem, ")
    assert "free for a checkpoint of 7" in out
    assert "without the embedding" in out


def test_whoever_has_seen_enough_sees_no_traceback_of_other_ranks(world, tmp_path):
    words = ["doctor", f"run.root={tmp_path}", *QUICK]
    for result in world.command(*words, ranks=2, seam=no_reader_of_rank_0):
        assert (result.out, result.err) == ("", "")


OTHER_RATE = "optim.lr=${oc.env:LR} launch.timeout=60s"


def test_what_is_other_on_one_rank_or_node_is_named(doctor):
    other = AN_OLD_TORCH_ON_RANK_2, another_command_on_rank_1, a_clock_that_is_behind_on_node_1
    outcome = doctor(*QUICK, OTHER_RATE, ranks=4, seam=inject.together(*other), code=3)
    assert {what for mark, what in outcome if mark == "problem"} == {"torch", "optim.lr"}
    assert re.search(r"2\.11\.0 on rank 2 \(.*node 1\)", outcome["problem", "torch"]["text"])
    assert outcome["problem", "optim.lr"]["text"].startswith("2e-5 on rank 1 (")
    behind = re.search(r"([\d.]+) s behind", outcome["warning", "clock"]["text"])
    assert 0 < float(behind[1]) <= 90


def test_train_refuses_another_configuration_on_one_rank(train):
    run = train("run", OTHER_RATE, ranks=2, seam=another_command_on_rank_1(), code=2)
    assert "optim.lr" in run.err
    assert "2e-5 on rank 1 (" in run.err
    assert not run.folder.exists()


def test_a_clock_that_is_off_and_too_little_room_do_not_keep_train_from_training(train):
    words = "model.hidden_size=128 model.intermediate_size=512 train.steps=1"
    faults = inject.together(a_clock_that_is_behind_on_node_1, a_full_disk)
    run = train("run", words, ranks=2, seam=faults)
    assert "note   clock: " in run.out
    assert "note   room: 1.0 MiB free for a checkpoint of" in run.out
    assert run["step"] == [1]


def test_there_must_be_room_for_the_checkpoints_and_the_one_that_is_written(tmp_path):
    with mock.patch("shutil.disk_usage", lambda _: SimpleNamespace(free=3 * 2**30)):
        [enough], [few] = (room(tmp_path, 2**30, keep) for keep in (2, 3))
    assert (enough.mark, few.mark) == ("ok", "warning")
    assert "4 more must fit" in few.text


@contextlib.contextmanager
def paths_of_its_own():
    with two_nodes(), mock.patch.dict(os.environ, {"MINE": f"{os.environ['PLACE']}{rank()}"}):
        yield


def test_nodes_that_have_the_same_under_other_names_train(train, tmp_path):
    before = train("before", "train.steps=1")
    for i in (0, 1):
        (tmp_path / f"node{i}").symlink_to(tmp_path)
    how = {"seam": paths_of_its_own, "env": {"PLACE": f"{tmp_path}/node"}, "ranks": 2}
    resume = f"checkpoint.resume=${{oc.env:MINE}}/before/checkpoints/{before.checkpoints[-1]}"
    run = train("run", "train.steps=2", resume, "run.root=${oc.env:MINE}", **how)
    assert run["step"] == [2]
    assert "note   run.root: " in run.out
    assert "note   checkpoint.resume: " in run.out


def test_a_slow_device_a_slow_link_and_a_slow_disk_are_named(doctor):
    slow = inject.together(slow_device_link_and_disk(), QUICKLY)
    outcome = doctor("doctor.slow=0.1", ranks=4, seam=slow)
    for what, said in {
        "float32 products": r"rank 1 \(",
        "links in a node": r"rank 2 \(.*↔ rank 3 \(",
        "read": ".*node 1: ",
        "write and fsync": ".*node 1: ",
    }.items():
        assert re.match(said, outcome["warning", f"slow: {what}"]["text"], re.DOTALL)
    assert ("ok", "links between nodes") in outcome
    assert ("ok", "all-reduce in a node") in outcome


def test_each_dimension_is_measured_and_tensor_groups_across_nodes_are_named(doctor, train):
    words = "sharding.tensor=4 model.num_key_value_heads=4"
    outcome = doctor(words, *QUICK, ranks=4, seam=two_nodes)
    warning = outcome["warning", "sharding.tensor=4"]
    assert "rank 0-1 (" in warning["text"]
    assert warning["advice"] == "sharding.tensor=2"
    run = train("run", "train.steps=1", words, ranks=4, seam=two_nodes)
    assert "note   sharding.tensor=4: rank 0-1 (" in run.out

    on_two_nodes = inject.together(two_nodes, QUICKLY)
    outcome = doctor("sharding.tensor=2 sharding.context=2", ranks=4, seam=on_two_nodes)
    assert ("warning", "sharding.tensor=2") not in outcome
    assert outcome["ok", "layout"]["text"] == "context 2, tensor 2"
    for name in ("context", "tensor"):
        assert ("ok", f"all-gather along {name}") in outcome


def test_ranks_that_a_layout_does_not_divide_are_a_problem(doctor):
    outcome = doctor("sharding.tensor=2", *QUICK, ranks=3, code=3)
    assert outcome["problem", "sharding.tensor=2"]["advice"] == "Use  sharding.tensor=1"


def test_a_folder_that_is_not_shared_and_other_data_are_named_and_train_refuses_both(
    doctor, train, tmp_path
):
    for i in (0, 1):
        (tmp_path / f"node{i}").mkdir()
        write_chats(tmp_path / f"node{i}" / "chats.jsonl", 40 + i)
    how = {"seam": folders_of_their_own, "env": {"PLACE": f"{tmp_path}/node"}, "ranks": 2}
    words = ["tokenizer.path=demo:bytes", "data.path=chats.jsonl", "launch.timeout=12s"]
    outcome = doctor(*QUICK, *words, "run.root=runs", code=3, **how)
    assert outcome["problem", "not shared"]["text"].startswith("rank 1 (")
    assert "2 on rank 1 (" not in outcome["problem", "data.path"]["text"]
    assert "1 file" in outcome["problem", "data.path"]["text"]
    words = ["data.path=chats.jsonl", "data.cache=cache"]
    run = train("run", *words, code=2, **how)
    assert "prepared differently" in run.err
    assert "not shared" not in run.err
    run = train("run", *words, "run.root=runs", code=2, **how)
    assert "is not shared. rank 1 (" in run.err


@inject.fault
def a_folder_that_is_seen_late():
    """Let NFS say on node 1, for two seconds, that rank 0's claim is not there."""
    began = time.monotonic()

    def late(real, run, group=None):
        return real.__self__([]) if rank() and time.monotonic() < began + 2 else real(run)

    with two_nodes(), inject.around("run_claim", late):
        yield


def test_a_shared_folder_that_another_node_sees_late_is_shared(train):
    run = train("run", "train.steps=1", ranks=2, seam=a_folder_that_is_seen_late())
    assert run["step"] == [1]


def test_settings_that_cost_speed_come_with_advice(doctor):
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "nosuch"}
    outcome = doctor(*QUICK, env=env, code=3)
    assert outcome["warning", "NCCL_P2P_DISABLE=1"]["advice"] == "unset NCCL_P2P_DISABLE"
    assert "no such interface" in outcome["problem", "NCCL_SOCKET_IFNAME=nosuch"]["text"]


def test_a_rank_that_does_not_come_and_a_store_that_cannot_be_reached_are_told(world):
    words, env = ["doctor", *QUICK, "launch.timeout=1s"], {"WORLD_SIZE": "2"}
    (alone,) = world.command(*words, env=env, code=3)
    assert "waited 1 s for all 2 ranks" in alone.err
    (lost,) = world.command(*words, env={**env, "RANK": "1"}, code=3)
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
    all_facts = [facts.RankFacts(node=i, host=f"n{i}", shm=2**40, files=1024) for i in range(512)]
    (files,) = facts.limits(all_facts, "cpu")
    assert files.what == "open files"
    assert "ulimit -n" in files.advice
