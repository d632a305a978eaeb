"""Answers over several turns: the model and an environment in turn, until the environment ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from fsdp_trainer.base import phases
from fsdp_trainer.base.distributed import gather
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.templates.template_forms import convert_turns
from fsdp_trainer.data.templates.template_probes import ASK, CALL, TOOL
from fsdp_trainer.data.tokens.turn_tokens import TurnTokens
from fsdp_trainer.errors import RunFailed, UserError
from fsdp_trainer.rl.environments.bounded_calls import call_all
from fsdp_trainer.rl.environments.environment import Message, row_of
from fsdp_trainer.rl.environments.known_environments import EnvironmentSpec
from fsdp_trainer.rl.environments.tool_calls import CallFormat, format_of, parse_answer
from fsdp_trainer.rl.rollouts.episode import Episode, EpisodeUpdate, reason_of
from fsdp_trainer.rl.rollouts.sampler import AnswerSampler, Request

CUT = " … (cut)"
"""End of an environment's text that was longer than allowed."""
PROMPT_END = 16
"""Tokens before an answer that may begin its reasoning."""
UNREAD_CALLS = (
    "writes tool calls in a form that is not read here:\n{shown}\nUse a template with the calls of"
    " Hermes, Qwen, Llama 3, Mistral, DeepSeek, GPT-OSS, GLM, Kimi or LFM2:"
    "  data.template=FILE.jinja"
)
TRY_AGAIN = "The tool calls could not be read, and none was made: {problem}."
Questions = dict[int, dict[str, Any]]
"""The data for scoring answers, by the row of the prompt."""
Updates = dict[tuple[int, int], EpisodeUpdate]
"""By the key of the episode."""


