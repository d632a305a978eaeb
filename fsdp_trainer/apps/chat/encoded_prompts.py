"""The tokens of the prompts of a request."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from fsdp_trainer.apps.chat.requests import BadRequest, ChatRequest, TextRequest
from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.data.templates.chat_template import Template
from fsdp_trainer.data.templates.template_forms import INLINE
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.errors import UserError
from fsdp_trainer.generation.prompt_media import PromptMedia

CHARACTERS_PER_TOKEN = 100
"""A prompt with more characters per token of the context is refused without being encoded, which
would take 20 s for 16 MiB. Text has 3 to 5."""
MOST_TEMPLATES = 8
"""Templates with a client's variables that are kept: compiling one takes about 0.1 s."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt. text: as it is repeated in an answer. goes_on: the answer continues its text."""

    tokens: list[int]
    text: str = ""
    media: PromptMedia | None = None
    goes_on: bool = False


class PromptEncoder:
    """Encodes the prompts of requests, all in one thread."""

    def __init__(self, speaker: Speaker):
        self.speaker = speaker
        self._templates: OrderedDict[str, Template] = OrderedDict()

    @property
    def context(self) -> int:
        return self.speaker.model.config.max_position_embeddings

    @cached_property
    def published(self) -> Tokenizer:
        return self.speaker.tokenizer.as_published()

    def encode(self, request: ChatRequest | TextRequest) -> list[EncodedPrompt]:
        """Return the prompts of a request. Raises BadRequest."""
        if isinstance(request, ChatRequest):
            return [self.conversation(request)]
        return [self.prompt(prompt, request) for prompt in request.prompts]

    def conversation(self, request: ChatRequest) -> EncodedPrompt:
        """Return a conversation up to where its answer begins. Raises BadRequest."""
        try:
            template = self.template(request.template_args)
            require_forms(request.messages, template)
            shown = self.speaker.ask(request.messages, text_of(template, request))
            self.require_room(shown.text, "messages")
            tokens = self.speaker.encode(shown.text)
        except UserError as error:
            reason = error.problems[0].reason
            raise BadRequest(f"{error.title}: {reason}", "messages") from None
        return EncodedPrompt(tokens, media=shown.media, goes_on=request.goes_on)

    def template(self, args: dict[str, Any] | None) -> Template:
        """Return the chat template with further variables. Raises BadRequest."""
        if args is None:
            return self.speaker.template
        key = json.dumps(args, sort_keys=True)
        if key not in self._templates:
            try:
                self._templates[key] = load_template(None, self.speaker.tokenizer, args)
            except UserError as error:
                problem = error.problems[0]
                shown = problem.what.removeprefix("data.template_args=")
                raise BadRequest(f"{shown}: {problem.reason}", "chat_template_kwargs") from None
            while len(self._templates) > MOST_TEMPLATES:
                self._templates.popitem(last=False)
        return self._templates[key]

    def prompt(self, prompt: str | list[int], request: TextRequest) -> EncodedPrompt:
        """Return a text or its tokens. Raises BadRequest."""
        if isinstance(prompt, str):
            self.require_room(prompt, "prompt")
            encoder = self.published if request.with_specials else self.speaker.tokenizer.backend
            tokens = encoder.encode(prompt, add_special_tokens=request.with_specials).ids
            text = prompt
        else:
            tokens = prompt
            text = self.speaker.tokenizer.decode(tokens, skip_special=False) if request.echo else ""
        if not tokens:
            raise BadRequest("'prompt' has no tokens", "prompt")
        # only one that is repeated may fill the context
        if len(tokens) >= self.context + request.echo:
            reason = f"'prompt' has {len(tokens):,} tokens, the model's context {self.context:,}"
            raise BadRequest(reason, "prompt", code="context_length_exceeded")
        return EncodedPrompt(tokens, text, goes_on=True)

    def require_room(self, text: str, key: str) -> None:
        """Raise BadRequest for a text that is far too long."""
        if len(text) > CHARACTERS_PER_TOKEN * self.context:
            reason = f"the prompt is too long: has {len(text):,} characters"
            reason = f"{reason}, the model's context {self.context:,} tokens"
            raise BadRequest(reason, key, code="context_length_exceeded")


def text_of(template: Template, request: ChatRequest) -> Any:
    if request.goes_on:
        return template.continued
    if request.asks:
        return template.ask
    return lambda turns, mark: template.render(template.adapt(turns, None, media_mark=mark))


def require_forms(messages: list[dict[str, Any]], template: Template) -> None:
    """Raise BadRequest for a part of a conversation that the template does not show."""
    forms = template.for_record(None).forms
    for place, turn in enumerate(messages):
        # without turns of the system a template is shown its text before a question
        asks_next = [after["role"] for after in messages[place + 1 : place + 2]] == ["user"]
        hidden = {
            "role system": turn["role"] == "system" and forms.system == "user" and not asks_next,
            "role tool": turn["role"] == "tool" and not forms.results,
            "tool_calls": "tool_calls" in turn and forms.arguments is None,
            "reasoning_content": "reasoning_content" in turn and forms.reasoning in (None, INLINE),
            "name": "name" in turn and turn["role"] != "tool" and "name" not in template.source,
        }
        for name in (name for name, is_hidden in hidden.items() if is_hidden):
            reason = f"messages[{place}]: the chat template does not show {name!r}: leave it out"
            raise BadRequest(reason, "messages")
