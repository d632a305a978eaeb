"""Chat templates in the styles of well-known families, and with constructs that no family uses."""

from folders import REPO

# ruff: noqa: E501 - lines are as long as in these families' templates
LONG_STYLES = {
    "long": (REPO / "benchmarks" / "long_template.jinja").read_text(),
    "as Qwen 3": """
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not(message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "as Llama 3.1": """
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" }}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "as Mistral": """
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role == "user" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}{{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}{{- '[TOOL_RESULTS] {"content": ' + message.content|string + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}""",
    "as DeepSeek R1": """
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = ns.system_prompt ~ message['content'] %}{%- endif %}{%- endfor %}
{{- bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<|User|>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- if ns.is_tool %}{{ '<|tool_end|>' + message['content'] + eos_token }}{%- set ns.is_tool = false %}
        {%- else %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + content + eos_token }}{%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{ '<|tool|>' + message['content'] }}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|><think>\\n' }}{% endif %}""",
    "as GLM and SmolLM": """
{%- macro visible(content) -%}
    {%- if content is string -%}{{ content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{ item.text }}{%- elif item is string -%}{{ item }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ content }}{%- endif -%}
{%- endmacro -%}
[gMASK]<sop>
{%- for m in messages -%}
    {%- if m.role == 'user' -%}<|user|>\n{{ visible(m.content) }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible(m.content).endswith("/nothink")) else '' -}}
    {%- elif m.role == 'assistant' -%}<|assistant|>
        {%- set reasoning = '' %}{%- set content = visible(m.content) %}
        {%- if m.reasoning_content is string and 0 != 1 %}{%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
        {%- if reasoning -%}{{ '\n<think>' + reasoning.strip() + '</think>' }}{%- else -%}{{ '\n<think></think>' }}{%- endif -%}
        {%- if content.strip() -%}{{ '\n' + content.strip() }}{%- endif -%}
    {%- elif m.role == 'system' -%}<|system|>\n{{ visible(m.content) }}
    {%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt else '' -}}""",
}
"""Templates that tracing supports, in the style of published ones."""

OPAQUE = {
    "joined": "{{ messages | map(attribute='content') | join('|') }}",
    "chosen": "{{ (messages | selectattr('content') | list | first).content }}"
    "{{ messages[1].content }}",
    "sum in a namespace": "{% set ns = namespace(t='') %}LOOP{% set ns.t = ns.t + m.content + '\n' %}"
    "END{{ ns.t.strip() }}",
    "macro": "{% macro turn(role, text='') %}[{{ role }}]{{ text }}{{ caller() }}{% endmacro %}"
    "LOOP{% call turn(m.role, text=m.content) %}!{% endcall %}END",
    "tilde": "LOOP{{ '<' ~ m.role ~ '>' ~ m.content ~ 1 }}END",
    "set block": "LOOP{% set t %}<{{ m.content }}>{% endset %}{{ t + t }}END",
    "filter block": "LOOP{% filter trim %} {{ m.content }} {% endfilter %}END",
    "compared": "LOOP{% if m.content == 'a' %}A{% else %}{{ m.content }}{% endif %}END",
    "one of": "LOOP{% if m.content in ['a', 'b'] %}!{% endif %}{{ m.content }}END",
    "cut": "LOOP{{ m.content[:2] }}|{{ m.content[1:] }}|{{ m.content[::-1] }}|{{ m.content }}END",
    "or": "LOOP{{ m.name or m.content or 'none' }}END",
    "default": "LOOP{{ m.content | default('nothing', true) }}{{ m.other | default('-') }}END",
    "changed": "LOOP{{ m.content.replace('a', 'A').removeprefix('x') }} {{ m.content }}END",
    "items": "LOOP{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}END",
    "get": "LOOP{{ m.get('content') }}{{ m.get('other', 'x') }}END",
    "parted": "LOOP{% set p = m.content.partition('|') %}{{ p[0] }}/{{ p[2] }}{{ m.content }}END",
}
"""Templates that tracing supports, with rare constructs. See `looped`."""

UNUSUAL = {
    "length": "LOOP{{ m.content | length }}END",
    "first letter": "LOOP{{ m.content[0] }}END",
    "in a text": "LOOP{% if m.content in 'abc user' %}yes{% else %}no{% endif %}END",
    "chain": "LOOP{% if 'a' in m.content in ['a', 'abc'] %}yes{% endif %}END",
    "is in": "LOOP{% if m.content is in 'abc' %}yes{% endif %}END",
    "ends a text": "LOOP{% if 'xab'.endswith(m.content) %}yes{% endif %}END",
    "a key": "LOOP{{ {'a': 1, 'b': 2}[m.content] }}|{{ {'a': 1}.get(m.content, 0) }}END",
    "keys made": "LOOP{{ {m.content: 1} }}END",
    "printed": "LOOP{{ m }}{{ [m.content] }}END",
    "json": "LOOP{{ m.content | tojson }}{{ m | tojson }}END",
    "percent": "LOOP{{ '%s!' % m.content }}{{ m.content % 1 if '%' in m.content else '' }}END",
    "format": "LOOP{{ '{}!'.format(m.content) }}{{ '%s' | format(m.content) }}END",
    "twins": "{{ messages[0].content == messages[1].content }}"
    "{{ messages[0].content in messages[1].content }}",
    "less": "LOOP{{ m.content < 'b' }}{{ 'b' >= m.content }}END",
    "loop.changed": "LOOP{{ loop.changed(m.content) }}END",
    "join by a text": "LOOP{{ ['a', 'b'] | join(m.content) }}{{ m.content.join(['a', 'b']) }}END",
    "unknown attribute": "LOOP{{ m.content.parts }}{{ m.content.trace }}{{ m.content.plain }}END",
    "escaped": "LOOP{{ m.content | e }}{{ (m.content | safe) + '<' }}END",
    "numbers": "LOOP{{ m.content | int }}{{ m.content.find('a') }}{{ m.content.count('a') }}END",
    "grouped": "{% for g in messages | groupby('content') %}{{ g.grouper }}{% endfor %}",
    "mapped": "{{ messages | map(attribute='content') | map('upper') | list | length }}"
    "{{ messages | map(attribute='content') | map('length') | sum }}",
    "date by a text": "LOOP{{ strftime_now(m.content + '%Y') }}END",
    "dictionary": "LOOP{{ dict(a=m.content).a }}{{ dict(a=m.content) }}END",
    "cycled": "LOOP{{ loop.cycle(m.content, 'x') }}END",
    "index": "{{ (messages | map(attribute='content') | list).index('a') }}",
    "same": "LOOP{{ m.content is sameas m.content }}{{ m.content is eq m.role }}END",
    "autoescaped": "{% autoescape true %}LOOP{{ m.content }}END{% endautoescape %}",
    "own class": "LOOP{{ m.content.__class__ }}{{ m.content.__len__ }}END",
    "in a list of lists": "LOOP{{ [m.content] in [['a'], ['b']] }}{{ m.content in ('a',) }}END",
    "undefined": "LOOP{{ m.nothing.more }}{{ m.content }}END",
    "adds a number": "LOOP{{ m.content + 1 }}END",
    "includes": "LOOP{% include m.content ignore missing %}{{ m.content }}END",
}
"""Templates with operations on texts that tracing does not support, or that are far-fetched."""


def looped(templates):
    """Return templates with LOOP and END as a loop over all turns m."""
    return {
        name: text.replace("LOOP", "{% for m in messages %}").replace("END", "{% endfor %}")
        for name, text in templates.items()
    }
