"""The fastest layouts of the recipes on the hardware that they name: benchmarks/recipe_layouts.json.

    python -m benchmarks.recipe_layouts [--write | --heads] [NAMES]

Runs `plan.search` for each recipe, as it is, on its hardware, and prints how fast the recipe is
beside the fastest layout that needs at most MEMORY_SHARE of the memory. With --write these layouts
are recorded, with which tests/config/test_recipes_layouts.py compares the recipes: needed after a
change of the plan or of a recipe. Takes a few minutes for all; needs no GPU. --heads computes the
numbers in the heads of recipes again: memory, speed and hours.
"""

import argparse
import json
import re
from pathlib import Path

from fsdp_trainer.apps.plan.rehearsed_plan import rehearsed_plan
from fsdp_trainer.apps.plan.search import PlannedLayout, Search
from fsdp_trainer.apps.plan.stored_answers import Store
from fsdp_trainer.config.composing.compose import CONF, compose, options
from fsdp_trainer.planning.plan.changes import Candidate
from fsdp_trainer.planning.plan.memory import GIB
from fsdp_trainer.planning.plan.plan import RunPlan
from fsdp_trainer.planning.plan.plan_inputs import architecture, target
from fsdp_trainer.planning.plan.planned_run import PlannedRun
from fsdp_trainer.planning.plan.rollout_cost import rows_of_answers
from fsdp_trainer.planning.plan.time import times

LAYOUTS = Path(__file__).parent / "recipe_layouts.json"
MEMORY_SHARE = 0.9
"""Largest share of a GPU's memory that a layout may need: plans are right to a few percent."""
SLOWER = 1.03
"""Largest ratio of a recipe's step to that of the fastest layout."""
GPUS = {
    80: ["plan.gpu=h100"],
    40: ["plan.gpu=a100_40gb"],
    24: ["plan.gpu=rtx4090"],
    16: ["plan.gpu=rtx4090", f"plan.memory_gib={16e9 / GIB:.1f}"],
    8: ["plan.gpu=rtx4090", f"plan.memory_gib={8e9 / GIB:.1f}"],
}
"""The GPU that a recipe is planned for, by the GB that its head names. Of cards with 8 and 16 GB
the plan's table has none with bfloat16 products: they have an RTX 4090's rates."""
NETWORKS = {"llama405b_pretrain_pp": ["plan.network_gbps=25"]}
"""Recipes for another network than that of the GPU's usual server."""


def recipes() -> list[str]:
    """Return the recipes that name GPUs."""
    return [name for name in options("train")["recipe"] if name != "quickstart"]


def hardware(name: str) -> list[str]:
    """Return the overrides of `plan` for the hardware that the head of a recipe names first."""
    text = (CONF / "recipe" / f"{name}.yaml").read_text().replace("one ", "1 ")
    match = re.search(r"hardware: (?:(\d+) nodes? of )?(\d+) GPUs? with (\d+) GB", text)
    assert match, name
    nodes, gpus, size = match.groups()
    ranks = int(nodes or 1) * int(gpus)
    return [*GPUS[int(size)], f"plan.world_size={ranks}", *NETWORKS.get(name, [])]


def candidate(name: str, overrides: list[str]) -> Candidate:
    """Return a recipe on its hardware, with these overrides."""
    cfg = compose("plan", [f"+recipe={name}", *hardware(name), *overrides], inputs=False)
    world = cfg.plan.world_size
    assert isinstance(world, int)
    return Candidate(cfg, architecture(cfg)[0], world, target(cfg, world))


def seconds(name: str, overrides: list[str]) -> float:
    """Return the seconds of a recipe's step with these overrides, in the middle of their range.

    Without the plan of its memory, which takes most of the time of a plan.
    """
    run = candidate(name, overrides)
    planned = PlannedRun.of(rows_of_answers(run.cfg), run.config, run.world, run.known)
    return sum(times(planned, run.device, best).step for best in (False, True)) / 2


