"""Tasks of an evaluation that are rollouts with an environment, or answers that rewards score."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
import yaml

from fsdp_trainer.base.distributed import gather
from fsdp_trainer.config.entries import values_for, wrong_part
from fsdp_trainer.config.evaluation_inputs import in_folder, why_untyped
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.config.schema import Data, Evaluation
from fsdp_trainer.config.yaml_text import load_yaml
from fsdp_trainer.data.files.sources import Problems, find_sources
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.tokens.questions import read_questions
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.data.tokens.turn_tokens import TurnTokens
from fsdp_trainer.errors import Problem, UserError
from fsdp_trainer.evaluation.scoring import Scorer
from fsdp_trainer.generation.sampling import Sampling
from fsdp_trainer.rl.environments.known_environments import (
    code_of,
    environment_problems,
    find_environment,
)
from fsdp_trainer.rl.rewards.reward import Reward
from fsdp_trainer.rl.rewards.table import entry_problems, make_rewards, names_of_code
from fsdp_trainer.rl.rollouts.answer_maker import AnswerMaker, AnswerPlayer, Player
from fsdp_trainer.rl.rollouts.episode_player import EpisodePlayer
from fsdp_trainer.rl.rollouts.rollout import Rollout
from fsdp_trainer.rl.rollouts.sampler import ModelSampler, Request

OF_OBJECTIVE = (
    *("environment", "rewards", "turns", "max_new_tokens", "temperature", "samples"),
    *("environment_seconds", "environment_output", "environments_at_once"),
)
"""Keys of a task's file that mean the same as those of `objective`."""
DEFAULTS = {"rewards": [], "temperature": 0.0, "samples": 1}
"""Values of such keys that differ from those of training: the likeliest tokens, once."""
OpenRewards = Callable[[list[Reward]], list[Reward]]
"""Loads the models of rewards that have one."""


