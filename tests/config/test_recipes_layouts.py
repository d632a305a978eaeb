"""Recipes beside the fastest layouts that `plan.search` finds on the hardware that they name."""

import pytest

from benchmarks.recipe_layouts import (
    MEMORY_SHARE,
    SLOWER,
    candidate,
    fastest,
    recipes,
    recorded,
    seconds,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
@pytest.mark.grid(4)
def test_a_recipe_is_nearly_as_fast_as_the_fastest_layout_of_its_hardware(name):
    best = seconds(name, recorded()[name])
    assert seconds(name, []) <= SLOWER * best, (
        f"{name} is slower than  {' '.join(recorded()[name])}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
@pytest.mark.grid(8)
def test_a_recipe_leaves_a_tenth_of_the_memory_of_its_hardware(name):
    plan = candidate(name, []).plan()
    assert plan.peak_bytes <= MEMORY_SHARE * plan.memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_sft", "llama8b_lora", "llama8b_sft"])
@pytest.mark.further
def test_the_recorded_layouts_are_those_that_a_search_finds(name):
    layout = fastest(name)
    assert seconds(name, recorded()[name]) == pytest.approx(layout.plan.seconds, rel=0.005), (
        "run  python -m benchmarks.recipe_layouts --write"
    )
