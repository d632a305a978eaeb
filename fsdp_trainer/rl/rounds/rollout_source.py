"""Prompts as a data source: the model answers them, and rewards score the answers."""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice, pairwise, takewhile
from typing import NamedTuple

import numpy as np

from fsdp_trainer.base import phases
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.data.order.mixture import Mixture
from fsdp_trainer.data.prepared import Prepared
from fsdp_trainer.data.store.findings import KINDS
from fsdp_trainer.data.templates.completeness import TOOLS
from fsdp_trainer.data.tokens.tokenizer import TextTokenizer
from fsdp_trainer.errors import RunFailed
from fsdp_trainer.models.decoder import MicroBatch
from fsdp_trainer.observe.step_log import StepReport
from fsdp_trainer.rl.rollouts.episode import OpenEpisode
from fsdp_trainer.rl.rollouts.rollout import HIDDEN_TOOLS, Rollout, decode_rollouts, encode_rollouts
from fsdp_trainer.rl.rollouts.sampler import Request
from fsdp_trainer.rl.rounds.answers import PackedAnswers
from fsdp_trainer.rl.rounds.rounds import Rounds, RoundWork
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
from fsdp_trainer.training.stopping.stop import DataLost, Stop

WINDOW, MOSTLY_EQUAL = 20, 0.9
"""Number of steps over which prompts whose answers have equal rewards are counted, and the share of
them above which the run prints a warning."""

BEFORE_ANSWER = re.compile(r"(?<=\[/INST\])|(?=<｜Assistant｜>)")
"""Where the question has ended in prompts of Mistral, Llama 2 and DeepSeek."""
FAILURES_SHOWN = 3
"""Number of different reasons for failed rollouts that a step's event has."""


def has_equal_rewards(group: np.ndarray) -> bool:
    """Return True if no answer to a prompt is better than another. NaN: a failed one."""
    used = group[~np.isnan(group)]
    return not len(used) or bool(np.ptp(used) == 0)


def require_some(rollouts: Sequence[Rollout]) -> None:
    if any(rollout.is_used for rollout in rollouts):
        return
    reasons = [rollout.episode.failure for rollout in rollouts if rollout.episode]
    reason = f"all {len(rollouts)} rollouts failed, the first with\n  {reasons[0]}"
    raise DataLost(RunFailed(reason))


def written(rollout: Rollout, tokenizer: TextTokenizer) -> Json:
    answer, decode = rollout.answer, partial(tokenizer.decode, skip_special=False)
    line = {
        "prompt": tokenizer.decode(rollout.prompt),
        "prompt_turns": turns_of_prompt(rollout.prompt, tokenizer),
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


def turns_of_prompt(prompt: list[int], tokenizer: TextTokenizer) -> list[str]:
    """Return the texts of a prompt's turns, as the model reads them.

    Each ends in a stop token, or, in templates where only answers do, before the answer.
    """
    ends = [i + 1 for i, token in enumerate(prompt) if token in tokenizer.stop_ids]
    parts = [prompt[start:end] for start, end in pairwise([0, *ends, len(prompt)])]
    texts = [tokenizer.decode(part, skip_special=False) for part in parts if part]
    return [turn.strip() for text in texts for turn in BEFORE_ANSWER.split(text) if turn.strip()]


@dataclass
class StepRollouts:
    """The rollouts of a step. count: how many there will be; open: those that have not ended."""

    plan: StepPlan
    count: int
    ended: list[Rollout] = field(default_factory=list)
    open: list[OpenEpisode] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.ended) == self.count

    def add(self, ended: Sequence[Rollout], going_on: Sequence[OpenEpisode]) -> None:
        """Take up the results of a round, of this step's prompts."""
        self.ended = sorted([*self.ended, *ended], key=lambda one: (one.row, one.sample))
        self.open = list(going_on)


class StepBlock(NamedTuple):
    """Steps whose rollouts are begun together. completed: with those beyond the end of the run."""

    plans: list[StepPlan]
    completed: list[StepPlan]


