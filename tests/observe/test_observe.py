"""Records of a run: the contract's fields, figures that are right, a line for people, trackers that
go on after a restart."""

import contextlib
import fcntl
import gzip
import importlib.util
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from functools import partial
from pathlib import Path

import inject
import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from world import read_lines, write_chats

from fsdp_trainer.config.devices import peak_flops
from fsdp_trainer.config.schema import Adapter, Logging
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.attention import DocumentAttention
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.freeze import choose_trained
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.observe.console import Console, duration, progress_line, short
from fsdp_trainer.observe.flops import causal_flops, palm_flops, trained_work
from fsdp_trainer.observe.metric_groups import group_of
from fsdp_trainer.observe.records import Records, numbers
from fsdp_trainer.observe.step_phases import phases_of, read_trace, table
from fsdp_trainer.observe.trackers import Tracker, Trackers
from fsdp_trainer.training.objective import CrossEntropy

FIELDS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "supervised_tokens",
    "tokens_per_second",
    "step_seconds",
    "memory_gib",
}


@pytest.mark.slow
def test_metrics_and_events_have_the_contracts_fields(train):
    run = train(
        "run",
        "train.steps=5",
        "logging.every=2",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        ranks=2,
    )
    assert run.column("step") == [1, 2, 3, 4, 5], (
        "each step has its line, whatever logging.every is"
    )
    for line in run.metrics:
        assert line.keys() >= FIELDS
        assert all(isinstance(line[name], int | float) for name in FIELDS)
        of_no_group = {name for name, _ in numbers(line) if not group_of(name, "sft", ())}
        assert of_no_group == {name for name, _ in numbers(line)}
    assert run.column("tokens") == sorted(set(run.column("tokens")))
    assert all(
        s < t for s, t in zip(run.column("supervised_tokens"), run.column("tokens"), strict=True)
    )
    assert 0.05 < run.metrics[-1]["memory_gib"] < 10
    names = [e["event"] for e in run.events]
    assert names == ["start", "checkpoint", "checkpoint", "checkpoint", "end"]
    assert all("time" in e for e in run.events)
    assert run.events[-1]["reason"] == "finished"
    assert run.events[-1]["exit_code"] == 0
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["optim"]["lr"] == 3e-3
    assert config["run"]["name"] == "run"


@pytest.mark.slow
def test_the_time_of_a_run_is_that_of_its_phases(train):
    began = time.time()
    run = train(
        "run",
        "train.steps=4",
        "logging.every=2",
        "checkpoint.every=2",
        "train.validate_every=2",
        "data.validation=0.2",
        "checkpoint.export_hf=true",
        seam=inject.at("data", partial(time.sleep, 0.3), nth=1),
    )
    wall, (first, last) = (
        time.time() - began,
        [line["phases"] for line in run.metrics if "phases" in line],
    )
    assert all(
        {"data", "forward", "backward", "clip", "update", "read", "validation", "log"}
        <= set(phases)
        for phases in (first, last)
    )
    assert first["data"] >= 0.3
    assert first["start"] > 0
    assert "start" not in last
    assert last["shards"] > 0, "the first checkpoint is the second write's"
    assert sum(last.values()) >= sum(run.column("step_seconds")[2:])
    assert began < run.metrics[0]["time"] <= run.metrics[3]["time"] < began + wall
    took = {event["event"]: event.get("seconds") for event in run.events}
    assert all(took[name] > 0 for name in ("start", "evaluation", "checkpoint", "export"))
    assert took["start"] <= first["start"] + 0.001
    end = run.events[-1]["phases"]
    (line,) = [line for line in run.out.splitlines() if line.startswith("time ")]
    assert sum(map(int, re.findall(r"(\d+)%", line))) > 80
    assert "start-up" in line
    assert "shards" not in line
    assert end["export"] > 0
    assert sum(sum(phases.values()) for phases in (first, last, end)) < wall


