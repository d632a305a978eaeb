"""`plan`: whether it fits, how fast it is and what to change, told before there are data, weights
or GPUs."""

import json
import re
import shlex
import sys
from dataclasses import replace

import inject
import pytest
from folders import REPO
from plans import plan, plan_json
from recipe import planned
from world import split, write_json

from benchmarks.plan_published import compare, published_runs, stored, summary
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.devices import DEVICES, device, named_by_driver, peak_flops
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.errors import UserError
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.messages import BLOCKS, Group, Message, RankGroups
from fsdp_trainer.planning.plan.plan import GIB, make_plan
from fsdp_trainer.planning.plan.plan_inputs import architecture, target, world_sizes
from fsdp_trainer.planning.plan.suggest import suggest, with_adapters

DOES_NOT_FIT = (
    "model=llama3_8b", "batch.seq_len=4096", "batch.micro_rows=2", "plan.memory_gib=60",
    "plan.gpu=h100", "plan.world_size=8",
)  # fmt: skip


def candidate(*words):
    """Return the run of these overrides, as what suggests changes is given it."""
    cfg = compose("plan", split(words), inputs=False)
    world = cfg.plan.world_size
    return Candidate(cfg, architecture(cfg)[0], world, target(cfg, world))


def test_what_is_suggested_fits_when_it_is_typed():
    run = candidate(*DOES_NOT_FIT)
    assert not run.plan().fits
    suggestions = suggest(run)
    assert len(suggestions) >= 4
    assert len({re.sub(r"=\d+", "=", s.override) for s in suggestions}) == len(suggestions), (
        "of one number the largest that fits"
    )
    for one in suggestions:
        # whoever types it changes what is there
        last = {word.split("=")[0]: word for word in [*DOES_NOT_FIT, *one.override.split()]}
        again = planned(*last.values())
        assert again.fits, one.override
        assert again.memory.peak.total == one.peak_bytes <= 60 * GIB, one.override
    altering = [bool(re.search("precision|seq_len|adapter", s.override)) for s in suggestions]
    assert altering == sorted(altering), "what may learn less comes last"
    order = [(alters, s.cost) for alters, s in zip(altering, suggestions, strict=True)]
    assert order == sorted(order)
    (bigger,) = (s.override.split() for s in suggestions if "world_size" in s.override)
    world = int(bigger[0].partition("=")[2])
    fewer = planned(*DOES_NOT_FIT[:-1], *bigger[1:], f"plan.world_size={world - 8}")
    assert not fewer.fits, "the smallest that fits"
    costs = {s.override: (s.cost, s.peak_bytes) for s in suggestions}
    full, selective = (costs[f"activation_checkpoint={mode}"] for mode in ("full", "selective"))
    assert full[1] < selective[1]
    assert 0.2 < full[0] < 0.4
    assert 0.05 < selective[0] < full[0]


def test_adapters_are_suggested_for_a_fine_tuning_that_does_not_fit():
    words = ["+recipe=llama8b_sft", "plan.gpu=l4", "plan.world_size=1"]
    words += ["activation_checkpoint=full"]
    run = candidate(*words)
    options = with_adapters(run, run.plan())
    assert [one.override for one in options] == ["adapter=lora", "adapter=qlora"]
    again = planned(*words, "adapter=qlora")
    assert again.fits
    assert again.memory.peak.total == options[-1].peak_bytes
    smaller = candidate(*words, "adapter=lora plan.memory_gib=14")
    assert with_adapters(smaller, smaller.plan())[-1].override == "adapter.base=nf4"
    run.cfg.model.init_from = None
    named = with_adapters(run, run.plan())
    published = " model.init_from=meta-llama/Llama-3.1-8B"
    assert [one.override for one in named] == [f"{each.override}{published}" for each in options]


LARGE_ROWS = (
    "model=llama3_8b", "batch.seq_len=8192", "batch.rows=32", "plan.gpu=a100_40gb",
    "plan.world_size=8", "plan.memory_gib=20.5",
)  # fmt: skip
EXPERTS = (
    "model=mixtral_8x7b", "plan.gpu=h100", "batch.rows=64", "batch.seq_len=4096",
    "plan.world_size=16",
)  # fmt: skip


