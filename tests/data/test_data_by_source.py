"""Contributions of several sources, in the records and in the preview."""

import json

import pytest
from world import write_chats


@pytest.fixture
def sources(tmp_path):
    """Two files of chats of their own, and one of a single chat."""
    (tmp_path / "data").mkdir()
    files = [
        write_chats(tmp_path / "data" / f"{name}.jsonl", n, start)
        for name, n, start in (("a", 40, 0), ("b", 20, 200), ("rare", 1, 300))
    ]
    weighted = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "answer", "weight": 0.5},
        ]
    }
    files[2].write_text(json.dumps(weighted))
    return files


@pytest.mark.slow
def test_the_loss_of_each_source_is_that_of_a_run_on_it_alone(train, sources):
    """A model that does not move (lr 0): one step over everything, against steps over each file."""
    still = [
        "optim.lr=0",
        "schedule.warmup_steps=0",
        "train.epochs=1",
        "batch.rows=100",
        "batch.micro_rows=20",
        "data.packing=none",
    ]
    alone = {path.stem: train(path.stem, f"data.path={path}", *still).metrics for path in sources}
    (line,) = train("all", f"data.path={sources[0].parent}", *still, ranks=2).metrics
    assert list(line["loss_by_source"]) == ["a", "b", "rare"]
    for name, (single,) in alone.items():
        assert line["loss_by_source"][name] == pytest.approx(single["loss"], rel=1e-5)
        assert "loss_by_source" not in single
    weights = {
        name: metrics[0]["supervised_tokens"] * (0.5 if name == "rare" else 1)
        for name, metrics in alone.items()
    }
    mean = sum(line["loss_by_source"][name] * weight for name, weight in weights.items()) / sum(
        weights.values()
    )
    assert line["loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.slow
def test_a_source_that_is_absent_from_a_step_has_no_loss_in_it(train, sources):
    run = train(
        "run",
        f"data.path=[{','.join(map(str, sources))}]",
        "train.epochs=1",
        "data.packing=none",
        ranks=2,
    )
    names = [set(line["loss_by_source"]) for line in run.metrics]
    assert sum("rare" in present for present in names) == 1
    assert all(present <= {"a", "b", "rare"} for present in names)


@pytest.mark.slow
def test_validation_tells_its_files_apart(train, sources):
    run = train(
        "run",
        f"data.validation=[{sources[0]},{sources[1]}]",
        "train.steps=2",
        "train.validate_every=1",
        ranks=2,
    )
    alone = [
        train(path.stem, f"data.validation={path}", "train.steps=1").event("evaluation")[-1]
        for path in sources[:2]
    ]
    before, first, _ = run.event("evaluation")
    assert before["step"] == 0
    assert set(before["losses"]) == {"a", "b"}
    assert first["losses"] == pytest.approx(
        {"a": alone[0]["loss"], "b": alone[1]["loss"]}, rel=1e-5
    )
    assert run.metrics[0]["validation_loss_by_source"] == first["losses"]
    assert "losses" not in alone[0]


@pytest.mark.slow
def test_the_preview_tells_what_each_source_has(world, sources):
    arguments = [
        f"data.path={sources[0].parent}",
        "tokenizer.path=demo:bytes",
        f"run.root={sources[0].parent.parent}",
    ]
    (result,) = world.command("preview", *arguments, "batch.seq_len=64")
    lines = [
        line.split()
        for line in result.out.splitlines()
        if line.split()[:1] in (["a"], ["b"], ["rare"])
    ]
    assert [(name, samples, epochs) for name, samples, *_, epochs in lines] == [
        ("a", "40", "1.00"),
        ("b", "20", "1.00"),
        ("rare", "1", "1.00"),
    ]


@pytest.mark.slow
def test_trackers_get_a_curve_for_each_source(train, sources):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(
        "run", f"data.path={sources[0].parent}", "train.steps=1", "logging.tensorboard=true"
    )
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    assert events.Scalars("loss_by_source/a")[0].value == pytest.approx(
        run.metrics[0]["loss_by_source"]["a"]
    )
