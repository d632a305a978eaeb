"""Contributions of several sources, in the records and in the preview."""

import pytest
from texts import turn
from world import write_json

STILL = ["optim.lr=0 schedule.warmup_steps=0 train.epochs=1 data.packing=none"]
"""Words for a model that does not move."""


@pytest.fixture
def sources(sources):
    """Let the last file have a single chat."""
    answer = turn("assistant", "answer", weight=0.5)
    write_json(sources[-1], {"messages": [turn("user", "q"), answer]})
    return sources


def test_the_loss_of_each_source_is_that_of_a_run_on_it_alone(train, sources):
    """One step over everything, and its validation, against a step over each file."""
    a, b, _ = sources
    words = [*STILL, "batch.rows=100 batch.micro_rows=20", f"data.validation={a}"]
    runs = {path.stem: train(path.stem, f"data.path={path}", *words) for path in sources}
    words[-1] = f"data.validation=[{a},{b}]"
    both = train("all", f"data.path={a.parent}", *words, "train.validate_every=1", ranks=2)
    alone = {name: run.metrics[0] for name, run in runs.items()}
    losses = {name: line["loss"] for name, line in alone.items()}
    (line,) = both.metrics
    assert list(line["loss_by_source"]) == ["a", "b", "c"]
    assert line["loss_by_source"] == pytest.approx(losses, rel=1e-5)
    assert all("loss_by_source" not in single for single in alone.values())
    weights = {name: single["supervised_tokens"] for name, single in alone.items()}
    weights["c"] *= 0.5
    sums = [line["loss_by_source"][name] * weight for name, weight in weights.items()]
    assert line["loss"] == pytest.approx(sum(sums) / sum(weights.values()), rel=1e-6)

    before, after = both.event("evaluation")
    assert (before["step"], after["step"]) == (0, 1)
    for evaluation in (before, after):
        assert evaluation["losses"] == pytest.approx({"a": losses["a"], "b": losses["b"]}, rel=1e-5)
    assert line["validation_loss_by_source"] == after["losses"]
    assert all("losses" not in event for run in runs.values() for event in run.event("evaluation"))


def test_a_source_that_is_absent_from_a_step_has_no_loss_in_it(train, sources):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = [*STILL, f"data.path=[{','.join(map(str, sources))}] logging.tensorboard=true"]
    run = train("run", *words, ranks=2)
    by_step = {line["step"]: line["loss_by_source"] for line in run.metrics}
    curves = EventAccumulator(f"{run.folder}/tensorboard")
    curves.Reload()
    for name in ("a", "b", "c"):
        curve = {each.step: each.value for each in curves.Scalars(f"loss_by_source/{name}")}
        assert curve == pytest.approx({n: row[name] for n, row in by_step.items() if name in row})
    assert all(set(losses) <= {"a", "b", "c"} for losses in by_step.values())
    assert sum("c" in losses for losses in by_step.values()) == 1


def test_the_preview_tells_what_each_source_has(preview, sources):
    shown = preview(f"data.path={sources[0].parent}", "batch.seq_len=64")
    lines = [line.split() for line in shown.splitlines()]
    figures = {line[0]: (line[1], line[-1]) for line in lines if len(line) > 3}
    for name, samples in (("a", "40"), ("b", "20"), ("c", "1")):
        assert figures[name] == (samples, "1.00")
