"""The cases of `make cuda-shapes`, which itself needs torch's build for CUDA."""

import pytest

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.config import FAMILIES
from fsdp_trainer.optim.optimizers import OPTIMIZERS
from tools.cuda_shapes.cases import KERNELS, TRANSFORMERS, WAITING, steps


@pytest.mark.slow
def test_every_case_can_be_configured_and_all_families_optimizers_and_layouts_are_among_them():
    cases = steps()
    by_transformers = {f"transformers {name}" for name in TRANSFORMERS}
    assert {*KERNELS, *WAITING, *by_transformers} <= cases.keys()
    cfgs = [
        compose("rehearse", words, None, inputs=False)
        for name, words in cases.items()
        if name not in by_transformers  # their folders are written by the command
    ]
    assert {cfg.model.family for cfg in cfgs} >= FAMILIES.keys()
    assert {cfg.model.attention for cfg in cfgs} >= LAYOUTS.keys()
    assert {cfg.optim.name for cfg in cfgs} >= OPTIMIZERS.keys()
