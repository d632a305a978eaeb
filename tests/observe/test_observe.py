"""Records of a run: the contract's fields, figures that are right, a line for people, trackers that
go on after a restart."""

import contextlib
import fcntl
import gzip
import io
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from collections import Counter
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name

import inject
import pytest
import torch
import yaml
from folders import table
from rich.text import Text
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tracker_services import SERVICES, SIGNATURES
from world import SMALL, Run, command, lines_of, read_json

from fsdp_trainer.cli import main
from fsdp_trainer.config.schema import Adapter, Logging
from fsdp_trainer.extensions import Tracker
from fsdp_trainer.models.adapters.adapter_targets import resolve_adapters
from fsdp_trainer.models.attention import DocumentAttention
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder, MicroBatch
from fsdp_trainer.models.from_config.freeze import choose_trained
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.observe.console import Console, duration, progress_line, short
from fsdp_trainer.observe.flops import causal_flops, palm_flops, trained_work
from fsdp_trainer.observe.metric_groups import group_of
from fsdp_trainer.observe.records import Records, numbers
from fsdp_trainer.observe.step_phases import phases_of, read_trace
from fsdp_trainer.observe.step_phases import table as table_of_phases
from fsdp_trainer.observe.terminal import Terminal
from fsdp_trainer.observe.tracker_threads import Trackers
from fsdp_trainer.run.run import repeats_steps
from fsdp_trainer.training.objective import CrossEntropy

CASES = table("observe/cases.yaml")
FIELDS = {*CASES["fields"]}


def test_metrics_and_events_have_the_contracts_fields(ledger):
    run = ledger.run("every step")
    assert run["step"] == list(range(1, 10)), "whatever logging.every is"
    for line in run.metrics:
        assert line.keys() >= FIELDS
        assert all(isinstance(line[name], int | float) for name in FIELDS)
        assert not any(group_of(name, "sft", ()) for name, _ in numbers(line))
    tokens, supervised = run["tokens"], run["supervised_tokens"]
    assert tokens == sorted(set(tokens))
    assert all(s < t for s, t in zip(supervised, tokens, strict=True))
    assert 0.05 < run.metrics[-1]["memory_gib"] < 10
    assert [e["event"] for e in run.events] == ["start", *9 * ["checkpoint"], "end"]
    assert all("time" in e for e in run.events)
    assert run.events[-1]["reason"] == "finished"
    assert run.events[-1]["exit_code"] == 0
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert config["optim"]["lr"] == 3e-3
    assert config["run"]["name"] == run.folder.name


def test_the_time_of_a_run_is_that_of_its_phases(train):
    began = time.time()
    words = (
        "train.steps=4 logging.every=2 checkpoint.every=2 train.validate_every=2"
        " data.validation=0.2 checkpoint.export_hf=true"
    )
    late = inject.at("data", partial(time.sleep, 0.3), nth=1)
    run = train("run", words, seam=late)
    wall = time.time() - began
    first, last = (line["phases"] for line in run.metrics if "phases" in line)
    assert {*CASES["training"]} <= first.keys() & last.keys()
    assert first["data"] >= 0.3
    assert first["start"] > 0
    assert "start" not in last
    assert last["shards"] > 0, "the first checkpoint is the second write's"
    assert sum(last.values()) >= sum(run["step_seconds"][2:])
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


def test_tokens_are_those_of_the_rows_without_padding(ledger):
    run = ledger.run("every step")
    words = [f"data.path={ledger.data / 'chats.jsonl'}", f"data.cache={ledger.folder / 'cache'}"]
    words += ["tokenizer.path=demo:bytes", "batch.seq_len=64"]
    out = command(["preview", "preview.format=json", "preview.rows=54", *words], None).out
    rows = lines_of(out)
    ends = range(6, 55, 6)
    assert run["tokens"] == [sum(len(r["tokens"]) for r in rows[:n]) for n in ends]
    assert run["supervised_tokens"] == [
        sum(label != -100 for r in rows[:n] for label in r["labels"]) for n in ends
    ]


