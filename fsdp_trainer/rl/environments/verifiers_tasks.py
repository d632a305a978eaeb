"""The environment `verifiers`: tasks of the package verifiers (0.4), its agents and rewards."""

import importlib.util
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from fsdp_trainer.config.keys import key
from fsdp_trainer.rl.environments.endpoint import MODEL, ProgramEnvironment

NO_KEY = "FSDP_TRAINER_POLICY_KEY"
"""Name of the environment variable that verifiers reads the address's key from; it needs none."""


@dataclass
class VerifiersTasks(ProgramEnvironment):
    """A task of a taskset. Its agent runs as verifiers runs it, and asks the model in training."""

    name: ClassVar[str] = "verifiers"
    names_code: ClassVar[tuple[str, ...]] = ("taskset", "harness")
    taskset: str = key("", "the taskset's id, as verifiers finds it")
    harness: str = key("null", "the id of the agent's program; `null`: a chat")
    runtime: str = key("subprocess", "where it runs: subprocess, docker or another of verifiers'")
    column: str = key("task", "the column with the number of the task in the taskset")

    def __post_init__(self) -> None:
        self.program = self._rollout

    def wrong_settings(self) -> str | None:
        if not self.taskset:
            return "lacks the tasks, as in  {name: verifiers, taskset: my_taskset}"
        if importlib.util.find_spec("verifiers") is None:
            return "is a package that is not installed:  pip install verifiers uv"
        return None

    async def _rollout(self, address: str, row: dict[str, Any]) -> float:
        # an optional package, which takes seconds to import
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        os.environ.setdefault(NO_KEY, "none")
        environment = new_environment(self.taskset, self.harness, self.runtime)
        task = tasks_of(self.taskset, self.harness, self.runtime)[int(row[self.column])]
        context = ModelContext(MODEL, EvalClientConfig(base_url=address, api_key_var=NO_KEY))
        async with environment.serving():
            episode = await environment.run_episode(task, context)
        if not episode.ok:
            errors = [*episode.errors, *(each for one in episode.traces for each in one.errors)]
            raise RuntimeError("; ".join(str(error.message) for error in errors))
        return float(episode.traces[0].reward)


def new_environment(taskset: str, harness: str, runtime: str) -> Any:
    from verifiers.v1.envs.single_agent.env import SingleAgentEnv, SingleAgentEnvConfig

    agent = {"harness": {"id": harness}, "runtime": {"type": runtime}}
    return SingleAgentEnv(SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))


@lru_cache(maxsize=1)
def tasks_of(taskset: str, harness: str, runtime: str) -> list[Any]:
    """Return all tasks of a taskset, which are loaded once."""
    return list(new_environment(taskset, harness, runtime).taskset)