@pytest.mark.parametrize(
    "words, suggested", [(LARGE_ROWS, "optim=muon"), (EXPERTS, "sharding.expert=")]
)
def test_a_pretraining_that_does_not_fit_is_told_of_muon_and_of_dividing_its_experts(
    words, suggested
):
    words = [*words, "activation_checkpoint=full", "batch.micro_rows=1"]
    option = next(one for one in suggest(candidate(*words)) if suggested in one.override)
    again = planned(*words, *option.override.split())
    assert again.fits
    assert again.memory.peak.total == pytest.approx(option.peak_bytes)


def test_a_run_that_does_not_fit_names_the_least_memory_that_would_do():
    words = "model=llama3_8b plan.gpu=h100 plan.world_size=1 batch.rows=8"
    report = plan_json(words, "plan.memory_gib=1", code=3)
    assert report["suggestions"] == []
    smallest = report["least_memory"]
    assert smallest["peak_gib"] < report["peak_gib"]
    memory = f"plan.memory_gib={smallest['peak_gib'] + 0.01:.2f}"
    assert planned(words, memory, *smallest["override"].split()).fits


def test_an_efficiency_that_nobody_reaches_is_told():
    words = "model=smollm2_135m plan.gpu=h100 plan.world_size=1"
    for efficiency, is_told in ((0.99, True), (0.5, False)):
        out = " ".join(plan(words, f"plan.efficiency={efficiency}").out.split())
        assert ("published trainings reach 0.2 to 0.65" in out) == is_told


def test_the_world_is_what_launch_would_start(enter):
    enter(inject.around("device_files", lambda *_: []))

    def worlds(*words):
        return world_sizes(compose("plan", ["model=tiny", *words], inputs=False))

    assert worlds("plan.gpu=h100", "launch.nodes=2") == [16]
    assert worlds("launch.nodes=2", "launch.nproc_per_node=4") == [8]
    assert worlds("launch.device=cpu") == [1]
    assert worlds("launch.device=cpu", "plan.gpu=h100") == [8]


def test_what_fits_is_told_what_makes_it_faster():
    words = ["model=smollm2_135m", "plan.gpu=h100", "plan.world_size=8"]
    suggestions = {
        s["override"]: s for s in plan_json(*words, "activation_checkpoint=full")["suggestions"]
    }
    assert {"activation_checkpoint=none", "compile=enabled"} <= {*suggestions}
    assert all(s["cost"] < 0 for s in suggestions.values())
    peak = suggestions["activation_checkpoint=none"]["peak_gib"]
    assert planned(*words).memory.peak.total / GIB == pytest.approx(peak, abs=1e-3)
    alone = "model=llama3_8b model.num_hidden_layers=8 batch.rows=64 batch.micro_rows=1"
    lines = [
        s["override"] for s in plan_json(alone, *words[1:2], "plan.world_size=1")["suggestions"]
    ]
    assert "batch.micro_rows=16" in lines
    assert sum("micro_rows" in line for line in lines) == 1


def test_json_is_one_object_and_the_exit_code_says_whether_it_fits():
    small = "model=smollm2_135m plan.format=json"
    report = json.loads(plan(small, "plan.memory_gib=0.1 plan.world_size=1", code=3).out)
    assert report["fits"] is False
    assert report["step_seconds"] is report["tokens_per_second"] is None
    assert sum(report["by_category"].values()) == pytest.approx(report["peak_gib"], abs=0.01)
    assert report["peak_gib"] > report["memory_gib"]
    fitting = "plan.memory_gib=3 plan.gpu=h100 plan.world_size=[8,1] train.steps=1000"
    several = json.loads(plan(small, fitting).out)
    assert {one["world_size"]: one["fits"] for one in several["worlds"]} == {1: False, 8: True}
    assert several["fits"]
    assert several["world_size"] == several["smallest"] == 8
    low, high = several["step_seconds"]
    assert 0 < low < high
    assert low * 1000 / 86400 == pytest.approx(several["days"][0])
    links = several["bytes_by_link"]
    assert several["bytes_per_step"] == links["shard"] > 0 == links["replicate"]
    assert several["checkpoint_gib"] > 1