def test_every_line_of_a_log_file_says_everything(ledger):
    words = "data.path=DATA/chats.jsonl train.steps=4 logging.every=2"
    out = ledger.run(words=[words]).out
    first, last = (line for line in out.splitlines() if "/4 " in line)
    assert "\r" not in out
    assert last.startswith("4/4 100%")
    assert all(part in first for part in ("loss ", "lr ", "|g| ", "tok/s", "GiB", "eta "))


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


@pytest.mark.parametrize("plain", [None, ("TERM", "dumb"), ("NO_COLOR", "1"), "a pipe"])
def test_warnings_and_the_end_are_coloured_in_a_terminal_alone(monkeypatch, plain):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if isinstance(plain, tuple):
        monkeypatch.setenv(*plain)
    stream = io.StringIO()
    stream.isatty = lambda: plain != "a pipe"
    console = Console(quiet=False, stream=stream)
    for line in ("data   warning: \x1b", "data   no warning: x", "done: runs/x"):
        console.say(line)
    starts = [line[:5] for line in stream.getvalue().splitlines()]
    assert starts == (["data "] * 2 + ["done:"] if plain else ["\x1b[33m", "data ", "\x1b[32m"])


LINE = CASES["line"]


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


def test_a_terminal_shows_validations_checkpoints_and_the_end_on_lines_of_their_own(
    world, input_words, tmp_path
):
    """The run is at a terminal of 60 columns."""
    words = [
        *SMALL, f"run.root={tmp_path}", "run.name=run", "data.validation=0.1", "train.steps=4",
        "train.validate_every=2", "checkpoint.every=2", "batch.seq_len=256",
        *input_words,
    ]  # fmt: skip
    (shown,) = world.call(1, at_a_terminal, words, 60)
    lines = [line.rpartition("\r")[2] for line in shown.split("\r\n")]
    said = [line.split(" ")[0] for line in lines]
    assert said.count("valid") == 4  # before the first step, after steps 2 and 4, and at the end
    assert said.count("saved") == 2
    redrawn = [part for line in shown.split("\r\n") for part in line.split("\r") if "eta " in part]
    assert len(redrawn) == 4
    assert max(map(len, redrawn)) < 60
    evaluated = [event["step"] for event in Run(tmp_path / "run").event("evaluation")]
    assert evaluated == [0, 2, 4]
    best = next(line for line in lines if line.startswith("best "))
    assert Path(best.rpartition(": ")[2], "MANIFEST.json").is_file()
    assert any(line.startswith("loss ") and "in the last step" in line for line in lines)


