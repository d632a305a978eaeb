"""The numbers in the heads of recipes and in docs/recipes.md, computed again from the recipes."""

import re
from pathlib import Path

import pytest
from test_recipes_compose import RECIPES, published_model, recipe_as_it_is

from fsdp_trainer.config.compose import CONF
from fsdp_trainer.config.document import recipes_page
from fsdp_trainer.observe.flops import palm_flops
from fsdp_trainer.plan.devices import device

GB = r"([\d.]+) GB"


class Recipe:
    """A recipe's configuration, its model with the published vocabulary, and the numbers in its head."""

    def __init__(self, name):
        self.cfg = recipe_as_it_is(name)
        self.batch = self.cfg.batch
        before = Path(self.cfg.model.init_from or "").name
        self.model = Recipe(before).model if before in RECIPES else published_model(self.cfg.model.name)
        self.text = (CONF / "recipe" / f"{name}.yaml").read_text().replace(",", "").replace("one GPU", "1 GPU")

    def numbers(self, pattern):
        """The groups of the pattern's only match."""
        (found,) = re.finditer(pattern, self.text)
        return [float(number) for number in found.groups()]


@pytest.fixture(scope="module", params=sorted({*RECIPES} - {"quickstart"}))
def recipe(request):
    return Recipe(request.param)


def test_a_step_is_rows_times_tokens_and_divides_over_the_ranks(recipe):
    rows, length, tokens = recipe.numbers(r"(\d+) rows × (\d+) tokens = (\d+) tokens a step")
    assert (rows, length) == (recipe.batch.rows, recipe.batch.seq_len) and rows * length == tokens
    for ranks, count in re.findall(r"(\d+) GPUs?: (\d+|one)(?: micro-batch|\.)", recipe.text):
        assert int(ranks) * recipe.batch.micro_rows * int(count.replace("one", "1")) == rows


def test_the_memory_of_a_rank_adds_up(recipe):
    billions, state = recipe.numbers(rf"16 B × ([\d.]+) G = {GB}")
    assert billions == pytest.approx(recipe.model.parameters() / 1e9, rel=2e-3) and state == pytest.approx(16 * billions, rel=5e-3)
    each = r"(\d+) × 2 B" if recipe.cfg.activation_checkpoint.mode == "full" else r"(\d+) kB"
    kept, layers, size, tokens = recipe.numbers(rf"activations +{GB}.* (\d+) blocks × {each} × (\d+) tokens")
    assert (layers, tokens) == (recipe.model.num_hidden_layers, recipe.batch.micro_rows * recipe.batch.seq_len)
    if recipe.cfg.activation_checkpoint.mode == "full":
        assert size == recipe.model.hidden_size
    assert kept == pytest.approx(layers * size * tokens * (2 if "× 2 B" in recipe.text else 1000) / 1e9, rel=0.1)
    rest = sum(map(float, re.findall(rf"(?m)^# +(?:gathered|activations|a block|head|reduction) +{GB}", recipe.text)))
    for total, ranks in re.findall(rf"{GB} on (\d+)", re.search("in all.*?(;|$)", recipe.text, re.M)[0]):
        assert float(total) == pytest.approx(state / int(ranks) + rest, rel=0.03), (total, ranks)


def test_a_checkpoint_takes_twelve_bytes_a_parameter(recipe):
    billions, size = recipe.numbers(rf"12 B × ([\d.]+) G = {GB} a checkpoint")
    assert billions == pytest.approx(recipe.model.parameters() / 1e9, rel=2e-3) and size == pytest.approx(12 * billions, rel=1e-2)


def test_the_expected_speed_follows_from_the_models_flops(recipe):
    speed, peak, share, flops = recipe.numbers(
        r"Speed +(\d+) tokens/s a GPU \(estimate\): an H100's (\d+) TFLOP/s × (\d+)% ÷ ([\d.]+) GFLOP a token"
    )
    assert peak * 1e12 == device("h100").flops
    assert flops == pytest.approx(palm_flops(recipe.model, 1, recipe.batch.seq_len) / 1e9, rel=5e-3)
    assert speed == pytest.approx(peak * 1e12 * share / 100 / (flops * 1e9), rel=5e-3)
    if recipe.cfg.train.steps:
        steps, tokens, each, hours, ranks = recipe.numbers(
            r"Length +(\d+) steps: ([\d.]+) G tokens (\d+) a weight; ([\d.]+) hours on (\d+) GPU"
        )
        assert steps == recipe.cfg.train.steps and tokens == pytest.approx(steps * recipe.batch.rows * recipe.batch.seq_len / 1e9, rel=1e-2)
        assert each == pytest.approx(tokens * 1e9 / recipe.model.parameters(), rel=0.06)
        assert hours == pytest.approx(tokens * 1e9 / speed / ranks / 3600, rel=0.06)


def test_the_table_in_the_docs_is_the_recipes():
    page = (CONF.parent / "docs" / "recipes.md").read_text()
    assert page == recipes_page(page), "run  python -m fsdp_trainer.config.document"
    assert all(f"| `{name}` |" in page for name in RECIPES)
