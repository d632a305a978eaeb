"""Prompts as a data source: the model answers them, and rewards score the answers."""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.order.mixture import Mixture
from fsdp_trainer.data.store.token_cache import Prepared
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.environments.environment import last_text
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.methods.answers import (
    EpisodeFacts,
    PackedAnswers,
    Rollout,
    decode_rollouts,
    encode_rollouts,
)
from fsdp_trainer.methods.episodes import Episode, EpisodePlayer
from fsdp_trainer.methods.sampler import AnswerSampler, Request, SampledAnswer
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.rewards.reward import Attempt, Reward, totals
from fsdp_trainer.rewards.scores_on_ranks import score_on_ranks
from fsdp_trainer.training.batches import (
    REMEMBERED_STEPS,
    Assembler,
    GroupPart,
    RowBatches,
    StepPlan,
    ranks_with_highest,
)
from fsdp_trainer.training.data_source import LeaveTogether, SourceContext, StoredRows
from fsdp_trainer.training.feed import Feed
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.stopping.stop import DataLost

WINDOW, MOSTLY_EQUAL = 20, 0.9
"""Number of steps over which prompts whose answers have equal rewards are counted, and the share of
them above which the run prints a warning."""

FAILURES_SHOWN = 3
"""Number of different reasons for failed rollouts that a step's event has."""

Questions = dict[int, dict[str, Any]]
"""The data for scoring answers, by the row of the prompt."""


def has_equal_rewards(group: np.ndarray) -> bool:
    """Return True if no answer to a prompt is better than another. NaN: a failed one."""
    used = group[~np.isnan(group)]
    return not len(used) or bool(np.ptp(used) == 0)


