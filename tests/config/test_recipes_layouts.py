"""The numbers in the heads of recipes and in the pages, computed again by `plan`.

And how fast recipes are beside the fastest layouts that `plan.search` finds on their hardware.
"""

import re
from pathlib import Path

import pytest
from recipe import RECIPES, planned, published_model, recipe_as_it_is

from benchmarks.recipe_layouts import (
    GIB,
    MEMORY_SHARE,
    SLOWER,
    candidate,
    fastest,
    hardware,
    plan_of,
    recipes,
    recorded,
    seconds,
)
from fsdp_trainer.config.composing.compose import CONF
from fsdp_trainer.config.depth import VOCABULARY
from fsdp_trainer.models.from_config.resolve import resolve_model

NUMBER = r"\d+(?:\.\d+)?"


def model_of(name):
    """A recipe's model with the published vocabulary."""
    model = recipe_as_it_is(name).model
    before = Path(model.init_from or "").name
    if before in RECIPES:
        return model_of(before)
    return resolve_model(model, VOCABULARY) if model.depth else published_model(model.name)


@pytest.mark.parametrize("name", recipes())
def test_the_head_of_a_recipe_is_its_arithmetic_and_its_plan(name):
    run = candidate(name, [])
    cfg, plan = run.cfg, run.plan()
    head = (CONF / "recipe" / f"{name}.yaml").read_text().replace(",", "")
    head = head.replace("one GPU", "1 GPU")

    def numbers(pattern):
        (match,) = re.finditer(pattern, head)
        return [float(number) for number in match.groups()]

    if cfg.objective.method.samples:
        check_answers(cfg, numbers)
    else:
        check_rows(cfg, numbers, head)
    words = [f"+recipe={name}", *(word for word in hardware(name) if "world_size" not in word)]
    assert f"Planned with:  fsdp-trainer plan {' '.join(words)} " in head
    assert plan.fits
    assert plan.peak_bytes <= MEMORY_SHARE * plan.memory_bytes
    ranks = run.world
    (memory,) = numbers(rf"Memory +({NUMBER}) GiB on {ranks}\b")
    assert_rehearsed_above(plan, memory)
    assert memory * GIB <= MEMORY_SHARE * plan.memory_bytes
    for pattern, expected in {
        rf"Disk +({NUMBER}) GiB a checkpoint": [plan.checkpoint / GIB],
        rf"Speed +({NUMBER}) – ({NUMBER}) tokens/s an .* planned not measured": speeds_of(plan),
    }.items():
        assert numbers(pattern) == pytest.approx(expected, rel=0.03)
    if cfg.train.steps:
        steps, tokens, each, *hours = numbers(
            rf"Length +(\d+) steps: ({NUMBER}) G tokens (\d+) a weight;"
            rf" ({NUMBER}) – ({NUMBER}) hours"
        )
        assert steps == cfg.train.steps
        assert tokens == pytest.approx(steps * plan.tokens / 1e9, rel=0.01)
        assert each == pytest.approx(tokens * 1e9 / model_of(name).parameters(), rel=0.06)
        expected = [steps * each / 3600 for each in plan.step_seconds]
        assert hours == pytest.approx(expected, rel=0.01)

    layout = recorded()[name]
    if candidate(name, layout).cfg == cfg:
        return  # it is the recipe's own
    own = sum(plan.step_seconds) / 2
    if cfg.objective.method.samples:  # whose plan counts the answers of a step, too
        own = seconds(name, [])
    assert own <= SLOWER * seconds(name, layout), f"slower than  {' '.join(layout)}"


@pytest.mark.parametrize("name", ["llama8b_pretrain", "gemma3_4b_sft", "qwen3_0_6b_distil"])
def test_memory_on_other_hardware_is_that_of_its_plan(name):
    (line,) = re.findall(r"# Memory .*", (CONF / "recipe" / f"{name}.yaml").read_text())
    _, *others = re.findall(r"(?:with (\S+=\S+) )?([\d.]+) GiB on (\d+|one GPU)", line)
    option = ""
    for more, size, ranks in others:
        option = more or option
        world = f"plan.world_size={ranks.replace('one GPU', '1')}"
        plan = candidate(name, [*option.split(), world]).plan()
        assert plan.fits
        assert_rehearsed_above(plan, float(size))


