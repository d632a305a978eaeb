"""Recipes, published models and plans, as configurations."""

from functools import cache

import yaml
from world import split
from zoo import PUBLISHED

from fsdp_trainer.config.composing.compose import CONF, compose, options
from fsdp_trainer.config.schema import Model
from fsdp_trainer.models.from_config.resolve import resolve_model
from fsdp_trainer.planning.plan.plan import make_plan
from fsdp_trainer.planning.plan.plan_inputs import architecture, target

RECIPES = options("train")["recipe"]
PARAMETERS = PUBLISHED["parameters"]
"""Published vocabularies and numbers of weights (model cards) by the names in conf/model.

Of Gemma 3's complete 4B (4,300,079,472), 416,866,032 belong to the vision tower and 2,950,272 to
the projector.
"""


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
    return resolve_model(named_size(name), PARAMETERS[name][0])


def planned(*words):
    cfg = compose("plan", split(words), inputs=False)
    return make_plan(
        cfg, architecture(cfg)[0], cfg.plan.world_size, target(cfg, cfg.plan.world_size)
    )
