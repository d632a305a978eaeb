"""What a run writes down: the contract's fields, figures that are right, a line for people, trackers that go on after a restart."""

import gzip
import importlib.util
import io
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fsdp_trainer.models.attention import Layout
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.initialize import initialize_whole
from fsdp_trainer.observe.console import Console, duration, progress_line, short
from fsdp_trainer.observe.flops import causal_flops, palm_flops
from fsdp_trainer.observe.records import Records
from fsdp_trainer.plan.devices import peak_flops
from fsdp_trainer.training.objective import CrossEntropy

FIELDS = {"step", "loss", "grad_norm", "lr", "tokens", "supervised_tokens", "tokens_per_second", "step_seconds", "memory_gib"}


def test_metrics_and_events_have_the_contracts_fields(train):
    run = train("run", "train.steps=5", "logging.every=2", "checkpoint.every=2", "checkpoint.keep=9", ranks=2)
    assert run.column("step") == [1, 2, 3, 4, 5], "each step has its line, whatever logging.every is"
    for line in run.metrics:
        assert line.keys() >= FIELDS and all(isinstance(line[name], int | float) for name in FIELDS)
    assert run.column("tokens") == sorted(set(run.column("tokens"))) and all(
        s < t for s, t in zip(run.column("supervised_tokens"), run.column("tokens"), strict=True)
    )
    assert 0.05 < run.metrics[-1]["memory_gib"] < 10
    names = [e["event"] for e in run.events]
    assert names == ["start", "checkpoint", "checkpoint", "checkpoint", "end"] and all("time" in e for e in run.events)
    assert run.events[-1]["reason"] == "finished" and run.events[-1]["exit_code"] == 0
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["optim"]["lr"] == 3e-3 and config["run"]["name"] == "run"


def test_tokens_are_those_of_the_rows_without_padding(train, world, inputs):
    run = train("run", "train.steps=2")
    out = world.command("preview", "preview.format=json", "preview.rows=12", *(f"{k}={v}" for k, v in inputs.items()), "batch.seq_len=64")[
        0
    ].out
    rows = [json.loads(line) for line in out.splitlines()]
    assert run.column("tokens") == [sum(len(r["tokens"]) for r in rows[:n]) for n in (6, 12)]
    assert run.column("supervised_tokens") == [sum(label != -100 for r in rows[:n] for label in r["labels"]) for n in (6, 12)]


def test_every_line_of_a_log_file_says_everything(train):
    run = train("run", "train.steps=4", "logging.every=2")
    lines = [line for line in run.out.splitlines() if "/4 " in line]
    assert len(lines) == 2 and "\r" not in run.out and lines[-1].startswith("4/4 100%")
    assert all(part in lines[0] for part in ("loss ", "lr ", "|g| ", "tok/s", "GiB", "eta "))


def test_a_terminal_sees_one_line_redrawn():
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    console = Console(quiet=False, stream=terminal)
    console.progress("a long line")
    console.progress("short")
    console.say("saved")
    console.progress("end", last=True)
    assert terminal.getvalue() == "\ra long line\rshort      \r     \rsaved\nend\n"
    quiet = io.StringIO()
    Console(quiet=True, stream=quiet).say("nothing")
    assert quiet.getvalue() == ""


def test_figures_are_short():
    line = {
        "step": 1240,
        "loss": 1.83421,
        "grad_norm": None,
        "lr": 2.7e-5,
        "tokens_per_second": 41_234.0,
        "memory_gib": 61.3,
        "step_seconds": 2.414,
        "mfu_palm": 0.412,
        "mfu_causal": 0.391,
    }
    assert progress_line(line, 5000, 9061) == (
        "1,240/5,000  24%  loss 1.8342  lr 2.7e-05  |g| not finite  41.2k tok/s  MFU 41.2% (causal 39.1%)  61.30 GiB  2.41 s  eta 2h31m"
    )
    assert [short(n) for n in (3, 999, 41_234, 7.5e6, 2e9)] == ["3", "999", "41.2k", "7.5M", "2.0G"]
    assert [duration(s) for s in (5, 65, 9061)] == ["5s", "1m05s", "2h31m"]


