"""The cases of `make cuda-shapes`, which itself needs torch's build for CUDA."""

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.parts.optimizers import OPTIMIZERS
from fsdp_trainer.models.attention import LAYOUTS
from fsdp_trainer.models.config import FAMILIES
from tools.cuda_shapes.cases import KERNELS, MODELS, WAITING, compiled_cases, steps


def test_all_families_optimizers_and_layouts_of_attention_are_among_the_cases():
    cases = steps()
    assert {*KERNELS, *WAITING} <= (cases | compiled_cases()).keys()
    families = {
        compose("rehearse", cases[f"model {name}"], None, inputs=False).model.family
        for name in MODELS
    }
    words = {word for case in cases.values() for word in case}
    assert families == FAMILIES.keys()
    assert words >= {f"model.attention={name}" for name in LAYOUTS}
    assert words >= {f"optim={name}" for name in OPTIMIZERS.keys() - {"adamw"}}