@dataclass
class AnswerMaker:
    """Makes answers and scores them.

    own_part, parts: index of this rank's part of a step's answers, and number of parts.
    is_first: False for a rank that makes the same answers as the first rank of its group.
    """

    sampler: AnswerSampler
    rewards: Sequence[Reward]
    tokenizer: TextTokenizer
    own_part: int
    parts: int
    is_first: bool = True
    player: EpisodePlayer | None = None

    @property
    def titles(self) -> list[str]:
        """The names of all scores of a rollout, that of the environment's reward first."""
        own = [self.player.spec.title] if self.player and self.player.spec.rewards else []
        return [*own, *(reward.title for reward in self.rewards)]

    def make(
        self,
        requests: list[Request],
        questions: Questions,
        step: int,
        check: Callable[[], None],
    ) -> list[Rollout]:
        """Return the answers to all requests, in order, on every rank. Collective.

        requests: the same on every rank; each rank makes a part of the answers. questions: see
        Questions. step: optimizer steps done so far. check: see AnswerSampler.
        """
        count = len(requests)
        first, stop = (count * part // self.parts for part in (self.own_part, self.own_part + 1))
        own = requests[first:stop]
        try:
            if self.player:
                episodes = self.player.play(own, questions, step, check)
                phases.enter("rewards")
                rollouts = self._judge_episodes(episodes, questions)
            else:
                answers = self.sampler.sample(own, step, check)
                phases.enter("rewards")
                rollouts = self._judge(own, answers, questions)
        except (RunFailed, UserError) as error:  # from a server or a reward, on all ranks
            raise DataLost(error) from None
        by_request = {(r.row, r.sample): r for part in gather(rollouts) for r in part}
        return [by_request[request.row, request.sample] for request in requests]

    def _judge(
        self,
        requests: list[Request],
        answers: list[SampledAnswer],
        questions: Questions,
    ) -> list[Rollout]:
        """Score answers; return this rank's rollouts, none if another rank makes the same ones.

        Collective.
        """
        pairs = list(zip(requests, answers, strict=True)) if self.is_first else []
        attempts = [self._attempt(request, answer, questions) for request, answer in pairs]
        scores = score_on_ranks(self.rewards, attempts)
        by_attempt = list(zip(*scores, strict=True)) if attempts else []
        judged = zip(pairs, totals(self.rewards, scores), by_attempt, strict=True)
        return [
            Rollout(request.row, request.sample, [*request.prompt], answer, total, [*each])
            for (request, answer), total, each in judged
        ]

    def _judge_episodes(self, episodes: list[Episode], questions: Questions) -> list[Rollout]:
        """Score rollouts with an environment, but for those that failed. Collective."""
        assert self.player
        played = episodes if self.is_first else []
        used = [episode for episode in played if episode.failure is None]
        attempts = [self._episode_attempt(episode, questions) for episode in used]
        scores = score_on_ranks(self.rewards, attempts)
        by_attempt = iter(zip(*scores, strict=True)) if self.rewards else iter([()] * len(used))
        sums = iter(totals(self.rewards, scores) if self.rewards else [0.0] * len(used))
        rollouts = []
        for episode in played:
            if episode.failure is None:
                others, total = next(by_attempt), next(sums)
                rollouts.append(rewarded(episode, total, others, self.player.spec.rewards))
            else:
                count = len(self.titles)
                rollouts.append(rewarded(episode, math.nan, [math.nan] * count, False))
        return rollouts

    def _episode_attempt(self, episode: Episode, questions: Questions) -> Attempt:
        """Return the last answer of a rollout with all turns before it."""
        question = questions[episode.request.row]
        last = max(i for i, turn in enumerate(episode.messages) if turn["role"] == "assistant")
        return Attempt(
            question["prompt"],
            last_text(episode.messages),
            question["row"],
            question["reference"],
            episode.sampled().own_tokens,
            episode.is_complete,
            episode.messages[:last],
            episode.tools,
        )

    def _attempt(self, request: Request, answer: SampledAnswer, questions: Questions) -> Attempt:
        question = questions[request.row]
        return Attempt(
            question["prompt"],
            self.tokenizer.decode(answer.tokens),
            question["row"],
            question["reference"],
            len(answer.tokens) - answer.finished,  # without the stop token
            answer.finished,
            question["messages"],
            question["tools"],
        )


def require_some(rollouts: Sequence[Rollout]) -> None:
    """Raise DataLost if all of a step's rollouts failed."""
    if any(rollout.is_used for rollout in rollouts):
        return
    reasons = [rollout.episode.failure for rollout in rollouts if rollout.episode]
    reason = f"all {len(rollouts)} rollouts failed, the first with\n  {reasons[0]}"
    raise DataLost(RunFailed(reason))


def rewarded(episode: Episode, others: float, scores: Sequence[float], has_own: bool) -> Rollout:
    """Return a rollout with an environment. others: the weighted sum of the rewards' scores.

    has_own: the environment's own reward is the first score. One for each turn is kept as such, and
    the others are added to that of the last turn.
    """
    own, by_turn = episode.rewards if has_own else 0.0, ()
    if isinstance(own, list):
        by_turn = (*own[:-1], own[-1] + others)
        own = math.fsum(own)
    facts = EpisodeFacts(episode.wrong_calls, episode.seconds, episode.failure)
    return Rollout(
        *episode.key,
        episode.prompt,
        episode.sampled(),
        own + others,
        [own, *scores] if has_own else [*scores],
        by_turn,
        facts,
    )


def written(rollout: Rollout, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return a rollout as text; with an environment also its turns, and whose they are."""
    answer, decode = rollout.answer, partial(tokenizer.decode, skip_special=False)
    line = {
        "prompt": tokenizer.decode(rollout.prompt),
        "text": decode(answer.tokens),
        "reward": rollout.reward,
    }
    if not rollout.episode:
        return line
    ends = accumulate(answer.turns)
    parts = [answer.tokens[end - n : end] for end, n in zip(ends, answer.turns, strict=True)]
    turns = [{"own": i % 2 == 0, "text": decode(part)} for i, part in enumerate(parts)]
    for turn, reward in zip(turns[::2], rollout.turn_rewards, strict=False):
        turn["reward"] = reward
    return {**line, "wrong_calls": rollout.episode.wrong_calls, "turns": turns}


class RolloutSource:
    """Stored prompts, of which each step uses the next ones and trains on answers to them."""

    def __init__(self, prompts: StoredRows, maker: AnswerMaker, context: SourceContext):
        self.prompts, self.maker, self.context = prompts, maker, context
        self.cfg: TrainConfig = context.cfg
        self.assembler = Assembler(prompts.order.seq_len, 1, **vars(context.options))
        self.order: Mixture = prompts.order
        self.source_names = [""]
        self.fingerprint, self.first_row = prompts.fingerprint, prompts.first_row
        self._answers: dict[int, list[Rollout]] = {}
        """Answers for the current step and for later ones, made together, by step."""
        self._steps: dict[int, tuple[PackedAnswers, np.ndarray]] = {}
        self._equal: deque[float] = deque(maxlen=WINDOW)
        self._has_warned = False

    def total_steps(self, progress: Progress) -> int:
        return self.prompts.total_steps(progress)

    def open(self, progress: Progress, leave: LeaveTogether, part: GroupPart) -> Feed:
        """Begin to read the rows after `progress`. Answers are made when a step needs them."""
        what = f"prompts prepared in {self.order.folder}"
        self._answers = self._stored(progress)
        items = self._read(progress, leave)
        return Feed(self.assembler, what, items, 0, self.context.signals)

    def _read(self, progress: Progress, leave: LeaveTogether) -> Iterator[StepPlan | MicroBatch]:
        """Yield each plan, followed by this rank's micro-batches of that step."""
        plans = self.prompts.plans(progress)
        while block := list(islice(plans, len(self._answers) or self.cfg.objective.updates)):
            if not self._answers:
                self._answers = self._answer(self._completed(block, progress), leave)
            for plan in block:
                require_some(self._answers[plan.step])
                packed = self._pack(plan, self._answers[plan.step])
                batches = RowBatches(packed, **vars(self.context.options))
                of_packed = StepPlan(plan.step, 0, len(packed))
                self._remember(plan.step, packed, batches.assign_rows_to_ranks(of_packed))
                metrics = self._metrics(packed, plan)
                yield packed.plan(plan.step, plan.start, plan.stop, metrics)
                yield from batches.micro_batches(of_packed)
                del self._answers[plan.step]

    def _completed(self, block: list[StepPlan], progress: Progress) -> list[StepPlan]:
        """Return the plans of steps whose answers are made together, beyond the end of the run too.

        A run that ends among them may be continued with more steps, and then uses the same answers
        as one that had them from the beginning. No step can follow one of fewer rows than usual.
        """
        last, missing = block[-1], self.cfg.objective.updates - len(block)
        if last.stop - last.start < self.cfg.batch.rows:
            return block
        return [*block, *islice(self.prompts.plans_after(last, progress), missing)]

    def _answer(self, block: list[StepPlan], leave: LeaveTogether) -> dict[int, list[Rollout]]:
        """Make the rollouts of some steps together; return a list of them by step.

        Collective. Raises Stop.
        """

        def check() -> None:
            leave()
            self.context.signals.raise_if_agreed()
            phases.enter("rollouts")

        samples = range(self.cfg.objective.samples)
        rows = [row for plan in block for row in range(plan.start, plan.stop)]
        prompts = {row: self._prompt(row) for row in rows}
        requests = [Request(prompts[row][0], row, i) for row in rows for i in samples]
        questions = {row: each for row, (_, each) in prompts.items()}
        phases.enter("rollouts")
        rollouts = self.maker.make(requests, questions, block[0].step - 1, check)
        phases.enter("data")
        in_order = iter(rollouts)
        sizes = {plan.step: (plan.stop - plan.start) * len(samples) for plan in block}
        return {step: list(islice(in_order, size)) for step, size in sizes.items()}

    def _prompt(self, row: int) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens of a prompt, and the data for scoring answers to it."""
        [(store, sample)] = self.order.samples_of(row)
        return store.read(sample)[0].tolist(), store.question(sample)

    def _pack(self, plan: StepPlan, rollouts: list[Rollout]) -> PackedAnswers:
        seq_len, cost = self.cfg.batch.seq_len, self.context.attention_cost
        return PackedAnswers(self.cfg.objective, seq_len, rollouts, cost, self.order.where)

    def _stored(self, progress: Progress) -> dict[int, list[Rollout]]:
        """Return the answers in a checkpoint for the next steps, by step.

        Empty if those use other rows, if answers are now made or scored in another number, or if
        all of a step's failed.
        """
        by_step = [decode_rollouts(text) for text in progress.rollouts]
        plans = list(islice(self.prompts.plans(progress), len(by_step)))
        last = plans[-1] if plans else StepPlan(progress.step, 0, progress.rows)
        plans += islice(self.prompts.plans_after(last, progress), len(by_step) - len(plans))
        samples, scores = range(self.cfg.objective.samples), len(self.maker.titles)
        stored = [[(r.row, r.sample, len(r.scores)) for r in step] for step in by_step]
        wanted = [
            [(row, i, scores) for row in range(plan.start, plan.stop) for i in samples]
            for plan in plans
        ]
        if stored != wanted or not all(any(r.is_used for r in step) for step in by_step):
            return {}
        return {plan.step: step for plan, step in zip(plans, by_step, strict=True)}

    # --- metrics and records

    def _metrics(self, packed: PackedAnswers, plan: StepPlan) -> dict[str, Any]:
        """Return the metrics of a step's answers for its line; warn, and record some answers."""
        used = [rollout for rollout in packed.rollouts if rollout.is_used]
        answers = [rollout.answer for rollout in used]
        rewards = np.array([rollout.reward for rollout in used])
        scores = np.array([rollout.scores for rollout in used])
        equal = float(np.mean([has_equal_rewards(group) for group in packed.rewards]))
        self._warn(equal, plan.step)
        self._record(packed, plan.step)
        return {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            **{
                f"reward/{title}": float(scores[:, i].mean())
                for i, title in enumerate(self.maker.titles)
            },
            "equal_groups": equal,
            "answer_tokens": float(np.mean([answer.own_tokens for answer in answers])),
            "answer_tokens_max": max(answer.own_tokens for answer in answers),
            "truncated_share": float(np.mean([not answer.finished for answer in answers])),
            "staleness": float(np.mean([plan.step - 1 - answer.version for answer in answers])),
            **self._episode_metrics(packed.rollouts, plan.step),
        }

    def _episode_metrics(self, rollouts: Sequence[Rollout], step: int) -> dict[str, Any]:
        """Return the metrics of rollouts with an environment; record why some failed."""
        if not self.maker.player:
            return {}
        facts = [rollout.episode for rollout in rollouts if rollout.episode]
        failures = Counter(each.failure for each in facts if each.failure)
        if failures:
            reasons = dict(failures.most_common(FAILURES_SHOWN))
            count = failures.total()
            self.context.observer.event("environment_failed", step=step, reasons=reasons)
            first = next(iter(reasons))
            self.context.observer.say(f"step {step}: {count} rollouts failed, as in: {first}")
        used = [rollout for rollout in rollouts if rollout.is_used]
        turns = [len(rollout.answer.own_turns) for rollout in used]
        return {
            "turns": float(np.mean(turns)),
            "turns_max": max(turns),
            "wrong_calls": float(np.mean([each.wrong_calls for each in facts])),
            "environment_seconds": float(np.mean([each.seconds for each in facts])),
            "environment_failures": failures.total() / len(facts),
        }

    def _warn(self, equal: float, step: int) -> None:
        """Warn once if almost all prompts have answers with equal rewards."""
        self._equal.append(equal)
        share = sum(self._equal) / WINDOW
        if self._has_warned or len(self._equal) < WINDOW or share <= MOSTLY_EQUAL:
            return
        self._has_warned = True
        self.context.observer.event("equal_rewards", step=step, share=round(share, 3))
        self.context.observer.say(
            f"warning: up to step {step} {share:.0%} of the prompts had answers with equal rewards,"
            " which contribute nothing to the update.\n"
            "  Prompts that are neither too easy nor too hard, a larger objective.samples or a"
            " reward with more values tell answers apart"
        )

    def _record(self, packed: PackedAnswers, step: int) -> None:
        """Record the best and the worst answer to the step's first prompt, at logging steps."""
        every = self.cfg.logging.every or 1
        if step % every:
            return
        first = packed.rollouts[: self.cfg.objective.samples]
        group = sorted((r for r in first if r.is_used), key=lambda r: -r.reward)
        if not group:
            return
        shown = [group[0], group[-1]] if group[0].reward != group[-1].reward else group[:1]
        lines = [written(rollout, self.maker.tokenizer) for rollout in shown]
        self.context.observer.answered(step, lines)

    def _remember(self, step: int, packed: PackedAnswers, assigned: np.ndarray) -> None:
        self._steps[step] = packed, assigned
        self._steps.pop(step - REMEMBERED_STEPS, None)

    def suspects(self, report: StepReport) -> dict[str, Any]:
        """Return the ranks with the highest loss, and the prompts of their micro-batches.

        No prompts are returned for steps longer ago than REMEMBERED_STEPS.
        """
        ranks = ranks_with_highest(report.worst_losses)
        if report.plan.step not in self._steps:
            return self.assembler.suspects_event(ranks, [])
        packed, assigned = self._steps[report.plan.step]
        places = [
            place
            for rank in ranks
            for row in assigned[int(report.worst_micro_batches[rank]), rank]
            if row >= 0
            for place in packed.where(int(row))
        ]
        return self.assembler.suspects_event(ranks, places)

    def state(self, progress: Progress) -> dict[str, Any]:
        """Return the mixtures that prompts were read from, and answers made for future steps."""
        future = [each for step, each in self._answers.items() if step > progress.step]
        stored = self.prompts.state(progress)
        return stored | {"rollouts": [encode_rollouts(each) for each in future]}

    def read_by_component(self, progress: Progress) -> list[dict[str, Any]]:
        return self.prompts.read_by_component(progress)

    def about(self, prepared: Prepared, progress: Progress) -> list[str]:
        return self.prompts.about(prepared, progress)

    def epochs(self, progress: Progress) -> float:
        return self.prompts.epochs(progress)
