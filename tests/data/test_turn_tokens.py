"""Turns of an environment as tokens: those of the whole conversation, and nothing is made again."""

import pytest
from texts import function, turn

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template
from fsdp_trainer.data.tokens.turn_tokens import TurnTokens

MARKS = [
    *("<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|call|>", "<|end|>"),
]
CALL = function("calculator", arguments={"expression": "1+1"}) | {"id": "call00000"}
TOOL = function("calculator", description="", parameters={})
ASK, CALLING = turn("user", "1+1?"), turn("assistant", "", tool_calls=[CALL])
RESULT = turn("tool", "2", tool_call_id="call00000", name="calculator")
# ruff: noqa: E501 - lines are as long as in these families' templates
LLAMA = """{{ '<s>' }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>

{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
MISTRAL = """{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}[TOOL_RESULTS] {"content": "{{ m.content }}", "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"""
GPT_OSS = """{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>functions.calculator to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>{% elif m.tool_calls %}<|start_header_id|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start_header_id|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant{% endif %}"""
TEMPLATES = {
    "chatml": None,
    "qwen3": None,
    "llama 3": LLAMA,
    "mistral": MISTRAL,
    "gpt-oss": GPT_OSS,
}
STOPS = {"llama 3": "<|eot_id|>", "mistral": "</s>", "gpt-oss": "<|call|>"}


@pytest.fixture(params=TEMPLATES)
def turns(request, tmp_path):
    """Return TurnTokens of a template, and the stop token after a call."""
    name, source = request.param, TEMPLATES[request.param]
    tokenizer = load_tokenizer("demo:bytes", MARKS)
    stop = STOPS.get(name, "<|im_end|>")
    ids = [tokenizer.backend.token_to_id(text) for text in (stop, "<|end|>")]
    tokenizer.stop_ids |= set(ids)
    file = tmp_path / "template.jinja"
    file.write_text(source or "")
    template = load_template(str(file) if source else name, tokenizer)
    return TurnTokens(template, tokenizer), ids[0]


def whole(turns, messages, tools):
    """Return the tokens of a conversation that is rendered at once."""
    adapted = turns.template.adapt(messages, tools)
    return turns.tokenizer.encode(turns.template.render(adapted, tools, True))


def test_turns_that_follow_are_the_tokens_of_the_whole_conversation(turns):
    """Results may follow one call or two, or a user an answer in words."""
    turns, stop = turns
    second = CALL | {"id": "call00001"}
    results = [RESULT, RESULT | {"content": "4", "tool_call_id": "call00001"}]
    for answer, following, tools in (
        (CALLING, [RESULT], [TOOL]),
        (CALLING | {"tool_calls": [CALL, second]}, results, [TOOL]),
        (turn("assistant", "2"), [turn("user", "sure?")], None),
    ):
        if len(following) == 2 and stop == turns.tokenizer.backend.token_to_id("<|call|>"):
            continue  # GPT-OSS makes one call in a message
        prompt, after = turns.prompt([ASK], tools), turns.following([ASK, answer], following, tools)
        every = whole(turns, [ASK, answer, *following], tools)
        assert every[: len(prompt)] == prompt
        assert every[len(every) - len(after) :] == after
        written = every[len(prompt) : len(every) - len(after)]
        assert written[-1] in ([stop] if tools else turns.tokenizer.stop_ids)
        assert ("1+1" if tools else "2") in turns.tokenizer.decode(written, skip_special=False)


def test_what_an_environment_writes_has_no_special_tokens(turns):
    turns, _ = turns
    evil = "".join(turns.tokenizer.special_tokens) + "2"
    special = set(turns.tokenizer.special_tokens.values())
    for produced in (
        lambda text: turns.following([ASK, CALLING], [RESULT | {"content": text}], [TOOL]),
        lambda text: turns.prompt([turn("user", text)], None),
    ):
        plain, tokens = produced("2"), produced(evil)
        assert [t for t in tokens if t in special] == [t for t in plain if t in special]
        assert evil in turns.tokenizer.decode(tokens, skip_special=False)


def test_turns_that_a_template_cannot_show_are_refused(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}")
    tokenizer = load_tokenizer("demo:bytes")
    turns = TurnTokens(load_template(str(file), tokenizer), tokenizer)
    with pytest.raises(RecordError, match="cannot show turns of tool"):
        turns.following([ASK, CALLING], [RESULT], [TOOL])
