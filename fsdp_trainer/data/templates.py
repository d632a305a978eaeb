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
from fsdp_trainer.data.sources import RowError
from fsdp_trainer.data.tokenizer import TextTokenizer
from fsdp_trainer.errors import Problem, UserError

TODAY = datetime(
    2024, 7, 26
)  # the date that Llama 3's own template falls back to; data must not depend on the day

# The format of `plain` ends its prompt in a newline: after a space, the first word of the answer would be one token with it, and not learnt.
BUILT_IN = {
    file.stem: file.read_text(encoding="utf-8")
    for file in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}
CHATML = ("<|im_start|>", "<|im_end|>")
MARKERS = {
    "chatml": CHATML, "qwen3": CHATML, "phi4": (*CHATML, "<|im_sep|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
}  # fmt: skip
"""Texts that must each be one token."""
NAMED = {
    "plain": ("eos_token",), "olmo2": ("eos_token",), "phi3": ("eos_token",),
    "llama2": ("bos_token", "eos_token"), "mistral": ("bos_token", "eos_token"), "gemma": ("bos_token",), "llama3": ("bos_token",),
}  # fmt: skip
"""What the tokenizer must have a token for."""


class Template:
    """A compiled chat template with a tokenizer's special tokens.

    What it cannot render becomes text: a system turn goes before the first user turn, a tool's result into a user turn, reasoning and
    tool calls into the assistant's content.
    """

    def __init__(self, name: str, source: str, special: dict[str, str]):
        self.name, self.source = name, source
        self._special = special
        self._compiled = _environment().from_string(source)
        self._compiled.globals = dict(
            self._compiled.globals
        )  # a chain of dictionaries takes half of a rendering's time to go through
        ask, answer = (
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "answer"},
        )
        call = {"type": "function", "function": {"name": "probed_call", "arguments": {"x": 1}}}
        tool = {
            "type": "function",
            "function": {"name": "probed_tool", "description": "", "parameters": {}},
        }
        self._renders_system = self._shows(
            "probed_system", [{"role": "system", "content": "probed_system"}, ask, answer]
        )
        self._renders_calls = self._shows(
            "probed_call", [ask, {"role": "assistant", "content": "", "tool_calls": [call]}]
        )
        calling = {
            "role": "assistant",
            "content": "call",
            **({"tool_calls": [call]} if self._renders_calls else {}),
        }
        self._renders_results = self._shows(
            "probed_result", [ask, calling, {"role": "tool", "content": "probed_result"}, answer]
        )
        self._renders_tools = self._shows("probed_tool", [ask, answer], [tool])
        self._renders_reasoning = self._shows(
            "probed_thought", [ask, {**answer, "reasoning_content": "probed_thought"}]
        )
        self._keeps_thinking = self._shows(
            "probed_thought",
            [ask, {"role": "assistant", "content": "<think>probed_thought</think>answer"}],
        )
        self.closing: str = self._closing([ask, answer], ask)
        """What the template writes behind the last turn, but not between turns: Phi-3's ends in an eos_token."""

    def __reduce__(self) -> tuple:
        return Template, (
            self.name,
            self.source,
            self._special,
        )  # what is compiled goes to no other process

    def render(
        self,
        messages: list[Message],
        tools: list[dict] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of a conversation; RowError with the template's own words if it refuses."""
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as e:  # a template is a program: it may raise anything
            raise RowError(
                f"the chat template ({self.name}) cannot render this conversation: {e}"
            ) from None

    def ask(self, messages: list[Message]) -> str:
        """The conversation up to where the model is to answer; RowError as `render`."""
        return self.render(self.adapt(messages, None), add_generation_prompt=True)

    def adapt(
        self,
        messages: list[Message],
        tools: list[dict] | None,
        note: Callable[[str], Any] = lambda key: None,
    ) -> list[Message]:
        """The same conversation in turns that this template can render. note: is told what it could not, as a key of `findings.KINDS`."""
        if tools and not self._renders_tools:
            note("tools_not_shown")
        adapted: list[Message] = []
        for message in messages:
            if message.get("tool_calls") and not self._renders_calls:
                note("calls_as_text")
                message = {**message, "content": _call_text(message)}
                del message["tool_calls"]
            if (reasoning := message.get("reasoning_content")) and not self._renders_reasoning:
                note("reasoning_as_text" if self._keeps_thinking else "reasoning_left_out")
                message = {
                    **message,
                    "content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}",
                }
                del message["reasoning_content"]
            if message["role"] == "tool" and not self._renders_results:
                note("results_as_user")
                message = {**message, "role": "user"}
            if (
                adapted
                and adapted[-1]["role"] == "system"
                and message["role"] == "user"
                and not self._renders_system
            ):
                note("system_in_user")
                message = {
                    **message,
                    "content": adapted.pop()["content"] + "\n\n" + message["content"],
                }
            adapted.append(message)
        return adapted

    def _closing(self, messages: list[Message], next_message: Message) -> str:
        try:
            whole, longer = self.render(messages), self.render([*messages, next_message])
        except RowError:
            return ""
        goes_on = [
            end
            for end in self._special.values()
            if whole.endswith(end) and longer.startswith(whole.removesuffix(end))
        ]
        return "" if longer.startswith(whole) or not goes_on else goes_on[0]

    def _shows(self, text: str, messages: list[Message], tools: list[dict] | None = None) -> bool:
        try:
            return text in self.render(messages, tools)
        except RowError:
            return False


def load_template(name_or_path: str | None, tokenizer: TextTokenizer) -> Template:
    """A built-in template, a .jinja file, or (null) the tokenizer's own, else `plain`. UserError if it does not fit the tokenizer."""
    name = name_or_path or ("tokenizer's own" if tokenizer.chat_template else "plain")
    source = BUILT_IN.get(name) or (_read(name) if name_or_path else tokenizer.chat_template or "")
    if missing := [
        marker for marker in MARKERS.get(name, ()) if tokenizer.backend.token_to_id(marker) is None
    ]:
        pieces = len(tokenizer.encode(missing[0]))
        use = (
            "null  (the tokenizer's own)"
            if tokenizer.chat_template
            else "plain  (needs no special tokens)"
        )
        add = ",".join(f"'{marker}'" for marker in missing)
        why = (
            f"the tokenizer has no special token {' '.join(missing)}: it would be {pieces} pieces of text.\n"
            f'Use  data.template={use}  or add what is missing:  "tokenizer.add_tokens=[{add}]"'
        )
        raise _bad(name, why)
    if missing := [role for role in NAMED.get(name, ()) if role not in tokenizer.special]:
        raise _bad(
            name,
            f"the tokenizer has no {' and no '.join(missing)}, which frames its turns. Use a tokenizer that has one",
        )
    try:
        return Template(name, source, tokenizer.special)
    except jinja2.TemplateSyntaxError as e:
        raise _bad(name, f"line {e.lineno}: {e.message}") from None


def _read(path: str) -> str:
    if not Path(path).expanduser().is_file():
        raise _bad(
            path,
            f"there is no such file, and no template of this name; there is  {'  '.join(BUILT_IN)}",
        )
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, f"cannot be read: {error}") from None


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
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    strftime_now: Callable[[str], str] = TODAY.strftime
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _bad(name: str, why: str) -> UserError:
    return UserError("the chat template cannot be used", [Problem(f"data.template={name}", why)])