def at_a_terminal(words, columns):
    """Train in this process at a terminal of its own, and return what it shows."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    shown = []

    def read():
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while part := os.read(ours, 4096):
                shown.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w") as terminal, contextlib.redirect_stdout(terminal):
        assert main(["train", *words]) == 0
    reader.join(60)
    return b"".join(shown).decode()


def test_figures_are_short():
    assert progress_line(LINE, 5000, 9061) == (
        "1,240/5,000  24%  loss 1.8342  lr 2.7e-05  |g| not finite  41.2k tok/s  MFU "
        "41.2% (causal 39.1%)  61.30 GiB  2.41 s  eta 2h31m"
    )
    of_pairs = LINE | {"reward_accuracy": 0.625, "reward_margin": -0.01234}
    assert "loss 1.8342  accuracy 62%  margin -0.012  lr" in progress_line(of_pairs, 5000, 9061)
    assert [short(n) for n in (3, 999, 41_234, 7.5e6, 2e9)] == ["3", "999", "41.2k", "7.5M", "2.0G"]
    assert [duration(s) for s in (5, 65, 9061)] == ["5s", "1m05s", "2h31m"]


@pytest.mark.parametrize(
    "options, adapter, freeze, first",
    CASES["flops"],
)
def test_the_formula_of_flops_counts_what_torch_counts(options, adapter, freeze, first):
    """Frozen weights have no product for a gradient of their own.

    Torch counts attention without the causal half, as PaLM does. Nothing is computed twice. The
    gradient of what enters the first block that is trained in is computed and not counted, and
    norms are in the formula, but in no matrix product.
    """
    sizes = {"vocab_size": 300, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 3}
    config, length = ModelConfig(**sizes | options), 96
    model = Decoder(config)
    choose_trained(model, resolve_adapters(Adapter(**adapter), config), freeze)
    initialize_weights(model, 0)
    places = torch.arange(length)
    layout = DocumentAttention([[length]], length, torch.device("cpu"))
    batch = MicroBatch(places[None], places[None], layout, places, places, torch.ones(length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(batch, CrossEntropy(batch.weights))[0].backward()
    block, unneeded = model.model.layers[str(first)], 0
    if not block.input_layernorm.weight.requires_grad:
        attention = block.self_attn
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
            unneeded += layer.weight.numel() + layer.lora_A.weight.numel()
    in_norms = 0
    for name, norm in model.named_parameters():
        if norm.ndim == 1:
            number = re.search(r"layers.(\d)", name)
            reached = number is None or int(number[1]) >= first
            in_norms += norm.numel() * (2 + 2 * reached + 2 * norm.requires_grad)
    counted = palm_flops(config, length, length, trained_work(model))
    assert counter.get_total_flops() == counted - length * (in_norms + 2 * unneeded)
    if not adapter and not freeze:
        assert counted == palm_flops(config, length, length)


def test_the_causal_formula_leaves_out_what_no_token_sees():
    config, length = ModelConfig(vocab_size=300, hidden_size=64, head_dim=16), 96
    whole = palm_flops(config, length, length)
    heads = config.num_attention_heads * 16
    halved = 6 * config.num_hidden_layers * heads * length**2
    assert causal_flops(config, length, length**2) == whole - halved
    two_documents = causal_flops(config, length, 2 * (length // 2) ** 2)
    assert two_documents < causal_flops(config, length, length**2)


def test_a_profile_holds_the_steps_asked_for_and_tells_who_waits_for_whom(train, ledger):
    """The first run ends in the middle of them; in the second one rank is late."""
    words = (
        "schedule=constant profile.steps=2-4 profile.memory=true"
        " sharding.reshard_after_forward=false"
    )
    train("run", words, "train.steps=2", ranks=2)
    late = inject.at("backward", partial(time.sleep, 0.5), rank=1)
    run = train("run", words, "train.steps=4", ranks=2, seam=late)
    folder = run.folder / "profile"
    assert sorted(file.name for file in folder.iterdir()) == [
        f"steps-{steps}-{what}"
        for steps in ("2-2", "3-4")
        for what in ("phases.json", "rank-0.json.gz", "rank-1.json.gz")
    ]
    assert [event["steps"] for event in run.event("profile")] == [[2, 2], [3, 4]]
    assert run["loss"] == ledger.run("every step")["loss"][:4]
    assert not (ledger.run("every step").folder / "profile").exists()
    with gzip.open(folder / "steps-3-4-rank-1.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = Counter(event["name"] for event in events if event.get("ph") == "X")
    assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4"}
    in_each = ["forward", "loss", "clip", "update"]
    in_each += [f"FSDP::pre_forward (model.layers.{number})" for number in (0, 1)]
    assert [names[name] for name in in_each] == [2] * 6
    assert names["aten::mm"] > 20
    phases = read_json(folder / "steps-3-4-phases.json")
    assert phases["steps"] == [3, 4]
    fast, slow = phases["ranks"]["0"], phases["ranks"]["1"]
    assert fast["gradient sync, exposed"]["seconds"] > 0.5
    assert slow["backward"]["idle"] > 0.9
    for row in ("data", "forward", "loss", "clip", "optimizer", "log"):
        assert min(fast[row]["seconds"], slow[row]["seconds"]) > 0
    trace = read_trace(folder / "steps-3-4-rank-0.json.gz")
    first, second = (event for event in trace if event.name.startswith("step "))
    assert sum(row["seconds"] for row in fast.values()) == pytest.approx(
        (second.end - first.begin) / 2e6
    ), "every instant counts once"
    (line,) = [line for line in run.out.splitlines() if "gradient sync, exposed" in line]
    assert "of 2 ranks" in run.out
    assert float(line.split()[-1]) > 900


def in_trace(kind, name, thread, begin, end, **args):
    """Return a slice of a trace as Kineto writes it; begin and end in milliseconds."""
    times = {"ts": 1e3 * begin, "dur": 1e3 * (end - begin)}
    return {"ph": "X", "cat": kind, "name": name, "tid": thread, "args": args, **times}


def test_on_a_gpu_messages_that_run_beside_a_kernel_are_hidden_and_those_alone_are_exposed(
    tmp_path,
):
    """A made trace, in the form that Kineto writes; the device's time is what counts, by the phase
    that launched it."""
    events = [in_trace("user_annotation", name, 1, *times) for name, *times in CASES["phases"]]
    for number, (name, stream, launched, *times) in enumerate(CASES["kernels"]):
        launch = in_trace("cuda_runtime", "launch", 2, launched, launched, correlation=number)
        events += [launch, in_trace("kernel", name, stream, *times, correlation=number)]
    events += CASES["no phases"]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"schemaVersion": 1, "traceEvents": events}, file)
    rows = phases_of(read_trace(tmp_path / "trace.json.gz"))
    ms = {
        row: [round(1e3 * args[what], 3) for what in ("seconds", "idle", "hidden")]
        for row, args in rows.items()
    }
    assert ms == CASES["milliseconds"]
    assert sum(seconds for seconds, _, _ in ms.values()) == 150
    assert table_of_phases({0: rows})[-1].split() == ["a", "step", "150.0"]


def test_trackers_get_the_metrics_of_a_method_and_of_ones_own_in_groups(tmp_path):
    logged = []

    class Recorder(Tracker):
        def log(self, values, step):
            logged.append(values)

    with inject.around("open_tracker", lambda real, kind, run: Recorder(run)):
        config = {"objective": {"name": "grpo"}}
        trackers = Trackers(Logging(wandb="online"), tmp_path, config, lambda text: None)
        trackers.log(CASES["logged"])
        trackers.close(0)
    assert logged == [CASES["sent"]]


def steps_of_mlflow(folder):
    """Return the steps with their losses of each run, the last run first."""
    client = pytest.importorskip("mlflow").MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'fsdp_trainer'")
    runs = client.search_runs([experiment.experiment_id])
    assert {(run.data.params["optim.lr"], run.info.status) for run in runs} == {("1", "FINISHED")}
    histories = [client.get_metric_history(run.info.run_id, "loss") for run in runs]
    return [[(one.step, one.value) for one in history] for history in histories]


def steps_of_tensorboard(folder):
    """Return the steps with their losses that TensorBoard shows."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(f"{folder}/tensorboard").Reload()
    return [[(scalar.step, scalar.value) for scalar in shown.Scalars("loss")]]


