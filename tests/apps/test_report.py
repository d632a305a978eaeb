"""`report` tells what the files of a run say, of any run, and shows it on a page that needs nothing
else."""

import errno
import json
import re
import time
from pathlib import Path

import inject
import numpy as np
import pytest
import yaml
from browser import PageParts, browser_page, check_nothing_acts, settle
from folders import table
from world import write_lines

from fsdp_trainer.apps.report import read
from fsdp_trainer.apps.report.goodput import goodput
from fsdp_trainer.apps.report.page import ROWS, write
from fsdp_trainer.apps.report.read import read_run
from fsdp_trainer.apps.report.run_summary import Summary
from fsdp_trainer.cli import main

EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(1)>" onmouseover="x'
RUNS = table("apps/report_runs.yaml")
STEP, METHODS = RUNS["phases"], RUNS["methods"]


def write_run(folder, lines=(), events=(), samples=(), **config):
    folder.mkdir(parents=True)
    for name, content in (("metrics", lines), ("events", events), ("samples", samples)):
        write_lines(folder / f"{name}.jsonl", content)
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


def event(kind, time, **more):
    return {"event": kind, "time": time} | more


def end(time, reason, code=0, **more):
    return event("end", time, reason=reason, exit_code=code, **more)


def resume(time, step, seconds, reached):
    at = dict(zip(("step", "time"), reached, strict=True))
    return event("resume", time, step=step, seconds=seconds, reached=at)


def crashed_and_resumed():
    """Ten seconds of start, 2 steps and a checkpoint of 3 seconds, 2 more steps, a crash, 50
    seconds later another start of 20, the steps again."""
    lines = [*steps(1, 2, 1015.0), *steps(3, 6, 1105.0), *steps(7, 8, 1145.0)]
    lines[0]["phases"] = {"start": 10.0} | STEP
    lines[2]["phases"] = {"start": 20.0} | STEP
    lines[3] |= {"validation_loss": 5.5, "time": 1117.0, "phases": STEP | {"validation": 7.0}}
    lines[4]["time"] += 7
    lines[5] |= {"time": lines[5]["time"] + 15, "phases": STEP | {"compile": 8.0}}
    return lines, [event(**one) for one in RUNS["crashed"]]


def report(*sources, out, code=0):
    """The data of the page of some runs, and its text."""
    assert main(["report", f"source=[{','.join(map(str, sources))}]", f"out={out}"]) == code
    return data_of(out)


def data_of(file):
    html = file.read_text()
    texts = PageParts(html).texts
    return next(json.loads(text) for tags, text in texts if tags[-1][1].get("id") == "data"), html


def test_a_trained_run_is_told_as_its_files_tell_it(ledger, tmp_path, program):
    run = ledger.copy("plain", tmp_path / "run")
    said = program("report", run.folder)
    assert not [part for part in ("page: ", "4 of 4", "finished", "1 start") if part not in said]
    [shown] = data_of(run.folder / "report.html")[0]["runs"]
    assert shown["x"]["steps"] == [1, 2, 3, 4]
    assert shown["x"]["tokens"] == run["tokens"]
    for name in ("loss", "grad_norm", "lr", "tokens_per_second"):
        assert shown["lines"][name] == pytest.approx(run[name], rel=1e-5)
    validated = shown["lines"]["validation_loss"]
    assert validated[::2] == [None, None]
    assert validated[1::2] == pytest.approx(
        [line["validation_loss"] for line in run.metrics[1::2]], rel=1e-5
    )
    assert [e["kind"] for e in shown["events"]] == [e["event"] for e in run.events]
    [reply] = json.loads(program("report", run.folder, "format=json"))
    assert (reply["loss"], reply["state"]) == (run.metrics[-1]["loss"], "finished")
    assert reply["events"]["checkpoint"] == 2
    seconds = reply["goodput_seconds"]
    assert sum(seconds.values()) == pytest.approx(reply["wall_seconds"])
    assert min(seconds.values()) >= 0
    phases = [line["phases"] for line in (*run.metrics, run.event("end")[-1])]
    wrote = sum(sum(each.values()) for each in phases)
    assert reply["wall_seconds"] == pytest.approx(wrote, abs=0.2)
    assert all(seconds[part] > 0 for part in ("training", "startup", "validation", "checkpoint"))
    assert any(line.startswith("data") for line in run.event("start")[0]["about"])


