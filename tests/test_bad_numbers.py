"""Numbers that are not finite, that stand out, or that are silently wrong: nothing of them is learnt or saved, and it is told whose they were."""

import contextlib
import json
import math
import os
import random
from unittest.mock import patch

import numpy as np
import pytest
import torch
from stored import assert_bitwise_equal, checkpoint, newest, stored
from test_optim import bad_gradient, bad_loss
from test_preemption import signalled

from fsdp_trainer.config.schema import Train
from fsdp_trainer.training.batches import row_ranges
from fsdp_trainer.training.guard import NEW_LEVEL, Guard

# --- what stands out ---------------------------------------------------------------------------------------------------------------


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def judged(losses, norms=None, **options):
    """Steps (from 0) that are spikes, and the guard behind them."""
    guard = Guard(Train(**{"spike_window": 16, **options}), torch.device("cpu"))
    norms = norms or [1.0] * len(losses)
    found = [
        bool(guard.judge(number(loss), number(norm)).spike)
        for loss, norm in zip(losses, norms, strict=True)
    ]
    return [i for i, spike in enumerate(found) if spike], guard


def falling(steps):
    """A loss as training has it: falling, noisy."""
    noise = random.Random(0)
    return [2 + 6 * math.exp(-i / 50) + noise.gauss(0, 0.05) for i in range(steps)]


