"""Parts that files name: a suffix of token files, a chat template, an activation, a family.

A package offers them (pyproject.toml here), or a module of `--import` registers them.
"""

from dataclasses import replace

import numpy as np
import torch

from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.data.token_files.token_file import TokenFile

TEMPLATE = """{#- needs eos_token #}
{%- for message in messages %}
{{- message['role'] + ': ' + message['content'] + (eos_token if message['role'] == 'assistant') }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""


def open_tok(path, content, is_mapped):
    """Return NAME.tok, tokens of two bytes after a header of eight. content: the file's bytes."""
    return TokenFile("ours", content, is_mapped, np.dtype("<u2"), first=8)


def squared_relu(x):
    return torch.relu(x) ** 2


SQUARED = replace(
    FAMILIES["llama"],
    architecture="SquaredForCausalLM",
    defaults={"hidden_act": "squared_relu"},
)
