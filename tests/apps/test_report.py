"""`report` tells what the files of a run say, of any run, and shows it on a page that needs nothing
else."""

import json
import re
import subprocess
import sys
import time
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import inject
import numpy as np
import pytest
import yaml
from browser import browser_page, settle

from fsdp_trainer.apps.report import read
from fsdp_trainer.apps.report.goodput import goodput
from fsdp_trainer.apps.report.page import ROWS, write
from fsdp_trainer.apps.report.read import read_run
from fsdp_trainer.apps.report.run_summary import Summary
from fsdp_trainer.cli import main

EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(1)>" onmouseover="x'
STEP = {
    "data": 0.5,
    "forward": 1.0,
    "backward": 2.0,
    "clip": 0.25,
    "read": 0.25,
    "log": 1.0,
}  # 5 seconds


def write_run(folder, lines=(), events=(), samples=(), **config):
    folder.mkdir(parents=True)
    for name, content in (("metrics", lines), ("events", events), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    if config:
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def steps(first, last, time, **more):
    """Lines of steps that take 5 seconds each, the first of them until `time`."""
    return [
        {"step": s, "loss": 6 - s / 10, "grad_norm": 1.0, "lr": 1e-3, "tokens": 100 * s,
        "time": time + 5.0 * (s - first), "step_seconds": 4.0, "phases": STEP} | more
        for s in range(first, last + 1)
    ]  # fmt: skip


def crashed_and_resumed():
    """Ten seconds of start, 2 steps and a checkpoint of 3 seconds, 2 more steps, a crash, 50
    seconds later another start of 20, the steps again."""
    lines = [*steps(1, 2, 1015.0), *steps(3, 6, 1105.0), *steps(7, 8, 1145.0)]
    lines[0]["phases"] = {"start": 10.0} | STEP
    lines[2]["phases"] = {"start": 20.0} | STEP
    lines[3] |= {"validation_loss": 5.5, "time": 1117.0, "phases": STEP | {"validation": 7.0}}
    for line, late in zip(lines[4:], (7, 15, 0, 0), strict=True):
        line["time"] += late
    lines[5]["phases"] = STEP | {"compile": 8.0}
    events = [
        {"event": "start", "time": 1010.0, "step": 0, "seconds": 10.0, "world_size": 4},
        {"event": "checkpoint", "time": 1023.0, "step": 2, "seconds": 9.0, "stall_seconds": 3.0},
        {
            "event": "resume",
            "time": 1100.0,
            "step": 2,
            "seconds": 20.0,
            "world_size": 2,
            "reached": {"step": 4, "time": 1033.0},
        },
        {"event": "evaluation", "time": 1117.0, "step": 4, "loss": 5.5},
        {"event": "spike", "time": 1130.0, "step": 5, "loss": 9.0},
        {
            "event": "end",
            "time": 1154.0,
            "reason": "finished",
            "exit_code": 0,
            "phases": {"staging": 3.0, "end": 1.0},
        },
        {"event": "end", "time": 9999.0, "reason": "already finished", "exit_code": 0},
    ]
    return lines, events


class Page(HTMLParser):
    """Tags with their attributes, and the content of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._in = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = (tag, dict(attrs)) if tag in ("script", "style") else None

    def handle_data(self, data):
        if self._in:
            self.scripts.append((*self._in, data))
            self._in = None

    @property
    def data(self):
        return next(
            json.loads(content) for tag, attrs, content in self.scripts if attrs.get("id") == "data"
        )


def report(*sources, out, code=0):
    """The page of some runs."""
    assert main(["report", f"source=[{','.join(map(str, sources))}]", f"out={out}"]) == code
    return Page(out.read_text())


@pytest.mark.slow
def test_a_trained_run_is_told_as_its_files_tell_it(train, capsys):
    run = train(
        "a",
        "train.steps=4",
        "train.validate_every=2",
        "checkpoint.every=2",
        "data.validation=0.1",
        'train.sample_prompts=["hello"]',
    )
    assert main(["report", f"source={run.folder}"]) == 0
    said = capsys.readouterr().out
    assert "page: " in said
    assert "4 of 4" in said
    assert "finished" in said
    assert "1 start" in said
    page = Page((run.folder / "report.html").read_text())
    [shown] = page.data["runs"]
    assert shown["x"]["steps"] == [1, 2, 3, 4]
    assert shown["x"]["tokens"] == run.column("tokens")
    for name in ("loss", "grad_norm", "lr", "tokens_per_second"):
        assert shown["lines"][name] == pytest.approx(run.column(name), rel=1e-5)
    assert [value is None for value in shown["lines"]["validation_loss"]] == [
        True,
        False,
        True,
        False,
    ]
    assert shown["lines"]["validation_loss"][1::2] == pytest.approx(
        [line["validation_loss"] for line in run.metrics[1::2]], rel=1e-5
    )
    assert [e["kind"] for e in shown["events"]] == [e["event"] for e in run.events]
    assert main(["report", f"source={run.folder}", "format=json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    assert report["loss"] == run.metrics[-1]["loss"]
    assert report["state"] == "finished"
    assert report["events"]["checkpoint"] == 2
    seconds = report["goodput_seconds"]
    assert sum(seconds.values()) == pytest.approx(report["wall_seconds"])
    assert min(seconds.values()) >= 0
    wrote = sum(sum(line["phases"].values()) for line in run.metrics) + sum(
        run.event("end")[-1]["phases"].values()
    )
    assert report["wall_seconds"] == pytest.approx(wrote, abs=0.2)
    assert all(seconds[part] > 0 for part in ("training", "startup", "validation", "checkpoint"))
    assert any(line.startswith("data") for line in run.event("start")[0]["about"])
    assert "samples" in [a.get("id") for _, a in page.tags]


@pytest.mark.slow
def test_turns_of_a_rollout_are_shown_with_whose_they_are(tmp_path):
    turns = [{"own": True, "text": "I call"}, {"own": False, "text": "it says"}]
    sample = {"step": 5, "prompt": "p", "text": "I call it says", "reward": 2.0, "turns": turns}
    folder = write_run(tmp_path / "run", steps(1, 5, 1000.0), samples=[sample])
    report(folder, out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert '<span class="own">I call</span><span class="faint">it says</span>' in text


@pytest.mark.slow
def test_rollouts_are_conversations_on_a_page_of_their_own(tmp_path):
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
    turns = [
        {"own": True, "text": call, "reward": 0.25},
        {"own": False, "text": "it says <2>"},
        {"own": True, "text": "2"},
    ]
    sample = {"step": 5, "prompt": "1+1?", "text": "…", "reward": 2.0, "turns": turns}
    plain = {"step": 6, "prompt": "<b>", "text": "</script><i>", "reward": -1.0}
    folder = write_run(tmp_path / "run", steps(1, 5, 1000.0), samples=[sample, plain])
    report(folder, out=tmp_path / "page.html")
    assert 'href="./page-rollouts.html"' in (tmp_path / "page.html").read_text()
    text = (tmp_path / "page-rollouts.html").read_text()
    assert "step 5, reward 2, 2 turns" in text
    assert "→ calculator({&#39;expression&#39;: &#39;1+1&#39;})" in text
    assert "model, reward 0.25" in text
    assert '<span class="faint">it says &lt;2&gt;</span>' in text
    assert "&lt;/script&gt;&lt;i&gt;" in text
    assert text.index("step 6") < text.index("step 5"), "the newest first"
    report(write_run(tmp_path / "other", steps(1, 2, 0.0)), out=tmp_path / "other.html")
    assert not (tmp_path / "other-rollouts.html").exists()


def test_goodput_sums_to_the_wall_time_of_a_run_that_crashed(tmp_path):
    good = goodput(read_run(write_run(tmp_path / "a", *crashed_and_resumed()), "a"))
    assert good.wall == 1154.0 - 1000.0 == pytest.approx(sum(good.seconds.values()))
    assert (good.attempts, good.lost_steps) == (2, 2)
    assert good.seconds == pytest.approx({
        "training": 8 * 3.5, "data": 8 * 0.5, "validation": 7.0, "checkpoint": 3.0 + 3.0,
        "compile": 8.0, "startup": 10.0, "restart": 20.0,
        "redone": 10.0, "down": 1080.0 - 1033.0, "other": 8 * 1.0 + 1.0 + 5.0,
    })  # fmt: skip


def test_what_was_trained_before_a_stop_in_order_is_not_lost_and_before_a_rewind_is(tmp_path):
    events = [{"event": "start", "time": 1000.0, "step": 0, "seconds": 0.0}]
    stop = {
        "event": "end",
        "time": 1012.0,
        "reason": "SIGTERM",
        "exit_code": 75,
        "phases": {"staging": 2.0},
    }
    stopped = [
        *events,
        stop,
        {
            "event": "resume",
            "time": 1020.0,
            "step": 2,
            "seconds": 3.0,
            "reached": {"step": 2, "time": 1010.0},
        },
    ]
    good = goodput(
        read_run(
            write_run(tmp_path / "a", [*steps(1, 2, 1005.0), *steps(3, 3, 1025.0)], stopped), "a"
        )
    )
    assert (good.seconds["redone"], good.seconds["checkpoint"], good.seconds["down"]) == (
        0.0,
        2.0,
        5.0,
    )
    rewound = [*events, {"event": "rewind", "time": 1031.0, "step": 5, "to": 2, "seconds": 6.0}]
    good = goodput(
        read_run(
            write_run(
                tmp_path / "b",
                [*steps(1, 2, 1005.0), *steps(3, 3, 1036.0, phases=STEP | {"rewind": 6.0})],
                rewound,
            ),
            "b",
        )
    )
    assert (good.seconds["redone"], good.seconds["restart"], good.seconds["down"], good.wall) == (
        15.0,
        6.0,
        0.0,
        36.0,
    )


def test_what_an_older_version_did_not_write_is_left_out(tmp_path):
    lines = [
        {key: value for key, value in line.items() if key not in ("time", "phases")}
        for line in steps(1, 4, 0.0)
    ]
    folder = write_run(
        tmp_path / "a",
        lines,
        [
            {"event": "start", "time": 1000.0, "step": 0},
            {"event": "checkpoint", "time": 1009.0, "step": 4},
        ],
    )
    assert goodput(read_run(folder, "a")) is None
    [shown] = report(folder, out=tmp_path / "page.html").data["runs"]
    assert shown["x"]["steps"] == [1, 2, 3, 4]
    assert [event["time"] for event in shown["events"]] == [
        0,
        9,
    ]
    assert "No phase times are on record" in (tmp_path / "page.html").read_text()


def test_names_prompts_and_settings_are_text_and_nothing_is_loaded(tmp_path):
    lines, events = crashed_and_resumed()
    events.insert(1, {"event": EVIL, "time": 1011.0, "why": EVIL})
    turns = [{"own": True, "text": EVIL, "reward": EVIL}, {"own": False, "text": EVIL}]
    samples = [{"step": 1, "prompt": EVIL, "text": EVIL}]
    samples += [{"step": 2, "prompt": EVIL, "turns": turns, "reward": 1.0}, {"turns": 3}]
    folder = write_run(
        tmp_path / "<script>alert(1)<", lines, events, samples, data={"path": EVIL, EVIL: 1}
    )
    plain = write_run(tmp_path / "plain", lines, events[2:], samples, data={"path": "b"})
    (tmp_path / "c").symlink_to(folder)
    page = report(tmp_path / "c", plain, out=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert EVIL in page.data["runs"][0]["events"][1]["text"]
    assert "&lt;img src=x onerror" in text
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert not {"img", "link", "iframe", "base", "object", "form"} & {tag for tag, _ in page.tags}
    assert not [attrs for _, attrs in page.tags if {"src", "style"} & attrs.keys()]
    links = [attrs["href"] for _, attrs in page.tags if "href" in attrs]
    assert links == ["./page-rollouts.html"]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp|WebSocket|importScripts|sendBeacon", text)
    rollouts = (tmp_path / "page-rollouts.html").read_text()
    assert "&lt;img src=x onerror" in rollouts
    assert rollouts.count("<script") == 1
    assert "<img" not in rollouts
    policy = next(
        attrs["content"]
        for tag, attrs in page.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    for tag, attrs, content in page.scripts:
        named = f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
        assert attrs.get("type") == "application/json" or f"{tag}-src {named}" in policy
    assert policy.startswith("default-src 'none'")


@pytest.mark.slow
def test_a_long_run_is_thinned_to_its_extremes(tmp_path):
    lines = [
        {"step": s, "loss": 2.0 + (s % 7) / 10, "grad_norm": 1.0, "tokens": s, "lr": 1e-3}
        for s in range(1, 30_001)
    ]
    lines[12_345]["loss"], lines[20_001]["loss"], lines[7]["grad_norm"], lines[9]["loss"] = (
        99.0,
        0.5,
        1e6,
        None,
    )
    [run] = report(write_run(tmp_path / "a", lines), out=tmp_path / "page.html").data["runs"]
    at = dict(
        zip(
            run["x"]["steps"],
            zip(
                run["lines"]["loss"],
                run["lines"]["grad_norm"],
                run["lines"]["mean of loss"],
                strict=True,
            ),
            strict=True,
        )
    )
    assert at[12_346][0] == 99.0
    assert at[20_002][0] == 0.5
    assert at[8][1] == 1e6
    assert {1, 30_000} <= at.keys()
    assert ROWS / 4 < len(at) <= 2 * ROWS
    assert run["rows"] == 30_000
    assert at[12_346][2] == pytest.approx(
        np.mean([line["loss"] for line in lines[12_345 - 75 : 12_345 + 76]]), rel=1e-5
    )
    assert all(value == lines[step - 1]["loss"] for step, (value, _, _) in at.items())


def test_what_cannot_be_read_is_counted_and_the_rest_is_shown(tmp_path, capsys, monkeypatch):
    folder = write_run(tmp_path / "a", *crashed_and_resumed())
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(
        b'{"step": 1, "lo\n\xff\xfe\x00\n[1, 2]\n' + whole + b'{"step": 9, "lo'
    )
    (folder / "config.yaml").write_text("a: [")
    with (folder / "events.jsonl").open("a") as file:
        file.write(
            '{"event": 5, "time": 1, "step": "x"}\n{"event": "no time"}\n{"event": "odd", '
            '"time": 1160.0, "step": null, "seconds": null}\n'
        )
    (folder / "samples.jsonl").write_text('{"step": null}\n')
    report(folder, out=tmp_path / "page.html")
    said = capsys.readouterr().out
    assert "3 lines of metrics.jsonl cannot be read" in said
    assert "config.yaml cannot be read" in said
    assert "\nsteps" in said
    with inject.setting("report_read_bytes", 1000):
        run = read.read_sources([str(folder)])[0]
    assert 0 < run.lines < 8
    assert run.last("step") == 8
    assert "only the last" in " ".join(run.remarks)


def test_a_run_says_in_which_state_it_is(tmp_path):
    lines, events = crashed_and_resumed()
    ended = {
        code: write_run(
            tmp_path / str(code),
            lines,
            [events[0], {"event": "end", "time": 1200.0, "reason": "why", "exit_code": code}],
        )
        for code in (0, 1, 75)
    }
    assert [read_run(folder, "a").state for folder in ended.values()] == [
        "finished",
        "failed",
        "stopped",
    ]
    again = {"event": "end", "time": 1300.0, "reason": "already finished", "exit_code": 0}
    assert (
        dict(Summary(read_run(write_run(tmp_path / "again", lines, [*events, again]), "a")).facts)[
            "state"
        ]
        == "finished"
    )
    refused = {"event": "end", "time": 1300.0, "reason": "no such key", "exit_code": 2}
    ends = [{"event": "end", "time": 1200.0, "reason": "done", "exit_code": 0}, refused, refused]
    after = read_run(write_run(tmp_path / "refused after", lines, [events[0], *ends]), "a")
    assert (after.state, after.explanation) == (
        "finished",
        "done; a later start was refused: no such key",
    )
    never = read_run(write_run(tmp_path / "refused at once", [], [refused]), "a")
    assert (never.state, never.explanation) == ("failed", "no such key")
    silent = write_run(
        tmp_path / "silent", lines, events[:4]
    )  # files that were just copied say nothing
    assert (read_run(silent, "a").state, read_run(silent, "a").explanation) == (
        "failed",
        "ended without a message",
    )
    alive = write_run(
        tmp_path / "alive",
        lines,
        [*events[:4], {"event": "checkpoint", "time": time.time() - 60, "step": 8}],
    )
    assert read_run(alive, "a").state == "running"


@pytest.mark.slow
def test_an_empty_run_says_so_and_a_folder_without_runs_is_refused(tmp_path, capsys):
    page = report(write_run(tmp_path / "empty"), out=tmp_path / "page.html")
    assert page.data["runs"][0]["rows"] == 0
    assert "nothing is on record yet" in capsys.readouterr().out
    assert "No step is on record yet" in (tmp_path / "page.html").read_text()
    (tmp_path / "nothing").mkdir()
    assert main(["report", f"source=[{tmp_path}/nothing,{tmp_path}/empty]"]) == 2
    assert f"source={tmp_path}/nothing holds no run" in " ".join(capsys.readouterr().err.split())
    assert main(["report", f"source=[{tmp_path}/empty,{tmp_path}/emty]"]) == 2
    assert f"Did you mean  {tmp_path}/empty ?" in capsys.readouterr().err
    assert main(["report", f"source={tmp_path}/empty", "out=/dev/null/page.html"]) == 2
    assert "out=/dev/null/page.html" in capsys.readouterr().err


@pytest.fixture
def sweep(tmp_path):
    """A sweep of three jobs that was moved: two finished, one refused before it had a folder."""
    jobs = []
    for i, (job, lr, objective) in enumerate(
        (("a1", "0.1", 5.0), ("b2", "0.02", 4.0), ("c3", "-1", None))
    ):
        jobs.append(
            {
                "job": job,
                "folder": f"/elsewhere/{job}",
                "overrides": ["model=tiny", f"optim.lr={lr}"],
                "state": "refused" if objective is None else "finished",
                "objective": objective,
                "seconds": 7.0,
                "reason": "below 0" if objective is None else "finished",
            }
        )
        if objective:
            lines, events = crashed_and_resumed()
            write_run(
                tmp_path / "s" / "jobs" / job,
                lines[: 8 - i],
                events,
                model={"name": "tiny"},
                optim={"lr": float(lr)},
                run={"name": job},
            )
    (tmp_path / "s" / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in jobs))
    return tmp_path / "s"


def test_a_sweep_is_a_table_of_its_jobs(sweep, tmp_path, capsys):
    assert main(["report", f"source={sweep}"]) == 0
    said, page = capsys.readouterr().out, (sweep / "report.html").read_text()
    assert said.index("b2") < said.index("a1") < said.index("c3")
    assert "refused" in said
    assert "optim.lr: 0.1, 0.02" in said
    assert re.search(r"b2 +0\.02 +4 +finished", said)
    rows = [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row)]
        for row in re.findall(r"<tr>.*?</tr>", page.split("</table>")[0])
    ]
    assert rows[0][:4] == ["run", "optim.lr", "objective", "state"]
    assert [row[:4] for row in rows[1:]] == [
        ["b2 best", "0.02", "4", "finished"],
        ["a1", "0.1", "5", "finished"],
        ["c3", "-1", "", "refusedbelow 0"],
    ]
    assert [run["rows"] for run in Page(page).data["runs"]] == [7, 8, 0]
    assert main(["report", f"source={tmp_path}", "format=json"]) == 0  # a folder of sweeps and runs
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == [
        "s/a1",
        "s/b2",
        "s/c3",
    ]
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_the_report_needs_no_torch():
    code = "import sys, fsdp_trainer.apps.report.verb; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def write_method_run(folder, method, **figures):
    """A run of a method that writes some figures, and an own metric, next to the general ones."""
    lines = [line | figures | {"mine": 7, "own_metrics": ["mine"]} for line in steps(1, 4, 10.0)]
    return write_run(folder, lines, objective={"name": method})


DPO = {
    "reward_margin": 2.0, "reward_accuracy": 0.5, "reward_chosen": 3.0, "reward_rejected": 1.0,
    "validation_reward_margin": 1.5, "surprise": {"a": 1, "b": 2.0}, "flag": True, "note": "text",
}  # fmt: skip
KTO = {"reward_margin": 4.0, "reward_good": 2.0, "reward_bad": -2.0, "baseline": 0.0}


def charts_by_section(page):
    """Section title → chart title → (run, column) of its lines."""
    return {
        section["title"]: {
            chart["title"]: [(line["run"], line["column"]) for line in chart["lines"]]
            for chart in section["charts"]
        }
        for section in page.data["sections"]
    }


def test_each_number_of_a_method_and_of_ones_own_has_a_curve_in_its_section(tmp_path, capsys):
    folder = write_method_run(tmp_path / "run", "dpo", **DPO)
    page = report(folder, out=tmp_path / "page.html")
    charts = charts_by_section(page)
    assert list(charts) == ["Course", "DPO", "Your own metrics", "Speed and memory"]
    assert list(charts["Course"]) == ["Loss", "Learning rate", "Gradient norm, before clipping"]
    assert list(charts["DPO"].values()) == [
        [(0, "reward_margin"), (0, "validation_reward_margin")],
        [(0, "reward_accuracy")],
        [(0, "reward_chosen"), (0, "reward_rejected")],
        [(0, "surprise/a"), (0, "surprise/b")],
    ]
    assert charts["Your own metrics"] == {"Mine": [(0, "mine")]}
    assert page.data["runs"][0]["lines"]["surprise/b"] == [2, 2, 2, 2]
    said = " ".join(capsys.readouterr().out.split())
    assert "DPO reward margin 2 (validation 1.5), reward accuracy 0.5, reward chosen 3" in said
    assert "Your own metrics mine 7" in said
    assert main(["report", f"source={folder}", "format=json"]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    numbers = {name: value for name, value in DPO.items() if isinstance(value, float)}
    assert shown["method_metrics"] == numbers | {"surprise/a": 1.0, "surprise/b": 2.0}
    assert (shown["method"], shown["own_metrics"]) == ("dpo", {"mine": 7.0})


def test_methods_with_common_metrics_share_charts_and_others_have_a_section(tmp_path, capsys):
    folders = [
        write_method_run(tmp_path / name, name, kl=0.1, **figures)
        for name, figures in (("dpo", DPO), ("kto", KTO), ("grpo", {"reward": 0.25}), ("new", {}))
    ] + [write_method_run(tmp_path / "distil", "distil", kl=0.2)]
    charts = charts_by_section(report(*folders, out=tmp_path / "page.html"))
    assert "Distillation" in charts
    assert charts["Distillation"] == {"Divergence from the teacher, nats a token": [(4, "kl")]}
    of_both = next(c for title, c in charts.items() if "DPO" in title and "KTO" in title)
    assert of_both["Rewards of the answers"] == [
        (0, "reward_chosen"), (0, "reward_rejected"), (1, "reward_good"), (1, "reward_bad"),
    ]  # fmt: skip
    assert charts["Your own metrics"]["Mine"] == [(run, "mine") for run in range(5)]
    assert re.search(r"reward accuracy.*reward margin.*kl", (tmp_path / "page.html").read_text())
    said = capsys.readouterr().out
    assert re.search(r"dpo +5\.6 +0\.5 +2 ", said)
    assert re.search(r"kto +5\.6 +4 ", said)


@pytest.mark.slow
@pytest.mark.further
def test_the_page_in_a_browser(sweep, tmp_path):
    report(sweep, out=tmp_path / "page.html")
    report(write_run(tmp_path / "empty"), out=tmp_path / "empty.html")
    with browser_page() as page:
        page.goto(f"file://{tmp_path}/empty.html")
        assert page.evaluate("charts.length") == 0
        page.goto(f"file://{tmp_path}/page.html")
        points = "charts.find(u => u.name === 'loss').data[1].filter(y => y !== null).length"
        assert page.evaluate(points) == 8
        assert page.evaluate("charts.some(u => u.name === 'phases')")
        assert page.evaluate("scatters.map(u => u.setting)") == ["optim.lr"]
        over = page.locator("#charts .u-over").first
        box = over.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 50)
        settle(lambda: page.locator("#tip").is_visible(), page)
        tip = page.locator("#tip").inner_text()
        assert "step 3" in tip
        assert re.search(r"optim\.lr=0\.1\s+5\.7", tip)
        assert re.search(r"optim\.lr=0\.02\s+5\.7", tip)
        extent = "charts.map(u => [u.scales.x.min, u.scales.x.max])"
        assert page.evaluate(extent) == [[1, 8]] * page.evaluate("charts.length")
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 50, steps=3)
        page.mouse.up()
        settle(lambda: page.evaluate(extent)[0] != [1, 8], page)
        zoomed = page.evaluate(extent)
        assert all(2.5 < low < 3.7 and 5.3 < high < 6.5 for low, high in zoomed)
        over.dblclick()
        settle(lambda: page.evaluate(extent)[0] == [1, 8], page)
        over.focus()
        page.keyboard.press("+")
        settle(lambda: page.evaluate(extent)[0] != [1, 8], page)
        assert page.evaluate(extent)[0][1] - page.evaluate(extent)[0][0] < 7
        page.keyboard.press("Escape")
        page.get_by_label("tokens", exact=True).check()
        assert page.evaluate(extent)[0] == [100, 800]
        page.get_by_label("time", exact=True).check()
        assert page.evaluate(extent)[0] == [15, 1150 - 1000]
        page.get_by_role("button", name="objective").click()
        assert page.locator("#runs tbody tr td:first-child").all_inner_texts() == [
            " b2 best",
            " a1",
            "c3",
        ]
        page.locator("[data-run='0']").uncheck()
        assert (
            page.evaluate(
                "new Set(charts.find(u => u.name === 'loss').shown.map(line => line.run)).size"
            )
            == 1
        )
        dark = "getComputedStyle(document.body).backgroundColor"
        before = page.evaluate(dark)
        page.locator("#theme").click()
        assert page.evaluate(dark) != before
        page.set_viewport_size({"width": 390, "height": 800})
        settle(lambda: page.evaluate("charts[0].width") <= 390, page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.slow
@pytest.mark.further
def test_the_page_of_rollouts_in_a_browser(tmp_path):
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    samples = [
        {"step": i, "prompt": f"question {i}", "text": call if i == 2 else "no", "reward": i / 2}
        for i in range(1, 5)
    ]
    report(write_run(tmp_path / "run", steps(1, 5, 0.0), samples=samples), out=tmp_path / "a.html")
    with browser_page() as page:
        page.goto(f"file://{tmp_path}/a.html")
        page.get_by_role("link", name="Each rollout as a conversation").click()
        shown = "[...document.querySelectorAll('.rollout')].filter(e => !e.hidden).length"
        assert page.evaluate(shown) == 4
        page.locator("#low").fill("1.5")
        assert page.evaluate(shown) == 2
        page.locator("#low").fill("")
        page.locator("#called").check()
        assert page.evaluate(shown) == 1
        page.locator("#find").fill("question 3")
        assert page.evaluate(shown) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "cells"),
    [(["40c", "z44"], 5), ([EVIL], None), (7, None), ([], None)],
    ids=["two blocks", "text", "number", "none"],
)
def test_the_load_of_every_expert_is_a_picture(tmp_path, load, cells):
    lines = [*steps(1, 2, 0.0, expert_load=["444", "444"]), *steps(3, 3, 10.0, expert_load=load)]
    run = read_run(write_run(tmp_path / "run", lines), "run")
    write([Summary(run)], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    drawn = re.search(r'<svg class="load".*?</svg>', html)
    assert (drawn and drawn[0].count("<rect")) == cells
    if cells:
        assert 'viewBox="0 0 3 2"' in drawn[0]
        assert 'x="2" y="0" width="1" height="1" fill-opacity="1' in drawn[0]
        assert "step 3" in html


@pytest.mark.slow
@pytest.mark.further
def test_lines_of_sources_and_of_both_answers_have_a_legend(tmp_path):
    figures = {"loss_by_source": {"maths": 2.0, "code": 1.0}, **DPO}
    report(write_method_run(tmp_path / "run", "dpo", **figures), out=tmp_path / "page.html")
    with browser_page() as page:
        page.goto(f"file://{tmp_path}/page.html")
        assert page.locator("#charts h2").all_inner_texts() == [
            "DPO",
            "Your own metrics",
            "Speed and memory",
        ]
        assert page.locator(".legend").all_inner_texts() == [
            "maths\ncode",
            "training\nvalidation",
            "chosen\nrejected",
            "a\nb",
        ]
