"""A check for the preview: that the model would see the tools of objective.environment."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.store.findings import KINDS, Finding
from fsdp_trainer.data.store.token_store import TokenStore
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.templates.completeness import TOOLS
from fsdp_trainer.rl.environments.bounded_calls import call_all
from fsdp_trainer.rl.environments.endpoint import ProgramEnvironment
from fsdp_trainer.rl.environments.environment import row_of
from fsdp_trainer.rl.environments.known_environments import find_environment
from fsdp_trainer.rl.environments.openenv import OpenEnv
from fsdp_trainer.rl.rollouts.rollout import HIDDEN_TOOLS

NOT_STARTED = (ProgramEnvironment, OpenEnv)
"""Environments that a preview does not begin: a program that asks the model, and a server."""


def hidden_tools(
    choice: ObjectiveChoice, stores: Sequence[TokenStore], template: Template
) -> list[Finding]:
    """Return the finding that the template does not show the tools of the environment.

    The environment is begun for the first prompt. Raises UserError if it cannot be made.
    """
    prompts = [store for store in stores if store.questions is not None and len(store)]
    if choice.environment is None or not prompts or any(s.counts.get(TOOLS) for s in prompts):
        return []
    environment = find_environment(choice.environment).make()
    if isinstance(environment, NOT_STARTED):
        return []
    reset = partial(environment.reset, row_of(prompts[0].question(0)))
    (value,) = call_all([reset], 1, choice.environment_seconds)
    tools: Any = value[1] if isinstance(value, tuple) and len(value) == 2 else None
    if callable(close := getattr(environment, "close", None)):
        call_all([close], 1, choice.environment_seconds)
    if template.shows(tools):
        return []
    return [Finding(HIDDEN_TOOLS, KINDS[TOOLS].fix)]