@pytest.mark.slow
def test_tokens_are_those_of_the_rows_without_padding(train, world, inputs):
    run = train("run", "train.steps=2")
    out = world.command(
        "preview",
        "preview.format=json",
        "preview.rows=12",
        *(f"{k}={v}" for k, v in inputs.items()),
        "batch.seq_len=64",
    )[0].out
    rows = [json.loads(line) for line in out.splitlines()]
    assert run.column("tokens") == [sum(len(r["tokens"]) for r in rows[:n]) for n in (6, 12)]
    assert run.column("supervised_tokens") == [
        sum(label != -100 for r in rows[:n] for label in r["labels"]) for n in (6, 12)
    ]


@pytest.mark.slow
def test_every_line_of_a_log_file_says_everything(train):
    run = train("run", "train.steps=4", "logging.every=2")
    lines = [line for line in run.out.splitlines() if "/4 " in line]
    assert len(lines) == 2
    assert "\r" not in run.out
    assert lines[-1].startswith("4/4 100%")
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


LINE = {
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


def test_a_progress_line_fits_the_terminal():
    line = LINE | {"loss_by_source": {"maths": 1.5, "code": None}}
    whole = progress_line(line, 5000, 9061)
    assert whole.endswith("eta 2h31m  (maths 1.5000, code not finite)")
    for width in range(20, len(whole) + 1):
        narrow = progress_line(line, 5000, 9061, width)
        assert len(narrow) <= max(width, len("1,240/5,000  24%  loss 1.8342"))
        assert narrow.startswith("1,240/5,000  24%  loss 1.8342")
    assert progress_line(line, 5000, 9061, 79) == (
        "1,240/5,000  24%  loss 1.8342  lr 2.7e-05  41.2k tok/s  eta 2h31m"
    )


@pytest.mark.slow
@pytest.mark.further
def test_a_terminal_shows_validations_checkpoints_and_the_end_on_lines_of_their_own(
    tmp_path,
):
    """The run is at a terminal of 60 columns."""
    rows = write_chats(tmp_path / "rows.jsonl", 40)
    words = [
        "run.name=run", f"data.path={rows}", "data.validation=0.1", "tokenizer.path=demo:bytes",
        "model=tiny", "precision=fp32", "batch.rows=2", "batch.seq_len=256", "train.steps=4",
        "train.validate_every=2", "checkpoint.every=2", "launch.nproc_per_node=1",
    ]  # fmt: skip
    shown = at_a_terminal([sys.executable, "-m", "fsdp_trainer", *words], tmp_path, columns=60)
    lines = [line.rpartition("\r")[2] for line in shown.split("\r\n")]
    said = [line.split(" ")[0] for line in lines]
    assert said.count("valid") == 4  # before the first step, after steps 2 and 4, and at the end
    assert said.count("saved") == 2
    redrawn = [part for line in shown.split("\r\n") for part in line.split("\r") if "eta " in part]
    assert len(redrawn) == 4
    assert max(map(len, redrawn)) < 60
    events = read_lines(tmp_path / "runs" / "run" / "events.jsonl")
    evaluated = [event["step"] for event in events if event["event"] == "evaluation"]
    assert evaluated == [0, 2, 4]
    best = next(line for line in lines if line.startswith("best "))
    folder = best.rpartition(": ")[2]
    assert (tmp_path / folder / "MANIFEST.json").is_file()
    assert any(line.startswith("loss ") and "in the last step" in line for line in lines)


def at_a_terminal(command, folder, columns):
    """Run a command at a terminal of its own, and return what it shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(timeout=600) == 0, shown.decode()
    return shown.decode()


def test_figures_are_short():
    assert progress_line(LINE, 5000, 9061) == (
        "1,240/5,000  24%  loss 1.8342  lr 2.7e-05  |g| not finite  41.2k tok/s  MFU "
        "41.2% (causal 39.1%)  61.30 GiB  2.41 s  eta 2h31m"
    )
    assert [short(n) for n in (3, 999, 41_234, 7.5e6, 2e9)] == ["3", "999", "41.2k", "7.5M", "2.0G"]
    assert [duration(s) for s in (5, 65, 9061)] == ["5s", "1m05s", "2h31m"]


def one_document(length):
    """Return a row of one document whose every token is learnt."""
    places = torch.arange(length)
    layout = DocumentAttention([[length]], length, torch.device("cpu"))
    return MicroBatch(places[None], places[None], layout, places, places, torch.ones(length))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": False},
        {"family": "qwen3", "head_dim": 16, "num_key_value_heads": 1},
    ],
    ids=["tied", "untied", "qwen3"],
)
def test_the_formula_of_flops_counts_what_torch_counts(options):
    """Torch counts attention without the causal half, as PaLM does. Nothing is computed twice."""
    config = ModelConfig(
        **{"vocab_size": 300, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2, **options}
    )
    model, length = Decoder(config), 96
    initialize_weights(model, 0)
    batch = one_document(length)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch, CrossEntropy(batch.weights))[0].backward()
    norms = (
        6 * sum(p.numel() for p in model.parameters() if p.ndim == 1) * length
    )  # are in N, but in no matrix product
    assert counter.get_total_flops() + norms == palm_flops(config, length, length)
    assert (
        causal_flops(config, length, length**2)
        == palm_flops(config, length, length) - 6 * 2 * 4 * 16 * length**2
    )
    assert causal_flops(config, length, 2 * (length // 2) ** 2) < causal_flops(
        config, length, length**2
    ), "two documents cost less than one"


@pytest.mark.parametrize(
    ("adapter", "freeze", "first"),
    [
        (Adapter(name="lora", rank=4), [], 0),
        (Adapter(), ["model.embed_tokens.*", "model.layers.0.*", "*.q_proj.*"], 1),
        (Adapter(name="lora", targets=["model.layers.2.*"], also=["head"]), [], 2),
    ],
)
def test_frozen_weights_have_no_product_for_a_gradient_of_their_own(adapter, freeze, first):
    """Products are those that torch counts, but for the gradient of what enters the first block
    that is trained in."""
    config = ModelConfig(
        vocab_size=300, hidden_size=64, head_dim=16, num_hidden_layers=3, tie_word_embeddings=False
    )
    model = Decoder(config)
    choose_trained(model, resolve_adapters(adapter, config), freeze)
    initialize_weights(model, 0)
    batch, length = one_document(96), 96
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch, CrossEntropy(batch.weights))[0].backward()
    block, unneeded = model.model.layers[str(first)], 0
    if not block.input_layernorm.weight.requires_grad:
        attention = block.self_attn
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            unneeded += layer.weight.numel() + layer.lora_A.weight.numel()
    norms = [(name, p) for name, p in model.named_parameters() if p.ndim == 1]
    in_norms = 0
    for name, norm in norms:
        number = re.search(r"layers.(\d)", name)
        reached = number is None or int(number[1]) >= first
        in_norms += norm.numel() * (2 + 2 * reached + 2 * norm.requires_grad)
    counted = palm_flops(config, length, length, trained_work(model))
    assert counter.get_total_flops() == counted - length * (in_norms + 2 * unneeded)


def test_a_device_that_is_not_known_has_no_peak():
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L4") == 121e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("Some GPU") is None


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_records_survive_a_half_written_line(tmp_path):
    records = Records(tmp_path)
    records.write([{"step": i, "loss": i} for i in range(1, 6)])
    append(records.metrics.path, '{"step": 6, "lo')
    records.cut_after(4)
    assert [json.loads(line)["step"] for line in records.metrics.path.read_text().splitlines()] == [
        1,
        2,
        3,
        4,
    ]
    records.event("end", exit_code=75)
    append(records.events.path, '{"event": "st')
    assert records.last_event()["exit_code"] == 75
    records.event("resume")
    assert records.last_event()["event"] == "resume", "a line after a half one is a line of its own"
    records.cut_after(4)
    events = [json.loads(line)["event"] for line in records.events.path.read_text().splitlines()]
    assert events == ["end", "resume"], "the next start drops the half one"


@pytest.fixture(scope="module")
def profiled(world, inputs, tmp_path_factory):
    """Two ranks, of which one is slow, and two of their steps."""
    how = [
        "train.steps=4",
        "profile.steps=2..3",
        "profile.memory=true",
        "model.tie_word_embeddings=false",
        "sharding.reshard_after_forward=false",
    ]
    late = [inject.at("backward", partial(time.sleep, 0.5), rank=1, step=s) for s in (2, 3)]
    where = tmp_path_factory.mktemp("profiled") / "run"
    return world.train(
        where, *(f"{k}={v}" for k, v in inputs.items()), *how, ranks=2, seam=inject.together(*late)
    )


@pytest.mark.slow
@pytest.mark.further
def test_a_profile_holds_exactly_the_steps_asked_for_with_their_phases_blocks_and_operators(
    profiled, train
):
    folder = profiled.folder / "profile"
    assert sorted(file.name for file in folder.iterdir()) == [
        "steps-2-3-phases.json",
        "steps-2-3-rank-0.json.gz",
        "steps-2-3-rank-1.json.gz",
    ]
    with gzip.open(folder / "steps-2-3-rank-1.json.gz") as file:
        names = Counter(
            event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"
        )
    assert {name for name in names if name.startswith("step ")} == {"step 2", "step 3"}
    assert names["forward"] == names["loss"] == names["clip"] == names["update"] == 2
    assert (
        names["FSDP::pre_forward (model.layers.0)"]
        == names["FSDP::pre_forward (model.layers.1)"]
        == 2
    )
    assert names["aten::mm"] > 20
    assert [event["steps"] for event in profiled.event("profile")] == [[2, 3]]
    assert profiled.events[-1]["event"] == "end"
    plain = train("plain", "train.steps=4", "model.tie_word_embeddings=false", ranks=2)
    assert plain.column("loss") == profiled.column("loss")
    assert not (plain.folder / "profile").exists()


@pytest.mark.slow
@pytest.mark.further
def test_what_one_rank_is_late_by_is_gradient_sync_that_the_other_waits_in(profiled):
    phases = json.loads((profiled.folder / "profile" / "steps-2-3-phases.json").read_text())
    fast, slow = phases["ranks"]["0"], phases["ranks"]["1"]
    assert phases["steps"] == [2, 3]
    assert fast["gradient sync, exposed"]["seconds"] > 0.5
    assert slow["backward"]["idle"] > 0.9
    assert all(
        rank_phases[row]["seconds"] > 0
        for rank_phases in (fast, slow)
        for row in ("data", "forward", "loss", "clip", "optimizer", "log")
    )
    steps = [
        event
        for event in read_trace(profiled.folder / "profile" / "steps-2-3-rank-0.json.gz")
        if event.name.startswith("step ")
    ]
    assert sum(row["seconds"] for row in fast.values()) == pytest.approx(
        (steps[1].end - steps[0].begin) / 2e6
    ), "every instant counts once"
    (line,) = [line for line in profiled.out.splitlines() if "gradient sync, exposed" in line]
    assert "of 2 ranks" in profiled.out
    assert float(line.split()[-1]) > 900


KERNELS = [  # name, stream, launched at, begin, end; milliseconds
    (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        9,
        2,
        5,
        30,
    ),  # 10 before the first block, then hidden
    ("shorter than the clock's tick", 7, 2, 4, 4),
    ("gemm of the forward", 7, 3, 15, 50),
    ("flash_fwd", 7, 12, 50, 60),
    ("cross_entropy", 7, 16, 60, 65),
    ("gemm of the backward", 7, 20, 65, 100),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 9, 22, 90, 115),  # 10 hidden, then 15 alone
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 9, 42, 115, 120),  # the norm's
    ("multi_tensor_apply", 7, 51, 120, 140),
]


def test_on_a_gpu_messages_that_run_beside_a_kernel_are_hidden_and_those_alone_are_exposed(
    tmp_path,
):
    """A made trace, in the form that Kineto writes; the device's time is what counts, by the phase
    that launched it."""
    host = {
        "step 7": (0, 150),
        "data": (0, 1),
        "forward": (1, 18),
        "loss": (14, 17),
        "backward": (18, 40),
        "clip": (40, 50),
    }
    host |= {"update": (50, 55), "read": (55, 145), "log": (145, 150)}
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": name,
            "tid": 1,
            "ts": 1e3 * at,
            "dur": 1e3 * (end - at),
        }
        for name, (at, end) in host.items()
    ]
    for number, (name, stream, launched, begin, end) in enumerate(KERNELS):
        args = {"correlation": number, "stream": stream}
        events.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "tid": 2,
                "ts": 1e3 * launched,
                "dur": 1,
                "args": args,
            }
        )
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "tid": stream,
                "ts": 1e3 * begin,
                "dur": 1e3 * (end - begin),
                "args": args,
            }
        )
    events += [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "tid": 3, "ts": 0, "dur": 9},
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": events}, file)
    rows = phases_of(read_trace(tmp_path / "trace.json.gz"))
    ms = {
        row: tuple(round(1e3 * args[what], 3) for what in ("seconds", "idle", "hidden"))
        for row, args in rows.items()
    }
    assert ms == {
        "data": (1, 1, 0),
        "forward": (4 + 45, 4, 0),
        "all-gather, exposed": (10, 0, 15),
        "loss": (5, 0, 0),
        "backward": (35, 0, 0),
        "gradient sync, exposed": (15, 0, 10),
        "clip": (5, 0, 0),
        "optimizer": (20, 0, 0),
        "log": (10, 10, 0),
    }
    assert sum(seconds for seconds, _, _ in ms.values()) == 150
    assert table({0: rows})[-1].split() == ["a", "step", "150.0"]


@pytest.mark.slow
@pytest.mark.further
def test_a_profile_that_a_run_cuts_short_is_written_and_the_rest_by_the_next(train):
    train("run", "train.steps=2", "profile.steps=2-4")
    run = train("run", "train.steps=5", "profile.steps=2-4")
    assert sorted(file.name for file in (run.folder / "profile").iterdir()) == [
        f"steps-{steps}-{what}"
        for steps in ("2-2", "3-4")
        for what in ("phases.json", "rank-0.json.gz")
    ]


@pytest.mark.slow
def test_a_profile_of_steps_or_ranks_that_are_not_there_is_refused(train):
    assert "write 10 or 10..12" in train("run", "profile.steps=3-2", code=2).err
    assert (
        "there is no rank 2"
        in train("run", "profile.steps=3", "profile.ranks=[0,2]", ranks=2, code=2).err
    )


def test_trackers_get_the_metrics_of_a_method_and_of_ones_own_in_groups(tmp_path):
    logged = []
    recorder = Tracker("wandb", lambda values, step: logged.append(values), lambda code: None)
    line = {
        "step": 1, "time": 9.0, "loss": 1.0, "reward": 0.5, "reward/exact": 0.25, "answers": 3,
        "mine": {"a": 2}, "own_metrics": ["mine"], "tasks": {"arc/acc": 0.5}, "flag": True,
        "phases": {"forward": 0.5}, "expert_load": ["44"],
    }  # fmt: skip
    with inject.around("wandb", lambda *_: recorder):
        config = {"objective": {"name": "grpo"}}
        trackers = Trackers(Logging(wandb="online"), tmp_path, config, lambda text: None)
        trackers.log(line)
        trackers.close(0)
    assert logged == [
        {
            "loss": 1.0, "tasks/arc/acc": 0.5, "phases/forward": 0.5, "own/mine/a": 2,
            "grpo/reward": 0.5, "grpo/reward/exact": 0.25, "grpo/answers": 3,
        }
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.further
def test_an_offline_wandb_run_goes_on_in_the_same_one(train):
    pytest.importorskip("wandb")
    first = train("run", "train.steps=2", "logging.wandb=offline", ranks=2, timeout=200)
    again = train("run", "train.steps=4", "logging.wandb=offline", ranks=2, timeout=200)
    ids = [p.read_text() for p in Path(first.folder).rglob("wandb_id")]
    folders = sorted((again.folder / "wandb").glob("offline-run-*"))
    assert len(ids) == 1
    assert len(folders) == 2
    assert all(folder.name.endswith(ids[0]) and list(folder.glob("*.wandb")) for folder in folders)
    assert again.column("step") == [1, 2, 3, 4]
    assert "gets no more metrics" not in first.out + again.out


@pytest.mark.slow
def test_tensorboard_gets_every_step_or_a_mistake_is_told(train):
    installed = importlib.util.find_spec("tensorboard") is not None
    run = train(
        "run", "train.steps=2", "logging.tensorboard=true", ranks=2, code=0 if installed else 2
    )
    assert (
        list((run.folder / "tensorboard").glob("events*"))
        if installed
        else "pip install" in run.err
    )
