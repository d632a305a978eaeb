"""Plans of models that read images: the tower's memory, messages and time."""

import pytest
import torch
from image_models import CONFIGS
from memory_of_a_step import steps_with_images
from plans import plan
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fsdp_trainer.config.devices import DEVICES
from fsdp_trainer.config.schema import Model
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.from_config.resolve import resolve_model
from fsdp_trainer.planning.plan.memory import memory
from fsdp_trainer.planning.plan.messages import busiest_wire
from fsdp_trainer.planning.plan.plan import make_plan
from fsdp_trainer.planning.plan.planned_run import PlannedRun

SIDE = 28
"""Patches of the image in a row and in a column."""
VISION = {"hidden_size": 128, "intermediate_size": 512}
SIZES = {
    "llava": VISION | {"num_hidden_layers": 4, "image_size": 4 * SIDE, "num_attention_heads": 2},
    "qwen3_vl": VISION | {"depth": 4, "num_heads": 2, "num_position_embeddings": 784},
}
CLASSES = {
    "llava": "LlavaForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
CASES = [
    ("llava", {}),
    ("llava", {"train.freeze": ["vision", "language"]}),
    ("qwen3_vl", {"activation_checkpoint.mode": "full", "precision.param_dtype": "bfloat16"}),
]


def architecture(folder, kind):
    """Write the configuration of a small model to a folder of its name, and return it as ours."""
    folder /= kind
    sizes = CONFIGS[kind]
    vision = sizes["vision_config"] | SIZES[kind]
    # LLaVA would read the states before its last block, which then had no gradient
    own = {"image_token_id": 270} | ({"vision_feature_layer": -1} if kind == "llava" else {})
    config = CONFIG_MAPPING[kind](**(sizes | {"vision_config": vision} | own))
    config.architectures = [CLASSES[kind]]
    config.save_pretrained(folder)
    return resolve_model(Model(init_from=str(folder)), None)


def image_of(kind):
    """Return the arrays of an image, and its number of tokens."""
    if kind == "llava":
        return {"pixel_values": torch.zeros(1, 3, 4 * SIDE, 4 * SIDE)}, SIDE**2
    pixels = torch.zeros(SIDE**2, 3 * 2 * 4**2)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, SIDE, SIDE]])}, SIDE**2 // 4


def configured(tokens, **keys):
    cfg = PlanConfig()
    cfg.batch.seq_len, cfg.batch.rows, cfg.precision.param_dtype = 2 * tokens, 2, "float32"
    cfg.plan.image_share = 0.5
    for name, value in keys.items():
        group, key = name.split(".")
        setattr(getattr(cfg, group), key, value)
    return cfg


def test_a_step_with_images_holds_at_least_and_sends_what_is_planned(world, tmp_path):
    configs = {kind: architecture(tmp_path, kind) for kind in SIZES}
    cases = [
        (configured(image_of(kind)[1], **keys), configs[kind], *image_of(kind))
        for kind, keys in CASES
    ]
    measured = zip(*world.call(2, steps_with_images, cases), strict=True)
    for case, (cfg, config, *_), ranks in zip(CASES, cases, measured, strict=True):
        run = PlannedRun.of(cfg, config, 2)
        bound, peak = memory(run, "cpu").tensors, max(held for held, _ in ranks)
        assert 0.5 * peak < bound <= peak, case
        sent, way = ranks[0][1], busiest_wire(run, DEVICES["h100"])["shard"]
        assert way.gathered == pytest.approx(sent["all_gather"], rel=0.01), case
        assert way.reduced == pytest.approx(sent["reduce_scatter"], rel=0.01), case


def test_images_cost_memory_and_time_and_less_with_a_frozen_tower(tmp_path):
    config = architecture(tmp_path, "qwen3_vl")

    def plan_of(share, **keys):
        cfg = configured(2048, **keys)
        cfg.plan.image_share = share
        return make_plan(cfg, config, 8, DEVICES["h100"])

    zero, fifth, large = plan_of(0), plan_of(0.2), plan_of(0.8)
    assert zero.peak_bytes < fifth.peak_bytes < large.peak_bytes
    assert zero.seconds < fifth.seconds < large.seconds
    assert plan_of(0.5).memory == plan_of(None).memory
    frozen = plan_of(0.8, **{"train.freeze": ["vision"]})
    recomputed = plan_of(0.8, **{"activation_checkpoint.mode": "full"})
    assert frozen.seconds < large.seconds < recomputed.seconds
    assert max(frozen.peak_bytes, recomputed.peak_bytes) < large.peak_bytes
    base = ["plan.gpu=h100", "plan.world_size=8", "data.path=none"]
    assert (
        "50% of the tokens of a row are of images"
        in plan(*base, f"model.init_from={tmp_path / 'qwen3_vl'}").out
    )
    assert "reads only text" in plan(*base, "model=llama3_8b plan.image_share=0.1", code=2).err