@dataclass
class EpisodePlayer:
    """Plays rollouts with an environment.

    longest: tokens of a rollout at most. is_first: see AnswerMaker. share: returns what each rank
    gives; all methods are collective if it is. enter: called at the beginning of a phase.
    """

    spec: EnvironmentSpec
    choice: ObjectiveChoice
    sampler: AnswerSampler
    turn_tokens: TurnTokens
    longest: int
    is_first: bool = True
    share: Callable[[Any], list[Any]] = gather
    enter: Callable[[str], None] = phases.enter

    def __post_init__(self) -> None:
        self.format = format_of("".join(self.turn_tokens.template.sources.values()))

    @cached_property
    def unread_call(self) -> str:
        """A call as the template writes it, if it is not read; else ""."""
        return unread_call(self.turn_tokens, self.format)

    @property
    def titles(self) -> list[str]:
        return [self.spec.title] if self.spec.rewards else []

    def play(self, requests: Sequence[Request], questions: Questions) -> list[Episode]:
        episodes = [Episode(request) for request in requests]
        self.begin(episodes, questions)
        self.go_on(episodes, 0, lambda: None)
        self.close(episodes)
        return episodes

    def begin(self, episodes: list[Episode], questions: Questions) -> None:
        """Make and reset the environments of new episodes; each then has its prompt."""
        self._update(episodes, lambda: self._begin(episodes, questions))

    def begin_again(self, episodes: list[Episode], questions: Questions) -> None:
        """Make the environments of stored episodes, and call them as they were called before."""
        self._update(episodes, lambda: self._begin_again(episodes, questions))

    def go_on(self, episodes: list[Episode], step: int, check: Callable[[], None]) -> None:
        """Play until every episode has ended or has no budget left. step, check: see AnswerSampler.

        An episode that has ended here has no reward yet.
        """
        longest = self.choice.max_new_tokens
        while True:
            running = [e for e in episodes if e.require_room(self.longest, longest)]
            if not any(self.share(len(running))):
                return
            requests = [episode.request_more(longest) for episode in running]
            self.enter("rollouts")
            answers = self.sampler.sample(requests, step, check)
            for episode, answer in zip(running, answers, strict=True):
                episode.add_answer(answer, longest)
            self.enter("environments")
            whole = [episode for episode in running if not episode.is_paused]
            self._update(episodes, partial(self._reply, whole))

    def close(self, episodes: list[Episode]) -> None:
        self._update(episodes, lambda: self._reward(episodes))

    def _update(
        self, episodes: list[Episode], work: Callable[[], dict[Any, EpisodeUpdate]]
    ) -> None:
        """Let the first rank of each group work, and make its updates on all."""
        updates: Updates = {}
        fault: Exception | None = None
        if self.is_first:
            try:
                updates = work()
            except (UserError, RunFailed) as error:
                fault = error
        everywhere: Updates = {}
        for others, other_fault in self.share((updates, fault)):
            if other_fault is not None:
                raise other_fault
            everywhere |= others
        for episode in episodes:
            episode.update(everywhere.get(episode.key, EpisodeUpdate()))

    # --- on the first rank of each group

    def _begin(self, episodes: list[Episode], questions: Questions) -> Updates:
        values = self._called(episodes, partial(self._reset, questions))
        return {episode.key: self._begun(episode, value) for episode, value in values}

    def _begin_again(self, episodes: list[Episode], questions: Questions) -> Updates:
        updates: Updates = {}
        values = self._called(episodes, partial(self._reset, questions))
        for number in range(1 + max((len(e.steps) for e in episodes), default=0)):
            for episode, value in values:
                if isinstance(value, Exception):
                    updates[episode.key] = EpisodeUpdate(failure=reason_of("replay", value))
            again = [e for e in episodes if number < len(e.steps) and e.key not in updates]
            values = self._called(again, lambda e: e.step_again(number))  # noqa: B023
        return updates

    def _reset(self, questions: Questions, episode: Episode) -> Any:
        return episode.begin(self.spec, row_of(questions[episode.request.row]))

    def _begun(self, episode: Episode, value: Any) -> EpisodeUpdate:
        if isinstance(value, Exception):
            return EpisodeUpdate(failure=reason_of("reset", value))
        if not (isinstance(value, tuple) and len(value) == 2 and are_turns(value[0]) and value[0]):
            return EpisodeUpdate(failure="reset returned no pair of turns and tools")
        messages, tools = value
        if tools and self.unread_call:
            reason = UNREAD_CALLS.format(shown=self.unread_call)
            title = "the model's tool calls cannot be read"
            name = f"the chat template {self.turn_tokens.template.name}"
            raise UserError(title, name, reason)
        episode.show(self._bounded(messages), tools or None)
        return self._tokens(lambda: self.turn_tokens.prompt(episode.messages, episode.tools))

    def _reply(self, episodes: list[Episode]) -> Updates:
        """Return the environments' replies to the newest answers, but to those that were cut."""
        updates: Updates = {}
        waiting = []
        for episode in episodes:
            before, text = self._prompt_end(episode), self._text(episode)
            parsed = parse_answer(text, self.format, episode.tools, before)
            episode.messages.append(parsed.message)
            if not episode.is_open:
                continue
            if parsed.problem is None:
                waiting.append(episode)
                continue
            episode.count_wrong_call()
            error = {"role": "user", "content": TRY_AGAIN.format(problem=parsed.problem)}
            updates[episode.key] = self._following(episode, [error], self._is_last(episode))
        for episode, value in self._called(waiting, Episode.step):
            updates[episode.key] = self._replied(episode, value)
        return updates

    def _is_last(self, episode: Episode) -> bool:
        return episode.answers >= self.choice.turns

    def _replied(self, episode: Episode, value: Any) -> EpisodeUpdate:
        if isinstance(value, Exception):
            return EpisodeUpdate(failure=reason_of("step", value))
        if not (isinstance(value, tuple) and len(value) == 2 and are_turns(value[0])):
            return EpisodeUpdate(failure="step returned no pair of turns and whether it is over")
        new, is_over = value
        if not new and not is_over:
            return EpisodeUpdate(failure="step returned no turn, and is not over")
        return self._following(episode, self._bounded(new), bool(is_over) or self._is_last(episode))

    def _following(self, episode: Episode, new: list[Message], is_over: bool) -> EpisodeUpdate:
        """Return the update for new turns; none is read after the last answer."""
        before = [*episode.messages]
        episode.messages.extend(new)
        if is_over:
            return EpisodeUpdate(is_over=True)
        return self._tokens(lambda: self.turn_tokens.following(before, new, episode.tools))

    def _reward(self, episodes: list[Episode]) -> Updates:
        updates: Updates = {}
        for episode in episodes:
            episode.note_tools(self.turn_tokens.template.shows(episode.tools))
        ended = [episode for episode in episodes if episode.failure is None]
        if self.spec.rewards:
            for episode, value in self._called(ended, lambda e: e.environment.reward(e.messages)):
                updates[episode.key] = episode.reward(value)
        closing = [e for e in episodes if callable(getattr(e.environment, "close", None))]
        for _ in self._called(closing, lambda episode: episode.environment.close()):
            pass  # what goes wrong in closing changes no rollout
        return updates

    def _called(
        self, episodes: list[Episode], function: Callable[[Episode], Any]
    ) -> list[tuple[Episode, Any]]:
        """Call a function for each episode; return its value, or its exception, with each.

        Raises UserError if an environment cannot work at all on this machine.
        """
        calls = [partial(episode.timed, function) for episode in episodes]
        limits = self.choice.environments_at_once, self.choice.environment_seconds
        values = call_all(calls, *limits)
        for value in values:
            if isinstance(value, UserError):
                raise value
        return list(zip(episodes, values, strict=True))

    def _tokens(self, make: Callable[[], list[int]]) -> EpisodeUpdate:
        try:
            return EpisodeUpdate(tokens=make())
        except RecordError as error:
            return EpisodeUpdate(failure=str(error))
        except Exception as error:  # turns of an environment may hold anything
            return EpisodeUpdate(failure=reason_of("its turns cannot be rendered", error))

    def _text(self, episode: Episode) -> str:
        own = episode.tokens[len(episode.tokens) - episode.turns[-1] :]
        stop_ids = self.turn_tokens.tokenizer.stop_ids
        own = own[:-1] if own and own[-1] in stop_ids else own
        return self.turn_tokens.tokenizer.decode(own, skip_special=False)

    def _prompt_end(self, episode: Episode) -> str:
        """Return the end of the text that the model read before its newest answer."""
        before = episode.context[: -episode.turns[-1] or None][-PROMPT_END:]
        return self.turn_tokens.tokenizer.decode(before, skip_special=False)

    def _bounded(self, turns: list[Message]) -> list[Message]:
        longest = self.choice.environment_output
        return [
            {**turn, "content": turn["content"][:longest] + CUT}
            if isinstance(turn.get("content"), str) and len(turn["content"]) > longest
            else turn
            for turn in turns
        ]


def are_turns(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn
        for turn in value
    )


def unread_call(turn_tokens: TurnTokens, form: CallFormat) -> str:
    """Return a call as a template writes it, if `form` does not read it; else "".

    A template that shows no calls is read as Hermes'.
    """
    template = turn_tokens.template.for_record([TOOL])
    if template.forms.arguments is None:
        return ""
    ask, call = convert_turns([ASK, CALL], template.forms)
    try:
        before, after = template.prompt([ask], [TOOL]), template.finished([ask, call], [TOOL])
    except RecordError:
        return ""
    both = enumerate(zip(before, after, strict=False))
    common = before[: next((i for i, (one, other) in both if one != other), len(before))]
    text = after[len(common.rstrip("<|｜[")) :].strip()  # not a half of a mark
    for stop in turn_tokens.stop_texts:
        text = text.removesuffix(stop).strip()
    return "" if parse_answer(text, form, [TOOL]).calls else text