def test_rollouts_are_conversations_on_a_page_of_their_own(tmp_path):
    folder = write_run(tmp_path / "run", steps(1, 5, 1000.0), samples=RUNS["samples"])
    _, html = report(folder, out=tmp_path / "page.html")
    assert 'id="samples"' in html
    assert 'href="./page-rollouts.html"' in html
    own_and_other = '<span class="own">2</span>', '<span class="faint">it says &lt;2&gt;</span>'
    assert own_and_other[1] + own_and_other[0] in html
    text = (tmp_path / "page-rollouts.html").read_text()
    assert "step 5, reward 2, 2 turns" in text
    assert "→ calculator({&#39;expression&#39;: &#39;1+1&#39;})" in text
    assert "model, reward 0.25" in text
    shown = [
        f'<pre class="faint turn">&lt;|{turn}</pre>' for turn in ("user|&gt;1+1?", "model|&gt;")
    ]
    assert "\n".join(shown) in text
    assert own_and_other[1] in text
    assert "&lt;/script&gt;&lt;i&gt;" in text
    assert text.index("step 6") < text.index("step 5"), "the newest first"
    report(write_run(tmp_path / "other", steps(1, 2, 0.0)), out=tmp_path / "other.html")
    assert not (tmp_path / "other-rollouts.html").exists()


def goodput_of(folder, lines, events):
    return goodput(read_run(write_run(folder, lines, events), "a"))


def test_goodput_sums_to_the_wall_time_of_a_run_that_crashed(tmp_path):
    good = goodput_of(tmp_path / "a", *crashed_and_resumed())
    assert good.wall == 1154.0 - 1000.0 == pytest.approx(sum(good.seconds.values()))
    assert (good.attempts, good.lost_steps) == (2, 2)
    assert good.seconds == pytest.approx({
        "training": 8 * 3.5, "data": 8 * 0.5, "validation": 7.0, "checkpoint": 3.0 + 3.0,
        "compile": 8.0, "startup": 10.0, "restart": 20.0,
        "redone": 10.0, "down": 1080.0 - 1033.0, "other": 8 * 1.0 + 1.0 + 5.0,
    })  # fmt: skip


def test_what_was_trained_before_a_stop_in_order_is_not_lost_and_before_a_rewind_is(tmp_path):
    start = event("start", 1000.0, step=0, seconds=0.0)
    stop = end(1014.0, "SIGTERM", 75, phases={"staging": 2.0})  # two seconds more than that
    stopped = [start, stop, resume(1020.0, 2, 3.0, (2, 1010.0))]
    good = goodput_of(tmp_path / "a", [*steps(1, 2, 1005.0), *steps(3, 3, 1025.0)], stopped)
    parts = ("redone", "checkpoint", "restart", "down")
    assert [good.seconds[part] for part in parts] == [0.0, 2.0, 0.0, 3.0]
    rewound = [start, event("rewind", 1031.0, step=5, to=2, seconds=6.0)]
    again = steps(3, 3, 1036.0, phases=STEP | {"rewind": 6.0})
    good = goodput_of(tmp_path / "b", [*steps(1, 2, 1005.0), *again], rewound)
    assert [good.seconds[part] for part in parts] == [15.0, 0.0, 6.0, 0.0]
    assert good.wall == 36.0


def test_what_an_older_version_did_not_write_is_left_out(tmp_path):
    lines = steps(1, 4, 0.0)
    for line in lines:
        del line["time"], line["phases"]
    events = [event("start", 1000.0, step=0), event("checkpoint", 1009.0, step=4)]
    folder = write_run(tmp_path / "a", lines, events)
    assert goodput(read_run(folder, "a")) is None
    data, html = report(folder, out=tmp_path / "page.html")
    assert data["runs"][0]["x"]["steps"] == [1, 2, 3, 4]
    assert [shown["time"] for shown in data["runs"][0]["events"]] == [0, 9]
    assert "No phase times are on record" in html


