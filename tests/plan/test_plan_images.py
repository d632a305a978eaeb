"""Plans of models that read images: the tower's memory, messages and time."""

import json
import re
import shlex

import pytest
import torch
from folders import REPO
from image_models import CONFIGS
from memory_of_a_step import only_tensors, steps_with_images
from messages_of_a_step import Message, bytes_sent, collectives_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fsdp_trainer.cli import main
from fsdp_trainer.config.devices import DEVICES
from fsdp_trainer.config.schema import Model
from fsdp_trainer.config.verbs import PlanConfig
from fsdp_trainer.models.resolve import resolve_model
from fsdp_trainer.plan.memory import memory
from fsdp_trainer.plan.plan import make_plan
from fsdp_trainer.plan.planned_run import PlannedRun
from fsdp_trainer.plan.wire import wire

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
CASES = {
    "whole": {},
    "full": {"activation_checkpoint.mode": "full"},
    "frozen": {"train.freeze": ["vision"]},
    "only the projector": {"train.freeze": ["vision", "language"]},
    "gathered": {"sharding.reshard_after_forward": False},
    "half": {"precision.param_dtype": "bfloat16"},
}


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


def messages_sent(compute):
    """Return the bytes that this rank sends meanwhile in gathers and reductions, by Message."""
    return bytes_sent(collectives_of(compute))


def configured(tokens, **keys):
    cfg = PlanConfig()
    cfg.batch.seq_len, cfg.batch.rows, cfg.precision.param_dtype = 2 * tokens, 2, "float32"
    cfg.plan.image_share = 0.5
    for name, value in keys.items():
        group, key = name.split(".")
        setattr(getattr(cfg, group), key, value)
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.further
def test_memory_and_messages_of_a_step_with_images_are_the_planned_ones(world, tmp_path, kind):
    config = architecture(tmp_path, kind)
    arrays, tokens = image_of(kind)
    cases = [(configured(tokens, **keys), config, arrays, tokens) for keys in CASES.values()]
    measured = world.call(2, steps_with_images, cases, messages_sent)
    for name, (cfg, *_), ranks in zip(CASES, cases, zip(*measured, strict=True), strict=True):
        run = PlannedRun.of(cfg, config, 2)
        with only_tensors():
            peak = memory(run, "cpu").peak
        held = max(peak for peak, _ in ranks)
        assert peak.total - peak.bytes["allowance"] == pytest.approx(held, rel=0.08), (name, peak)
        sent, planned = ranks[0][1], wire(run, DEVICES["h100"])["shard"]
        assert planned.gathered == pytest.approx(sent[Message(2, True)], rel=0.01), name
        assert planned.reduced == pytest.approx(sent.get(Message(2, False), 0), rel=0.01), name


@pytest.mark.further
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
    frozen, recomputed = (
        plan_of(0.8, **{"train.freeze": ["vision"]}),
        plan_of(0.8, **{"activation_checkpoint.mode": "full"}),
    )
    assert frozen.seconds < large.seconds < recomputed.seconds
    assert max(frozen.peak_bytes, recomputed.peak_bytes) < large.peak_bytes


@pytest.mark.further
def test_a_plan_says_how_many_tokens_are_of_images(tmp_path, capsys):
    folder = tmp_path / "qwen3_vl"
    architecture(tmp_path, "qwen3_vl")
    base = ["plan", "plan.gpu=h100", "plan.world_size=8", "data.path=none"]
    assert main([*base, f"model.init_from={folder}"]) == 0
    assert "50% of the tokens of a row are of images" in capsys.readouterr().out
    assert main([*base, f"model.init_from={folder}", "plan.image_share=0.1"]) == 0
    assert "of the tokens" not in capsys.readouterr().out
    assert main([*base, "model=llama3_8b", "plan.image_share=0.1"]) == 2
    assert "reads only text" in capsys.readouterr().err


QWEN3_VL_8B = {
    "text_config": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
"""The published sizes, without what changes no plan."""


def overridden(words, more):
    """Yield the words of a command, with one more in place of the word with the same key."""
    key = more.partition("=")[0]
    yield from (word for word in words if not word.startswith(f"{key}="))
    yield more


@pytest.mark.slow
@pytest.mark.further
def test_the_recipes_of_the_page_need_what_it_says(tmp_path, capsys):
    config = CONFIG_MAPPING["qwen3_vl"](**QWEN3_VL_8B, tie_word_embeddings=False)
    config.architectures = [CLASSES["qwen3_vl"]]
    config.save_pretrained(tmp_path / "model")
    page = (REPO / "docs/images.md").read_text()
    commands = re.findall(
        r"-m fsdp_trainer (.*?)```|^fsdp-trainer (model.*?)```", page, re.M | re.S
    )
    full, small = [
        shlex.split((a or b).replace("\\\n", "")) for a, b in commands if "Qwen3-VL" in a + b
    ]
    [peaks] = re.findall(r"\| peak of a GPU, GiB \| (.*) \|", page)
    card = re.findall(r"rtx4090 plan.world_size=1`: ([\d.]+) of", page)
    h100 = [*full, "plan.gpu=h100", "plan.world_size=8"]
    others = ["plan.image_share=0.1"], ["train.freeze=[vision]"], ["activation_checkpoint=full"]
    cases = [h100, *(list(overridden(h100, *more)) for more in others)]
    cases.append([*small, "plan.gpu=rtx4090", "plan.world_size=1"])
    for words, peak in zip(cases, [*peaks.split(" | "), *card], strict=True):
        own = [word for word in words if not word.startswith("model.init_from")]
        assert (
            main(["plan", *own, f"model.init_from={tmp_path / 'model'}", "plan.format=json"]) == 0
        )
        assert json.loads(capsys.readouterr().out)["peak_gib"] == pytest.approx(
            float(peak), abs=0.1
        )