REAL = {"mlflow": steps_of_mlflow, "tensorboard": steps_of_tensorboard}
"""What reads the trackers that need no service."""


@pytest.mark.parametrize(
    "mode",
    ["wandb=online", "wandb=offline", "trackio=true", "comet=online", "comet=offline",
     "swanlab=offline", "mlflow=true", "tensorboard=true"],
)  # fmt: skip
def test_each_tracker_shows_each_step_once_whatever_ends_a_run(tmp_path, monkeypatch, mode):
    name, _, value = mode.partition("=")
    package = {"comet": "comet_ml"}.get(name, name)
    if package in SERVICES:
        service = SERVICES[package]()
        monkeypatch.setitem(sys.modules, package, service)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    cfg, said = Logging(**{name: True if value == "true" else value}), []
    records = Records(tmp_path, said.append)

    def session(losses, step=0, is_killed=False, **start):
        records.cut_after(step)
        trackers = Trackers(cfg, tmp_path, {"optim": {"lr": 1}}, said.append, step, **start)
        for step, loss in losses:
            line = {"step": step, "loss": loss, "lr": 1.0}
            records.cut_after(step - 1)
            records.write([line])
            trackers.log(line)
        if is_killed:
            idle = threading.Event()
            trackers.threads[0].put(lambda steps: idle.set())
            assert idle.wait(60)
        else:
            trackers.close(0)

    def shown():
        if name in REAL:
            return REAL[name](tmp_path)
        for stored in service.runs.values():
            assert len({*stored.names}) == 1, "its name stays"
            assert "lr" in str(stored.config)
        return [stored.steps for stored in reversed(service.runs.values())]

    session([(1, 1), (2, 2), (3, 3)])
    session([(3, 3), (4, 4)], step=2)  # after a crash
    session([(5, 5), (6, 6)], step=4, is_killed=True)
    session([(7, 7)], step=6)
    assert shown() == [[(i, i) for i in range(1, 8)]]
    assert said == []
    session([(6, 60)], step=5, goes_back=True)  # with another learning rate
    session([(7, 70), (8, 80), (7, 700)], step=6)  # a spike
    last = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60), (7, 700)]
    assert shown()[0] == last
    assert len(said) == len(shown()) - 1 == (0 if name == "tensorboard" else 2)
    assert "are now repeated" in "".join(said) or name == "tensorboard"