def test_names_prompts_and_settings_are_text_and_nothing_is_loaded(tmp_path):
    lines, events = crashed_and_resumed()
    evil = event(EVIL, 1011.0, why=EVIL)
    turns = [{"own": True, "text": EVIL, "reward": EVIL}, {"own": False, "text": EVIL}]
    samples = [{"step": 1, "prompt": EVIL, "text": EVIL}]
    samples += [{"step": 2, "prompt": EVIL, "turns": turns, "reward": 1.0}, {"turns": 3}]
    folder = write_run(
        tmp_path / "<script>alert(1)<",
        lines,
        [events[0], evil, *events[1:]],
        samples,
        data={"path": EVIL, EVIL: 1},
    )
    plain = write_run(tmp_path / "plain", lines, events[1:], samples, data={"path": "b"})
    (tmp_path / "c").symlink_to(folder)
    data, html = report(tmp_path / "c", plain, out=tmp_path / "page.html")
    assert EVIL in data["runs"][0]["events"][1]["text"]
    assert "&lt;img src=x onerror" in html
    page = check_nothing_acts(html, ["./page-rollouts.html"])
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not page.values("style")
    rollouts = (tmp_path / "page-rollouts.html").read_text()
    assert "&lt;img src=x onerror" in rollouts
    assert rollouts.count("<script") == 1
    assert "<img" not in rollouts


def test_a_long_run_is_thinned_to_its_extremes(tmp_path):
    lines = [
        {"step": s, "loss": 2.0 + (s % 7) / 10, "grad_norm": 1.0, "tokens": s, "lr": 1e-3}
        for s in range(1, 30_001)
    ]
    lines[12_345]["loss"], lines[20_001]["loss"], lines[9]["loss"] = 99.0, 0.5, None
    lines[7]["grad_norm"] = 1e6
    [run] = report(write_run(tmp_path / "a", lines), out=tmp_path / "page.html")[0]["runs"]
    shown = run["x"]["steps"]
    loss, norm, mean = (
        dict(zip(shown, run["lines"][name], strict=True))
        for name in ("loss", "grad_norm", "mean of loss")
    )
    assert (loss[12_346], loss[20_002], norm[8]) == (99.0, 0.5, 1e6)
    assert (shown[0], shown[-1], run["rows"]) == (1, 30_000, 30_000)
    assert ROWS / 4 < len(shown) <= 2 * ROWS
    window = [line["loss"] for line in lines[12_345 - 75 : 12_345 + 76]]
    assert mean[12_346] == pytest.approx(np.mean(window), rel=1e-5)
    assert loss == {step: lines[step - 1]["loss"] for step in shown}


