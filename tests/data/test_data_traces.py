"""Rendering by traces: the same texts as from the template itself, for any template and texts."""

from functools import cache

import jinja2
import pytest
from chat_templates import LONG_STYLES, OPAQUE, UNUSUAL
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.templates.chat_template import BUILT_IN, Template
from fsdp_trainer.data.templates.template_language import (
    DEFAULT_DATE,
    compile_template,
    environment,
)

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {**BUILT_IN, **LONG_STYLES, **OPAQUE, **UNUSUAL}
TEXTS = st.sampled_from(
    [
        "", " ", "a", "b", "abc", " a\n", "\n\nb", "x y z", "None", "user", "</s>", "</think>",
        "<think>\nwhy\n</think>\n\nso", "<think>\n\n</think>\n\nso", "why</think>so</think>end",
        "<result>1</result>", "<result>", "{{ 1 }}", "a|b", "a,b,c", "%s", "{}", "é中\u2028", "1",
        "12", "ABC", "\u00a0a", "\x1c", "'", '"', "\\n",
    ]
)  # fmt: skip
ROLES = (
    ("user", "assistant"),
    ("system", "user", "assistant"),
    ("user", "assistant", "user", "assistant"),
    ("user", "assistant", "tool", "assistant"),
    ("user", "user"),
)


@st.composite
def conversations(draw):
    """Many of one shape, so that they are rendered by traces."""
    roles = draw(st.sampled_from(ROLES))
    more = draw(st.sampled_from([(), ("reasoning_content",), ("name", "weight"), ("parts",)]))
    texts = []
    for _ in range(draw(st.integers(4, 6))):
        messages = []
        for role in roles:
            message = {"role": role, "content": draw(TEXTS)}
            if "name" in more:
                message |= {"name": draw(TEXTS), "weight": 0.5}
            if "reasoning_content" in more and role == "assistant":
                message["reasoning_content"] = draw(TEXTS)
            if "parts" in more and role == "user":
                message["content"] = [{"type": "text", "text": draw(TEXTS)} for _ in range(2)]
            messages.append(message)
        texts.append(messages)
    return texts


def text_or_error(render):
    try:
        return render()
    except (
        RecordError,
        jinja2.TemplateError,
        TypeError,
        ValueError,
        KeyError,
        AttributeError,
    ) as e:
        return "refused", str(e).removeprefix(
            "the chat template (of a test) cannot render this conversation: "
        )


@cache
def compiled(name):
    return compile_template(TEMPLATES[name], environment(DEFAULT_DATE))


@pytest.mark.slow
@pytest.mark.grid(40)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=5, deadline=None)
@given(conversations(), st.booleans())
def test_texts_are_those_of_the_template_itself(name, template_given, is_prompt):
    template = Template("of a test", TEMPLATES[name], SPECIAL)
    itself = compiled(name)
    for messages in template_given:
        expected = text_or_error(
            lambda messages=messages: itself.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=is_prompt,
                **SPECIAL,
            )
        )
        for _ in range(2):
            text = text_or_error(
                lambda messages=messages: template.render(messages, None, is_prompt)
            )
            assert text == expected
            assert type(text) is type(expected)


@pytest.mark.parametrize("name", {**LONG_STYLES, **OPAQUE} | {"qwen3": BUILT_IN["qwen3"]})
def test_a_template_is_not_rendered_again_for_conversations_that_meet_the_same_conditions(
    name, monkeypatch
):
    template = Template("of a test", TEMPLATES[name], SPECIAL)
    rendered = []
    render = jinja2.Template.render
    monkeypatch.setattr(
        jinja2.Template, "render", lambda *args, **kw: rendered.append(1) or render(*args, **kw)
    )
    for number in range(20):
        if number == 10:
            rendered.clear()
        messages = [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
        text = template.render(messages)
        assert f"question {number}" in text
        assert f"answer {number}" in text
    assert not rendered


def test_a_template_that_cannot_be_followed_is_soon_rendered_as_it_is(monkeypatch):
    template = Template(
        "of a test", "{% for m in messages %}{{ m.content | length }}{% endfor %}", {}
    )
    tried = []
    render = jinja2.Template.render
    for number in range(200):
        if number == 100:
            monkeypatch.setattr(
                jinja2.Template,
                "render",
                lambda *args, **kw: tried.append(1) or render(*args, **kw),
            )
        assert template.render([{"role": "user", "content": "x" * number}]) == str(number)
    assert len(tried) == 100  # once for each: nothing is traced any more
