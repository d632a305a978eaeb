"""Numbers that are not finite, that stand out, or that are silently wrong: nothing of them is
learnt or saved, and it is told whose they were."""

import json
import math
import random
from functools import partial
from unittest.mock import patch

import inject
import pytest
import torch
from inject import SPIKED
from stored import (
    assert_bitwise_equal,
    assert_columns,
    assert_same_end,
    checkpoint,
    newest,
    save_tensors,
    stored,
    tensors,
)
from world import SPIKY, read_json
from zoo import HF, make_folder

from fsdp_trainer.config.schema import Train
from fsdp_trainer.run import rewind
from fsdp_trainer.training.batches import row_ranges
from fsdp_trainer.training.guard import Guard
from fsdp_trainer.training.progress import Progress

# --- what stands out ----------------------------------------------------------------------------


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def judged(losses, norms=None, **options):
    """Steps (from 0) that are spikes, and the guard behind them."""
    guard = Guard(Train(**{"spike_window": 16, **options}), torch.device("cpu"), Progress())
    norms = norms or [1.0] * len(losses)
    verdicts = [
        bool(guard.judge(number(loss), number(norm)).spike)
        for loss, norm in zip(losses, norms, strict=True)
    ]
    return [i for i, spike in enumerate(verdicts) if spike], guard


def falling(steps):
    """A loss as training has it: falling, noisy."""
    noise = random.Random(0)
    return [2 + 6 * math.exp(-i / 50) + noise.gauss(0, 0.05) for i in range(steps)]


def test_a_loss_or_a_gradient_norm_far_above_those_before_is_a_spike_and_usual_training_has_none():
    losses = falling(400)
    assert judged(losses)[0] == []
    assert judged([2.0] * 300)[0] == []
    assert judged([*losses[:100], 9.0, *losses[100:]])[0] == [100]
    assert judged(losses, [1.0] * 200 + [30.0] + [1.0] * 199)[0] == [200]
    assert judged([*losses[:100], 0.01, *losses[100:]])[0] == [], "below is no spike"
    too_few = [9.0, *losses[:6], 30.0]
    assert judged(too_few)[0] == [], "not judged by fewer steps than half the window"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_window_never_holds_what_is_not_finite_nor_a_spike(bad):
    losses = falling(40)
    verdicts, guard = judged([*losses, bad, 50.0, bad])
    usual, in_a_row = (guard.state()[name] for name in ("recent", "spikes_in_a_row"))
    assert verdicts == [41]
    assert usual[0] == losses[-16:]
    assert all(map(math.isfinite, usual[0] + usual[1]))
    assert in_a_row == 1
    verdict = guard.judge(torch.tensor(2.1), torch.tensor(bad))
    assert verdict.not_finite
    assert not verdict.spike
    assert verdict.skip
    assert guard.state()["recent"][0] == losses[-16:]


def test_a_step_without_a_target_is_no_measure():
    verdicts, guard = judged([*falling(40), 0.0], [1.0] * 40 + [0.0])
    assert verdicts == []
    assert 0.0 not in guard.state()["recent"][0]


def test_a_new_level_is_told_a_few_times_and_then_taken_for_what_it_is():
    noise = random.Random(1)
    levels = [level + noise.gauss(0, 0.02) for level in [2] * 60 + [5] * 60]
    assert judged([*levels, 9.0])[0] == [60, 61, 62, 63, 120]


def test_a_guard_goes_on_where_another_stopped_to_the_last_bit():
    losses = [*falling(50), 8.0, 8.1, 2.1]
    whole, half = judged(losses)[1], judged(losses[:51])[1]
    before = Progress.from_stored(json.loads(json.dumps(half.state())))
    onward = Guard(half.cfg, torch.device("cpu"), before)
    for loss in losses[51:]:
        onward.judge(number(loss), number(1.0))
    assert onward.state() == whole.state()


def test_only_skip_and_rewind_hold_the_update_back():
    for policy, held in {"ignore": False, "warn": False, "skip": True, "rewind": True}.items():
        guard = judged(falling(40), on_spike=policy)[1]
        verdict = guard.judge(torch.tensor(50.0), torch.tensor(1.0))
        assert bool(verdict.skip) == held, policy
        assert bool(verdict.spike) == (policy != "ignore"), policy
        assert guard.judge(torch.tensor(math.nan), torch.tensor(1.0)).skip


