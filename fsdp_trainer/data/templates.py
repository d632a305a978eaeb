"""Chat templates: Jinja, set up as `transformers` sets it up, so that a text looks the same in training as at inference."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fsdp_trainer.data.conversations import Message
from fsdp_trainer.data.demo import CHATML
from fsdp_trainer.data.sources import RowError
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError

TODAY = datetime(2024, 7, 26)  # the date that Llama 3's own template falls back to; data must not depend on the day

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}
{{- message['content'] + '<|eot_id|>' }}
{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

# The prompt ends in a newline: after a space, the first word of the answer would be one token with it, and not be learnt.
PLAIN = """{{- bos_token }}
{%- for message in messages %}
{{- ('' if loop.first else '\\n\\n') + message['role'] | capitalize + ':\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}
{{- message['content'] + eos_token }}
{%- endgeneration %}
{%- else %}
{{- message['content'] }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '\\n\\nAssistant:\\n' }}
{%- endif %}"""

BUILT_IN = {"chatml": CHATML, "llama3": LLAMA3, "plain": PLAIN}
MARKERS = {"chatml": ("<|im_start|>", "<|im_end|>"), "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "plain": ()}


class Template:
    """A compiled chat template with a tokenizer's special tokens.

    What it cannot render becomes text: a system turn goes before the first user turn, a tool's result into a user turn, a tool call
    into the assistant's content. `adapted` says which of that happened.
    """

    def __init__(self, name: str, source: str, special: dict[str, str]):
        self.name, self.source = name, source
        self._special = special
        self._compiled = _environment().from_string(source)
        ask, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
        call = {"type": "function", "function": {"name": "probed_call", "arguments": {"x": 1}}}
        tool = {"type": "function", "function": {"name": "probed_tool", "description": "", "parameters": {}}}
        self._renders_system = self._shows("probed_system", [{"role": "system", "content": "probed_system"}, ask, answer])
        self._renders_calls = self._shows("probed_call", [ask, {"role": "assistant", "content": "", "tool_calls": [call]}])
        calling = {"role": "assistant", "content": "call", **({"tool_calls": [call]} if self._renders_calls else {})}
        self._renders_results = self._shows("probed_result", [ask, calling, {"role": "tool", "content": "probed_result"}, answer])
        self._renders_tools = self._shows("probed_tool", [ask, answer], [tool])
        self.adapted: set[str] = set()
        """What the template could not render so far, for the report."""

    def render(self, messages: list[Message], tools: list[dict] | None = None, add_generation_prompt: bool = False) -> str:
        """The text of a conversation; RowError with the template's own words if it refuses."""
        try:
            return self._compiled.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **self._special
            )
        except Exception as e:  # a template is a program: it may raise anything
            raise RowError(f"the chat template ({self.name}) cannot render this conversation: {e}") from None

    def ask(self, messages: list[Message]) -> str:
        """The conversation up to where the model is to answer; RowError as `render`."""
        return self.render(self.adapt(messages, None), add_generation_prompt=True)

    def adapt(self, messages: list[Message], tools: list[dict] | None) -> list[Message]:
        """The same conversation in turns that this template can render."""
        if tools and not self._renders_tools:
            self.adapted.add("the template shows no tools: the model does not see their descriptions")
        adapted: list[Message] = []
        for message in messages:
            if message.get("tool_calls") and not self._renders_calls:
                self.adapted.add("the template knows no tool calls: they are written as JSON text")
                message = {**message, "content": _call_text(message)}
                del message["tool_calls"]
            if message["role"] == "tool" and not self._renders_results:
                self.adapted.add("the template knows no tool results: they are user turns")
                message = {**message, "role": "user"}
            if adapted and adapted[-1]["role"] == "system" and message["role"] == "user" and not self._renders_system:
                self.adapted.add("the template knows no system turns: they are put before the user's")
                message = {**message, "content": adapted.pop()["content"] + "\n\n" + message["content"]}
            adapted.append(message)
        return adapted

    def _shows(self, text: str, messages: list[Message], tools: list[dict] | None = None) -> bool:
        try:
            return text in self.render(messages, tools)
        except RowError:
            return False


def load_template(name_or_path: str | None, tokenizer: TextTokenizer) -> Template:
    """A built-in template, a .jinja file, or (null) the tokenizer's own, else `plain`. UserError if it does not fit the tokenizer."""
    name = name_or_path or ("tokenizer's own" if tokenizer.chat_template else "plain")
    source = BUILT_IN.get(name) or (_read(name) if name_or_path else tokenizer.chat_template or "")
    missing = [marker for marker in MARKERS.get(name, ()) if marker not in tokenizer.special_tokens]
    if missing:
        pieces = len(tokenizer.encode(missing[0]))
        use = "null  (the tokenizer's own)" if tokenizer.chat_template else "plain  (needs no special tokens)"
        why = f"the tokenizer has no special token {' '.join(missing)}: it would be {pieces} pieces of text.\nUse  data.template={use}"
        raise _bad(name, why)
    if name == "plain" and not tokenizer.eos_token:
        raise _bad(name, "the tokenizer has no eos_token to end a turn with. Use a tokenizer that has one")
    try:
        return Template(name, source, tokenizer.special)
    except jinja2.TemplateSyntaxError as e:
        raise _bad(name, f"line {e.lineno}: {e.message}") from None


def _read(path: str) -> str:
    if not Path(path).expanduser().is_file():
        raise _bad(path, f"there is no such file, and no template of this name; there is  {'  '.join(BUILT_IN)}")
    return Path(path).expanduser().read_text(encoding="utf-8")


def _call_text(message: Message) -> str:
    if "text" in message:
        return message["text"]
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message["tool_calls"]]
    return "\n".join([message["content"]] * bool(message["content"]) + calls)


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` as plain text: the mask is found by rendering, with and without."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """The block's statements, as if the tag were not there."""
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    strftime_now: Callable[[str], str] = TODAY.strftime
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _bad(name: str, why: str) -> UserError:
    return UserError("the chat template cannot be used", [Problem(f"data.template={name}", why)])