@dataclass(eq=False)
class RolloutSource:
    """Stored prompts, of which each step uses the next ones and trains on rollouts of them.

    Before each block of steps a round of generation is run: it begins the rollouts of the block
    that is `objective.ahead` steps away, and goes on with those that are open. titles: the names of
    a rollout's scores.
    """

    prompts: StoredRows
    rounds: Rounds
    titles: list[str]
    tokenizer: TextTokenizer
    context: SourceContext

    def __post_init__(self) -> None:
        self.cfg: TrainConfig = self.context.cfg
        self.assembler = Assembler(self.prompts.order.seq_len, 1, self.context.options)
        self.order: Mixture = self.prompts.order
        self.source_names = [""]
        self.fingerprint, self.first_row = self.prompts.fingerprint, self.prompts.first_row
        self._rollouts: dict[int, StepRollouts] = {}
        """Of the current step and of later ones, by step."""
        self._stored: list[OpenEpisode] = []
        """Open rollouts of a checkpoint, which the next round takes up."""
        self._runs_ahead = False
        """True while a round is run that the next step does not need."""
        self._error: DataLost | None = None
        self._steps: dict[int, tuple[PackedAnswers, np.ndarray]] = {}
        self._equal: deque[float] = deque(maxlen=WINDOW)
        self._has_warned = False
        self._has_said_tools = False

    def total_steps(self, progress: Progress) -> int:
        return self.prompts.total_steps(progress)

    def open(self, progress: Progress, leave: LeaveTogether, part: GroupPart) -> Feed:
        """Begin to read the rows after `progress`. Rollouts are made when a step needs them."""
        what = f"prompts prepared in {self.order.folder}"
        self.rounds.forget()
        self._runs_ahead, self._error = False, None
        self._rollouts = self._read_stored(progress)
        self._stored = [one for step in self._rollouts.values() for one in step.open]
        items = self._read(progress, leave)
        return Feed(self.assembler, what, items, 0, self.context.signals)

    def _read(self, progress: Progress, leave: LeaveTogether) -> Iterator[StepPlan | MicroBatch]:
        choice = self.cfg.objective
        blocks = self._blocks(progress)
        coming = deque(islice(blocks, choice.ahead // choice.updates))
        while True:
            coming.extend(islice(blocks, 1))
            if not coming:
                return
            block = coming.popleft()
            self._make(block, coming, leave)
            for plan in block.plans:
                rollouts = self._rollouts[plan.step].ended
                require_some(rollouts)
                packed = self._pack(plan, rollouts)
                batches = RowBatches(packed, self.context.options)
                of_packed = StepPlan(plan.step, 0, len(packed))
                self._remember(plan.step, packed, batches.assign_rows_to_ranks(of_packed))
                metrics = self._metrics(packed, plan)
                yield packed.plan(plan.step, plan.start, plan.stop, metrics)
                yield from batches.micro_batches(of_packed)
                del self._rollouts[plan.step]

    # --- rounds

    def _blocks(self, progress: Progress) -> Iterator[StepBlock]:
        """Yield the steps after `progress` in blocks.

        With objective.ahead they begin after multiples of objective.updates, else with rollouts.
        """
        choice = self.cfg.objective
        size = len(self._rollouts) or choice.updates
        if choice.ahead:
            size = choice.updates - progress.step % choice.updates
        plans = self.prompts.plans(progress)
        while block := list(islice(plans, size)):
            yield StepBlock(block, self._completed(block, size, progress))
            size = choice.updates

    def _completed(self, block: list[StepPlan], size: int, progress: Progress) -> list[StepPlan]:
        """Return the plans of a block with those beyond the end of the run.

        A run that ends amid a block may be continued with more steps, and then uses the same
        rollouts as one that had them from the beginning. No step can follow one of fewer rows than
        usual.
        """
        last, missing = block[-1], size - len(block)
        if last.stop - last.start < self.cfg.batch.rows:
            return block
        return [*block, *islice(self.prompts.plans_after(last, progress), missing)]

    def _make(self, block: StepBlock, coming: Sequence[StepBlock], leave: LeaveTogether) -> None:
        """Complete the rollouts of a block, and run a round for the coming ones. Collective.

        Raises Stop and DataLost.
        """

        def check() -> None:
            leave()
            self.context.signals.raise_if_agreed()
            phases.enter("rollouts")

        version = block.plans[0].step - 1
        if self._error:
            raise self._error
        if self._runs_ahead:
            self._finish(check)
        if missing := [plan for plan in block.completed if plan.step not in self._rollouts]:
            try:
                self._start(version, missing, None, check)
                self._finish(check)
            except (Stop, DataLost):  # the same weights make them after a restart
                self.rounds.forget()
                raise
        new = [plan for one in coming for plan in one.completed]
        new = [plan for plan in new if plan.step not in self._rollouts]
        is_boundary = version % self.cfg.objective.updates == 0
        is_open = any(not step.is_complete for step in self._rollouts.values())
        if new or (is_open and is_boundary):
            due = coming[0].completed[-1].stop if len(coming) > 1 else None
            self._start(version, new, due, check)
            self._runs_ahead = True
        phases.enter("data")

    def _start(
        self, version: int, plans: list[StepPlan], due: int | None, check: Callable[[], None]
    ) -> None:
        """Start a round that begins the rollouts of these steps. due: see RoundWork."""
        samples = range(self.cfg.objective.samples)
        rows = [row for plan in plans for row in range(plan.start, plan.stop)]
        prompts = {row: self._prompt(row) for row in rows}
        prompts |= {row: self._prompt(row) for row in {o["request"]["row"] for o in self._stored}}
        requests = [Request(prompts[row][0], row, i) for row in rows for i in samples]
        questions = {row: each for row, (_, each) in prompts.items()}
        phases.enter("rollouts")
        self.rounds.start(RoundWork(version, requests, questions, self._stored, due), check)
        self._stored = []
        for plan in plans:
            count = (plan.stop - plan.start) * len(samples)
            self._rollouts[plan.step] = StepRollouts(plan, count)

    def _finish(self, check: Callable[[], None]) -> None:
        try:
            result = self.rounds.finish(check)
        except DataLost:
            self._runs_ahead = False
            raise
        self._runs_ahead = False
        for step in self._rollouts.values():
            if not step.is_complete:
                rows = range(step.plan.start, step.plan.stop)
                ended = [rollout for rollout in result.ended if rollout.row in rows]
                step.add(ended, [one for one in result.open if one["request"]["row"] in rows])

    def _prompt(self, row: int) -> tuple[list[int], Json]:
        [(store, sample)] = self.order.samples_of(row)
        return store.read(sample)[0].tolist(), store.question(sample)

    def _pack(self, plan: StepPlan, rollouts: list[Rollout]) -> PackedAnswers:
        seq_len, cost = self.cfg.batch.seq_len, self.context.attention_cost
        return PackedAnswers(self.cfg.objective, seq_len, rollouts, cost, self.order.where)

    def _read_stored(self, progress: Progress) -> dict[int, StepRollouts]:
        """Return the rollouts in a checkpoint for the next steps, by step.

        Empty if those use other rows, if rollouts are now made or scored in another number, or if
        all of a step's failed.
        """
        by_step = [decode_rollouts(text) for text in progress.rollouts]
        plans = list(islice(self.prompts.plans(progress), len(by_step)))
        last = plans[-1] if plans else StepPlan(progress.step, 0, progress.rows)
        plans += islice(self.prompts.plans_after(last, progress), len(by_step) - len(plans))
        steps = {}
        for plan, (ended, going_on) in zip(plans, by_step, strict=True):
            rows, samples = range(plan.start, plan.stop), range(self.cfg.objective.samples)
            wanted = [(row, i) for row in rows for i in samples]
            there = [(r.row, r.sample) for r in ended]
            there += [(o["request"]["row"], o["request"]["sample"]) for o in going_on]
            is_scored = all(len(r.scores) == len(self.titles) for r in ended)
            if sorted(there) != wanted or not is_scored:
                return {}
            if not going_on and not any(r.is_used for r in ended):
                return {}
            steps[plan.step] = StepRollouts(plan, len(wanted), ended, going_on)
        return steps

    # --- metrics and records

    def _metrics(self, packed: PackedAnswers, plan: StepPlan) -> Json:
        used = [rollout for rollout in packed.rollouts if rollout.is_used]
        answers = [rollout.answer for rollout in used]
        rewards = np.array([rollout.reward for rollout in used])
        scores = np.array([rollout.scores for rollout in used])
        equal = float(np.mean([has_equal_rewards(group) for group in packed.rewards]))
        self._warn(equal, plan.step)
        self._record(packed, plan.step)
        self.context.observer.call("rollouts", plan.step, packed.rollouts)
        return {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            **{
                f"reward/{title}": float(scores[:, i].mean()) for i, title in enumerate(self.titles)
            },
            "equal_groups": equal,
            "answer_tokens": float(np.mean([answer.own_tokens for answer in answers])),
            "answer_tokens_max": max(answer.own_tokens for answer in answers),
            "truncated_share": float(np.mean([not answer.finished for answer in answers])),
            "staleness": float(np.mean([plan.step - 1 - answer.version for answer in answers])),
            **self._ahead_metrics(packed.rollouts, plan.step),
            **self._episode_metrics(packed.rollouts, plan.step),
        }

    def _ahead_metrics(self, rollouts: Sequence[Rollout], step: int) -> Json:
        choice = self.cfg.objective
        metrics: dict[str, float] = {}
        if choice.ahead:
            used = (one for one in rollouts if one.is_used)
            metrics["staleness_max"] = max(step - 1 - one.answer.version for one in used)
        if choice.round_tokens and choice.unfinished == "drop":
            metrics["dropped"] = float(np.mean([not one.is_used for one in rollouts]))
        return metrics

    def _episode_metrics(self, rollouts: Sequence[Rollout], step: int) -> Json:
        """Return the metrics of rollouts with an environment; record why some failed."""
        if self.cfg.objective.environment is None:
            return {}
        facts = [rollout.episode for rollout in rollouts if rollout.episode]
        failures = Counter(each.failure for each in facts if each.failure)
        if failures:
            reasons = dict(failures.most_common(FAILURES_SHOWN))
            count = failures.total()
            self.context.observer.event("environment_failed", step=step, reasons=reasons)
            first = next(iter(reasons))
            self.context.observer.say(f"step {step}: {count} rollouts failed, as in: {first}")
        if any(each.hides_tools for each in facts) and not self._has_said_tools:
            self._has_said_tools = True
            self.context.observer.event(TOOLS, step=step)
            self.context.observer.say(f"warning: {HIDDEN_TOOLS}.\n  {KINDS[TOOLS].fix}")
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
        lines = [written(rollout, self.tokenizer) for rollout in shown]
        self.context.observer.answered(step, lines)

    def _remember(self, step: int, packed: PackedAnswers, assigned: np.ndarray) -> None:
        self._steps[step] = packed, assigned
        self._steps.pop(step - REMEMBERED_STEPS, None)

    def suspects(self, report: StepReport) -> Json:
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

    def state(self, progress: Progress) -> Json:
        """Return the mixtures that prompts were read from, and rollouts made for future steps.

        Waits for a round that runs ahead: the weights that make it are gone after a restart.
        """
        if self._runs_ahead:
            phases.enter("rollouts")
            try:
                self._finish(lambda: None)
            except DataLost as lost:
                self._error = lost  # raised when the next step needs its rollouts
        future = [self._rollouts[step] for step in sorted(self._rollouts) if step > progress.step]
        future = [*takewhile(lambda step: len(step.ended) + len(step.open) == step.count, future)]
        texts = [encode_rollouts(step.ended, step.open) for step in future]
        return self.prompts.state(progress) | {"rollouts": texts}

    def read_by_component(self, progress: Progress) -> list[Json]:
        return self.prompts.read_by_component(progress)

    def about(self, prepared: Prepared, progress: Progress) -> list[str]:
        return self.prompts.about(prepared, progress)

    def epochs(self, progress: Progress) -> float:
        return self.prompts.epochs(progress)