@pytest.mark.parametrize("function", SIGNATURES)
def test_stand_ins_of_trackers_take_what_the_packages_do(function):
    pytest.importorskip(function.split(":")[0])
    used = dict(signature(SIGNATURES[function]).parameters)
    used.pop("self")
    by_place = [
        name for name, parameter in used.items() if parameter.kind != Parameter.KEYWORD_ONLY
    ]
    real = [name for name in signature(resolve_name(function)).parameters if name != "self"]
    assert {*used} <= {*real}
    assert real[: len(by_place)] == by_place


def test_what_repeats_steps_with_other_values_is_known():
    assert repeats_steps({"optim.lr": [1, 2]}, {"step": 4}, 2)
    assert not repeats_steps({"optim.lr": [1, 2]}, {"step": 2}, 2)
    assert not repeats_steps({"logging.every": [1, 2], "world_size": [1, 2]}, {"step": 4}, 2)


def test_an_offline_wandb_run_goes_on_in_the_same_one(train):
    pytest.importorskip("wandb")
    first, again = (
        train("run", f"train.steps={steps} logging.wandb=offline", timeout=200) for steps in (1, 2)
    )
    (name,) = [read_json(path)["id"] for path in first.folder.rglob("wandb_id")]
    folders = sorted((again.folder / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all(folder.name.endswith(name) and list(folder.glob("*.wandb")) for folder in folders)
    assert again["step"] == [1, 2]
    assert "gets no more metrics" not in first.out + again.out


def test_without_tensorboard_its_installation_is_told(train):
    seam = inject.without_package("tensorboard")
    assert "pip install" in train("run", "logging.tensorboard=true", seam=seam, code=2).err


def test_data_cannot_command_the_terminal():
    stream = io.StringIO()
    Terminal(file=stream, force_terminal=True, width=80).print(Text("a\x1b[2Jb\u009b", "bold"))
    Console(quiet=False, stream=stream).say("c\x1b]0;d\x07")
    said = stream.getvalue()
    assert r"a\u001b[2Jb\u009b" in said
    assert said.count("\x1b") == 2  # our own: bold, and its end
    assert r"c\u001b]0;d\u0007" in said