def fastest(name: str) -> PlannedLayout:
    """Return the fastest layout of a recipe's hardware that needs at most MEMORY_SHARE of it."""
    layouts = Search(candidate(name, [])).layouts
    return next(
        layout
        for layout in layouts
        if layout.plan.peak_bytes <= MEMORY_SHARE * layout.plan.memory_bytes
    )


def recorded() -> dict[str, list[str]]:
    """Return the overrides of the recorded layouts, by recipe."""
    return json.loads(LAYOUTS.read_text()) if LAYOUTS.is_file() else {}


def plan_of(words: list[str]) -> RunPlan:
    """Return the plan of a configuration for one number of ranks, as `plan` prints it."""
    cfg = compose("plan", words, inputs=False)
    world = cfg.plan.world_size
    assert isinstance(world, int)
    run = Candidate(cfg, architecture(cfg)[0], world, target(cfg, world))
    return rehearsed_plan(run, run.plan(), Store(cfg))[0]


def updated_head(name: str, text: str) -> str:
    """Return the text of a recipe with the numbers of its head computed again.

    Memory for each number of ranks and override that stands there; speed and hours on the hardware
    that is named first.
    """
    words = [f"+recipe={name}", *(word for word in hardware(name) if "world_size" not in word)]

    def memory(line: re.Match) -> str:
        return ";".join(_with_sizes(part, words) for part in line[0].split(";"))

    text = re.sub(r"(?m)^# Memory .*", memory, text)
    plan = plan_of([f"+recipe={name}", *hardware(name)])
    assert plan.step_seconds
    speeds = tuple(plan.tokens / plan.world_size / each for each in reversed(plan.step_seconds))
    text = _replaced(r"# Speed +([\d.,]+) – ([\d.,]+) tokens/s an ", speeds, text)
    steps = re.search(r"# Length +([\d,]+) steps", text)
    if steps:
        count = int(steps[1].replace(",", ""))
        hours = tuple(count * each / 3600 for each in plan.step_seconds)
        text = _replaced(r"# Length .*; ([\d.,]+) – ([\d.,]+) hours", hours, text)
    typed = " ".join(words)
    return re.sub(r"(fsdp-trainer plan) \+recipe=\S+( plan\.(?!world)\S+)*", rf"\1 {typed}", text)


def _with_sizes(part: str, words: list[str]) -> str:
    """Return a part of a Memory line with the sizes of plans with the override in it, if any."""
    more = re.findall(r"with (\S+=\S+)", part)

    def size(match: re.Match) -> str:
        ranks = match[2].replace("one GPU", "1").replace(",", "")
        plan = plan_of([*words, *more, f"plan.world_size={ranks}"])
        return f"{rounded(plan.memory.peak.total / GIB)} GiB on {match[2]}"

    return re.sub(r"([\d.]+) GiB on ([\d,]+|one GPU)", size, part)


def _replaced(pattern: str, values: tuple[float, ...], text: str) -> str:
    """Return the text with the groups of the pattern's match replaced by these values."""
    match = re.search(pattern, text)
    assert match, pattern
    for group, value in reversed(list(enumerate(values, start=1))):
        text = text[: match.start(group)] + rounded(value) + text[match.end(group) :]
    return text


def rounded(value: float) -> str:
    """Return a number with three digits: 4,730, 38.7 or 0.113."""
    return f"{float(f'{value:.3g}'):,.10g}"


def main() -> None:
    """Search, print, and record what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="recipes; all that name GPUs if none is given")
    parser.add_argument("--write", action="store_true", help=f"record them in {LAYOUTS.name}")
    parser.add_argument("--heads", action="store_true", help="update heads instead of searching")
    given = parser.parse_args()
    if given.heads:
        for name in given.names or recipes():
            file = CONF / "recipe" / f"{name}.yaml"
            file.write_text(updated_head(name, file.read_text()))
        return
    layouts = recorded()
    for name in given.names or recipes():
        layout = fastest(name)
        layouts[name] = list(layout.overrides)
        share = layout.plan.seconds / seconds(name, [])
        print(f"{name}: {share:.3f} of the speed of  {' '.join(layout.overrides)}", flush=True)
    if given.write:
        LAYOUTS.write_text(json.dumps(dict(sorted(layouts.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