def test_several_gpus_are_compared_in_one_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = [*DOES_NOT_FIT[:3], "plan.world_size=[8,16]"]
    out = plan(*words, "plan.gpu=[h100,l40s]").out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert re.search(r"8 × H100 +[\d.]+ of 79.1 +maybe +[\d.]+k", out)
    assert re.search(r"16 × L40S +[\d.]+ of 44.[\d] +no +[\d.]+k", out)
    assert re.search(r"8 × L40S .*activation_checkpoint=selective +[\d.]+ GiB +\+\d+%", out)


def test_a_list_of_gpus_is_a_list_of_plans_in_json():
    words = "model=smollm2_135m plan.world_size=[1,8] plan.format=json"

    def answer(gpus, code=0):
        said = plan(words, f"plan.gpu={gpus}", code=code)
        return said.err if code else json.loads(said.out)

    compared = answer("[h100,l40s]")
    assert [one["gpu"] for one in compared] == ["H100", "L40S"]
    assert compared[1] == answer("l40s")
    assert compared[1:] == answer("[l40s]")
    assert compared == answer('"h100,l40s"')
    assert "plan.gpu=[h100,l4]" in answer("h100,l4", code=2)
    refused = answer("[h101,h100,l40]", code=2)
    assert "Did you mean  plan.gpu=h100 ?" in refused
    assert "Did you mean  plan.gpu=l40s ?" in refused


def test_a_plan_for_people_fits_a_narrow_terminal(monkeypatch):
    def printed(columns, code, *words):
        monkeypatch.setenv("COLUMNS", str(columns))
        return plan(*words, code=code).out

    out = printed(80, 3, *DOES_NOT_FIT)
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "does not fit" in out
    assert "activation_checkpoint=selective " in out
    assert re.search(r"plan.world_size=\d+ +[\d.]+ GiB", out)
    cut = [line for line in printed(40, 3, *DOES_NOT_FIT).splitlines() if "…" in line]
    assert all("━" in line for line in cut), "bars may be cut, but nothing to be read or typed"
    rows = "batch.micro_rows=5 batch.rows=32"
    out = printed(80, 0, "+recipe=qwen3_0_6b_sft", "plan.gpu=l4", "plan.world_size=1", rows)
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) < 50
    assert "\x1b" not in out
    said = " ".join(out.split())
    assert "9% of the rows that ranks compute: batch.rows=35" in said
    assert "may fit: at least " in said
    assert "Qwen/Qwen3-0.6B is not on this disk" in said
    assert "tokens/s" in said


MISTAKES = {
    "plan.gpu=h101": "plan.memory_gib=",
    "plan.gpu=[]": "plan.gpu=[h100,a100_40gb]",
    "model.init_from=nobody/nothing plan.gpu=h100": "Say which size it is",
    "model=tiny sharding=hsdp plan.gpu=h100 plan.world_size=[4,9]": "Use  plan.world_size=8",
    "model=tiny precision=fp8 plan.gpu=a100": "A100 has no float8",
    "model=tiny plan.gpu=h100 plan.world_size=[]": "plan.world_size=[8,16,64]",
    "model=tiny plan.gpu=h100 plan.world_size=[8,x]": "a list of whole numbers",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_told_with_what_to_type(typed):
    assert MISTAKES[typed] in plan(*typed.split(), code=2).err


def test_without_a_gpu_one_must_be_named(enter, monkeypatch):
    enter(inject.around("device_files", lambda *_: []))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "torch", None)  # takes longer to import than to be told so
        without.delitem(sys.modules, "fsdp_trainer.planning.plan.plan_inputs")
        assert "h100 " in plan("model=tiny", code=2).err
    ranks = "model.vocab_size=100 launch.device=cpu launch.nproc_per_node=2"
    assert "2 ranks on this machine" in plan("model=tiny", ranks).out


