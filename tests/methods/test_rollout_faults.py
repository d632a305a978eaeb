"""Bad steps, stops and the end of the data in runs that learn from their own answers."""

import functools
import json
import math
import signal

import inject
import pytest
from stored import assert_bitwise_equal, newest, stored

from fsdp_trainer.base import phases
from fsdp_trainer.cli import main

GRPO = [
    "objective=grpo", 'objective.rewards=[{name: regex, pattern: "[a-z]"}]',
    "tokenizer.path=demo:bytes", "objective.max_new_tokens=6", "objective.samples=4",
    "batch.rows=4", "batch.micro_rows=2", "schedule=constant", "checkpoint.keep=9",
]  # fmt: skip
SPIKED = 9


def never_had_them(real, self):
    """A run whose prompts never were those of step SPIKED."""
    self.progress.skipped_row_ranges = [[4 * (SPIKED - 1), 4 * SPIKED]]
    return real(self)


TERM = functools.partial(inject.send, signal.SIGTERM)


def lost_at_step_4(real, self, rows):
    """An error of rank 0 where it packs answers for the second update of a batch."""
    if phases.training.step == 4 and rows.documents:
        raise OSError("no such answers")
    return real(self, rows)


# words, seam and exit code of a run that ends after step 3, between two updates from one batch
ENDINGS = {
    "the last step": (["train.steps=3"], None, 0),
    "a signal": ([], inject.at("backward", TERM, rank=0, step=3, nth=1), 75),
    "a signal amid samples": (
        ["checkpoint.every=1", "train.validate_every=3", "train.sample_prompts=[a]"],
        inject.at("samples", TERM, rank=0, step=3),
        75,
    ),
    "data lost at the next step": ([], inject.around("batch_read", lost_at_step_4, rank=0), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.further
def test_a_run_that_ended_between_updates_from_the_same_answers_goes_on_with_the_rest_of_them(
    world, tmp_path, ranks
):
    keys = [*GRPO, "data.path=demo:sums", f"data.cache={tmp_path}", "objective.updates=2"]
    keys += ["train.steps=4"]
    whole = world.train(tmp_path / "whole", *keys, ranks=ranks)
    assert whole.column("staleness") == [0, 1, 0, 1]
    for name, (words, seam, code) in ENDINGS.items():
        ended = world.train(tmp_path / name, *keys, *words, ranks=ranks, seam=seam, code=code)
        assert ended.column("step") == [1, 2, 3], name
        words = [word for word in words if not word.startswith("train.steps")]
        run = world.train(tmp_path / name, *keys, *words, ranks=ranks)
        for column in ("reward", "loss", "grad_norm", "staleness"):
            assert run.column(column) == whole.column(column), (name, column)
        assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


@pytest.mark.slow
def test_answers_left_over_are_made_again_where_other_ones_are_wanted(world, tmp_path):
    keys = [*GRPO, "data.path=demo:sums", f"data.cache={tmp_path}", "objective.updates=2"]
    world.train(tmp_path / "run", *keys, "train.steps=1")
    keys += ["objective.samples=3", "checkpoint.allow_changes=[objective.samples]"]
    run = world.train(tmp_path / "run", *keys, "train.steps=2")
    assert run.column("staleness") == [0, 0]


@pytest.mark.slow
@pytest.mark.further
def test_a_bad_gradient_is_skipped_and_a_spike_taken_back_amid_answers_made_together(
    world, tmp_path
):
    keys = [*GRPO, "data.path=demo:sums", f"data.cache={tmp_path}", "train.steps=10"]
    keys += ["objective.updates=3", "train.on_spike=rewind", "train.rewind_margin=0"]
    keys += ["train.spike_window=8", "train.spike_score=50", "checkpoint.every=4"]
    faults = inject.infinite_gradient(step=3), inject.spiked_once("rewarded_objective", SPIKED)
    run = world.train(tmp_path / "run", *keys, ranks=2, seam=inject.together(*faults))
    assert [event["step"] for event in run.event("skipped")] == [3]
    (event,) = run.event("rewind")
    first = 4 * (SPIKED - 1)
    assert (event["step"], event["to"], event["left_out"]) == (SPIKED, 8, [first, first + 4])
    # the answers that were left at step 8 are to prompts that are passed over
    assert run.column("staleness") == [0, 1, 2, 0, 1, 2, 0, 1, 0, 1]

    middle = run.folder / "checkpoints" / "step-00000008"
    never = inject.around("fit", never_had_them)
    keys += [f"checkpoint.resume={middle}"]
    other = world.train(tmp_path / "other", *keys, ranks=2, seam=never)
    for name in ("reward", "loss"):
        assert run.column(name)[8:] == other.column(name), name
    assert_bitwise_equal(stored(newest(run)), stored(newest(other)))


@pytest.mark.slow
def test_a_bad_step_that_is_read_long_after_it_is_recorded_without_its_prompts(world, tmp_path):
    keys = [*GRPO, "data.path=demo:sums", f"data.cache={tmp_path}", "train.steps=5"]
    faults = (
        inject.setting("remembered_steps", 2),
        inject.spiked_once("rewarded_objective", 2, math.inf),
    )
    run = world.train(tmp_path / "run", *keys, "logging.every=5", seam=inject.together(*faults))
    (event,) = run.event("skipped")
    assert (event["step"], event["samples"]) == (2, [])


@pytest.mark.slow
@pytest.mark.further
def test_a_run_that_is_stopped_in_a_step_ends_with_its_data_and_the_same_weights(world, tmp_path):
    rows = [{"question": f"{i}+{i}?", "answer": f"{2 * i}"} for i in range(14)]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = [*GRPO, f"data.path={data}", f"data.cache={tmp_path}", "objective.updates=3"]
    keys += ["train.steps=null", "train.epochs=1"]
    whole = world.train(tmp_path / "whole", *keys, ranks=2)
    assert whole.column("staleness") == [0, 1, 2, 0], "14 rows are 4 steps, the last one shorter"

    stop = inject.signalled("backward", nth=1)
    stopped = world.train(tmp_path / "run", *keys, ranks=2, seam=stop, code=75)
    assert json.loads((newest(stopped) / "trainer.json").read_text())["rollouts"]
    run = world.train(tmp_path / "run", *keys, ranks=2)
    assert run.column("reward") == whole.column("reward")
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))

    out = tmp_path / "page.html"
    assert main(["report", f"source={run.folder}", f"out={out}"]) == 0
    page = out.read_text()
    lines = [json.loads(one) for one in (run.folder / "samples.jsonl").read_text().splitlines()]
    assert "What the model said" in page
    assert "reward/regex" in page
    assert f'data-v="{lines[-1]["reward"]}"' in page