def test_a_loss_or_a_gradient_norm_far_above_those_before_is_a_spike_and_training_as_usual_has_none():
    losses = falling(400)
    assert judged(losses)[0] == [] and judged([2.0] * 300)[0] == []
    assert judged([*losses[:100], 9.0, *losses[100:]])[0] == [100]
    assert judged(losses, [1.0] * 200 + [30.0] + [1.0] * 199)[0] == [200]
    assert judged([*losses[:100], 0.01, *losses[100:]])[0] == [], "below is no spike"
    assert judged([9.0, *losses[:6], 30.0])[0] == [], (
        "not judged by fewer steps than half the window"
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_window_never_holds_what_is_not_finite_nor_a_spike(bad):
    losses = falling(40)
    found, guard = judged([*losses, bad, 50.0, bad])
    kept, in_a_row = guard.state()
    assert (
        found == [41]
        and kept[0] == losses[-16:]
        and all(map(math.isfinite, kept[0] + kept[1]))
        and in_a_row == 1
    )
    verdict = guard.judge(torch.tensor(2.1), torch.tensor(bad))
    assert (
        verdict.not_finite
        and not verdict.spike
        and verdict.skip
        and guard.state()[0][0] == losses[-16:]
    )


def test_a_step_without_a_target_is_no_measure():
    found, guard = judged([*falling(40), 0.0], [1.0] * 40 + [0.0])
    assert found == [] and 0.0 not in guard.state()[0][0]


def test_a_new_level_is_told_a_few_times_and_then_taken_for_what_it_is():
    noise = random.Random(1)
    found, _ = judged(
        [2 + noise.gauss(0, 0.02) for _ in range(60)]
        + [5 + noise.gauss(0, 0.02) for _ in range(60)]
        + [9.0]
    )
    assert found == [*range(60, 59 + NEW_LEVEL), 120]


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
        assert bool(verdict.skip) == held and bool(verdict.spike) == (policy != "ignore"), policy
        assert guard.judge(torch.tensor(math.nan), torch.tensor(1.0)).skip


def sums_that_differ():
    """How many of this world's sums are not the same bits on all ranks."""
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


@pytest.mark.parametrize("ranks", [3, 4])
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


# --- a step that is not finite -----------------------------------------------------------------------------------------------------

EVERY = [
    "train.steps=4",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "batch.micro_rows=1",
    "train.on_spike=ignore",
]


def bad_infinite_gradient():
    """On the last rank, in step 3, one element of one shard."""
    from fsdp_trainer.training import trainer

    real = trainer.Trainer.clip

    def clip(self):
        if self.progress.step == 2 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            next(
                p for p in self.model.parameters() if p.grad.to_local().numel()
            ).grad.to_local().view(-1)[0] = math.inf
        return real(self)

    return patch.object(trainer.Trainer, "clip", clip)


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


@pytest.mark.parametrize("seam", [bad_gradient, bad_loss, bad_infinite_gradient])
@pytest.mark.parametrize(
    "name", ["fp32", *(pytest.param(name, marks=pytest.mark.faults) for name in list(FORMATS)[1:])]
)
def test_one_bad_number_on_one_rank_leaves_every_byte_of_every_format(train, name, seam):
    run = train("run", *EVERY, *FORMATS[name], ranks=4 if name == "hsdp" else 2, seam=seam)
    two, three, four = (stored(checkpoint(run, step)) for step in (2, 3, 4))
    assert_bitwise_equal(two, three)
    assert any(not torch.equal(three[name], four[name]) for name in three) and all(
        t.isfinite().all() for t in four.values()
    )
    assert [e["step"] for e in run.event("skipped")] == [3]


def test_a_skipped_step_tells_the_rank_and_the_lines_of_the_file(train, chats):
    run = train(
        "run",
        "train.steps=3",
        "batch.micro_rows=1",
        "data.packing=none",
        "data.shuffle=false",
        ranks=2,
        seam=bad_gradient,
    )
    (event,) = run.event("skipped")
    assert event["ranks"] == [1] and event["rows"] == [12, 18]
    assert event["samples"] == [f"{chats}:14"], (
        "the second row of step 3 is the first of rank 1; a row is a line"
    )


def no_good():
    from test_optim import bad_numbers

    return bad_numbers("gradient", range(5, 99))


@pytest.mark.parametrize("mode", ["sync", "async"])
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
    run = train("run", "train.steps=40", *how, ranks=2, seam=no_good, code=1)
    assert (
        "4 steps in a row" in run.err
        and str(checkpoint(run, 4)) in run.err
        and run.column("step") == [*range(1, 9)]
    )
    assert run.checkpoints == ["step-00000004"] and all(
        t.isfinite().all() for t in stored(newest(run)).values()
    )


# --- a spike -----------------------------------------------------------------------------------------------------------------------

SPIKED = 20
SPIKY = [
    "train.spike_window=8", "checkpoint.every=6", "checkpoint.keep=9", "batch.micro_rows=3", "schedule=constant", "batch.rows=3", "optim.lr=1e-3",
]  # fmt: skip


@contextlib.contextmanager
def garbage():
    """The rows of step SPIKED hold nothing but noise to learn, wherever and whenever they are trained."""
    from fsdp_trainer.data.mixture import Mixture

    real = Mixture.read_rows

    def read(self, indices):
        rows = real(self, indices)
        for index, tokens, labels in zip(indices, rows.tokens, rows.labels, strict=True):
            if 3 * (SPIKED - 1) <= index < 3 * SPIKED:
                labels[:] = np.where(
                    labels == -100, -100, (tokens * 2654435761 + index * 40503) % 200
                )
        return rows

    with patch.object(Mixture, "read_rows", read):
        yield


LONG = "train.steps=30"


@pytest.fixture(scope="module")
def spiky(world, inputs, tmp_path_factory):
    """`spiky(policy, *overrides)`: runs over a spike, each made once."""
    made = {}

    def run(policy, *overrides, ranks=1, seam=garbage, name="run"):
        key = (policy, *overrides, ranks, seam, name)
        if key not in made:
            folder = tmp_path_factory.mktemp("spike") / name
            how = [*SPIKY, LONG, f"train.on_spike={policy}", *overrides]
            made[key] = world.train(
                folder, *(f"{k}={v}" for k, v in inputs.items()), *how, ranks=ranks, seam=seam
            )
        return made[key]

    return run


def test_a_warning_changes_nothing_of_training_and_names_the_rows(spiky, chats):
    warned, ignored = spiky("warn"), spiky("ignore")
    (event,) = warned.event("spike")
    assert (event["step"], event["rows"], event["policy"], event["ranks"]) == (
        SPIKED,
        [57, 60],
        "warn",
        [0],
    )
    assert (
        event["loss_score"] > 10
        and event["samples"][0].startswith(f"{chats}:")
        and f"spike in step {SPIKED}" in warned.out
    )
    assert ignored.event("spike") == [] and warned.column("loss") == ignored.column("loss")
    assert_bitwise_equal(stored(newest(warned)), stored(newest(ignored)))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_skipped_spike_leaves_every_byte_as_it_was(spiky, ranks):
    run = spiky("skip", f"checkpoint.every={SPIKED - 1}", ranks=ranks)
    again = spiky("skip", "checkpoint.every=1", "checkpoint.keep=30", ranks=ranks)
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


def left_out():
    """A run whose data never had the rows of steps SPIKED − 1 to SPIKED + 1."""
    from fsdp_trainer.training.trainer import Trainer

    real = Trainer.fit

    def fit(self):
        self.progress.left_out = [[3 * (SPIKED - 2), 3 * (SPIKED + 1)]]
        return real(self)

    return patch.object(Trainer, "fit", fit)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mode"), [(1, "sync"), (2, "async")])
def test_a_rewound_run_ends_bitwise_where_one_does_that_never_had_the_rows(spiky, ranks, mode):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = spiky("rewind", f"checkpoint={mode}", "logging.tensorboard=true", ranks=ranks)
    never = spiky("rewind", ranks=ranks, seam=left_out)
    (event,) = run.event("rewind")
    assert (event["step"], event["to"], event["left_out"]) == (SPIKED, 18, [54, 63]) and len(
        run.event("spike")
    ) == 1
    shown = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert (
        run.column("step") == [*range(1, 31)] == [scalar.step for scalar in shown.Scalars("loss")]
    ), "never two lines for a step"
    assert run.column("loss") == never.column("loss") and run.column("tokens") == never.column(
        "tokens"
    )
    assert_bitwise_equal(stored(newest(run)), stored(newest(never)))
    assert (
        json.loads((newest(run) / "trainer.json").read_text())["left_out"] == [[54, 63]]
        and "back to step 18" in run.out
    )


def stopped_after(step):
    """As good as killed once that step's checkpoint is committed."""
    from fsdp_trainer.errors import RunFailed
    from fsdp_trainer.training.trainer import Trainer

    real = Trainer.save

    def save(self, again=False):
        real(self, again)
        if self.progress.step == step and self.progress.rewinds:
            raise RunFailed("as good as killed")

    return patch.object(Trainer, "save", save)


@contextlib.contextmanager
def garbage_and_killed():
    with garbage(), stopped_after(24):
        yield


@pytest.mark.slow
def test_a_rewound_run_that_is_killed_goes_on_bitwise_and_ends_with_its_data(train, spiky):
    """Counted in epochs: the rows left out make it shorter."""
    how = [*SPIKY, "train.on_spike=rewind", "train.steps=null", "train.epochs=2"]
    whole = train("whole", *how, seam=garbage)
    train("run", *how, seam=garbage_and_killed, code=1)
    run = train("run", *how, seam=garbage)
    plain = train("plain", *how, "train.on_spike=ignore")
    assert len(whole.event("rewind")) == 1 and len(plain.metrics) - len(whole.metrics) == 3
    assert run.column("loss") == whole.column("loss") and run.column("step") == [
        *range(1, len(whole.metrics) + 1)
    ]
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


@contextlib.contextmanager
def garbage_and_stopped():
    """Two steps after the spike, of which the host has not read yet."""
    with garbage(), signalled("forward", rank=0, nth=SPIKED + 2):
        yield


@pytest.mark.slow
def test_a_run_that_is_stopped_before_it_has_read_of_a_spike_is_taken_back_too(train, spiky):
    whole = spiky("rewind")
    how = [*SPIKY, LONG, "train.on_spike=rewind", "logging.every=30"]
    stopped = train("run", *how, seam=garbage_and_stopped, code=75)
    assert [e["to"] for e in stopped.event("rewind")] == [18] and stopped.checkpoints[
        -1
    ] == "step-00000018"
    run = train("run", *how, seam=garbage)
    assert run.column("loss") == whole.column("loss")
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))