def test_the_architecture_is_read_where_it_is_and_otherwise_what_the_hub_calls_so(tmp_path):
    cfg = compose("plan", ["model.init_from=Qwen/Qwen3-0.6B"], inputs=False)
    config, assumed = architecture(cfg)
    assert config.parameters() == pytest.approx(0.596e9, rel=1e-2)
    assert len(assumed) == 2
    folder = tmp_path / "hf"
    folder.mkdir()
    write_json(folder / "config.json", replace(config, num_hidden_layers=3).to_hf("bfloat16"))
    read, assumed = architecture(compose("plan", [f"model.init_from={folder}"], inputs=False))
    assert (read.num_hidden_layers, read.vocab_size, assumed) == (3, 151_936, [])


REHEARSED = (
    "titan-8b-8-eager", "ao-h100-bf16", "ao-mi300x-bf16", "prime-4b-16k-b200", "olmo-1b-bf16",
)  # fmt: skip
"""Published runs of which all but the last one's memory is known. Those of ao share a rehearsal."""
PLAIN = "trainy-64", "ibm-70b-a100-compile", "foundry-7b-4096-8xa100"


def test_published_runs_are_as_fast_as_planned_and_fit():
    """`python -m benchmarks.plan_published --check` rehearses all of them."""
    runs = {run["name"]: run for run in published_runs()}
    plans = {row.run["name"]: row for row in stored()}
    rows = [compare(runs[name], rehearse=False) for name in (*REHEARSED, *PLAIN)]
    for row in rows:
        plan = plans[row.run["name"]]
        say = "run  python -m benchmarks.plan_published --plain --write"
        assert (row.slow, row.fast) == pytest.approx((plan.slow, plan.fast), rel=0.005), say
        assert row.gpu == plan.gpu
    rehearsed = [compare(runs[name]) for name in REHEARSED]
    for row in (*rehearsed, *rows[len(REHEARSED) :]):
        assert row.inside, row
        assert row.fits_as_published, row
        assert row.fast < 1.41 * row.slow, row
    figures = summary(rehearsed)
    assert (figures["memories"], figures["memories within 8%"]) == (4, 4)


def test_the_table_of_activation_checkpointing_is_planned():
    page = (REPO / "docs/sharding.md").read_text()
    (command,) = re.findall(r"(?m)^fsdp-trainer plan (model=llama3_8b .*) \S+$", page)
    rows = re.findall(r"(?m)^\| `(.*)` \|.*\| ([\d.]+) GiB \| × ([\d.]+) \|$", page)
    times = []
    for mode, gib, times_none in rows:
        plan = planned(command, *shlex.split(f"activation_checkpoint={mode}"))
        assert plan.memory.peak.bytes["activations"] / 2**30 == pytest.approx(float(gib), abs=0.06)
        times.append(plan.slow.step)
        assert times[-1] / times[0] == pytest.approx(float(times_none), abs=0.006)
    assert len(times) == 5


def seconds(*words):
    """The arithmetic of a step, the slow end."""
    base = "model=llama3_8b plan.gpu=h100 plan.world_size=8 batch.rows=64"
    last = {word.split("=")[0]: word for word in split([base, *words])}
    return planned(*last.values()).slow.compute


def test_speed_depends_on_what_bounds_it():
    usual, compiled = seconds(), seconds("compile=enabled")
    assert seconds("precision=fp8") == usual, "casts are not compiled"
    assert seconds("compile=enabled precision=fp8") < 0.9 * compiled < compiled < usual
    assert seconds("batch.micro_rows=8") < 0.97 * usual, "products of more tokens are faster"
    assert seconds("plan.gpu=h200") < usual, "its memory is faster"
    assert seconds("plan.efficiency=0.4") == seconds("plan.efficiency=0.4 plan.gpu=h200")
    long = "model=llama3_8b batch.seq_len=8192 plan.gpu=h100 compile=enabled"
    flash, fa3 = seconds(long), seconds(long, "model.attention_kernel=fa3")
    assert fa3 < 0.95 * flash


