"""However the work of tokenizing is divided, cut short or looked up, the tokens are the same."""

import gzip
import json

import inject
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.store import component_store
from fsdp_trainer.data.store.token_cache import component_stores, prepare
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

BYTES = load_tokenizer("demo:bytes")
LINES = st.lists(
    st.sampled_from(["", "a", "ü\r", "你好", "\u2028", "x" * 90]) | st.text("ab \t", max_size=30),
    max_size=12,
)


def prepared(root, files, **options):
    data = Data(path=[str(file) for file in files], **options)
    return prepare(data, Batch(seq_len=64), BYTES, load_template("chatml", BYTES), root)


def columns(data):
    """Everything that is stored of the samples."""
    stores = {
        "train": data.train[0],
        **({"validation": data.validation} if data.validation else {}),
    }
    return {
        (name, file.name): file.read_bytes()
        for name, store in stores.items()
        for file in store.folder.glob("*.bin")
    }


def write_files(folder, contents):
    """Texts as JSONL, as chats, and packed."""
    files = []
    for i, texts in enumerate(contents):
        rows = [
            json.dumps(
                {"text": text} if i % 2 else {"prompt": text, "completion": text * 2},
                ensure_ascii=False,
            )
            for text in texts
        ]
        content = ("\n" * (i % 3) + "\n".join([*rows, ""])).encode()
        files.append(folder / f"{i}.jsonl{'.gz' if i % 4 == 3 else ''}")
        files[-1].write_bytes(gzip.compress(content) if i % 4 == 3 else content)
    return files


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.lists(LINES.filter(any), min_size=1, max_size=4),
    st.integers(40, 400),
    st.integers(1, 3),
    st.sampled_from([None, 0.4]),
    st.data(),
)
def test_any_cut_into_parts_shards_and_interruptions_gives_the_same_samples(
    tmp_path_factory, contents, smallest, shards, validation, draw
):
    folder = tmp_path_factory.mktemp("work")
    files = write_files(folder, contents)
    options = {"validation": validation, "too_long": "truncate", "on_error": "skip"}
    try:
        whole = columns(prepared(folder / "whole", files, **options))
    except UserError as error:  # nothing to learn is in it: however it is divided
        whole = type(error)
    with inject.setting("smallest_part", smallest), inject.setting("fewest_parts", 1 << 40):
        data = Data(path=[str(file) for file in files], **options)
        how = (
            data,
            Batch(seq_len=64),
            BYTES,
            load_template("chatml", BYTES),
            folder / "parts",
            component_store.Reporter(),
        )
        try:
            for i in draw.draw(st.permutations(range(shards)))[: draw.draw(st.integers(0, shards))]:
                component_stores(*how)[0].shard(i, shards)
            again = columns(prepared(folder / "parts", files, **options))
        except UserError as error:
            again = type(error)
    assert again == whole
