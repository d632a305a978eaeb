"""Recipes, published models and plans, as configurations."""

from functools import cache

import yaml

from fsdp_trainer.config.composing.compose import CONF, compose, options
from fsdp_trainer.config.schema import Model
from fsdp_trainer.models.resolve import resolve_model
from fsdp_trainer.plan.plan import make_plan
from fsdp_trainer.plan.plan_inputs import architecture, target

RECIPES = options("train")["recipe"]
# Published parameter counts (model cards): a wrong number in conf/model would show here.
PUBLISHED = {
    "llama2_7b": (32_000, 6_738_415_616), "llama2_13b": (32_000, 13_015_864_320),
    "llama2_70b": (32_000, 68_976_648_192),
    "llama3_2_1b": (128_256, 1_235_814_400), "llama3_2_3b": (128_256, 3_212_749_824),
    "llama3_8b": (128_256, 8_030_261_248),
    "llama3_70b": (128_256, 70_553_706_496), "llama3_1_405b": (128_256, 405_853_388_800),
    "mistral_7b": (32_768, 7_248_023_552), "mistral_nemo_12b": (131_072, 12_247_782_400),
    "mistral_small_24b": (131_072, 23_572_403_200),
    "qwen2_5_0_5b": (151_936, 494_032_768), "qwen2_5_1_5b": (151_936, 1_543_714_304),
    "qwen2_5_3b": (151_936, 3_085_938_688),
    "qwen2_5_7b": (152_064, 7_615_616_512), "qwen2_5_14b": (152_064, 14_770_033_664),
    "qwen2_5_32b": (152_064, 32_763_876_352),
    "qwen2_5_72b": (152_064, 72_706_203_648),
    "qwen3_0_6b": (151_936, 596_049_920), "qwen3_1_7b": (151_936, 1_720_574_976),
    "qwen3_4b": (151_936, 4_022_468_096),
    "qwen3_8b": (151_936, 8_190_735_360), "qwen3_14b": (151_936, 14_768_307_200),
    "qwen3_32b": (151_936, 32_762_123_264), "qwen3_30b_a3b": (151_936, 30_532_122_624),
    "qwen1_5_moe_a2_7b": (151_936, 14_315_784_192), "mixtral_8x7b": (32_000, 46_702_792_704),
    "olmoe_7b": (50_304, 6_919_161_856), "deepseek_v3": (129_280, 671_026_404_352),
    "moonlight_16b_a3b": (163_840, 15_960_108_544),
    "gpt_oss_20b": (201_088, 20_914_757_184), "gpt_oss_120b": (201_088, 116_829_156_672),
    "gemma2_2b": (256_000, 2_614_341_888), "gemma2_9b": (256_000, 9_241_705_984),
    "gemma2_27b": (256_000, 27_227_128_320),
    # of the complete 4B (4,300,079,472), 416,866,032 belong to the vision tower and 2,950,272 to
    # the projector
    "gemma3_1b": (262_144, 999_885_952),
    "gemma3_4b": (262_208, 4_300_079_472 - 416_866_032 - 2_950_272),
    "gemma3_12b": (262_208, 11_766_034_176), "gemma3_27b": (262_208, 27_009_346_304),
    "olmo2_1b": (100_352, 1_484_916_736), "olmo2_7b": (100_352, 7_298_617_344),
    "olmo2_13b": (100_352, 13_716_198_400),
    "olmo2_32b": (100_352, 32_234_279_936),
    "phi3_mini": (32_064, 3_821_079_552), "phi3_medium": (32_064, 13_960_238_080),
    "phi4": (100_352, 14_659_507_200),
    "tinyllama_1b": (32_000, 1_100_048_384),
    "smollm2_135m": (49_152, 134_515_008), "smollm2_360m": (49_152, 361_821_120),
    "smollm2_1_7b": (49_152, 1_711_376_384),
}  # fmt: skip


@cache
def recipe_as_it_is(name):
    return compose("train", [f"+recipe={name}"], inputs=False)


def named_size(name):
    """Return a file of conf/model/ without composing it: composing all takes half a minute.

    Raises TypeError for a key that the schema does not have.
    """
    return Model(**yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text()))


def published_model(name):
    """Return the configuration of a named size with its published vocabulary."""
    return resolve_model(named_size(name), PUBLISHED[name][0])


def planned(*words):
    cfg = compose("plan", list(words), inputs=False)
    return make_plan(
        cfg, architecture(cfg)[0], cfg.plan.world_size, target(cfg, cfg.plan.world_size)
    )
