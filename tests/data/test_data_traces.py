"""Rendering by traces: the same texts as from the template itself, for any template and texts."""

from functools import partial

import jinja2
import pytest
import yaml
from chat_templates import LONG_STYLES, OPAQUE, UNUSUAL, looped
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import SPECIAL, turn

from fsdp_trainer.data.templates.chat_template import BUILT_IN, Template
from fsdp_trainer.data.templates.template_language import (
    DEFAULT_DATE,
    compile_template,
    environment,
)

FOLLOWED = {name: BUILT_IN[name] for name in ("mistral", "qwen3")} | LONG_STYLES | looped(OPAQUE)
TEMPLATES = FOLLOWED | looped(UNUSUAL)
TEXTS = st.sampled_from(
    yaml.safe_load(r"""
["", " ", "a", "b", "abc", " a\n", "\n\nb", "x y z", "None", "user", "</s>", "</think>",
 "<think>\nwhy\n</think>\n\nso", "<think>\n\n</think>\n\nso", "why</think>so</think>end",
 "<result>1</result>", "<result>", "{{ 1 }}", "a|b", "a,b,c", "%s", "{}", "é中\u2028", "1", "12",
 "ABC", "\u00a0a", "\u001c", "'", "\"", "\\n"]
""")
)
ROLES = yaml.safe_load("""
- [user, assistant]
- [system, user, assistant]
- [user, assistant, user, assistant]
- [user, assistant, tool, assistant]
- [user, user]
""")


@st.composite
def conversations(draw):
    """Many of one shape, so that they are rendered by traces."""
    roles = draw(st.sampled_from(ROLES))
    more = draw(st.sampled_from(["", "reasoning_content", "name", "parts"]))

    def message(role):
        content = draw(TEXTS)
        if more == "parts" and role == "user":
            content = [{"type": "text", "text": text} for text in (content, draw(TEXTS))]
        has_more = more == "name" or (more == "reasoning_content" and role == "assistant")
        return turn(role, content, weight=0.5, **({more: draw(TEXTS)} if has_more else {}))

    return [[message(role) for role in roles] for _ in range(draw(st.integers(4, 6)))]


def text_or_error(render):
    try:
        return render()
    except Exception as e:
        before = "the chat template (of a test) cannot render this conversation: "
        return "refused", str(e).removeprefix(before)


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_the_template_itself(name):
    itself = compile_template(TEMPLATES[name], environment(DEFAULT_DATE))

    @settings(max_examples=2)
    @given(conversations(), st.booleans())
    def check(drawn, is_prompt):
        template = Template("of a test", TEMPLATES[name], SPECIAL)
        values = SPECIAL | {"tools": None, "documents": None, "add_generation_prompt": is_prompt}
        for messages in drawn:
            expected = text_or_error(partial(itself.render, messages=messages, **values))
            for _ in range(2):
                text = text_or_error(partial(template.render, messages, None, is_prompt))
                assert text == expected
                assert type(text) is type(expected)

    check()


@pytest.fixture
def renderings(monkeypatch):
    """Return a list that gets an entry for each rendering by Jinja."""
    noted = []
    render = jinja2.Template.render
    monkeypatch.setattr(
        jinja2.Template, "render", lambda *args, **kw: noted.append(1) or render(*args, **kw)
    )
    return noted


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_template_is_not_rendered_again_for_conversations_that_meet_the_same_conditions(
    name, renderings
):
    template = Template("of a test", TEMPLATES[name], SPECIAL)
    for number in range(20):
        if number == 10:
            renderings.clear()
        texts = f"question {number}", f"answer {number}"
        rendered = template.render([turn("user", texts[0]), turn("assistant", texts[1])])
        assert all(text in rendered for text in texts)
    assert not renderings


def test_a_template_that_cannot_be_followed_is_soon_rendered_as_it_is(renderings):
    template = Template("of a test", TEMPLATES["length"], {})
    for number in range(200):
        if number == 100:
            renderings.clear()
        assert template.render([turn("user", "x" * number)]) == str(number)
    assert len(renderings) == 100  # once for each: nothing is traced any more