@pytest.mark.parametrize(
    "options",
    [{}, {"tie_word_embeddings": False}, {"family": "qwen3", "head_dim": 16, "num_key_value_heads": 1}],
    ids=["tied", "untied", "qwen3"],
)
def test_the_formula_of_flops_counts_what_torch_counts(options):
    """Torch counts attention without the causal half, as PaLM does. Nothing is computed twice."""
    config = ModelConfig(**{"vocab_size": 300, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2, **options})
    model, length = Decoder(config), 96
    initialize_whole(model, 0)
    places = torch.arange(length)
    batch = MicroBatch(places[None], places[None], Layout([[length]]), places, places, torch.ones(length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch, CrossEntropy(batch.weights))[0].backward()
    norms = 6 * sum(p.numel() for p in model.parameters() if p.ndim == 1) * length  # are in N, but in no matrix product
    assert counter.get_total_flops() + norms == palm_flops(config, length, length)
    assert causal_flops(config, length, length**2) == palm_flops(config, length, length) - 6 * 2 * 4 * 16 * length**2
    assert causal_flops(config, length, 2 * (length // 2) ** 2) < causal_flops(config, length, length**2), (
        "two documents cost less than one"
    )


def test_a_device_that_is_not_known_has_no_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("NVIDIA L40S") == 362e12 and peak_flops("Some GPU") is None


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_records_survive_a_half_written_line(tmp_path):
    records = Records(tmp_path)
    records.write([{"step": i, "loss": i} for i in range(1, 6)])
    append(records.metrics, '{"step": 6, "lo')
    records.cut_after(4)
    assert [json.loads(line)["step"] for line in records.metrics.read_text().splitlines()] == [1, 2, 3, 4]
    records.event("end", exit_code=75)
    append(records.events, '{"event": "st')
    assert records.last_event()["exit_code"] == 75
    records.event("resume")
    assert records.last_event()["event"] == "resume", "a line after a half one is a line of its own"


@pytest.mark.slow
def test_a_profile_holds_exactly_the_steps_asked_for_with_their_phases_blocks_and_operators(train):
    run = train("run", "train.steps=5", "profile.steps=2-3", "profile.ranks=[1]", "profile.memory=true", ranks=2)
    assert [file.name for file in (run.folder / "profile").iterdir()] == ["steps-2-3-rank-1.json.gz"]
    with gzip.open(run.folder / "profile" / "steps-2-3-rank-1.json.gz") as file:
        names = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    assert {name for name in names if name.startswith("step ")} == {"step 2", "step 3"}
    assert names["forward_backward"] == names["clip"] == names["update"] == 2
    assert names["FSDP::pre_forward (model.layers.0)"] == names["FSDP::pre_forward (model.layers.1)"] == 2 and names["aten::mm"] > 20
    assert [event["steps"] for event in run.event("profile")] == [[2, 3]] and run.events[-1]["event"] == "end"
    plain = train("plain", "train.steps=5", ranks=2)
    assert plain.column("loss") == run.column("loss") and not (plain.folder / "profile").exists()


@pytest.mark.slow
def test_a_profile_that_a_run_cuts_short_is_written_and_the_rest_by_the_next(train):
    train("run", "train.steps=2", "profile.steps=2-4")
    run = train("run", "train.steps=5", "profile.steps=2-4")
    assert sorted(file.name for file in (run.folder / "profile").iterdir()) == ["steps-2-2-rank-0.json.gz", "steps-3-4-rank-0.json.gz"]


def test_a_profile_of_steps_or_ranks_that_are_not_there_is_refused(train):
    assert "write 10 or 10-12" in train("run", "profile.steps=3-2", code=2).err
    assert "there is no rank 2" in train("run", "profile.steps=3", "profile.ranks=[0,2]", ranks=2, code=2).err


@pytest.mark.slow
def test_an_offline_wandb_run_goes_on_in_the_same_one(train):
    pytest.importorskip("wandb")
    first = train("run", "train.steps=2", "logging.wandb=offline", ranks=2, timeout=200)
    again = train("run", "train.steps=4", "logging.wandb=offline", ranks=2, timeout=200)
    kept = [p.read_text() for p in Path(first.folder).rglob("wandb_id")]
    folders = sorted((again.folder / "wandb").glob("offline-run-*"))
    assert (
        len(kept) == 1 and len(folders) == 2 and all(folder.name.endswith(kept[0]) and list(folder.glob("*.wandb")) for folder in folders)
    )
    assert again.column("step") == [1, 2, 3, 4] and "gets no more metrics" not in first.out + again.out


@pytest.mark.slow
def test_tensorboard_gets_every_step_or_a_mistake_is_told(train):
    installed = importlib.util.find_spec("tensorboard") is not None
    run = train("run", "train.steps=2", "logging.tensorboard=true", ranks=2, code=0 if installed else 2)
    assert list((run.folder / "tensorboard").glob("events*")) if installed else "pip install" in run.err