def test_an_expert_computes_slower_than_a_dense_layer_of_as_many_operations():
    words = ("model=qwen3_30b_a3b", "plan.gpu=h100", "batch.rows=8", "compile=enabled")
    one, eight = (planned(*words, f"sharding.expert={ranks} plan.world_size=8") for ranks in (1, 8))
    assert eight.slow.compute < one.slow.compute, "eight ranks' rows are in an expert's products"
    dense = planned("model=qwen3_4b", *words[1:], "plan.world_size=8")
    widths = [plan.slow.compute / plan.fast.compute for plan in (one, dense)]
    assert widths == pytest.approx([1.4**2, 1.18**2])


def test_nvlink_connects_the_nodes_of_a_rack():
    words = "model=qwen3_30b_a3b plan.world_size=16 batch.rows=16 sharding.expert=16"
    slow, rack = (planned(words, f"plan.gpu={gpu}") for gpu in ("b200", "gb200"))
    assert rack.wire["expert"].across == 0 < slow.wire["expert"].across
    assert rack.slow.exposed < slow.slow.exposed
    assert rack.host_limit_gib == 4 * 224


def test_weights_that_stay_gathered_are_copied_once_a_micro_batch():
    again, once = seconds(), seconds("sharding.reshard_after_forward=false")
    copied = 8 * 20 / 3 * 8.03e9 / (3350e9 * 0.8)  # bytes of eight micro-batches over the rate
    assert again - once == pytest.approx(1.18 * copied, rel=0.01)


TYPED = {
    "H100-SXM5-80GB": "H100", "A100-80GB": "A100", "NVIDIA A100-SXM4-40GB": "A100-SXM4-40GB",
    "a100-40": "A100-SXM4-40GB", "3090": "RTX 3090", "RTX 6000 Ada Generation": "RTX 6000 Ada",
    "rtx6000ada": "RTX 6000 Ada", "gb200": "GB200", "mi325": "MI325X",
}  # fmt: skip


def test_a_gpu_is_found_by_the_name_that_is_typed_but_not_by_one_that_is_only_alike():
    assert {typed: device(typed).name for typed in TYPED} == TYPED
    for typed in ("a1000", "l40", "6000", "h101"):
        with pytest.raises(UserError):
            device(typed)


def test_every_device_of_the_table_has_times():
    for known in DEVICES.values():
        assert min(known.flops, known.memory_rate, known.link, known.network) > 0, known.name
        assert named_by_driver(f"NVIDIA {known.name} 80GB").name == known.name


def test_a_device_that_the_table_does_not_have_is_timed_by_its_tflops():
    words = "model=smollm2_135m plan.memory_gib=48 plan.world_size=1"
    assert planned(words).step_seconds is None
    plan = plan_json(words, "plan.tflops=150")
    assert plan["step_seconds"][0] > 0
    assert any("its memory bandwidth is assumed to be 500 GB/s" in line for line in plan["assumed"])
    slower = planned("plan.tflops=75", words, "plan.gpu=h100").slow.compute
    assert slower > planned(words, "plan.gpu=h100").slow.compute


def test_empty_rows_and_memory_of_the_host_are_told():
    words = [
        "model=llama3_70b", "plan.gpu=a100_40gb", "sharding.cpu_offload=true",
        "activation_checkpoint=full", "batch.rows=32", "plan.world_size=[8,1024]",
    ]  # fmt: skip
    one, several = plan_json(*words)["worlds"]
    assert (one["empty_rows_share"], several["empty_rows_share"]) == (0, pytest.approx(0.9688))
    assert one["host_gib_per_node"] == pytest.approx(8 * one["host_gib"], abs=0.01)
    assert one["host_gib_per_node"] > 1024
    assert not one["host_fits"]
    assert several["host_fits"]
    assert one["tokens_per_second_per_gpu"] == pytest.approx(one["tokens_per_second"] / 8)
    assert [*one["moments"]] == ["forward", "head and loss", "backward", "update"]
    assert one["moment"] in one["moments"]
    out = " ".join(plan(*words).out.split())
    assert "empty" in out
    assert "97%" in out
    assert "1,051 GiB a node, pinned: more than 1,024 GiB" in out


