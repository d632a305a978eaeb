"""A page with the memory of a step over time, as a picture, beside the tables."""

from pathlib import Path

import jinja2

from fsdp_trainer.apps.rehearse.comparison import PlanComparison
from fsdp_trainer.apps.rehearse.rehearsal_text import collectives_json, sent_of, size
from fsdp_trainer.base.live_bytes import CATEGORIES
from fsdp_trainer.config.verbs import RehearseConfig
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.planning.rehearse.rank_step import RankStep

COLOURS = ("#4c6a92", "#9c755f", "#8a6fb0", "#59a14f", "#edc949", "#4e9fd1", "#e15759")
WIDTH, HEIGHT = 1000, 320
POINTS = 800
"""Points of a curve that are drawn."""


def write_page(file: Path, answer: PlanComparison, cfg: RehearseConfig) -> None:
    page = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
    )
    busiest = answer.rehearsal.busiest
    text = page.get_template("rehearsal.html.jinja").render(
        title=str(cfg.run.name or cfg.model.name),
        answer=answer,
        rows=[(name, size(sent)) for name, sent in sent_of(answer).items()],
        pictures=[(one.kind, picture(one.step)) for one in answer.rehearsal.kinds if one.step],
        legend=list(zip(CATEGORIES, COLOURS, strict=True)),
        collectives=collectives_json(busiest) if busiest.step else [],
        size=size,
        width=WIDTH,
        height=HEIGHT,
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise cannot_write(file, str(error)) from None


def cannot_write(file: Path, reason: str) -> UserError:
    return UserError("the page cannot be written", [Problem(f"rehearse.html={file}", reason)])


def picture(step: RankStep) -> list[tuple[str, str]]:
    """Return (colour, points) of an area for each category, stacked, first the lowest one."""
    curve = thinned(step.curve)
    if not curve:
        return []
    last, highest = curve[-1][0], max(step.peak.total, 1)
    xs = [WIDTH * number / last for number, _ in curve]
    below = [0.0] * len(curve)
    areas = []
    for i, colour in enumerate(COLOURS):
        above = [low + parts[i] for low, (_, parts) in zip(below, curve, strict=True)]
        edges = [*zip(xs, above, strict=True), *reversed([*zip(xs, below, strict=True)])]
        points = " ".join(f"{x:.1f},{HEIGHT - HEIGHT * y / highest:.1f}" for x, y in edges)
        areas.append((colour, points))
        below = above
    return areas


def thinned(curve: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Return at most POINTS points of a curve: of neighbours the one with most bytes."""
    every = max(1, len(curve) // POINTS)
    groups = (curve[i : i + every] for i in range(0, len(curve), every))
    return [max(group, key=lambda point: sum(point[1])) for group in groups]