@contextlib.contextmanager
def garbage_and_killed_after_18_again():
    with garbage(), stopped_after(18):
        yield


def test_what_a_rewind_left_aside_stays_until_as_many_new_checkpoints_are_there_as_are_kept(train):
    how = [*SPIKY, LONG, "train.on_spike=rewind", "train.rewind_margin=3", "checkpoint.keep=2"]
    run = train("run", *how, seam=garbage_and_killed_after_18_again, code=1)
    assert run.event("rewind")[0]["to"] == 12
    assert run.checkpoints == ["step-00000012", "step-00000018", "step-00000018.left"]


@pytest.mark.slow
def test_without_a_checkpoint_to_go_back_to_the_update_is_left_out_instead(train):
    how = [*SPIKY, LONG, "checkpoint.every=26", "train.spike_score=5"]
    run, skipped = (
        train(policy, *how, f"train.on_spike={policy}", seam=always_garbage)
        for policy in ("rewind", "skip")
    )
    assert [e["step"] for e in run.event("spike")] == [
        e["step"] for e in skipped.event("spike")
    ] and len(run.event("spike")) > 1
    assert (
        not run.event("rewind")
        and "no checkpoint before step 20" in run.out
        and run.column("loss") == skipped.column("loss")
    )
    assert_bitwise_equal(stored(newest(run)), stored(newest(skipped)))


@contextlib.contextmanager
def always_garbage():
    """From row 57 on there is nothing else, one step in three."""
    from fsdp_trainer.data.mixture import Mixture

    real = Mixture.read_rows

    def read(self, indices):
        rows = real(self, indices)
        for index, labels in zip(indices, rows.labels, strict=True):
            if index >= 57 and (index - 57) // 3 % 3 == 0:
                labels[:] = np.where(labels == -100, -100, 199 * np.arange(len(labels)) % 256)
        return rows

    with patch.object(Mixture, "read_rows", read):
        yield


