"""The tasks of an evaluation, which are loaded once and run on each state of the model."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fsdp_trainer.config.evaluation_inputs import has_environment, task_names
from fsdp_trainer.config.schema import Evaluation
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.evaluation.core import CORE, Core
from fsdp_trainer.evaluation.environment_tasks import EnvironmentTasks, OpenRewards
from fsdp_trainer.evaluation.scoring import Metrics, Scorer


class Tasks:
    def __init__(
        self,
        cfg: Evaluation,
        tokenizer: TextTokenizer,
        template: Template,
        open_rewards: OpenRewards = list,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Load the tasks. Raises UserError for a task that does not exist.

        defaults: the model's settings of generation, for the harness's tasks.
        """
        self.tokenizer, self.template = tokenizer, template
        self.core = self.harness = None
        names = task_names(cfg)
        if CORE in names:
            self.core = Core(str(cfg.core_data), cfg.limit, tokenizer)
        names = [name for name in names if name != CORE]
        own = [name for name in names if has_environment(name)]
        self.with_environment = (
            EnvironmentTasks(cfg, own, tokenizer, template, open_rewards) if own else None
        )
        if names := [name for name in names if name not in own]:
            # it imports a heavy optional package
            from fsdp_trainer.evaluation.harness_tasks import HarnessTasks

            self.harness = HarnessTasks(cfg, names, defaults)

    def run(self, scorer: Scorer) -> Metrics:
        """Return {task: {metric: value}}; it may be empty on ranks that are not their node's first.

        Collective.
        """
        metrics = self.core.run(scorer) if self.core else {}
        if self.with_environment:
            metrics |= self.with_environment.run(scorer)
        if self.harness:
            with preserved_randomness():
                metrics |= self.harness.run(scorer, self.tokenizer, self.template)
        return metrics


@contextmanager
def preserved_randomness() -> Iterator[None]:
    """Restore the process's random number generators at the end: the harness seeds them."""
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
