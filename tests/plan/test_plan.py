"""`plan`: whether it fits, how fast it is and what to change, told before there are data, weights
or GPUs."""

import json
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import inject
import pytest
from recipe import planned
from world import SMALL

from benchmarks.plan_published import compare, goals_missed, published_runs, summary
from fsdp_trainer.cli import main
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.devices import DEVICES, device, named_by_driver, peak_flops
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.errors import UserError
from fsdp_trainer.plan.changes import Candidate
from fsdp_trainer.plan.plan import GIB, make_plan
from fsdp_trainer.plan.plan_inputs import architecture, target, world_sizes
from fsdp_trainer.plan.suggest import suggest
from fsdp_trainer.plan.wire import Group, RankGroups

DOES_NOT_FIT = (
    "model=llama3_8b",
    "batch.seq_len=4096",
    "batch.micro_rows=2",
    "plan.memory_gib=60",
    "plan.gpu=h100",
    "plan.world_size=8",
)


@contextmanager
def counting():
    """Writes what rank 0's collectives send in the whole run: gathers and reduce-scatters, and
    all-reduces of more than a few numbers."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    sent = {"shard": 0.0, "replicate": 0.0}

    class Wire(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name
            if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
                whole, part = sorted((args[0].nbytes, args[1].nbytes), reverse=True)
                sent["shard"] += whole - part
            elif name == "c10d::alltoall_base_":
                ranks = torch.distributed.ProcessGroup.unbox(args[2]).size()
                # with sizes for each rank it is all for another one
                share = 1.0 if args[4] else (ranks - 1) / ranks
                sent["shard"] += share * args[1].nbytes
            elif name == "c10d::allreduce_" and args[0][0].numel() > 256:
                ranks = torch.distributed.ProcessGroup.unbox(args[1]).size()
                sent["replicate"] += 2 * (ranks - 1) / ranks * args[0][0].nbytes
            return func(*args, **(kwargs or {}))

    with Wire():
        yield
    if os.environ["RANK"] == "0":
        Path(os.environ["SENT"]).write_text(json.dumps(sent))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            2,
            [
                "sharding.reshard_after_forward=false",
                "sharding.accumulate=unsharded",
                "batch.micro_rows=1",
                "model.tie_word_embeddings=false",
            ],
        ),
        pytest.param(
            4,
            ["sharding=hsdp", "batch.micro_rows=1", "sharding.blocks_per_unit=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ["sharding=ddp", "batch.micro_rows=1"], marks=pytest.mark.slow),
        pytest.param(
            4,
            ["sharding.reshard_after_forward=2", "batch.micro_rows=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            ["sharding.quantize=both", "model.hidden_size=256", "batch.micro_rows=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            ["adapter=lora", "adapter.also=[norms]", "batch.micro_rows=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ["adapter=qlora", "batch.micro_rows=1"], marks=pytest.mark.slow),
        pytest.param(
            3,
            ["adapter=dora", "adapter.targets=[model.layers.1.*]", "batch.micro_rows=1"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else None,
)
@pytest.mark.grid(1)
def test_the_bytes_on_the_wire_are_those_that_a_real_run_sends(train, tmp_path, ranks, words):
    words = ["precision.param_dtype=bfloat16", "model.vocab_multiple=4", "train.steps=2", *words]
    train("run", *words, ranks=ranks, seam=counting, env={"SENT": str(tmp_path / "sent")})
    base = [word for word in SMALL if word.split("=")[0] not in [w.split("=")[0] for w in words]]
    result = planned(
        *base, "tokenizer.path=demo:bytes", "plan.gpu=h100", f"plan.world_size={ranks}", *words
    ).wire
    sent = json.loads((tmp_path / "sent").read_text())
    both = {name: 2 * (way.gathered + way.reduced) for name, way in result.items()}
    both["shard"] += both.pop("copy", 0.0)
    assert sent == {name: pytest.approx(size, rel=2e-3) for name, size in both.items()}
    assert sum(sent.values()) > 0


@pytest.mark.slow
@pytest.mark.further
def test_the_bytes_that_a_tensor_group_exchanges_are_those_of_a_real_run(train, tmp_path):
    words = ["sharding.tensor=2", "train.steps=2", "batch.micro_rows=2", "model.vocab_multiple=4"]
    train("run", *words, ranks=2, seam=counting, env={"SENT": str(tmp_path / "sent")})
    base = [word for word in SMALL if word.split("=")[0] not in [w.split("=")[0] for w in words]]
    result = planned(
        *base, "tokenizer.path=demo:bytes", "plan.gpu=h100", "plan.world_size=2", *words
    )
    sent = json.loads((tmp_path / "sent").read_text())
    tensor = result.wire["tensor"]
    # what the head exchanges of each token is not counted
    assert sent["shard"] == pytest.approx(2 * (tensor.gathered + tensor.reduced), rel=0.03)
    assert tensor.across == 0


@pytest.mark.slow
def test_a_tensor_group_splits_states_and_activations():
    words = ("model=llama3_70b", "plan.gpu=h100", "batch.seq_len=8192", "batch.rows=64")
    alone = planned(*words, "plan.world_size=64")
    shared = planned(*words, "plan.world_size=64", "sharding.tensor=8")
    for name, lower, upper in (("parameters", 0.99, 1.02), ("activations", 0.12, 0.2)):
        ratio = shared.memory.peak.bytes[name] / alone.memory.peak.bytes[name]
        assert lower < ratio < upper, name
    assert shared.micro_batches == 8 * alone.micro_batches
    assert shared.wire["shard"].ranks == shared.wire["tensor"].ranks == 8
    assert shared.wire["tensor"].across == 0 < shared.wire["shard"].across


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "gathered", "ring"])
@pytest.mark.grid(1)
def test_the_bytes_that_ranks_exchange_which_split_rows_are_those_of_a_real_run(
    train, tmp_path, method
):
    words = ["sharding.context=2", f"sharding.context_method={method}", "train.steps=2",
             "batch.micro_rows=2", "model.vocab_multiple=4"]  # fmt: skip
    train("run", *words, ranks=2, seam=counting, env={"SENT": str(tmp_path / "sent")})
    base = [word for word in SMALL if word.split("=")[0] not in [w.split("=")[0] for w in words]]
    result = planned(
        *base, "tokenizer.path=demo:bytes", "plan.gpu=h100", "plan.world_size=2", *words
    )
    sent = json.loads((tmp_path / "sent").read_text())
    expected = sum(wire.gathered + wire.reduced for wire in result.wire.values())
    assert result.wire["context"].gathered > 0
    assert sent["shard"] == pytest.approx(2 * expected, rel=0.03)


@pytest.mark.slow
def test_ranks_that_split_rows_split_activations_and_states():
    words = (
        "model=llama3_8b", "plan.gpu=h100", "batch.seq_len=65536", "batch.rows=8",
        "model.max_position_embeddings=65536", "batch.micro_rows=1", "plan.world_size=8",
    )  # fmt: skip
    alone = planned(*words)
    shared = planned(*words, "sharding.context=8")
    gathered = planned(*words, "sharding.context=8", "sharding.context_method=gathered")
    ratio = shared.memory.peak.bytes["activations"] / alone.memory.peak.bytes["activations"]
    assert 0.12 < ratio < 0.14
    assert shared.memory.peak.bytes["parameters"] == alone.memory.peak.bytes["parameters"]
    assert gathered.memory.peak.bytes["activations"] > shared.memory.peak.bytes["activations"]
    assert shared.micro_batches == 8 * alone.micro_batches
    assert shared.wire["shard"].ranks == shared.wire["context"].ranks == 8


@pytest.mark.slow
def test_what_is_suggested_fits_when_it_is_typed():
    cfg = compose("plan", list(DOES_NOT_FIT), inputs=False)
    config, gpu = architecture(cfg)[0], target(cfg, 8)
    assert not make_plan(cfg, config, 8, gpu).fits
    suggestions = suggest(Candidate(cfg, config, 8, gpu))
    assert len(suggestions) >= 4
    assert len({re.sub(r"=\d+", "=", s.override) for s in suggestions}) == len(suggestions), (
        "of one number the largest that fits"
    )
    for one in suggestions:
        words = [*DOES_NOT_FIT, *one.override.split()]
        last = {
            word.split("=")[0]: word for word in words
        }  # whoever types it changes what is there
        again = planned(*last.values())
        assert again.fits, one.override
        assert again.memory.peak.total == one.peak_bytes, one.override
        assert one.peak_bytes <= 60 * GIB, one.override
    altering = [bool(re.search("precision|seq_len", s.override)) for s in suggestions]
    assert altering == sorted(altering), "what may learn less comes last"
    order = [(alters, s.cost) for alters, s in zip(altering, suggestions, strict=True)]
    assert order == sorted(order)
    (bigger,) = (s for s in suggestions if "world_size" in s.override)
    world = int(re.search(r"world_size=(\d+)", bigger.override)[1])
    assert not planned(
        *DOES_NOT_FIT[:-1], *bigger.override.split()[1:], f"plan.world_size={world - 8}"
    ).fits, "the smallest that fits"
    full = next(s for s in suggestions if s.override == "activation_checkpoint=full")
    selective = next(s for s in suggestions if s.override == "activation_checkpoint=selective")
    assert full.peak_bytes < selective.peak_bytes
    assert 0.2 < full.cost < 0.4
    assert 0.05 < selective.cost < full.cost


@pytest.mark.slow
@pytest.mark.further
def test_adapters_are_suggested_last_for_a_fine_tuning_that_does_not_fit():
    words = ["+recipe=llama8b_sft", "plan.gpu=l4", "plan.world_size=1"]
    words += ["activation_checkpoint=full"]
    cfg = compose("plan", words, inputs=False)
    config, gpu = architecture(cfg)[0], target(cfg, 1)
    suggestions = suggest(Candidate(cfg, config, 1, gpu))
    assert [s.override for s in suggestions][-2:] == ["adapter=lora", "adapter=qlora"]
    for one in suggestions[-2:]:
        again = planned(*words, one.override)
        assert again.fits
        assert again.memory.peak.total == one.peak_bytes
    smaller = compose("plan", [*words, "adapter=lora", "plan.memory_gib=14"], inputs=False)
    bits = [s.override for s in suggest(Candidate(smaller, config, 1, target(smaller, 1)))]
    assert bits[-1] == "adapter.base=nf4"
    cfg.model.init_from = None
    assert not [s for s in suggest(Candidate(cfg, config, 1, gpu)) if "adapter" in s.override], (
        "random weights are trained whole"
    )


@pytest.mark.slow
@pytest.mark.further
def test_a_run_that_does_not_fit_names_the_least_memory_that_would_do(capsys):
    words = ["model=llama3_8b", "plan.gpu=h100", "plan.world_size=1", "batch.rows=8"]
    assert main(["plan", *words, "plan.memory_gib=1", "plan.format=json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["suggestions"] == []
    smallest = report["least_memory"]
    assert smallest["peak_gib"] < report["peak_gib"]
    memory = f"plan.memory_gib={smallest['peak_gib'] + 0.01:.2f}"
    assert main(["plan", *words, memory, *smallest["override"].split()]) == 0
    assert "least memory" not in capsys.readouterr().out
    assert main(["plan", *words[:1], *words[2:], "plan.memory_gib=1"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert f"would do here: {smallest['peak_gib']:.1f} GiB with" in out
    assert "compared as on" not in out, "nothing is compared"


@pytest.mark.slow
def test_an_efficiency_that_nobody_reaches_is_told(capsys):
    words = ["plan", "model=smollm2_135m", "plan.gpu=h100", "plan.world_size=1"]
    assert main([*words, "plan.efficiency=0.99"]) == 0
    assert "published trainings reach 0.2 to 0.65" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "plan.efficiency=0.5"]) == 0
    assert "published trainings" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.further
def test_formats_of_moments_are_suggested_before_those_that_change_what_is_computed():
    cfg = compose("plan", ["+recipe=llama70b_sft", "plan.gpu=h100"], inputs=False)
    words = [s.override for s in suggest(Candidate(cfg, architecture(cfg)[0], 16, target(cfg, 16)))]
    assert words.index("optim=adamw_8bit") < words.index("precision=pure_bf16"), (
        "the costs are the same"
    )


@pytest.mark.slow
def test_the_world_is_what_launch_would_start(enter):
    enter(inject.around("device_files", lambda *_: []))

    def worlds(*words):
        return world_sizes(compose("plan", ["model=tiny", *words], inputs=False))

    assert worlds("plan.gpu=h100", "launch.nodes=2") == [16]
    assert worlds("launch.nodes=2", "launch.nproc_per_node=4") == [8]
    assert worlds("launch.device=cpu") == [1]
    assert worlds("launch.device=cpu", "plan.gpu=h100") == [8]


@pytest.mark.slow
def test_what_fits_is_told_what_makes_it_faster(capsys):
    words = [
        "plan",
        "model=smollm2_135m",
        "activation_checkpoint=full",
        "plan.gpu=h100",
        "plan.world_size=8",
        "plan.format=json",
    ]
    assert main(words) == 0
    suggestions = {s["override"]: s for s in json.loads(capsys.readouterr().out)["suggestions"]}
    assert {"activation_checkpoint=none", "compile=enabled"} <= {*suggestions}
    assert all(s["cost"] < 0 for s in suggestions.values())
    assert planned(
        *words[1:2], *words[3:5], "activation_checkpoint=none"
    ).memory.peak.total / GIB == pytest.approx(
        suggestions["activation_checkpoint=none"]["peak_gib"], abs=1e-3
    )


@pytest.mark.slow
def test_json_is_one_object_and_the_exit_code_says_whether_it_fits(capsys):
    small = ["plan", "model=smollm2_135m", "plan.format=json"]
    assert main([*small, "plan.memory_gib=0.1", "plan.world_size=1"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is False
    assert report["step_seconds"] is None
    assert report["tokens_per_second"] is None
    assert sum(report["by_category"].values()) == pytest.approx(report["peak_gib"], abs=0.01)
    assert report["peak_gib"] > report["memory_gib"]
    assert (
        main(
            [
                *small,
                "plan.memory_gib=3",
                "plan.gpu=h100",
                "plan.world_size=[8,2,1]",
                "train.steps=1000",
            ]
        )
        == 0
    )
    several = json.loads(capsys.readouterr().out)
    assert [one["world_size"] for one in several["worlds"]] == [1, 2, 8]
    assert not several["worlds"][0]["fits"]
    assert several["fits"]
    assert several["world_size"] == several["smallest"] > 1
    low, high = several["step_seconds"]
    assert 0 < low < high
    assert low * 1000 / 86400 == pytest.approx(several["days"][0])
    assert (
        several["bytes_per_step"]
        == several["bytes_by_link"]["shard"]
        > 0
        == several["bytes_by_link"]["replicate"]
    )
    assert several["checkpoint_gib"] > 1


COMPARED = "plan.gpu=[h100,a100_40gb,l40s]"


@pytest.mark.slow
@pytest.mark.further
def test_several_gpus_are_compared_in_one_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = ["plan", *DOES_NOT_FIT[:3]]
    assert main([*words, COMPARED, "plan.world_size=[8,16]"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert re.search(r"8 × H100 +[\d.]+ of 79.1 +yes +[\d.]+k", out)
    assert re.search(r"16 × A100-SXM4-40GB +[\d.]+ of 39.4 +no +[\d.]+k", out)
    assert re.search(r"8 × L40S .*activation_checkpoint=selective +[\d.]+ GiB +\+\d+%", out)
    smaller = ["plan.gpu=[h100,l40s]", "plan.world_size=8", "plan.memory_gib=1"]
    assert main([*words, *smaller]) == 3
    assert "nothing that a key changes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_list_of_gpus_is_a_list_of_plans_in_json(capsys):
    words = ["plan", "model=smollm2_135m", "plan.world_size=[1,8]", "plan.format=json"]
    assert main([*words, COMPARED]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert [one["gpu"] for one in compared] == ["H100", "A100-SXM4-40GB", "L40S"]
    assert main([*words, "plan.gpu=l40s"]) == 0
    assert compared[2] == json.loads(capsys.readouterr().out)
    assert main([*words, "plan.gpu=[l40s]"]) == 0
    assert json.loads(capsys.readouterr().out) == compared[2:]


@pytest.mark.slow
def test_several_gpus_without_brackets_are_told_how_a_list_is_written(capsys):
    words = ["plan", "model=smollm2_135m", "plan.world_size=8", "plan.format=json"]
    assert main([*words, "plan.gpu=h100,l4"]) == 2
    error = capsys.readouterr().err
    assert "plan.gpu=[h100,l4]" in error
    assert main([*words, 'plan.gpu="h100,l4"']) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main([*words, "plan.gpu=[h101,h100,l40]"]) == 2
    error = capsys.readouterr().err
    assert "Did you mean  plan.gpu=h100 ?" in error
    assert "Did you mean  plan.gpu=l40s ?" in error


@pytest.mark.slow
@pytest.mark.further
def test_a_plan_for_people_fits_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", *DOES_NOT_FIT]) == 3
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "does not fit" in out
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["plan", *DOES_NOT_FIT]) == 3
    cut = [line for line in capsys.readouterr().out.splitlines() if "…" in line]
    assert all("━" in line for line in cut), (
        "bars may be cut, but nothing that is to be read or typed"
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert "activation_checkpoint=selective " in out
    assert re.search(r"plan.world_size=\d+ +[\d.]+ GiB", out)
    assert (
        main(
            [
                "plan",
                "+recipe=qwen3_0_6b_sft",
                "plan.gpu=l4",
                "plan.world_size=1",
                "batch.micro_rows=5",
                "batch.rows=32",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) < 50
    assert "9% of the rows that ranks compute: batch.rows=35" in " ".join(out.split())
    assert "fits: " in out
    assert "Qwen/Qwen3-0.6B is not on this disk" in " ".join(out.split())
    assert "tokens/s" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan.gpu=h101"], "plan.memory_gib="),
        (["plan.gpu=[]"], "plan.gpu=[h100,a100_40gb]"),
        (["model.init_from=nobody/nothing", "plan.gpu=h100"], "Say which size it is"),
        (
            ["model=tiny", "sharding=hsdp", "plan.gpu=h100", "plan.world_size=[4,9]"],
            "Use  plan.world_size=8",
        ),
        (["model=tiny", "precision=fp8", "plan.gpu=a100"], "A100 has no float8"),
        (["model=tiny", "plan.gpu=h100", "plan.world_size=[]"], "plan.world_size=[8,16,64]"),
        (["model=tiny", "plan.gpu=h100", "plan.world_size=[8,x]"], "a list of whole numbers"),
    ],
)
def test_a_mistake_is_told_with_what_to_type(words, message, capsys):
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_gpu_one_must_be_named(capsys, enter, monkeypatch):
    enter(inject.around("device_files", lambda *_: []))
    with monkeypatch.context() as without:
        without.setitem(
            sys.modules, "torch", None
        )  # which takes longer to import than to be told so
        without.delitem(sys.modules, "fsdp_trainer.plan.plan_inputs")
        assert main(["plan", "model=tiny"]) == 2
    assert "h100 " in capsys.readouterr().err
    assert (
        main(
            [
                "plan",
                "model=tiny",
                "model.vocab_size=100",
                "launch.device=cpu",
                "launch.nproc_per_node=2",
            ]
        )
        == 0
    )
    assert "2 ranks on this machine" in capsys.readouterr().out


def test_the_architecture_is_read_where_it_is_and_otherwise_what_the_hub_calls_so(tmp_path):
    cfg = compose("plan", ["model.init_from=Qwen/Qwen3-0.6B"], inputs=False)
    config, assumed = architecture(cfg)
    assert config.parameters() == pytest.approx(0.596e9, rel=1e-2)
    assert len(assumed) == 2
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(replace(config, num_hidden_layers=3).to_hf("bfloat16"))
    )
    read, assumed = architecture(compose("plan", [f"model.init_from={folder}"], inputs=False))
    assert (read.num_hidden_layers, read.vocab_size, assumed) == (3, 151_936, [])


SOME_PUBLISHED = (
    "titan-8b-8-eager", "ao-h100-bf16", "ao-mi300x-bf16", "trainy-64", "ibm-70b-a100-compile",
    "olmo-1b-bf16", "prime-4b-16k-b200", "foundry-7b-4096-8xa100",
)  # fmt: skip


@cache
def compared(name):
    """A published run beside its plan."""
    [run] = [run for run in published_runs() if run["name"] == name]
    return compare(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [SOME_PUBLISHED[0], *(pytest.param(n, marks=pytest.mark.slow) for n in SOME_PUBLISHED[1:])],
)
@pytest.mark.grid(2)
def test_published_runs_are_as_fast_as_planned_and_fit(name):
    row = compared(name)
    assert row.inside
    assert row.fast < 1.41 * row.slow
    assert row.fits_as_published


@pytest.mark.slow
@pytest.mark.further
def test_the_plan_reaches_its_goals_over_published_runs():
    """Every second one: `python -m benchmarks.plan_published --check` takes all."""
    runs = published_runs()[::2]
    assert goals_missed(summary([compared(run["name"]) for run in runs])) == []


def seconds(*words):
    """The arithmetic of a step, the slow end."""
    base = ("model=llama3_8b", "plan.gpu=h100", "plan.world_size=8", "batch.rows=64")
    last = {word.split("=")[0]: word for word in (*base, *words)}
    return planned(*last.values()).slow.compute


@pytest.mark.slow
@pytest.mark.further
def test_speed_depends_on_what_bounds_it():
    usual, compiled = seconds(), seconds("compile=enabled")
    assert seconds("precision=fp8") == usual, "casts are not compiled"
    assert seconds("compile=enabled", "precision=fp8") < 0.9 * compiled < compiled < usual
    assert seconds("batch.micro_rows=8") < 0.97 * usual, "products of more tokens are faster"
    assert seconds("plan.gpu=h200") < usual, "its memory is faster"
    assert seconds("plan.efficiency=0.4") == seconds("plan.efficiency=0.4", "plan.gpu=h200")
    long = ("model=llama3_8b", "batch.seq_len=8192", "plan.gpu=h100", "compile=enabled")
    flash, fa3 = seconds(*long), seconds(*long, "model.attention_kernel=fa3")
    assert fa3 < 0.95 * flash
    assert gain_of_float8("llama3_2_1b") < 0.95 * gain_of_float8("llama3_70b"), "casts are by width"


def gain_of_float8(model):
    """Return how much faster a step of this model is with compiled float8 products."""
    words = (f"model={model}", "compile=enabled")
    return seconds(*words) / seconds(*words, "precision=fp8")


@pytest.mark.slow
@pytest.mark.further
def test_an_expert_computes_slower_than_a_dense_layer_of_as_many_operations():
    words = ("model=qwen3_30b_a3b", "plan.gpu=h100", "batch.rows=8", "compile=enabled")
    one, eight = (
        planned(*words, f"sharding.expert={ranks}", "plan.world_size=8") for ranks in (1, 8)
    )
    assert eight.slow.compute < one.slow.compute, "eight ranks' rows are in an expert's products"
    dense = planned("model=qwen3_4b", *words[1:], "plan.world_size=8")
    widths = [plan.slow.compute / plan.fast.compute for plan in (one, dense)]
    assert widths == pytest.approx([1.4**2, 1.18**2])


@pytest.mark.slow
def test_nvlink_connects_the_nodes_of_a_rack():
    words = ("model=qwen3_30b_a3b", "plan.world_size=16", "batch.rows=16", "sharding.expert=16")
    slow, rack = (planned(*words, f"plan.gpu={gpu}") for gpu in ("b200", "gb200"))
    assert rack.wire["expert"].across == 0 < slow.wire["expert"].across
    assert rack.slow.exposed < slow.slow.exposed
    assert rack.host_limit_gib == 4 * 224


@pytest.mark.slow
def test_weights_that_stay_gathered_are_copied_once_a_micro_batch():
    again, once = seconds(), seconds("sharding.reshard_after_forward=false")
    copied = 8 * 20 / 3 * 8.03e9 / (3350e9 * 0.8)  # bytes of eight micro-batches over the rate
    assert again - once == pytest.approx(1.18 * copied, rel=0.01)


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H100-SXM5-80GB", "H100"),
        ("A100-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("a100-40", "A100-SXM4-40GB"),
        ("3090", "RTX 3090"),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("rtx6000ada", "RTX 6000 Ada"),
        ("gb200", "GB200"),
        ("mi325", "MI325X"),
    ],
)
def test_a_gpu_is_found_by_the_name_that_is_typed(typed, name):
    assert device(typed).name == name


@pytest.mark.parametrize("typed", ["a1000", "l40", "6000", "h101"])
def test_a_gpu_that_is_only_spelled_alike_is_not_taken(typed):
    with pytest.raises(UserError):
        device(typed)


def test_every_device_of_the_table_has_times():
    for known in DEVICES.values():
        assert min(known.flops, known.memory_rate, known.link, known.network) > 0, known.name
        assert named_by_driver(f"NVIDIA {known.name} 80GB").name == known.name


@pytest.mark.slow
def test_a_device_that_the_table_does_not_have_is_timed_by_its_tflops(capsys):
    words = ["model=smollm2_135m", "plan.memory_gib=48", "plan.world_size=1"]
    assert planned(*words).step_seconds is None
    assert main(["plan", *words, "plan.tflops=150", "plan.format=json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_seconds"][0] > 0
    assert any("its memory bandwidth is assumed to be 500 GB/s" in line for line in plan["assumed"])
    slower = planned("plan.tflops=75", *words, "plan.gpu=h100").slow.compute
    assert slower > planned(*words, "plan.gpu=h100").slow.compute


@pytest.mark.slow
def test_empty_rows_and_memory_of_the_host_are_told(capsys):
    words = [
        "plan", "model=llama3_70b", "plan.gpu=a100_40gb", "sharding.cpu_offload=true",
        "activation_checkpoint=full", "batch.rows=32",
    ]  # fmt: skip
    assert main([*words, "plan.world_size=[8,1024]", "plan.format=json"]) == 0
    one, several = json.loads(capsys.readouterr().out)["worlds"]
    assert (one["empty_rows_share"], several["empty_rows_share"]) == (0, pytest.approx(0.9688))
    assert one["host_gib_per_node"] == pytest.approx(8 * one["host_gib"], abs=0.01)
    assert one["host_gib_per_node"] > 1024
    assert not one["host_fits"]
    assert several["host_fits"]
    assert one["tokens_per_second_per_gpu"] == pytest.approx(one["tokens_per_second"] / 8)
    assert [*one["moments"]] == ["forward", "head and loss", "backward", "update"]
    assert one["moment"] in one["moments"]
    assert main([*words, "plan.world_size=[8,1024]"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "empty" in out
    assert "97%" in out
    assert "1,051 GiB a node, pinned: more than 1,024 GiB" in out


@pytest.mark.slow
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
    h100 = device("h100")
    assert sharded.seconds(1e9, h100, 1.0) == pytest.approx(15 / 16 / 450)
    assert Group(2, 1).seconds(1e9, h100, 1.0) == pytest.approx(1 / 2 / 50)


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
    assert (
        named_by_driver("NVIDIA A100-SXM4-40GB").memory_gib
        < 40
        < named_by_driver("NVIDIA A100-SXM4-80GB").memory_gib
    )


@pytest.mark.slow
@pytest.mark.further
def test_a_plan_counts_what_a_reference_computes(capsys):
    ours = ["model=qwen3_0_6b", "plan.gpu=h100", "plan.world_size=1"]
    plain, base = (planned(*ours, "adapter=lora", *more).slow for more in ([], ["objective=dpo"]))
    assert base.compute == plain.compute
    assert base.step == pytest.approx(plain.step + base.forwards)
    assert base.compute / 4 < base.forwards < base.compute / 2
    assert planned(*ours, "objective=dpo").slow.forwards == 0
    assert planned(*ours, "objective=dpo").slow.reading > 0
    assert main(["plan", *ours, "objective=dpo", "plan.format=json"]) == 0
    assert json.loads(capsys.readouterr().out)["reference"] == "stored"
    assert main(["plan", *ours, "objective=dpo"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "reads all rows of an epoch once, before step 1" in said


@pytest.mark.slow
def test_offloaded_activations_and_messages_share_a_link_without_nvlink():
    words = ("model=llama3_8b", "plan.gpu=l40s", "plan.world_size=8", "batch.rows=32")
    moved = ("batch.micro_rows=4", "activation_checkpoint=selective")
    cfg = compose("plan", [*words, *moved, "activation_checkpoint.offload=true"], inputs=False)
    config, pcie = architecture(cfg)[0], target(cfg, 8)
    with_nvlink = pcie._replace(link=2 * pcie.host_link)
    shared, own = (make_plan(cfg, config, 8, one).slow.exposed for one in (pcie, with_nvlink))
    assert shared > 1.2 * own
