"""Rollouts that are made for several steps, or begun some steps before the one that learns from
them: of which weights they are, and how a run goes on with them after stops and bad steps."""

import functools
import math
import signal

import inject
import pytest
from rollouts import COLUMNS, KEYS, PARTS, SEVERAL, with_environment
from stored import assert_columns, assert_same_end, checkpoint, newest
from world import read_json, read_lines, write_lines

from fsdp_trainer.base import phases

TERM = functools.partial(inject.send, signal.SIGTERM)


def said(run, steps):
    lines = read_lines(run.folder / "samples.jsonl")
    return [(line["text"], line["reward"]) for line in lines if line["step"] in steps]


@pytest.mark.parametrize(
    "words, staleness",
    [
        (["objective.ahead=1"], [0, 1, 1, 1, 1, 1]),
        (PARTS, [0, 1, 2, 3, 3, 3]),
        (["objective.ahead=2 objective.updates=2"], [0, 1, 2, 3, 2, 3]),
    ],
)
def test_rollouts_are_of_the_weights_of_so_many_steps_before(ledger, words, staleness):
    run = ledger.run(words=[*SEVERAL, *words])
    assert run["staleness"] == staleness
    assert run["staleness_max"] == staleness
    differences = run["sampler_difference"]
    assert differences[0] < 1e-5 < min(differences[1:]), "older weights give other probabilities"


def test_newer_weights_go_on_with_open_rollouts_on_any_ranks(ledger, train):
    whole = ledger.run(words=[*SEVERAL, *PARTS])
    middle = f"checkpoint.resume={checkpoint(whole, 3)}"
    rest = train("rest", *SEVERAL, *PARTS, middle, ranks=2)
    assert said(rest, (4, 5, 6)) == said(whole, (4, 5, 6))
    for name in COLUMNS:
        assert rest[name] == pytest.approx(whole[name][3:], rel=2e-4, abs=2e-6), name
    at_once = train("once", *SEVERAL, *PARTS, "objective.round_tokens=null train.steps=3")
    assert said(at_once, (1, 2)) == said(whole, (1, 2)), "the step that comes next has no limit"
    assert said(at_once, (3,)) != said(whole, (3,))


# --- stops ----------------------------------------------------------------------------------------


def lost_at_step_4(real, self, rows):
    """An error of rank 0 where it packs answers for the second update of a batch."""
    if phases.training.step == 4 and rows.documents:
        raise OSError("no such answers")
    return real(self, rows)


BETWEEN = {
    "after the last step": (["train.steps=3 train.epochs=null"], None, 0),
    "as data are lost": ([], inject.around("batch_read", lost_at_step_4, rank=0), 1),
}
"""Words, seam and exit code of a run that ends between two updates from the same answers."""
OPEN = {
    "in a round": ([], inject.at("rollouts", TERM, rank=0, step=3, nth=1), 75),
    "amid samples": (
        ["checkpoint.every=1 train.validate_every=3 train.sample_prompts=[a]"],
        inject.at("samples", TERM, rank=0, step=3),
        75,
    ),
}
"""The same, also with open rollouts."""


@pytest.mark.parametrize(
    "words, staleness, endings",
    [
        (["objective.updates=2"], [0, 1, 0, 1, 0], BETWEEN),
        (["objective.updates=2 objective.ahead=4", PARTS[1]], [0, 1, 2, 3, 4], OPEN),
    ],
    ids=["between updates", "with open rollouts"],
)
def test_a_run_that_ended_goes_on_with_its_rollouts_to_the_end_of_its_data(
    train, tmp_path, words, staleness, endings
):
    rows = [{"question": f"{i}+{i}?", "answer": f"{2 * i}"} for i in range(18)]
    data = tmp_path / "questions.jsonl"
    write_lines(data, rows)
    keys = [*KEYS, *words, f"data.path={data} train.steps=null train.epochs=1"]
    whole = train("whole", *keys, ranks=2)
    assert whole["staleness"] == staleness, "the fifth step has two rows"
    for name, (more, seam, code) in endings.items():
        ended = train(name, *keys, *more, ranks=2, seam=seam, code=code)
        assert len(ended.metrics) == (2 if name == "in a round" else 3), name
        assert read_json(newest(ended) / "trainer.json")["rollouts"], name
        run = train(name, *keys, *(more if code == 75 else []), ranks=2)
        assert_columns(run, whole, *COLUMNS)
        assert_same_end(run, whole)