def test_rows_that_are_left_out_are_in_no_step_and_the_data_ends_where_it_ends():
    assert list(row_ranges(4, 20, 0, [])) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]
    assert list(row_ranges(4, 22, 4, [[8, 12], [11, 13]])) == [(4, 8), (13, 17), (17, 21), (21, 22)]
    left_out = [[6, 9], [18, 30]]
    assert list(row_ranges(4, 20, 0, left_out)) == [(0, 4), (4, 6), (9, 13), (13, 17), (17, 18)]


# --- a step that is not finite ------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        "sharding=fsdp",
        pytest.param("sharding=ddp", marks=pytest.mark.faults),
        pytest.param("sharding.cpu_offload=true", marks=pytest.mark.faults),
        pytest.param("sharding.accumulate=unsharded", marks=pytest.mark.faults),
    ],
)
def test_one_bad_number_on_one_rank_leaves_every_byte_and_is_told_with_its_rows(
    train, chats, layout
):
    """Formats of weights and states are in tests/optim."""
    how = (
        "train.steps=8 checkpoint.every=1 checkpoint.keep=9 batch.micro_rows=1"
        " train.on_spike=ignore data.packing=none data.shuffle=false"
    )
    bad = [inject.bad_gradient(3), inject.bad_loss(5), inject.infinite_gradient(7)]
    run = train("run", how, layout, ranks=2, seam=inject.together(*bad))
    assert "skipped 3 of 8 steps, which changed no weight" in run.out
    states = [stored(checkpoint(run, step)) for step in range(1, 9)]
    for step in (3, 5, 7):
        assert_bitwise_equal(states[step - 2], states[step - 1])
    assert any(not torch.equal(states[2][name], states[3][name]) for name in states[2])
    assert all(tensor.isfinite().all() for tensor in states[-1].values())
    assert run["step"] == [*range(1, 9)]
    missing = {
        name: [i for i, each in enumerate(run[name], 1) if each is None]
        for name in ("grad_norm", "loss")
    }
    assert missing == {"grad_norm": [3, 5, 7], "loss": [5]}
    assert "NaN" not in (run.folder / "metrics.jsonl").read_text()
    assert "not finite" in run.out
    tokens = run["tokens"]
    assert tokens == sorted(set(tokens)), "rows of bad steps are not trained again"
    events = run.event("skipped")
    assert [event["step"] for event in events] == [3, 5, 7]
    assert events[0]["ranks"] == [1]
    assert events[0]["rows"] == [12, 18]
    # the second row of step 3 is the first of rank 1; a row is a line
    assert events[0]["samples"] == [f"{chats}:14"]


def test_a_run_that_learns_nothing_names_the_last_good_checkpoint_however_rarely_it_looks(train):
    how = (
        "train.max_skipped=3 logging.every=10 checkpoint.every=4 checkpoint=async"
        " checkpoint.keep=9 train.steps=40"
    )
    run = train("run", how, ranks=2, seam=inject.bad_gradient(2, *range(5, 99)), code=1)
    assert "4 steps in a row" in run.err, "step 2 does not count"
    assert run.events[-1]["exit_code"] == 1
    assert str(checkpoint(run, 4)) in run.err
    assert run["step"] == [*range(1, 9)]
    assert run.checkpoints == ["step-00000004"]
    assert all(t.isfinite().all() for t in stored(newest(run)).values())


def test_a_broken_number_in_the_base_is_named_with_its_file(train, tmp_path):
    base = make_folder(tmp_path / "base")
    weights, name = tensors(base), "model.layers.1.mlp.up_proj.weight"
    weights[name][-1, -1] = torch.nan
    save_tensors(base, weights)
    run = partial(train, "run", f"train.steps=2 model.init_from={base}", ranks=2, code=1)
    for again in (run(base=HF), run(base=HF)):
        assert f"{name} in {base}/model.safetensors" in again.err
        assert "optim.lr" not in again.err
        assert again.events[-1]["exit_code"] == 1


def test_a_run_of_which_no_step_changed_a_weight_has_failed(train):
    run = train("run", "train.steps=2", seam=inject.bad_gradient(1, 2), code=1)
    assert "none of the 2 steps changed a weight" in run.err
    assert not (run.folder / "hf").exists()


# --- a spike ------------------------------------------------------------------------------------

LONG = "train.steps=24"
NOISE = inject.garbage()
REWIND = [*SPIKY, "train.on_spike=rewind"]