def test_lines_beyond_those_in_memory_change_no_figure_but_the_median(tmp_path):
    lines, rows = steps(1, 4000, 1005.0), 1024
    for line in lines:
        step = line["step"]
        line |= {"loss": float("nan") if step == 7 else 5 + step * 7919 % 4001 / 4001}
        line |= {"tokens_per_second": step, "mine": {"often": 1.0}, "own_metrics": ["mine"]}
        if step % 130 == 1:
            line |= {"validation_loss": 9 - step / 1000, "phases": STEP | {"validation": step}}
    lines[1234]["loss"], lines[3999]["time"] = -1.0, None
    events = [event("start", 1000.0, step=0), event("checkpoint", 9000.0, step=1600)]
    events += [resume(6110.0, 1001, 3.0, (1003, 6015.0)), end(22_000.0, "signal", 75)]
    events += [event("start", 22_100.0, step=3333, seconds=7.0), end(22_500.0, "finished")]
    folder = write_run(tmp_path / "run", lines, events)
    shown, runs = [], []
    for limit in (2**16, rows):
        with inject.setting("report_rows", limit):
            shown += report(folder, out=tmp_path / "page.html")[0]["runs"]
            runs += read.read_sources([str(folder)])
    whole, thinned = runs
    assert len(thinned.columns.counts) < rows < thinned.lines == whole.lines
    assert "the median speed is of 1,024 lines" in " ".join(thinned.remarks)
    assert abs(np.median(thinned.columns.speeds) - 2000) < 200
    for name in whole.metrics.keys() - {f"phases/{phase}" for phase in whole.phases}:
        assert (thinned.last(name), thinned.minimum(name)) == (
            whole.last(name),
            whole.minimum(name),
        )
    assert (thinned.groups, thinned.state) == (whole.groups, whole.state)
    for figure in ("seconds", "lost_steps", "wall"):
        values = [getattr(Summary(run).goodput, figure) for run in runs]
        assert values[1] == pytest.approx(values[0], rel=1e-12), figure
    assert Summary(thinned).phases == pytest.approx(Summary(whole).phases, rel=1e-12)
    for curve in (min, max):
        first, second = (curve(filter(None, run["lines"]["loss"])) for run in shown)
        assert first == second
    bars = [{group: sum(bar) for group, bar in run["phases"]["bars"].items()} for run in shown]
    assert bars[1] == pytest.approx(bars[0])
    assert [sum(run["phases"]["count"]) for run in shown] == [4000, 4000]
    sums = [np.nansum(run.means("loss") * run.columns.counts) for run in runs]
    assert sums[1] == pytest.approx(sums[0], rel=1e-3)


def test_what_cannot_be_read_is_counted_and_the_rest_is_shown(tmp_path, capsys):
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


STATES = RUNS["states"]


@pytest.mark.parametrize("name", STATES)
def test_a_run_says_in_which_state_it_is(tmp_path, name):
    (lines, known), case = crashed_and_resumed(), STATES[name]
    events = [known[one] if isinstance(one, int) else event(**one) for one in case["events"]]
    if name == "alive":
        events.append(event("checkpoint", time.time() - 60, step=8))
    run = read_run(write_run(tmp_path / "run", lines[: case.get("lines")], events), "a")
    assert run.state == case["state"]
    assert run.explanation == case.get("explanation", run.explanation)
    assert dict(Summary(run).facts)["state"].startswith(run.state)


def test_an_empty_run_says_so(tmp_path, capsys):
    data, html = report(write_run(tmp_path / "empty"), out=tmp_path / "page.html")
    assert data["runs"][0]["rows"] == 0
    assert "nothing is on record yet" in capsys.readouterr().out
    assert "No step is on record yet" in html


def test_records_that_hold_no_usable_numbers_are_counted_or_shown_as_they_are(tmp_path):
    lines = [*steps(1, 2, 1000.0, further=10**400), *steps(3, 3, 1010.0, loss=float("inf"))]
    events = [
        event("start", 990.0, step=0),
        event("checkpoint", 1001.0, step=2, seconds="long"),
        event("checkpoint", float("inf"), step=2),
        end(1011.0, "finished", phases={"staging": {"a": {}}}),
    ]
    samples = [{"step": 1, "prompt": "p", "text": "t", "reward": "high"}]
    folder = write_run(tmp_path / "run", lines, events, samples)
    data, html = report(folder, out=tmp_path / "page.html")
    assert "3 lines of events.jsonl are no events" in html
    assert "<td>inf" in html or ">inf" in html
    assert [e["kind"] for e in data["runs"][0]["events"]] == ["start"]


