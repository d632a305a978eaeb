"""The version of the tokens: a change of code that changes the tokens of a row raises it, and every
other change leaves the caches as they are.

`WRITE=1 pytest tests/data/test_data_version.py` stores the digests of a version that was raised.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
from texts import BYTES, SPECIAL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from world import read_json, write_json, write_lines

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.files.built_in_templates import TEMPLATES
from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.store.fingerprint import TOKENS_VERSION
from fsdp_trainer.data.templates.chat_template import BUILT_IN
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.data.tokens.tokenizer_template import load_template

FILE = Path(__file__).with_name("tokens_of_a_version.json")
STORED = read_json(FILE)
"""The rows, the digests of their tokens in each case, and merges of a tokenizer."""
ROWS = STORED["rows"]
SEQ_LEN = 192
# as the templates that show the last turn in another way than those before it
REWRITING = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{{- m.content.split('</think>')[-1].strip() + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# name: (rows, tokenizer, template, options)
CASES = {
    **{f"{rows} by bytes": (rows, "bytes", None, {}) for rows in ROWS},
    **{f"chats as {name}": ("chats", "bpe", name, {}) for name in BUILT_IN},
    **STORED["cases"],
}


MARKED = ("chatml", "phi4", "gemma", "llama3", "phi3")
"""Templates whose markers the stored digests have, in this order."""


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """The bytes' own tokenizer, and a BPE of a few merges beside the families' markers."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [*map(tuple, STORED["merges"])]
    words = [*letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    markers = dict.fromkeys(marker for name in MARKED for marker in TEMPLATES[name].markers)
    special = [*SPECIAL.values(), *markers]
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    folder = tmp_path_factory.mktemp("bpe")
    backend.save(f"{folder}/tokenizer.json")
    write_json(folder / "tokenizer_config.json", SPECIAL)
    return {"bytes": BYTES, "bpe": load_tokenizer(folder)}


def tokens_digest(folder, tokenizers, case):
    """Return a digest of all tokens and weights, in their order and with the samples' limits."""
    rows, name, template, options = CASES[case]
    folder.mkdir()
    write_lines(folder / "rows.jsonl", ROWS[rows])
    if template == "REWRITING":
        template = f"{folder}/template.jinja"
        Path(template).write_text(REWRITING)
    tokenizer = tokenizers[name]
    data = Data(path=f"{folder}/rows.jsonl", max_lost=1.0, **options)
    batch = Batch(seq_len=SEQ_LEN)
    prepared = prepare(data, batch, tokenizer, load_template(template, tokenizer), folder / "c")
    digest = hashlib.blake2b(digest_size=8)
    for store in [*prepared.train, *filter(None, [prepared.validation])]:
        for column in (store.lengths, store.tokens, store.weights):
            digest.update(column.tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def digests(tmp_path_factory, tokenizers):
    root = tmp_path_factory.mktemp("tokens")
    return {case: tokens_digest(root / str(i), tokenizers, case) for i, case in enumerate(CASES)}


def test_tokens_that_change_have_another_version(digests):
    stored, before = STORED["digests"], STORED["version"]
    changed = [case for case, digest in digests.items() if stored.get(case, digest) != digest]
    if os.environ.get("WRITE") and (before < TOKENS_VERSION or not changed):
        written = STORED | {"version": TOKENS_VERSION, "digests": digests}
        FILE.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")
        return
    assert not changed, (
        "the tokens of these rows have changed. If they are meant to, raise TOKENS_VERSION in "
        "fsdp_trainer/data/store/fingerprint.py and run this test once with WRITE=1"
    )
    assert (TOKENS_VERSION, set(digests)) == (before, set(stored)), (
        "run this test once with WRITE=1"
    )


def test_every_case_has_samples_of_its_own(digests):
    alike = {case for case in CASES if list(digests.values()).count(digests[case]) > 1}
    assert alike == {"chats by bytes", "sharegpt by bytes"}  # the same chats