def test_a_warning_changes_nothing_of_training_and_names_the_rows(train, chats):
    warned, ignored = (
        train(policy, *SPIKY, f"train.steps=21 train.on_spike={policy}", seam=NOISE)
        for policy in ("warn", "ignore")
    )
    (event,) = warned.event("spike")
    figures = (event["step"], event["rows"], event["policy"], event["ranks"])
    assert figures == (SPIKED, [57, 60], "warn", [0])
    assert event["loss_score"] > 10
    assert event["samples"][0].startswith(f"{chats}:")
    assert f"spike in step {SPIKED}" in warned.out
    assert ignored.event("spike") == []
    assert_same_end(warned, ignored)


def test_a_skipped_spike_leaves_every_byte_as_it_was(train):
    how = f"train.on_spike=skip train.steps={SPIKED + 1} checkpoint.every=1"
    run = train("run", *SPIKY, how, "checkpoint.keep=3", seam=NOISE)
    assert [event["step"] for event in run.event("spike")] == [SPIKED]
    before, skipped, after = (stored(checkpoint(run, SPIKED + i)) for i in (-1, 0, 1))
    assert_bitwise_equal(before, skipped)
    norm = "weights/model.norm.weight"
    assert not torch.equal(skipped[norm], after[norm])
    tokens = run["tokens"]
    assert tokens[SPIKED - 1] > tokens[SPIKED - 2], "its rows are not trained again"


def never_had_them(real, self):
    """A run whose data never had the rows of steps SPIKED − 1 to SPIKED + 1."""
    self.progress.skipped_row_ranges = [[3 * (SPIKED - 2), 3 * (SPIKED + 1)]]
    return real(self)


@pytest.fixture(scope="module")
def never(world, inputs, tmp_path_factory):
    """Two epochs of a run whose data never had the rows of a spike."""
    folder = tmp_path_factory.mktemp("never") / "run"
    data = [f"{key}={value}" for key, value in inputs.items()]
    seam = inject.around("fit", never_had_them)
    return world.train(folder, *data, *REWIND, "train.epochs=2", ranks=2, seam=seam)