def test_blocks_gathered_inside_nodes_do_not_cross_them():
    cfg = compose("plan", ["sharding=hsdp", "sharding.replicas=2"], inputs=False)

    def groups(world):
        every = RankGroups.of(Layout(cfg.sharding, world, cfg.batch), 8)
        return every.shard, every.replicate

    assert groups(16) == (Group(8, 8), Group(2, 1))
    assert Group(8, 8).across == 0
    assert groups(8) == (Group(4, 4), Group(2, 2))
    # 2 nodes: each rank sends 15/16 of a message; half of it leaves the node over 8 network cards
    sharded = Group(16, 8)
    assert (sharded.sent, sharded.across) == (15 / 16, 1 / 16)
    for group, seconds in ((sharded, 15 / 16 / 450), (Group(2, 1), 1 / 2 / 50)):
        message = Message("shard", BLOCKS, 1e9 * group.sent, 1e9 * group.across)
        assert message.seconds(device("h100"), 1.0) == pytest.approx(seconds)


def test_devices_are_known_by_the_drivers_names():
    names = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GH200 480GB": 989e12,
    }
    assert {name: peak_flops(name) for name in names} == names
    assert peak_flops("Some GPU") is None
    smaller, larger = (named_by_driver(f"NVIDIA A100-SXM4-{size}GB") for size in (40, 80))
    assert smaller.memory_gib < 40 < larger.memory_gib


def test_a_plan_counts_what_a_reference_computes():
    ours = "model=qwen3_0_6b plan.gpu=h100 plan.world_size=1"
    words = ("objective=simpo", "objective=dpo")
    plain, base = (planned(ours, "adapter=lora", one).slow for one in words)
    assert base.compute == plain.compute
    assert base.step == pytest.approx(plain.step + base.forwards)
    assert base.compute / 4 < base.forwards < base.compute / 2
    stored = planned(ours, "objective=dpo").slow
    assert stored.forwards == 0 < stored.reading
    said = " ".join(plan(ours, "objective=dpo").out.split())
    assert "reads all rows of an epoch once, before step 1" in said


def test_offloaded_activations_and_messages_share_a_link_without_nvlink():
    words = "model=llama3_8b plan.gpu=l40s plan.world_size=8 batch.rows=32"
    moved = "batch.micro_rows=4 activation_checkpoint=selective"
    run = candidate(words, moved, "activation_checkpoint.offload=true")
    with_nvlink = run.device._replace(link=2 * run.device.host_link)
    shared, own = (
        make_plan(run.cfg, run.config, 8, one).slow.exposed for one in (run.device, with_nvlink)
    )
    assert shared > 1.2 * own


PRETRAINING = "+recipe=llama8b_pretrain plan.gpu=h100"


def test_newton_schulz_takes_its_share_of_a_step():
    """docs/optimizers.md: 2.8% of the arithmetic of Llama 8B with half a million tokens."""
    words = (PRETRAINING, "plan.world_size=8", "batch.rows=64", "activation_checkpoint=none")
    adamw, muon = (planned(*words, f"optim={name}").fast for name in ("adamw", "muon"))
    share = (muon.optimizer - adamw.optimizer) / muon.compute
    assert 0.01 < share < 0.03  # products of wide matrices are faster than the rest
    assert muon.compute == adamw.compute


def test_owners_of_other_nodes_are_sent_to_over_the_network():
    one, eight = (
        planned(PRETRAINING, f"optim=muon plan.world_size={ranks}").wire["owners"]
        for ranks in (8, 64)
    )
    assert one.across == 0
    assert eight.across == pytest.approx((eight.gathered + eight.reduced) * 56 / 63)


def test_the_plan_tells_the_load_of_the_busiest_rank():
    words = (
        "model=qwen3_30b_a3b plan.gpu=h100 batch.rows=64 batch.seq_len=4096 plan.world_size=8"
        " activation_checkpoint=full sharding.expert=8"
    )
    report = plan_json(words, "batch.micro_rows=4")
    assert report["uneven"]["expert_load"] == 1.5
    assert report["uneven"]["peak_gib"] > report["peak_gib"]
    assert report["uneven"]["step_seconds"][0] > 1.1 * report["step_seconds"][0]
    out = " ".join(plan(words, "batch.micro_rows=8 plan.expert_load=3").out.split())
    assert "3 × the even rows at one rank's experts" in out
    assert "it does not fit then" in out