def test_answers_left_over_are_made_again_where_other_ones_are_wanted(train):
    train("run", *KEYS, "objective.updates=2 train.steps=1")
    words = "objective.samples=3 checkpoint.allow_changes=[objective.samples]"
    run = train("run", *KEYS, "objective.updates=2", words, "train.steps=2")
    assert run["staleness"] == [0, 0]


STATEFUL = """
class Counts:
    def __init__(self):
        self.letters = []
    def reset(self, row):
        return row["messages"], None
    def step(self, messages):
        if "refuse" in messages[0]["content"]:
            raise ValueError("not again")
        self.letters += messages[-1]["content"]
        return [{"role": "user", "content": f"{len(self.letters)} so far"}], False
    def reward(self, messages):
        return sum(each in "abcdefghijklm" for each in self.letters)
"""


def test_environments_of_open_rollouts_are_where_they_were_after_a_stop(train, tmp_path):
    keys = [
        *SEVERAL,
        *with_environment(tmp_path, STATEFUL, "Counts"),
        "objective.turns=4 objective.max_new_tokens=24 batch.seq_len=160",
        "model.initializer_range=0.5 objective.ahead=3 objective.round_tokens=12",
        "train.steps=4 sharding.tensor=2 objective.samples=2",
    ]
    whole = train("whole", *keys, ranks=2)
    assert max(whole["turns_max"]) > 1
    assert max(whole["reward_std"]) > 0
    stopped = inject.at("backward", TERM, rank=0, step=2, nth=1)
    train("run", *keys, ranks=2, seam=stopped, code=75)
    run = train("run", *keys, ranks=2)
    assert said(run, range(6)) == said(whole, range(6))
    assert_same_end(run, whole)

    with_environment(tmp_path, STATEFUL.replace('"refuse"', '""'), "Counts")
    middle = f"checkpoint.resume={checkpoint(whole, 2)}"
    failed = train("failed", *keys, middle, ranks=2).event("environment_failed")
    reasons = " ".join(reason for event in failed for reason in event["reasons"])
    assert "replay: " in reasons
    assert "ValueError: not again" in reasons


# --- bad steps, and rollouts that take too long ---------------------------------------------------

SPIKED = 9


def never_had_them(real, self):
    """A run whose prompts never were those of step SPIKED."""
    self.progress.skipped_row_ranges = [[4 * (SPIKED - 1), 4 * SPIKED]]
    return real(self)


def test_a_bad_gradient_is_skipped_and_a_spike_taken_back_amid_answers_made_together(train):
    keys = [
        *KEYS, "train.steps=10 objective.updates=3 checkpoint.every=4 optim.lr=3e-3",
        "train.on_spike=rewind train.rewind_margin=0 train.spike_window=8",
        "train.spike_score=50",
    ]  # fmt: skip
    faults = inject.infinite_gradient(step=3), inject.spiked_once("rewarded_objective", SPIKED)
    run = train("run", *keys, ranks=2, seam=inject.together(*faults))
    assert [event["step"] for event in run.event("skipped")] == [3]
    (event,) = run.event("rewind")
    first = 4 * (SPIKED - 1)
    assert (event["step"], event["to"], event["left_out"]) == (SPIKED, 8, [first, first + 4])
    # the answers that were left at step 8 are to prompts that are passed over
    assert run["staleness"] == [0, 1, 2, 0, 1, 2, 0, 1, 0, 1]

    middle = f"checkpoint.resume={checkpoint(run, 8)}"
    other = train("other", *keys, middle, ranks=2, seam=inject.around("fit", never_had_them))
    for name in ("reward", "loss"):
        assert run[name][8:] == other[name], name
    assert_same_end(run, other)


def test_a_bad_step_that_is_read_long_after_it_is_recorded_without_its_prompts(train):
    faults = (
        inject.setting("remembered_steps", 2),
        inject.spiked_once("rewarded_objective", 2, math.inf),
    )
    keys = [*KEYS, "train.steps=5 logging.every=5"]
    (event,) = train("run", *keys, seam=inject.together(*faults)).event("skipped")
    assert (event["step"], event["samples"]) == (2, [])


def test_long_rollouts_are_dropped_and_counted(train):
    keys = [*KEYS, "objective.ahead=1 objective.unfinished=drop objective.round_tokens=60"]
    run = train("run", *keys, "objective.max_new_tokens=64 batch.seq_len=128")
    assert 0 < min(run["dropped"]) <= max(run["dropped"]) < 1
    assert run["truncated_share"] == [0, 0, 0]
    assert max(run["answer_tokens_max"]) <= 60