def test_a_full_disk_leaves_the_older_page(tmp_path, monkeypatch, program):
    folder = write_run(tmp_path / "run", steps(1, 2, 1000.0))
    report(folder, out=tmp_path / "page.html")
    before = (tmp_path / "page.html").read_bytes()

    def fill_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fill_disk)
    said = program("report", folder, f"out={tmp_path}/page.html", code=1)
    assert "No space left on device" in said
    assert (tmp_path / "page.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


@pytest.fixture
def sweep(tmp_path):
    """A sweep that was moved, with the records of what finished."""
    for i, (job, lr) in enumerate({"a1": 0.1, "b2": 0.02}.items()):
        lines, events = crashed_and_resumed()
        config = {"model": {"name": "tiny"}, "optim": {"lr": lr}, "run": {"name": job}}
        write_run(tmp_path / "s/jobs" / job, lines[: 8 - i], events, **config)
    write_lines(tmp_path / "s/sweep.jsonl", RUNS["jobs"])
    return tmp_path / "s"


def test_a_sweep_is_a_table_of_its_jobs(sweep, tmp_path, program):
    said = program("report", sweep)
    assert said.index("b2") < said.index("a1") < said.index("c3")
    assert "refused" in said
    assert "optim.lr: 0.1, 0.02" in said
    assert re.search(r"b2 +0\.02 +4 +finished", said)
    data, html = data_of(sweep / "report.html")
    rows = [
        [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[dh].*?</t[dh]>", row)]
        for row in re.findall(r"<tr>.*?</tr>", html.split("</table>")[0])
    ]
    assert [row[:4] for row in rows] == RUNS["table"]
    assert [run["rows"] for run in data["runs"]] == [7, 8, 0]
    shown = program("report", tmp_path, "format=json")  # a folder of sweeps and runs
    names = [run["name"] for run in json.loads(shown)]
    assert names == ["s/a1", "s/b2", "s/c3"]
    assert not (tmp_path / "report.html").exists()


def write_method_run(folder, method, **more):
    """A run of a method that writes its figures, and an own metric, next to the general ones."""
    lines = steps(1, 4, 10.0, mine=7, own_metrics=["mine"], **METHODS[method], **more)
    return write_run(folder, lines, objective={"name": method})


def charts_by_section(data):
    """Section title → chart title → (run, column) of its lines."""
    return {
        section["title"]: {
            chart["title"]: [(line["run"], line["column"]) for line in chart["lines"]]
            for chart in section["charts"]
        }
        for section in data["sections"]
    }


def test_each_number_of_a_method_and_of_ones_own_has_a_curve_in_its_section(
    tmp_path, capsys, program
):
    folder = write_method_run(tmp_path / "run", "dpo")
    data, _ = report(folder, out=tmp_path / "page.html")
    charts = charts_by_section(data)
    assert list(charts) == ["Course", "DPO", "Your own metrics", "Speed and memory"]
    assert list(charts["Course"]) == ["Loss", "Learning rate", "Gradient norm, before clipping"]
    columns = [[column for _, column in lines] for lines in charts["DPO"].values()]
    assert columns == RUNS["charts"]
    assert charts["Your own metrics"] == {"Mine": [(0, "mine")]}
    assert data["runs"][0]["lines"]["surprise/b"] == [2, 2, 2, 2]
    said = " ".join(capsys.readouterr().out.split())
    assert "DPO reward margin 2 (validation 1.5), reward accuracy 0.5, reward chosen 3" in said
    assert "Your own metrics mine 7" in said
    [shown] = json.loads(program("report", folder, "format=json"))
    numbers = {name: value for name, value in METHODS["dpo"].items() if isinstance(value, float)}
    assert shown["method_metrics"] == numbers | {"surprise/a": 1.0, "surprise/b": 2.0}
    assert (shown["method"], shown["own_metrics"]) == ("dpo", {"mine": 7.0})


def test_methods_with_common_metrics_share_charts_and_others_have_a_section(tmp_path, capsys):
    folders = [write_method_run(tmp_path / name, name, kl=0.1) for name in METHODS]
    data, html = report(*folders, out=tmp_path / "page.html")
    charts = charts_by_section(data)
    assert charts["Distillation"] == {"Divergence from the teacher, nats a token": [(4, "kl")]}
    of_both = next(c for title, c in charts.items() if "DPO" in title and "KTO" in title)
    assert of_both["Rewards of the answers"] == [
        (0, "reward_chosen"), (0, "reward_rejected"), (1, "reward_good"), (1, "reward_bad"),
    ]  # fmt: skip
    assert charts["Your own metrics"]["Mine"] == [(run, "mine") for run in range(5)]
    assert re.search(r"reward accuracy.*reward margin.*kl", html)
    said = capsys.readouterr().out
    assert re.search(r"dpo +5\.6 +0\.5 +2 ", said)
    assert re.search(r"kto +5\.6 +4 ", said)


def test_the_pages_in_a_browser(sweep, tmp_path):
    call = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    samples = [
        {"step": i, "prompt": f"question {i}", "text": call if i == 2 else "no", "reward": i / 2}
        for i in range(1, 5)
    ]
    by_source = {"loss_by_source": {"maths": 2.0, "code": 1.0}}
    for name, folder in {
        "sweep": sweep,
        "empty": write_run(tmp_path / "nothing"),
        "sampled": write_run(tmp_path / "run", steps(1, 5, 0.0), samples=samples),
        "method": write_method_run(tmp_path / "dpo", "dpo", **by_source),
    }.items():
        report(folder, out=tmp_path / f"{name}.html")
    with browser_page() as page:

        def open_page(name):
            page.goto(f"file://{tmp_path}/{name}.html")

        open_page("empty")
        assert page.evaluate("charts.length") == 0
        open_page("sweep")
        check_curves(page)
        check_table_and_theme(page)
        open_page("sampled")
        check_rollouts(page)
        open_page("method")
        sections = ["DPO", "Your own metrics", "Speed and memory"]
        assert page.locator("#charts h2").all_inner_texts() == sections
        legends = ["maths\ncode", "training\nvalidation", "chosen\nrejected", "a\nb"]
        assert page.locator(".legend").all_inner_texts() == legends


def check_curves(page):
    """Curves tell their values, are zoomed together, and lie over steps, tokens or time."""

    def extents():
        return page.evaluate("charts.map(u => [u.scales.x.min, u.scales.x.max])")

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
    assert extents() == [[1, 8]] * page.evaluate("charts.length")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 50, steps=3)
    page.mouse.up()
    settle(lambda: extents()[0] != [1, 8], page)
    assert all(2.5 < low < 3.7 and 5.3 < high < 6.5 for low, high in extents())
    over.dblclick()
    settle(lambda: extents()[0] == [1, 8], page)
    over.focus()
    page.keyboard.press("+")
    settle(lambda: extents()[0] != [1, 8], page)
    first, last = extents()[0]
    assert last - first < 7
    page.keyboard.press("Escape")
    page.get_by_label("tokens", exact=True).check()
    assert extents()[0] == [100, 800]
    page.get_by_label("time", exact=True).check()
    assert extents()[0] == [15, 1150 - 1000]


def check_table_and_theme(page):
    """Jobs are sorted and left out, and the page fits a dark room and a phone."""
    page.get_by_role("button", name="objective").click()
    names = page.locator("#runs tbody tr td:first-child").all_inner_texts()
    assert names == [" b2 best", " a1", "c3"]
    page.locator("[data-run='0']").uncheck()
    shown = "new Set(charts.find(u => u.name === 'loss').shown.map(line => line.run)).size"
    assert page.evaluate(shown) == 1
    dark = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(dark)
    page.locator("#theme").click()
    assert page.evaluate(dark) != before
    page.set_viewport_size({"width": 390, "height": 800})
    settle(lambda: page.evaluate("charts[0].width") <= 390, page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def check_rollouts(page):
    """The page of rollouts shows those that are asked for."""
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


def test_the_load_of_every_expert_is_a_picture(tmp_path):
    loads = {"two blocks": ["40c", "z44"], "text": [EVIL], "number": 7, "none": []}
    for name, load in loads.items():
        lines = steps(1, 2, 0.0, expert_load=["444", "444"]) + steps(3, 3, 10.0, expert_load=load)
        run = read_run(write_run(tmp_path / name, lines), "run")
        write([Summary(run)], tmp_path / "page.html")
        html = (tmp_path / "page.html").read_text()
        drawn = re.search(r'<svg class="load".*?</svg>', html)
        assert bool(drawn) == (name == "two blocks")
        if drawn:
            assert drawn[0].count("<rect") == 5
            assert 'viewBox="0 0 3 2"' in drawn[0]
            assert 'x="2" y="0" width="1" height="1" fill-opacity="1' in drawn[0]
            assert "step 3" in html