@dataclass(frozen=True)
class EnvironmentTask:
    """A task as its file describes it. file: the path, whose name without suffix is the task's."""

    file: Path
    data: Any
    choice: ObjectiveChoice

    @classmethod
    def read(cls, name: str, code: Collection[str] = ()) -> "EnvironmentTask":
        """Return the task in a file. Raises UserError. code: evaluation.code."""
        file = Path(name)
        try:
            given = load_yaml(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError("a task cannot be run", name, f"cannot be read: {error}") from None
        problems = [Problem(name, reason) for reason in problems_of(given, code)]
        if problems:
            raise UserError("a task cannot be run", problems)
        data, options = beside(given.pop("data"), file.parent), {**DEFAULTS, **given}
        values = values_for(ObjectiveChoice, options)
        return cls(file, data, ObjectiveChoice(name="grpo", **values))

    @property
    def name(self) -> str:
        return self.file.stem

    def questions(self, limit: int | None) -> list[dict[str, Any]]:
        """Return the first rows of the data as questions. Raises UserError."""
        problems = Problems("fail")
        rows = read_questions(Data(), find_sources(self.data, f"{self.file}: data"), problems)
        questions = [each for _, each in rows]
        problems.raise_if_failing()
        return [each.as_values for each in questions[:limit]]


def beside(data: Any, folder: Path) -> Any:
    if isinstance(data, list):
        return [beside(each, folder) for each in data]
    if isinstance(data, dict):
        return {**data, "path": in_folder(data.get("path"), folder)}
    return in_folder(data, folder)


def problems_of(given: Any, code: Collection[str] = ()) -> list[str]:
    """Return what is wrong with the content of a task's file. code: evaluation.code."""
    if not isinstance(given, dict):
        return ["holds no keys"]
    about = {each.name: each for each in fields(ObjectiveChoice)}
    known = {"data": None, **{part: about[part] for part in OF_OBJECTIVE}}
    options = {part: value for part, value in given.items() if part != "temperature" or value}
    wrong = [wrong_part(part, value, known, "key of a task") for part, value in options.items()]
    problems = [reason for reason in wrong if reason]
    if "data" not in given:
        problems.append("has no data: a file of rows as in training, such as  data: rows.jsonl")
    if (entry := given.get("environment")) is not None:
        problems += [f"environment: {reason}" for reason in environment_problems(entry)]
        problems += [] if problems else untyped_code(code_of(entry), code)
    if isinstance(rewards := given.get("rewards", []), list):
        problems += [f"rewards: {reason}" for reason in entry_problems(rewards)]
        problems += [] if problems else untyped_code(names_of_code(rewards), code)
    return problems


def untyped_code(names_of_code: Sequence[str], code: Collection[str]) -> list[str]:
    known = {*code, *(str(Path(file).expanduser().resolve()) for file in code)}
    names = [name.rpartition(":")[0] or name for name in names_of_code]
    return [why_untyped(name) for name in names if not known & {name, str(Path(name).resolve())}]


class EnvironmentTasks:
    """Tasks with an environment, for one tokenizer."""

    def __init__(
        self,
        cfg: Evaluation,
        names: Sequence[str],
        tokenizer: TextTokenizer,
        template: Template,
        open_rewards: OpenRewards,
    ):
        self.tokenizer, self.turn_tokens = tokenizer, TurnTokens(template, tokenizer)
        self.tasks = [EnvironmentTask.read(name, cfg.code) for name in names]
        self.questions = [task.questions(cfg.limit) for task in self.tasks]
        chosen = [task.choice.environment for task in self.tasks]
        self.environments = [None if one is None else find_environment(one) for one in chosen]
        self.rewards = [open_rewards(make_rewards(task.choice.rewards)) for task in self.tasks]
        for task, spec, rewards in zip(self.tasks, self.environments, self.rewards, strict=True):
            if not rewards and not (spec and spec.rewards):
                reason = "has no rewards.\nAdd  rewards: [exact]  or an environment that rewards"
                raise UserError("nothing scores a task", str(task.file), reason)

    def run(self, scorer: Scorer) -> dict[str, dict[str, float]]:
        return {task.name: self._run(i, scorer) for i, task in enumerate(self.tasks)}

    def _run(self, number: int, scorer: Scorer) -> dict[str, float]:
        choice, questions = self.tasks[number].choice, dict(enumerate(self.questions[number]))
        sampling = Sampling(
            max_tokens=choice.max_new_tokens,
            temperature=choice.temperature,
            log_probabilities=True,
        )
        stop_ids = list(self.tokenizer.stop_ids)
        sampler = ModelSampler(
            scorer.model,
            sampling,
            scorer.device,
            stop_ids,
            scorer.rows,
            choice.samples,
            scorer.split.ranks,
        )
        is_first = is_first_of_group(scorer)
        spec, turns = self.environments[number], self.turn_tokens
        player: Player = AnswerPlayer(sampler, choice.max_new_tokens)
        if spec:
            player = EpisodePlayer(spec, choice, sampler, turns, scorer.context, is_first)
        parts = scorer.split.part, scorer.split.parts
        maker = AnswerMaker(player, self.rewards[number], self.tokenizer, *parts, is_first)
        prompts = {
            row: [] if spec else turns.prompt(each["messages"], each["tools"])
            for row, each in questions.items()
        }
        samples = range(choice.samples)
        requests = [Request(prompts[row], row, i) for row in questions for i in samples]
        episodes = maker.begin(requests, questions)
        player.go_on(episodes, 0, scorer.check)
        rollouts = [each for part in gather(maker.judge(episodes, questions)) for each in part]
        return metrics_of(rollouts, maker.titles)


def is_first_of_group(scorer: Scorer) -> bool:
    groups = getattr(scorer.split.ranks, "groups", [])
    return all(dist.get_rank(group) == 0 for group in groups)


def metrics_of(rollouts: Sequence[Rollout], titles: Sequence[str]) -> dict[str, float]:
    rewards = np.array([one.reward if one.is_used else 0.0 for one in rollouts])
    scores = np.array([one.scores if one.is_used else [0.0] * len(titles) for one in rollouts])
    used = [one for one in rollouts if one.is_used]
    facts = [one.episode for one in rollouts if one.episode]
    count = len(rollouts)
    metrics = {"reward": float(rewards.mean())}
    if count > 1:
        metrics["reward_stderr"] = float(rewards.std(ddof=1) / count**0.5)
    metrics |= {f"reward/{title}": float(scores[:, i].mean()) for i, title in enumerate(titles)}
    if used:
        metrics["turns"] = float(np.mean([len(one.answer.own_turns) for one in used]))
        metrics["truncated"] = float(np.mean([not one.answer.finished for one in used]))
    metrics["wrong_calls"] = sum(each.wrong_calls for each in facts) / count
    return metrics | {"failed": 1 - len(used) / count}
