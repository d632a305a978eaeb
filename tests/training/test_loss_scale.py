"""Training in float16: the scale of the loss follows the gradients, alike on all ranks."""

from itertools import pairwise

import torch
from stored import assert_near

from fsdp_trainer.config.schema import Precision
from fsdp_trainer.training.loss_scale import LossScale

FLOAT16 = "precision.param_dtype=float16"
HOW = "schedule=constant schedule.warmup_steps=0 batch.micro_rows=3"
TOO_LARGE = [
    HOW, FLOAT16, "precision.loss_scale=262144 precision.loss_scale_steps=2",
    # the gradients of a tied matrix are summed in float16, but for stages that have a copy each
    "model.tie_word_embeddings=false",
]  # fmt: skip


def test_the_scale_is_halved_after_an_overflow_and_doubled_after_enough_steps_without():
    scale = LossScale(Precision(loss_scale=8.0, loss_scale_steps=2), torch.device("cpu"))
    scales = []
    for overflow in (True, False, False, False, True, False, False):
        scale.update(torch.tensor(overflow))
        scales.append(scale.scale.item())
    assert scales == [4, 4, 8, 8, 4, 4, 8]
    for _ in range(5):
        scale.update(torch.tensor(True))
    assert scale.scale.item() == 1


def test_an_overflow_skips_the_step_everywhere_and_a_resume_goes_on_with_its_scale(train):
    whole = train("whole", *TOO_LARGE, "train.steps=7", ranks=2)
    scales, norms = whole["loss_scale"], whole["grad_norm"]
    skipped = [norm is None for norm in norms]
    assert scales[0] == 2**18
    assert skipped[0], "the gradients of so large a scale are not finite"
    assert not skipped[-1]
    for step in range(6):
        factors = (0.5,) if skipped[step] else (1, 2)
        assert scales[step + 1] / scales[step] in factors
    assert 2 in [later / before for before, later in pairwise(scales)]
    steps_skipped = [event["step"] - 1 for event in whole.event("skipped")]
    assert steps_skipped == [step for step in range(7) if skipped[step]]

    train("run", *TOO_LARGE, "train.steps=4 sharding.tensor=2", ranks=2)
    run = train("run", *TOO_LARGE, "train.steps=7 sharding.pipeline=2", ranks=2)
    assert run["loss_scale"] == scales
    assert_near(run, whole, loss=5e-3)