@pytest.mark.parametrize(
    "name", ["llama8b_sft", "qwen3_0_6b_lora", "olmoe_pretrain", "qwen3_8b_rerank"]
)
def test_figures_in_the_head_of_a_recipe_are_rehearsed(name, tmp_path):
    head = (CONF / "recipe" / f"{name}.yaml").read_text().replace(",", "")
    (memory, _) = re.findall(rf"# Memory +({NUMBER}) GiB on (\d+|one GPU)", head)[0]
    plan = plan_of([f"+recipe={name}", *hardware(name), f"run.root={tmp_path}"])
    assert plan.rehearsed
    assert plan.peak_bytes / GIB == pytest.approx(float(memory), rel=0.01)
    if name != "qwen3_8b_rerank":
        return  # others' speeds are compared without a rehearsal
    (speeds,) = re.findall(rf"# Speed +({NUMBER}) – ({NUMBER}) tokens/s an ", head)
    assert speeds_of(plan) == pytest.approx([*map(float, speeds)], rel=0.01)


def speeds_of(plan):
    """Return the tokens per second of a rank, the slow end first."""
    return [plan.tokens / each / plan.world_size for each in reversed(plan.step_seconds)]


def assert_rehearsed_above(plan, gib):
    """Compare rehearsed memory, in GiB, with the lower bound of a plan without rehearsal."""
    bound = plan.memory.peak.total / GIB
    assert bound <= 1.01 * gib <= 3 * bound


def check_rows(cfg, numbers, head):
    """A step is rows times tokens, and divides over the ranks that the head names."""
    batch, sharding = cfg.batch, cfg.sharding
    rows, length, tokens = numbers(r"(\d+) rows × (\d+) tokens = (\d+) tokens a step")
    assert (rows, length) == (batch.rows, batch.seq_len)
    assert rows * length == tokens
    for ranks, count in re.findall(r"(\d+) GPUs?: (\d+|one)(?: micro-batch|\.)", head):
        groups = int(ranks) // (sharding.pipeline * sharding.tensor * sharding.context)
        assert groups * batch.micro_rows * int(count.replace("one", "1")) == rows


def check_answers(cfg, numbers):
    """A step of prompts is as many answers as the head says, and a GPU makes so many at a time."""
    *counts, answers, longest, length = numbers(
        r"(\d+) prompts × (\d+) answers = (\d+) answers a step of up to (\d+) tokens"
        r" in rows of (\d+)"
    )
    choice = cfg.objective
    assert counts == [cfg.batch.rows, choice.samples]
    assert counts[0] * counts[1] == answers
    assert (longest, length) == (choice.max_new_tokens, cfg.batch.seq_len)
    assert numbers(r"A GPU makes (\d+) at a time") == [choice.answer_rows]


def test_the_recorded_layouts_are_those_that_a_search_finds():
    layout = fastest("chain_sft")
    assert seconds("chain_sft", recorded()["chain_sft"]) == pytest.approx(
        layout.plan.seconds, rel=0.005
    ), "run  python -m benchmarks.recipe_layouts --write"


def test_the_chain_on_eight_gpus_is_planned_for_about_100_dollars():
    page = (CONF.parent / "docs/from-nothing-to-chat.md").read_text()
    written = re.findall(r"\| ([\d.]+) – ([\d.]+) \| \$([\d.]+) – \$([\d.]+) \|", page)
    stages = {"chain_depth": [], "chain_mid": ["model.init_from=null", "model.depth=24"]}
    dollars = []
    for (stage, model), row in zip(stages.items(), written, strict=True):
        plan = planned(f"+recipe={stage}", *model, "plan.gpu=h100", "plan.world_size=8")
        steps = recipe_as_it_is(stage).train.steps
        hours = [steps * each / 3600 for each in plan.step_seconds]
        dollars.append([24 * each for each in hours])  # 8 GPUs at $3 an hour
        assert [*map(float, row)] == pytest.approx([*hours, *dollars[-1]], rel=0.02)
    cheapest, dearest = map(sum, zip(*dollars, strict=True))
    assert cheapest < 100 < dearest
