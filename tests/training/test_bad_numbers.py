"""Numbers that are not finite, that stand out, or that are silently wrong: nothing of them is
learnt or saved, and it is told whose they were."""

import json
import math
import random

import inject
import pytest
import torch
from inject import SPIKED
from stored import assert_bitwise_equal, checkpoint, newest, stored
from world import SPIKY

from fsdp_trainer.config.schema import Train
from fsdp_trainer.training.batches import row_ranges
from fsdp_trainer.training.guard import Guard

# --- what stands out ----------------------------------------------------------------------------


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def judged(losses, norms=None, **options):
    """Steps (from 0) that are spikes, and the guard behind them."""
    guard = Guard(Train(**{"spike_window": 16, **options}), torch.device("cpu"))
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


@pytest.mark.slow
def test_a_loss_or_a_gradient_norm_far_above_those_before_is_a_spike_and_usual_training_has_none():
    losses = falling(400)
    assert judged(losses)[0] == []
    assert judged([2.0] * 300)[0] == []
    assert judged([*losses[:100], 9.0, *losses[100:]])[0] == [100]
    assert judged(losses, [1.0] * 200 + [30.0] + [1.0] * 199)[0] == [200]
    assert judged([*losses[:100], 0.01, *losses[100:]])[0] == [], "below is no spike"
    assert judged([9.0, *losses[:6], 30.0])[0] == [], (
        "not judged by fewer steps than half the window"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_window_never_holds_what_is_not_finite_nor_a_spike(bad):
    losses = falling(40)
    verdicts, guard = judged([*losses, bad, 50.0, bad])
    usual, in_a_row = guard.state()
    assert verdicts == [41]
    assert usual[0] == losses[-16:]
    assert all(map(math.isfinite, usual[0] + usual[1]))
    assert in_a_row == 1
    verdict = guard.judge(torch.tensor(2.1), torch.tensor(bad))
    assert verdict.not_finite
    assert not verdict.spike
    assert verdict.skip
    assert guard.state()[0][0] == losses[-16:]


def test_a_step_without_a_target_is_no_measure():
    verdicts, guard = judged([*falling(40), 0.0], [1.0] * 40 + [0.0])
    assert verdicts == []
    assert 0.0 not in guard.state()[0][0]


def test_a_new_level_is_told_a_few_times_and_then_taken_for_what_it_is():
    noise = random.Random(1)
    verdicts, _ = judged(
        [2 + noise.gauss(0, 0.02) for _ in range(60)]
        + [5 + noise.gauss(0, 0.02) for _ in range(60)]
        + [9.0]
    )
    assert verdicts == [60, 61, 62, 63, 120]


def test_a_guard_goes_on_where_another_stopped_to_the_last_bit():
    losses = [*falling(50), 8.0, 8.1, 2.1]
    whole, half = judged(losses)[1], judged(losses[:51])[1]
    onward = Guard(half.cfg, torch.device("cpu"))
    onward.load(*json.loads(json.dumps(half.state())))
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


def sums_that_differ():
    """Return how many of this world's sums are not the same bits on all ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    mine, bad = torch.Generator().manual_seed(dist.get_rank()), 0
    for i in range(100):
        summed = torch.randn(1 + i % 23, dtype=torch.float64, generator=mine) * 10.0 ** (i % 7 - 3)
        dist.all_reduce(summed)
        everyones = [torch.empty_like(summed) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, summed)
        bad += any(not torch.equal(other, summed) for other in everyones)
    return bad


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_rank_is_given_the_same_sums_to_the_last_bit_and_so_judges_alike(world, ranks):
    assert world.call(ranks, sums_that_differ) == [0] * ranks


def test_rows_that_are_left_out_are_in_no_step_and_the_data_ends_where_it_ends():
    assert list(row_ranges(4, 20, 0, [])) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 20)]
    assert list(row_ranges(4, 22, 4, [[8, 12], [11, 13]])) == [(4, 8), (13, 17), (17, 21), (21, 22)]
    assert list(row_ranges(4, 20, 0, [[6, 9], [18, 30]])) == [
        (0, 4),
        (4, 6),
        (9, 13),
        (13, 17),
        (17, 18),
    ]


# --- a step that is not finite ------------------------------------------------------------------

EVERY = [
    "train.steps=4",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "batch.micro_rows=1",
    "train.on_spike=ignore",
]


FORMATS = {
    "fp32": [],
    "bf16": ["precision.param_dtype=bfloat16"],
    "pure_bf16": ["precision.param_dtype=bfloat16", "precision.master_dtype=bfloat16"],
    "8bit": ["optim=adamw_8bit", "model.hidden_size=64"],
    "foreach": ["optim.implementation=foreach"],
    "ddp": ["sharding=ddp"],
    "offload": ["sharding.cpu_offload=true"],
    "unsharded": ["sharding.accumulate=unsharded"],
    "hsdp": ["sharding=hsdp", "sharding.replicas=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad", [inject.bad_gradient(), inject.bad_loss(), inject.infinite_gradient()], ids=str
)
@pytest.mark.parametrize(
    "name", ["fp32", *(pytest.param(name, marks=pytest.mark.faults) for name in list(FORMATS)[1:])]
)
@pytest.mark.grid(1)
def test_one_bad_number_on_one_rank_leaves_every_byte_of_every_format(train, name, bad):
    run = train("run", *EVERY, *FORMATS[name], ranks=4 if name == "hsdp" else 2, seam=bad)
    two, three, four = (stored(checkpoint(run, step)) for step in (2, 3, 4))
    assert_bitwise_equal(two, three)
    assert any(not torch.equal(three[name], four[name]) for name in three)
    assert all(t.isfinite().all() for t in four.values())
    assert [e["step"] for e in run.event("skipped")] == [3]


@pytest.mark.slow
def test_a_skipped_step_tells_the_rank_and_the_lines_of_the_file(train, chats):
    run = train(
        "run",
        "train.steps=3",
        "batch.micro_rows=1",
        "data.packing=none",
        "data.shuffle=false",
        ranks=2,
        seam=inject.bad_gradient(),
    )
    (event,) = run.event("skipped")
    assert event["ranks"] == [1]
    assert event["rows"] == [12, 18]
    assert event["samples"] == [f"{chats}:14"], (
        "the second row of step 3 is the first of rank 1; a row is a line"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.grid(1)
def test_a_run_that_learns_nothing_names_the_last_good_checkpoint_however_rarely_it_looks(
    train, mode
):
    how = [
        "train.max_skipped=3",
        "logging.every=10",
        "checkpoint.every=4",
        f"checkpoint={mode}",
        "checkpoint.keep=9",
    ]
    run = train(
        "run", "train.steps=40", *how, ranks=2, seam=inject.bad_gradient(*range(5, 99)), code=1
    )
    assert "4 steps in a row" in run.err
    assert str(checkpoint(run, 4)) in run.err
    assert run.column("step") == [*range(1, 9)]
    assert run.checkpoints == ["step-00000004"]
    assert all(t.isfinite().all() for t in stored(newest(run)).values())


# --- a spike ------------------------------------------------------------------------------------

LONG = "train.steps=24"
NOISE = inject.garbage()


@pytest.fixture(scope="module")
def spiky(world, inputs, tmp_path_factory):
    """`spiky(policy, *overrides)`: runs over a spike, each made once."""
    runs = {}

    def run(policy, *overrides, ranks=1, seam=NOISE, name="run"):
        key = (policy, *overrides, ranks, str(seam), name)
        if key not in runs:
            folder = tmp_path_factory.mktemp("spike") / name
            how = [*SPIKY, LONG, f"train.on_spike={policy}", *overrides]
            runs[key] = world.train(
                folder, *(f"{k}={v}" for k, v in inputs.items()), *how, ranks=ranks, seam=seam
            )
        return runs[key]

    return run


@pytest.mark.slow
def test_a_warning_changes_nothing_of_training_and_names_the_rows(spiky, chats):
    warned, ignored = spiky("warn"), spiky("ignore")
    (event,) = warned.event("spike")
    assert (event["step"], event["rows"], event["policy"], event["ranks"]) == (
        SPIKED,
        [57, 60],
        "warn",
        [0],
    )
    assert event["loss_score"] > 10
    assert event["samples"][0].startswith(f"{chats}:")
    assert f"spike in step {SPIKED}" in warned.out
    assert ignored.event("spike") == []
    assert warned.column("loss") == ignored.column("loss")
    assert_bitwise_equal(stored(newest(warned)), stored(newest(ignored)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.grid(1)
def test_a_skipped_spike_leaves_every_byte_as_it_was(spiky, ranks):
    short = f"train.steps={SPIKED + 1}"
    run = spiky("skip", short, f"checkpoint.every={SPIKED - 1}", ranks=ranks)
    again = spiky("skip", short, "checkpoint.every=1", "checkpoint.keep=3", ranks=ranks)
    assert (
        [e["step"] for e in run.event("spike")]
        == [e["step"] for e in again.event("spike")]
        == [SPIKED]
    )
    assert_bitwise_equal(stored(checkpoint(again, SPIKED - 1)), stored(checkpoint(again, SPIKED)))
    assert_bitwise_equal(stored(checkpoint(run, SPIKED - 1)), stored(checkpoint(again, SPIKED)))
    assert not torch.equal(
        *(
            stored(checkpoint(again, step))["weights/model.norm.weight"]
            for step in (SPIKED, SPIKED + 1)
        )
    )
    assert run.column("tokens")[SPIKED - 1] > run.column("tokens")[SPIKED - 2], (
        "its rows are not trained again"
    )


def never_had_them(real, self):
    """A run whose data never had the rows of steps SPIKED − 1 to SPIKED + 1."""
    self.progress.skipped_row_ranges = [[3 * (SPIKED - 2), 3 * (SPIKED + 1)]]
    return real(self)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode"), [(1, "sync"), (2, "async")])
@pytest.mark.grid(1)
def test_a_rewound_run_ends_bitwise_where_one_does_that_never_had_the_rows(spiky, ranks, mode):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = spiky("rewind", f"checkpoint={mode}", "logging.tensorboard=true", ranks=ranks)
    never = spiky("rewind", ranks=ranks, seam=inject.around("fit", never_had_them))
    (event,) = run.event("rewind")
    assert (event["step"], event["to"], event["left_out"]) == (SPIKED, 18, [54, 63])
    assert len(run.event("spike")) == 1
    shown = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert (
        run.column("step") == [*range(1, 25)] == [scalar.step for scalar in shown.Scalars("loss")]
    ), "never two lines for a step"
    assert run.column("loss") == never.column("loss")
    assert run.column("tokens") == never.column("tokens")
    assert_bitwise_equal(stored(newest(run)), stored(newest(never)))
    assert json.loads((newest(run) / "trainer.json").read_text())["skipped_row_ranges"] == [
        [54, 63]
    ]
    assert "back to step 18" in run.out


@pytest.mark.slow
@pytest.mark.further
def test_a_rewound_run_that_is_killed_goes_on_bitwise_and_ends_with_its_data(train, spiky):
    """Counted in epochs: the rows left out make it shorter."""
    how = [*SPIKY, "train.on_spike=rewind", "train.steps=null", "train.epochs=2"]
    whole = train("whole", *how, seam=NOISE)
    train("run", *how, seam=inject.together(NOISE, inject.failed(step=25)), code=1)
    run = train("run", *how, seam=NOISE)
    plain = train("plain", *how, "train.on_spike=ignore")
    assert len(whole.event("rewind")) == 1
    assert len(plain.metrics) - len(whole.metrics) == 3
    assert run.column("loss") == whole.column("loss")
    assert run.column("step") == [*range(1, len(whole.metrics) + 1)]
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


@pytest.mark.slow
@pytest.mark.further
def test_a_run_that_is_stopped_before_it_has_read_of_a_spike_is_taken_back_too(train, spiky):
    whole = spiky("rewind")
    how = [*SPIKY, LONG, "train.on_spike=rewind", "logging.every=24"]
    # two steps after the spike, of which the host has not read yet
    stop = inject.signalled("forward", rank=0, nth=SPIKED + 2)
    stopped = train("run", *how, seam=inject.together(NOISE, stop), code=75)
    assert [e["to"] for e in stopped.event("rewind")] == [18]
    assert stopped.checkpoints[-1] == "step-00000018"
    run = train("run", *how, seam=NOISE)
    assert run.column("loss") == whole.column("loss")
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


@pytest.mark.slow
def test_what_a_rewind_left_aside_stays_until_as_many_new_checkpoints_are_there_as_are_kept(train):
    how = [*SPIKY, LONG, "train.on_spike=rewind", "train.rewind_margin=3", "checkpoint.keep=2"]
    after_18_again = inject.failed(step=19, nth=2)
    run = train("run", *how, seam=inject.together(NOISE, after_18_again), code=1)
    assert run.event("rewind")[0]["to"] == 12
    assert run.checkpoints == ["step-00000012", "step-00000018", "step-00000018.left"]


@pytest.mark.slow
@pytest.mark.further
def test_without_a_checkpoint_to_go_back_to_the_update_is_left_out_instead(train):
    how = [*SPIKY, LONG, "checkpoint.every=26", "train.spike_score=5"]
    run, skipped = (
        train(policy, *how, f"train.on_spike={policy}", seam=inject.always_garbage())
        for policy in ("rewind", "skip")
    )
    assert [e["step"] for e in run.event("spike")] == [e["step"] for e in skipped.event("spike")]
    assert len(run.event("spike")) > 1
    assert not run.event("rewind")
    assert "no checkpoint before step 20" in run.out
    assert run.column("loss") == skipped.column("loss")
    assert_bitwise_equal(stored(newest(run)), stored(newest(skipped)))


@pytest.mark.slow
def test_a_run_is_not_taken_back_for_ever(train):
    run = train(
        "run",
        *SPIKY,
        LONG,
        "train.on_spike=rewind",
        "train.max_rewinds=2",
        "train.rewind_margin=0",
        "train.spike_score=5",
        seam=inject.always_garbage(),
        code=1,
    )
    assert len(run.event("rewind")) == 2
    assert "2 times already" in run.err
    assert "step-00000018" in run.err
    assert "Traceback" not in run.err


def test_a_rewind_needs_checkpoints(train):
    refused = train(
        "run", "train.steps=2", "train.on_spike=rewind", "checkpoint.every=null", code=2
    )
    assert "train.on_spike=skip" in refused.err


@pytest.mark.parametrize(
    "bad",
    ["train.on_spike=stop", "train.spike_score=0", "train.spike_window=2", "train.check_every=0"],
)
def test_wrong_values_are_refused(train, bad):
    assert bad.split("=")[0] in train("run", "train.steps=2", bad, code=2).err


# --- silently wrong -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "how", "named"),
    [
        (3, ["sharding=ddp"], [1]),
        pytest.param(2, ["sharding=ddp"], [0, 1], marks=pytest.mark.faults),
        pytest.param(4, ["sharding=hsdp", "sharding.replicas=2"], [1, 3], marks=pytest.mark.faults),
        (4, ["sharding.tensor=2", "sharding.context=2"], [0, 1]),
    ],
)
@pytest.mark.grid(1)
def test_a_replica_that_holds_another_bit_is_named_and_nothing_of_it_is_saved(
    train, ranks, how, named
):
    run = train(
        "run",
        "train.steps=9",
        "train.check_every=4",
        "checkpoint.every=3",
        *how,
        ranks=ranks,
        seam=inject.flipped_bit(rank=1, after_step=5),
        code=1,
    )
    (event,) = run.event("corruption")
    assert event["ranks"] == named
    assert event["step"] == 6
    assert "weights/model.norm.weight" in run.err
    assert "Traceback" not in run.err
    assert run.checkpoints == ["step-00000003"], "checked before the checkpoint of step 6, too"


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


CHECKED = ["train.steps=8", "train.check_every=6", "checkpoint.every=2", "batch.micro_rows=2"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.faults)])
def test_a_rank_that_computes_differently_the_second_time_is_named_and_nothing_of_it_is_learnt(
    train, ranks
):
    run = train("run", *CHECKED, ranks=ranks, seam=wrong_once(), code=1)
    (event,) = run.event("corruption")
    assert event["ranks"] == [ranks - 1]
    assert event["step"] == 6
    assert f"rank {ranks - 1} on" in run.err
    assert run.checkpoints == ["step-00000004"] or run.checkpoints[-1] == "step-00000004"


@inject.fault
def never_the_same(rank=None):
    """Let the gradient of the activations differ from pass to pass.

    As with kernels that add in any order, on all ranks or on one.
    """
    passes = []

    def compute(real, self, *args):
        loss, stream, gradients = real(self, *args)
        passes.append(0)
        return loss, stream + len(passes) * 1e-3, gradients

    with inject.around("compute_again", compute, rank):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only_rank", "ranks"), [(None, [0]), (None, [0, 1]), pytest.param(1, [1], id="one of two")]
)
@pytest.mark.grid(1)
def test_kernels_that_are_not_deterministic_are_told_once_and_do_not_end_the_run(
    train, only_rank, ranks
):
    seam = never_the_same(only_rank)
    run = train("run", *CHECKED, "train.check_every=2", ranks=ranks[-1] + 1, seam=seam)
    (event,) = run.event("not_deterministic")
    assert event["what"] == ["gradient of the activations"]
    assert event["ranks"] == ranks
    assert len(run.metrics) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ["sharding=ddp"],
        pytest.param(["sharding.accumulate=unsharded"], marks=pytest.mark.faults),
        pytest.param(
            ["activation_checkpoint=full", "precision.param_dtype=bfloat16"],
            marks=pytest.mark.faults,
        ),
        pytest.param(["sharding=hsdp", "sharding.replicas=2"], marks=pytest.mark.faults),
        pytest.param(
            ["optim=adamw_8bit", "model.hidden_size=64", "sharding=ddp"], marks=pytest.mark.faults
        ),
    ],
    ids=str,
)
@pytest.mark.grid(1)
def test_looking_changes_nothing_of_a_healthy_run(train, how):
    ranks = 4 if "sharding=hsdp" in how else 2
    common = ["train.steps=6", "batch.micro_rows=1", *how]
    run, plain = (
        train("run", *common, "train.check_every=2", ranks=ranks),
        train("plain", *common, ranks=ranks),
    )
    assert run.column("loss") == plain.column("loss")
    assert not run.event("corruption")
    assert not run.event("not_deterministic")
    assert_bitwise_equal(stored(newest(run)), stored(newest(plain)))
