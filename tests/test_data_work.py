"""However the work of tokenising is divided, cut short or looked up, the tokens are the same."""

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fsdp_trainer.config.data_files import data_files
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data import preparation
from fsdp_trainer.data.prepare import preparations, prepare
from fsdp_trainer.data.templates import load_template
from fsdp_trainer.data.tokenizer import load_tokenizer
from fsdp_trainer.data.words import PATTERNS, Words, looks_across_no_space
from fsdp_trainer.errors import UserError

BYTES = load_tokenizer("demo:bytes")
LINES = st.lists(st.sampled_from(["", "a", "ü\r", "你好", "\u2028", "x" * 90]) | st.text("ab \t", max_size=30), max_size=12)


def prepared(root, files, **options):
    data = Data(path=[str(file) for file in files], **options)
    return prepare(data, Batch(seq_len=64), BYTES, load_template("chatml", BYTES), root)


def columns(made):
    """Everything that is stored of the samples."""
    stores = {"train": made.train[0], **({"validation": made.validation} if made.validation else {})}
    return {(name, file.name): file.read_bytes() for name, store in stores.items() for file in store.folder.glob("*.bin")}


def write_files(folder, contents):
    """Texts as JSONL, as chats, and packed."""
    files = []
    for i, texts in enumerate(contents):
        rows = [json.dumps({"text": text} if i % 2 else {"prompt": text, "completion": text * 2}, ensure_ascii=False) for text in texts]
        content = ("\n" * (i % 3) + "\n".join([*rows, ""])).encode()
        files.append(folder / f"{i}.jsonl{'.gz' if i % 4 == 3 else ''}")
        files[-1].write_bytes(gzip.compress(content) if i % 4 == 3 else content)
    return files


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(LINES.filter(any), min_size=1, max_size=4), st.integers(40, 400), st.integers(1, 3), st.sampled_from([None, 0.4]), st.data()
)
def test_any_cut_into_parts_shards_and_interruptions_gives_the_same_samples(tmp_path_factory, contents, smallest, shards, validation, draw):
    folder = tmp_path_factory.mktemp("work")
    files = write_files(folder, contents)
    options = {"validation": validation, "too_long": "truncate", "on_error": "skip"}
    try:
        whole = columns(prepared(folder / "whole", files, **options))
    except UserError as error:  # nothing to learn is in it: however it is divided
        whole = type(error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "SMALLEST", smallest)
        patch.setattr(preparation, "FEWEST", 1 << 40)
        data = Data(path=[str(file) for file in files], **options)
        how = (data, Batch(seq_len=64), BYTES, load_template("chatml", BYTES), folder / "parts", preparation.Told())
        try:
            for i in draw.draw(st.permutations(range(shards)))[: draw.draw(st.integers(0, shards))]:
                preparations(*how)[0].shard(i, shards)
            again = columns(prepared(folder / "parts", files, **options))
        except UserError as error:
            again = type(error)
    assert again == whole


def trained(cut, normalizer):
    """A byte-level BPE with the pattern of a family, whose added tokens are special or words of their own."""
    backend = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Split(Regex(cut), "isolated")] if cut else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut)])
    backend.decoder, backend.normalizer = decoders.ByteLevel(), normalizer
    text = [Path(preparation.__file__).read_text(encoding="utf-8"), "a  b\n\n  c \t d\r\n it's 你好 " * 50]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(text, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("foo", normalized=True)])
    return backend


FAMILIES = [trained(cut, normalizer) for cut in ("", *PATTERNS) for normalizer in (None, normalizers.NFC())]
LOOKED_UP = [Words(backend) for backend in FAMILIES]
PIECES = [" ", "  ", "\n", "\r\n", "\t", "\x0b", "\x1c", "\x85", "\xa0", "\u2003", "\u3000", "\u200b", "a", "A", "foo", "e\u0301", "\u0301", "'s", "'LL", "1", "234", "²", "!", "...", "/", "<|im_end|>", "<|im", "你好", "。", "👩‍👩‍👧", "\x00"]  # fmt: skip


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=20).map("".join))
def test_words_that_are_looked_up_are_the_tokens_of_the_whole_text(text):
    for backend, words in zip(FAMILIES, LOOKED_UP, strict=True):
        assert looks_across_no_space(backend)
        whole, (found,), (plain,) = backend.encode(text, add_special_tokens=False), words.encode([text]), words.plain([text])
        assert found.ids.tolist() == plain.tolist() == whole.ids
        assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == whole.offsets


@pytest.mark.parametrize("path", ["**/*.jsonl", "**", "*/../**/a.jsonl", "."])
def test_links_in_a_ring_are_gone_through_once(tmp_path, path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "a"}')
    for name, target in {"in/loop": ".", "in/up": "..", "in/back": "../in"}.items():  # 3 links: Python's own glob follows 3^40 paths
        (tmp_path / name).symlink_to(target)
    found = data_files(str(tmp_path / path))
    assert {os.path.realpath(file) for file in found} == {str(tmp_path / "in" / "a.jsonl")} and len(found) < 5
