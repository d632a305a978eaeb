"""The numbers in the heads of recipes and in docs/recipes.md, computed again from the recipes."""

import re
from functools import cache
from pathlib import Path

import pytest
from recipe import RECIPES, planned, published_model, recipe_as_it_is

from fsdp_trainer.config.composing.compose import CONF
from fsdp_trainer.config.depth import VOCABULARY
from fsdp_trainer.config.document import recipes_page
from fsdp_trainer.models.resolve import resolve_model
from fsdp_trainer.plan.plan import GIB

planned_once = cache(planned)


class Recipe:
    """A recipe's configuration, its model with the published vocabulary, and the numbers in its
    head."""

    def __init__(self, name):
        self.cfg = recipe_as_it_is(name)
        self.batch = self.cfg.batch
        sharding = self.cfg.sharding
        self.ranks_per_row = sharding.pipeline * sharding.tensor * sharding.context
        before = Path(self.cfg.model.init_from or "").name
        if before in RECIPES:
            self.model = Recipe(before).model
        elif self.cfg.model.depth:
            self.model = resolve_model(self.cfg.model, VOCABULARY)
        else:
            self.model = published_model(self.cfg.model.name)
        self.text = (
            (CONF / "recipe" / f"{name}.yaml")
            .read_text()
            .replace(",", "")
            .replace("one GPU", "1 GPU")
        )

    def numbers(self, pattern):
        """The groups of the pattern's only match."""
        (match,) = re.finditer(pattern, self.text)
        return [float(number) for number in match.groups()]


@pytest.fixture(scope="module", params=sorted({*RECIPES} - {"quickstart"}))
def recipe(request):
    return Recipe(request.param)


@pytest.mark.slow
def test_a_step_is_rows_times_tokens_and_divides_over_the_ranks(recipe):
    if recipe.cfg.objective.method.samples:
        check_answers(recipe)
        return
    rows, length, tokens = recipe.numbers(r"(\d+) rows × (\d+) tokens = (\d+) tokens a step")
    assert (rows, length) == (recipe.batch.rows, recipe.batch.seq_len)
    assert rows * length == tokens
    for ranks, count in re.findall(r"(\d+) GPUs?: (\d+|one)(?: micro-batch|\.)", recipe.text):
        groups = int(ranks) // recipe.ranks_per_row
        assert groups * recipe.batch.micro_rows * int(count.replace("one", "1")) == rows


def hardware(text):
    """The device and the ranks that the head of a recipe names: `8 nodes of 8 GPUs with 80 GB`,
    `1 GPU with 40 GB`."""
    nodes, gpus, size = re.search(
        r"hardware: (?:(\d+) nodes? of )?(\d+) GPUs? with (\d+) GB", text.replace("one ", "1 ")
    ).groups()
    return [
        f"plan.world_size={int(nodes or 1) * int(gpus)}",
        f"plan.memory_gib={int(size) * 1e9 / GIB:.2f}",
    ]


@pytest.mark.slow
@pytest.mark.grid(4)
def test_every_recipe_fits_the_hardware_that_its_head_names(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert planned(f"+recipe={recipe.cfg.run.name}", *hardware(recipe.text)).fits


def check_answers(recipe):
    """A step of prompts is as many answers as the head says, and a GPU makes so many at a time."""
    *counts, answers, longest, length = recipe.numbers(
        r"(\d+) prompts × (\d+) answers = (\d+) answers a step of up to (\d+) tokens"
        r" in rows of (\d+)"
    )
    choice = recipe.cfg.objective
    assert counts == [recipe.batch.rows, choice.samples]
    assert counts[0] * counts[1] == answers
    assert (longest, length) == (choice.max_new_tokens, recipe.batch.seq_len)
    assert recipe.numbers(r"A GPU makes (\d+) at a time") == [choice.answer_rows]


@pytest.mark.slow
@pytest.mark.grid(4)
def test_memory_speed_and_length_are_those_of_the_plan_that_the_head_names(recipe):
    (line,) = re.findall(
        r"# +Planned with:  fsdp-trainer plan (.*) '?plan.world_size=\S+", recipe.text
    )
    (memory,) = re.findall("Memory +(.*)", recipe.text)
    for part in memory.split(";"):
        (more,) = re.findall(r"with (\S+=\S+)", part) or [""]
        for size, ranks in re.findall(r"([\d.]+) GiB on (\d+)", part):
            plan = planned_once(*line.split(), *more.split(), f"plan.world_size={ranks}")
            assert plan.fits, (more, ranks)
            assert plan.memory.peak.total / GIB == pytest.approx(float(size), rel=0.01), (
                more,
                ranks,
            )
    ranks = int(re.findall(r"GiB on (\d+)", memory)[0])
    plan = planned_once(*line.split(), f"plan.world_size={ranks}")
    assert plan.checkpoint / GIB == pytest.approx(
        *recipe.numbers(r"Disk +([\d.]+) GiB a checkpoint"), rel=0.01
    )
    speeds = [plan.tokens / seconds / ranks for seconds in reversed(plan.step_seconds)]
    assert speeds == pytest.approx(
        recipe.numbers(r"Speed +([\d.]+) – ([\d.]+) tokens/s an .* planned not measured"), rel=0.01
    )
    if recipe.cfg.train.steps:
        steps, tokens, each, *hours = recipe.numbers(
            r"Length +(\d+) steps: ([\d.]+) G tokens (\d+) a weight; ([\d.]+) – ([\d.]+) hours"
        )
        assert steps == recipe.cfg.train.steps
        assert tokens == pytest.approx(steps * plan.tokens / 1e9, rel=1e-2)
        assert each == pytest.approx(tokens * 1e9 / recipe.model.parameters(), rel=0.06)
        assert hours == pytest.approx(
            [steps * seconds / 3600 for seconds in plan.step_seconds], rel=0.01
        )


@pytest.mark.slow
def test_the_chain_on_eight_gpus_is_planned_for_about_100_dollars():
    page = (CONF.parent / "docs" / "from-nothing-to-chat.md").read_text()
    written = re.findall(r"\| ([\d.]+) – ([\d.]+) \| \$(\d+) – \$(\d+) \|", page)
    sizes = {"chain_depth": [], "chain_mid": ["model.init_from=null", "model.depth=24"]}
    total = [0.0, 0.0]
    for (recipe, model), row in zip(sizes.items(), written, strict=True):
        plan = planned(f"+recipe={recipe}", *model, "plan.gpu=h100", "plan.world_size=8")
        steps = recipe_as_it_is(recipe).train.steps
        hours = [steps * seconds / 3600 for seconds in plan.step_seconds]
        dollars = [24 * each for each in hours]  # 8 GPUs at $3 an hour
        assert [*map(float, row)] == pytest.approx([*hours, *dollars], rel=0.02)
        total = [sum(pair) for pair in zip(total, dollars, strict=True)]
    assert total[0] < 100 < total[1]


def test_the_table_in_the_docs_is_the_recipes():
    page = (CONF.parent / "docs" / "recipes.md").read_text()
    assert page == recipes_page(page), "run  python -m fsdp_trainer.config.document"
    assert all(f"| `{name}` |" in page for name in RECIPES)