def test_a_run_is_not_taken_back_for_ever(train):
    run = train(
        "run",
        *SPIKY,
        LONG,
        "train.on_spike=rewind",
        "train.max_rewinds=2",
        "train.rewind_margin=0",
        "train.spike_score=5",
        seam=always_garbage,
        code=1,
    )
    assert (
        len(run.event("rewind")) == 2
        and "2 times already" in run.err
        and "step-00000018" in run.err
        and "Traceback" not in run.err
    )


def test_a_rewind_needs_checkpoints(train):
    told = train("run", "train.steps=2", "train.on_spike=rewind", "checkpoint.every=null", code=2)
    assert "train.on_spike=skip" in told.err


@pytest.mark.parametrize(
    "bad",
    ["train.on_spike=stop", "train.spike_score=0", "train.spike_window=2", "train.check_every=0"],
)
def test_wrong_values_are_refused(train, bad):
    assert bad.split("=")[0] in train("run", "train.steps=2", bad, code=2).err


# --- silently wrong ----------------------------------------------------------------------------------------------------------------


def flipped_bit():
    """After step 5 one bit of one weight of rank 1 is another."""
    from fsdp_trainer.training.trainer import Trainer

    real = Trainer.update

    def update(self, *args):
        verdict = real(self, *args)
        if self.progress.step == 4 and os.environ["RANK"] == "1":
            dict(self.model.named_parameters())["model.norm.weight"].to_local().detach().view(
                torch.int32
            )[3] ^= 1
        return verdict

    return patch.object(Trainer, "update", update)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "how", "named"),
    [
        (3, ["sharding=ddp"], [1]),
        pytest.param(2, ["sharding=ddp"], [0, 1], marks=pytest.mark.faults),
        pytest.param(4, ["sharding=hsdp", "sharding.replicas=2"], [1, 3], marks=pytest.mark.faults),
    ],
)
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
        seam=flipped_bit,
        code=1,
    )
    (event,) = run.event("corruption")
    assert (
        event["ranks"] == named
        and event["step"] == 6
        and "weights/model.norm.weight" in run.err
        and "Traceback" not in run.err
    )
    assert run.checkpoints == ["step-00000003"], "checked before the checkpoint of step 6, too"


@contextlib.contextmanager
def wrong_once():
    """The last rank's gradients of one pass over step 6's first micro-batch, which is computed twice, are wrong in the last bit."""
    from fsdp_trainer.training import trainer

    real, passes = trainer.Trainer.computed_apart, []

    class Objective(trainer.CrossEntropy):
        def __call__(self, scores, tokens):
            if len(passes) == 2 and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
                scores.log_probability.register_hook(lambda gradient: gradient * (1 + 2**-23))
            return super().__call__(scores, tokens)

    def computed_apart(self, batch, weights):
        passes.append(0)
        found = real(self, batch, weights)
        passes.append(0) if len(passes) == 2 else None
        return found

    with (
        patch.object(trainer, "CrossEntropy", Objective),
        patch.object(trainer.Trainer, "computed_apart", computed_apart),
    ):
        yield


CHECKED = ["train.steps=8", "train.check_every=6", "checkpoint.every=2", "batch.micro_rows=2"]


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.faults)])
def test_a_rank_that_computes_differently_the_second_time_is_named_and_nothing_of_it_is_learnt(
    train, ranks
):
    run = train("run", *CHECKED, ranks=ranks, seam=wrong_once, code=1)
    (event,) = run.event("corruption")
    assert (
        event["ranks"] == [ranks - 1] and event["step"] == 6 and f"rank {ranks - 1} on" in run.err
    )
    assert run.checkpoints == ["step-00000004"] or run.checkpoints[-1] == "step-00000004"


def never_the_same():
    """As kernels do that add in any order."""
    from fsdp_trainer.training import trainer

    real, passes = trainer.Trainer.computed_apart, []

    def computed_apart(self, batch, weights):
        loss, stream, gradients = real(self, batch, weights)
        passes.append(0)
        return loss, stream + len(passes) * 1e-3, gradients

    return patch.object(trainer.Trainer, "computed_apart", computed_apart)


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_that_are_not_deterministic_are_told_once_and_do_not_end_the_run(train, ranks):
    run = train("run", *CHECKED, "train.check_every=2", ranks=ranks, seam=never_the_same)
    (event,) = run.event("not_deterministic")
    assert event["what"] == ["gradient of the activations"] and len(run.metrics) == 8


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
def test_looking_changes_nothing_of_a_healthy_run(train, how):
    ranks = 4 if "sharding=hsdp" in how else 2
    common = ["train.steps=6", "batch.micro_rows=1", *how]
    run, plain = (
        train("run", *common, "train.check_every=2", ranks=ranks),
        train("plain", *common, ranks=ranks),
    )
    assert (
        run.column("loss") == plain.column("loss")
        and not run.event("corruption")
        and not run.event("not_deterministic")
    )
    assert_bitwise_equal(stored(newest(run)), stored(newest(plain)))