def test_a_rewound_run_that_is_killed_ends_bitwise_where_one_does_that_never_had_the_rows(
    train, never
):
    """Counted in epochs: the rows left out make it shorter."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    how = [*REWIND, "train.epochs=2 checkpoint=async logging.tensorboard=true"]
    killed = inject.together(NOISE, inject.failed(step=25))
    first = train("run", *how, ranks=2, seam=killed, code=1)
    (event,) = first.event("rewind")
    assert (event["step"], event["to"], event["left_out"]) == (SPIKED, 18, [54, 63])
    assert len(first.event("spike")) == 1
    assert "back to step 18" in first.out
    run = train("run", *how, ranks=2, seam=NOISE)
    rows = int(run.out.split(" rows an epoch")[0].split()[-1])
    steps = [*range(1, -(-(2 * rows - 9) // 3) + 1)]
    shown = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [scalar.step for scalar in shown.Scalars("loss")] == steps, "never two lines for a step"
    assert_columns(run, never, "step", "loss", "tokens")
    assert run["step"] == steps
    assert_same_end(run, never)
    trainer = read_json(newest(run) / "trainer.json")
    assert trainer["skipped_row_ranges"] == [[54, 63]]


def test_a_run_that_is_stopped_before_it_has_read_of_a_spike_is_taken_back_too(train, never):
    how = [*REWIND, "train.epochs=2 logging.every=24"]
    # two steps after the spike, of which the host has not read yet
    stop = inject.signalled("forward", rank=0, nth=SPIKED + 2)
    stopped = train("run", *how, ranks=2, seam=inject.together(NOISE, stop), code=75)
    assert [event["to"] for event in stopped.event("rewind")] == [18]
    assert stopped.checkpoints[-1] == "step-00000018"
    run = train("run", *how, ranks=2, seam=NOISE)
    assert_same_end(run, never)


@inject.fault
def an_earlier_warm_up():
    """Checkpoints to go back to are from before a change of the schedule."""
    real = rewind.read_progress
    with patch.object(rewind, "read_progress", lambda file: real(file) | {"warmup_steps": 9}):
        yield


def test_what_a_rewind_left_aside_stays_until_as_many_new_checkpoints_are_there_as_are_kept(train):
    how = [*REWIND, LONG, "train.rewind_margin=3 checkpoint.keep=2"]
    faults = inject.together(NOISE, inject.failed(step=19, nth=2), an_earlier_warm_up())
    run = train("run", *how, seam=faults, code=1)
    assert run.event("rewind")[0]["to"] == 12
    assert run.checkpoints == ["step-00000012", "step-00000018", "step-00000018.left"]
    trainer = read_json(checkpoint(run, 18) / "trainer.json")
    assert trainer["warmup_steps"] == 3, "a rewind keeps the run's own"


def test_without_a_checkpoint_to_go_back_to_the_update_is_left_out_instead(train):
    how = [*SPIKY, LONG, "checkpoint.every=26 train.spike_score=5"]
    run, skipped = (
        train(policy, *how, f"train.on_spike={policy}", seam=inject.always_garbage())
        for policy in ("rewind", "skip")
    )
    assert [e["step"] for e in run.event("spike")] == [e["step"] for e in skipped.event("spike")]
    assert len(run.event("spike")) > 1
    assert not run.event("rewind")
    assert "no checkpoint before step 20" in run.out
    assert_same_end(run, skipped)


def test_a_run_is_not_taken_back_for_ever(train):
    how = [*REWIND, LONG, "train.max_rewinds=2 train.rewind_margin=0 train.spike_score=5"]
    run = train("run", *how, seam=inject.always_garbage(), code=1)
    assert len(run.event("rewind")) == 2
    assert "2 times already" in run.err
    assert "step-00000018" in run.err


def test_the_steps_that_several_rewinds_took_back_are_all_counted(train):
    how = [*REWIND, LONG, "train.rewind_margin=0 train.spike_score=5"]
    run = train("run", *how, seam=inject.always_garbage(times=2))
    taken_back = [event["step"] - event["to"] for event in run.event("rewind")]
    assert len(taken_back) == 2
    assert read_json(newest(run) / "trainer.json")["taken_back"] == sum(taken_back)


# --- silently wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks, how, named",
    [
        (3, ["sharding=ddp"], [1]),
        pytest.param(4, ["sharding=hsdp sharding.replicas=2"], [1, 3], marks=pytest.mark.faults),
        (4, ["sharding.tensor=2 sharding.context=2"], [0, 1]),
    ],
)
def test_a_replica_that_holds_another_bit_is_named_and_nothing_of_it_is_saved(
    train, ranks, how, named
):
    steps = "train.steps=6 train.check_every=3 checkpoint.every=2"
    seam = inject.flipped_bit(rank=1, after_step=3)
    run = train("run", steps, *how, ranks=ranks, seam=seam, code=1)
    (event,) = run.event("corruption")
    assert event["ranks"] == named
    assert event["step"] == 4
    assert "weights/model.norm.weight" in run.err
    assert run.checkpoints == ["step-00000002"], "checked before the checkpoint of step 4, too"


@inject.fault
def wrong_once():
    """Make the last rank's gradients wrong in the last bit in one pass over step 6's first
    micro-batch, which is computed twice."""
    passes = []

    def objective(real, self, scores, tokens):
        if len(passes) == 2:
            scores.log_probability.register_hook(lambda gradient: gradient * (1 + 2**-23))
        return real(self, scores, tokens)

    def compute(real, self, *args):
        passes.append(0)
        computed = real(self, *args)
        passes.append(0) if len(passes) == 2 else None
        return computed

    with (
        inject.around("objective", objective, rank="last"),
        inject.around("compute_again", compute),
    ):
        yield


CHECKED = "train.steps=8 train.check_every=6 checkpoint.every=2 batch.micro_rows=2"


def test_a_rank_that_computes_differently_the_second_time_is_named_and_nothing_of_it_is_learnt(
    train,
):
    run = train("run", CHECKED, ranks=2, seam=wrong_once(), code=1)
    (event,) = run.event("corruption")
    assert event["ranks"] == [1]
    assert event["step"] == 6
    assert "rank 1 on" in run.err
    assert run.checkpoints[-1] == "step-00000004"


@inject.fault
def never_the_same(rank):
    """Let the gradient of a rank's activations differ from pass to pass.

    As with kernels that add in any order.
    """
    passes = []

    def compute(real, self, *args):
        loss, stream, gradients = real(self, *args)
        passes.append(0)
        return loss, stream + len(passes) * 1e-3, gradients

    with inject.around("compute_again", compute, rank):
        yield


def test_kernels_that_are_not_deterministic_are_told_once_and_do_not_end_the_run(train):
    run = train("run", CHECKED, "train.check_every=2", ranks=2, seam=never_the_same(rank=1))
    (event,) = run.event("not_deterministic")
    assert event["what"] == ["gradient of the activations"]
    assert event["ranks"] == [1]
    assert len(run.metrics) == 8
