"""Random chat templates in the shapes of published ones; the text that is learnt is marked."""

from folders import table

PARTS = table("strangers/template_parts.yaml")

HEADERS = PARTS["headers"]
ENDS = PARTS["ends"]
CALLS = PARTS["calls"]
OPENINGS = PARTS["openings"]
AFTER = PARTS["after"]
DEFAULT = "You are a helpful assistant who was made for tests."


def random_template(chance):
    """Return a template. Its `{% generation %}` holds what an answer's turn should teach."""
    pick = chance.choice
    header, end, opening = pick(HEADERS), pick(ENDS), pick(OPENINGS)
    names = {"user": pick(("user", "human", "question")), "assistant": pick(("assistant", "model"))}

    def header_of(role):
        return header.replace("ROLE", names.get(role, role))

    always = pick(AFTER) * bool(header)
    for role in ("assistant", "system"):
        always = always.replace(f"HEADER_OF_{role}", header_of(role))
    is_header = always.startswith(header_of("assistant")) and bool(header)
    tools = "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    shows_tools = "{% if tools %}" + header_of("system") + tools + end + "{% endif %}"
    default = header_of("system") + DEFAULT + end
    first = {
        "": "",
        "tools": shows_tools,
        "default": "{% if messages[0].role != 'system' %}" + default + "{% endif %}" + shows_tools,
        "if any": "{% if messages %}" + default + shows_tools + "{% endif %}",
    }[pick(("", "tools", "default", "if any"))]
    if chance.random() < 0.15:
        first += (
            "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
            "{{ raise_exception('no question') }}{% endif %}"
        )
    reasoning = pick(
        (
            "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
            "{% else %}OPENING{% endif %}",
            "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>"
            "{% else %}OPENING{% endif %}",
            "{% if m.thinking is defined %}[THINK]{{ m.thinking }}[/THINK]{% endif %}OPENING",
            "OPENING",
        )
    ).replace("OPENING", opening)
    calls = "{% for call in m.tool_calls or [] %}" + pick(CALLS) + "{% endfor %}"
    calls = pick((calls, calls, ""))
    content = pick(("{{ m.content }}", "{{ m.content }}", "{{ m.content | trim }}"))
    answer = (
        f"{header_of('assistant')}{{% generation %}}{reasoning}{content}{calls}{end.rstrip()}"
        "{% endgeneration %}" + end[len(end.rstrip()) :]
    )
    result = pick((header_of("tool"), header_of("user") + "<tool_response>")) + content + end
    system = pick((header_of("system") + content + end,) * 3 + ("",))
    other = header_of("user") + content + end
    prompt = header_of("assistant") + pick(("", "", "", "<think>\n"))
    turns = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + "{% elif m.role == "
        "'tool' %}" + result + "{% elif m.role == 'system' %}" + system + "{% else %}" + other
    )
    last = "" if is_header else "{% if add_generation_prompt %}" + prompt + "{% endif %}"
    if always and not is_header and chance.random() < 0.5:
        always = "{% if not add_generation_prompt %}" + always + "{% endif %}"
    bos = pick(("{{ bos_token }}", "", "<|begin|>"))
    return bos + first + turns + "{% endif %}{% endfor %}" + always + last + "{# #}"
