"""Files that other tools have tokenized are trained on where they lie, document by document.

The folders in `token_files` were written by the libraries that own the formats.
"""

import hashlib
import json
import shutil
from functools import partial
from itertools import chain, compress, pairwise

import inject
import numpy as np
import pytest
from folders import TESTS, table
from refused import refusal
from tables import rows
from texts import BYTES
from world import read_json, write_lines

from fsdp_trainer.config.data_files import TOKEN_FORMS
from fsdp_trainer.data.files.file_splits import read_records
from fsdp_trainer.data.order.row_order import RowOrder

CASES = table("data/token_files.yaml")

WRITTEN = TESTS / "data/token_files"
DOCUMENTS = read_json(WRITTEN / "documents.json")
END = 258
"""The end token of `demo:bytes`, at the end of each document."""
FLAT = [*chain(*DOCUMENTS)]
STREAM = [token for document in DOCUMENTS for token in (END, *document[:-1])]
"""The same documents as llm.c writes them."""
LLM_C_2, LLM_C_4 = (20240520, 1, "<u2"), (20240801, 7, "<u4")


@pytest.fixture
def prepared(prepared_in, tmp_path):
    """Return `prepared(path, cache="c", ...)`, with the keys of data=pretrain."""
    keys = {"format": "text", "loss_on": "all", "too_long": "split", "packing": "stream"}

    def prepare(path, cache="c", seq_len=64, **data):
        return prepared_in(tmp_path / cache, path, seq_len=seq_len, **(keys | data))

    return prepare


@pytest.fixture
def store_of(prepared):
    """Return `store_of(path, ...)`: all that a path has for training."""

    def store(path, **how):
        (train,) = prepared(path, **how).train
        return train

    return store


@pytest.fixture
def whole_and_in_parts(store_of):
    """Return a function: the store of a path, of which many processes make the same."""

    def store(path):
        whole = store_of(path)
        with inject.setting("smallest_part", 70):
            parts = store_of(path, cache="of parts")
        assert documents(parts) == documents(whole)
        for i in range(len(whole)):
            assert parts.where(i) == whole.where(i)
        return whole

    return store


@pytest.fixture
def problem(prepared):
    """Return `problem(path, ...)`: what is told of a path that is refused."""
    return partial(refusal, prepared)


def documents(store):
    return [store.read(i)[0].tolist() for i in range(len(store))]


def write_flat(path, tokens, dtype="<u2"):
    np.array(tokens, dtype).tofile(path)
    return path


def write_llm_c(path, tokens, kind=LLM_C_2, count=None):
    """Write tokens behind the header of llm.c, as modded-nanogpt does too."""
    magic, version, dtype = kind
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return path


def write_rows(path, documents):
    """Write tokenized rows of JSON."""
    path.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in documents))
    return path


@pytest.mark.parametrize(
    "name",
    CASES["written"],
)
def test_documents_are_those_that_another_tool_wrote_and_stay_in_its_files(
    store_of, whole_and_in_parts, name
):
    read = whole_and_in_parts if name in ("megatron", "mds_int32") else store_of
    store = read(WRITTEN / name)
    assert sorted(documents(store)) == sorted(DOCUMENTS)
    assert documents(store) == DOCUMENTS or not name.startswith("megatron/")
    for i in range(len(store)):
        tokens, weights = store.read(i)
        assert weights.tolist() == [0, *[1] * (len(tokens) - 1)]
    is_copied = name.endswith("zstd")
    assert len(store.tokens) == (store.token_count if is_copied else 0)


@pytest.mark.parametrize(
    "name, dtype",
    rows("""
train.bin → <u2
train.bin → <u4
train.bin → <i8
part-0-00000.npy → <u2
part-0-00000.npy → <u4
a.npy →
"""),
)
def test_files_of_tokens_alone_are_cut_behind_each_end_token(tmp_path, store_of, name, dtype):
    (tmp_path / "index.json").write_text("[1]")  # another program's
    if dtype:
        write_flat(tmp_path / name, FLAT, dtype)
    else:
        np.save(tmp_path / name, np.array(FLAT, np.int32))
    store = store_of(tmp_path / name)
    assert documents(store) == DOCUMENTS
    assert len(store.tokens) == 0


@pytest.mark.parametrize(
    "stream, kind",
    [
        (STREAM, LLM_C_2),
        (STREAM, LLM_C_4),
        (STREAM[10:], LLM_C_2),  # a shard that begins within a document
        ([i % 200 for i in range(1000)], None),  # a document without an end is cut
    ],
)
def test_each_token_of_a_stream_is_learnt_from_the_one_before_it(
    tmp_path, whole_and_in_parts, stream, kind
):
    path = tmp_path / "train_000001.bin"
    if kind:
        write_llm_c(path, stream, kind)
    else:
        write_flat(path, stream)
    with inject.setting("largest_document", 300):
        store = whole_and_in_parts(path)
    assert [pair for tokens in documents(store) for pair in pairwise(tokens)] == [*pairwise(stream)]
    assert kind or max(store.lengths) == 300


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("name", ["megatron", "litdata_items", "train.bin"])
def test_rows_are_those_of_the_same_tokens_in_rows_of_json(tmp_path, store_of, name, packing):
    path = WRITTEN / name
    if name == "train.bin":
        path = write_flat(tmp_path / name, FLAT)
    linked = store_of(path)
    copied = store_of(write_rows(tmp_path / "rows.jsonl", documents(linked)), format="tokens")
    assert linked.fingerprint == copied.fingerprint
    for store in (linked, copied):
        store.orders = RowOrder(store, 32, packing, True, 0)
    count = linked.orders.rows_per_epoch
    assert count == copied.orders.rows_per_epoch
    ours, others = (store.orders.read_rows(range(2 * count)) for store in (linked, copied))
    assert ours.documents == others.documents
    for field in ("tokens", "positions", "labels", "weights"):
        assert np.array_equal(getattr(ours, field), getattr(others, field)), field
    assert linked.orders.totals(0, 2 * count) == copied.orders.totals(0, 2 * count)


def test_documents_end_at_the_token_that_data_end_of_text_names(tmp_path, store_of, problem):
    path = write_flat(tmp_path / "a.bin", [1, 2, 3, 65, 4, END, 5, 6, END])
    for named, lengths in ((None, [6, 3]), (END, [6, 3]), (65, [4, 5]), ("<|im_end|>", [6, 3])):
        assert store_of(path, end_of_text=named).lengths.tolist() == lengths
    for named in ("<|none|>", 260):  # which the tokenizer lacks
        text = problem(path, end_of_text=named)
        assert f"data.end_of_text={named}" in text
        assert "data.end_of_text='<|im_end|>'" in text


@pytest.mark.parametrize("too_long", ["split", "truncate", "drop"])
def test_documents_are_cut_refused_and_counted_as_rows_of_json_are(tmp_path, store_of, too_long):
    draw = np.random.default_rng(0)
    bos, unknown = BYTES.special_tokens["<|im_start|>"], 300
    rows = [[*draw.integers(0, 256, 1 + i % 90).tolist(), END] for i in range(300)]
    rows += [[bos, bos, 1, END], [1, unknown, unknown + 1, END], [1, unknown, END], [3, 4]]
    keys = {"on_error": "skip", "too_long": too_long, "max_lost": 1.0, "packing": "best_fit"}
    ours = store_of(write_flat(tmp_path / "a.bin", [*chain(*rows)], "<u4"), **keys)
    others = store_of(write_rows(tmp_path / "a.jsonl", rows), format="tokens", **keys)
    assert documents(ours) == documents(others)
    assert ours.fingerprint == others.fingerprint
    assert ours.counts == others.counts
    assert ours.counts["unreadable"] == 2
    assert ours.supervised_tokens == others.supervised_tokens


def test_a_share_of_the_documents_is_held_out_and_stays_in_its_file(tmp_path, prepared):
    everything = [[i, i + 1, END] for i in range(1, 100)]
    path = write_flat(tmp_path / "a.bin", [*chain(*everything)])
    data = prepared(path, validation=0.3)
    hashes = [
        hashlib.blake2b(np.array(one, "<i4").tobytes().hex().encode(), digest_size=8).digest()
        for one in everything
    ]
    is_held_out = [int.from_bytes(each, "big") < 0.3 * 2**64 for each in hashes]
    assert documents(data.validation) == [*compress(everything, is_held_out)]
    both = [*documents(data.train[0]), *documents(data.validation)]
    assert sorted(both) == everything
    assert len(data.validation.tokens) == 0


def test_token_files_and_texts_are_packed_together(tmp_path, store_of):
    (tmp_path / "data").mkdir()
    write_flat(tmp_path / "data/a.bin", FLAT)
    (tmp_path / "data/b.txt").write_text("hello")
    store = store_of(tmp_path / "data", seq_len=512)
    hello = [*BYTES.encode("hello"), END]
    assert sorted(documents(store)) == sorted([*DOCUMENTS, hello])
    rows = RowOrder(store, 512, "best_fit", False, 0)
    assert rows.read(0).tokens[: len(FLAT)].tolist() == FLAT


def cut(name, size):
    def make(tmp_path):
        shutil.copytree(WRITTEN / name.split("/")[0], tmp_path / name.split("/")[0])
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:size])
        return path.with_suffix(".bin") if path.suffix == ".idx" else path

    return make


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: write_llm_c(p / "a.bin", FLAT, count=999), "holds 265 tokens, and its header"),
        (lambda p: write_llm_c(p / "a.bin", FLAT, (20240520, 3, "<u2")), "known are 20240520/1"),
        (lambda p: write_flat(p / "a.bin", [*b"odd"], "u1"), "has 3 bytes, no multiple of the 2"),
        (lambda p: write_flat(p / "a.bin", [30000, END]), "the tokenizer has 0 to 259"),
        (lambda p: write_flat(p / "a.bin", []), "is empty"),
        (lambda p: write_flat(p / "a.npy", [*b"PK\x03\x04weights."], "u1"), "holds weights"),
        (cut("megatron/tokens_text_document.bin", 100), "its index needs 530"),
        (cut("megatron/tokens_text_document.idx", 100), "has 100 bytes instead of"),
        (cut("mds_any/shard.00000.mds", 100), "has 100 bytes, and index.json says"),
        (cut("litdata/chunk-0-1.bin", 100), "it was cut off"),
    ],
)
def test_a_file_that_cannot_be_read_as_tokens_is_named_with_the_reason(
    tmp_path, problem, make, reason
):
    path = make(tmp_path)
    text = problem(path)
    assert reason in text
    assert path.name in text


def npy(header, content=b""):
    """Return a file of numpy with this header before the content."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def npy_of(shape, dtype="<u2", size=0):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}"
    return npy(header, b"x" * size)


LIES = CASES["lies"]


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_never_read_as_other_tokens(tmp_path, name):
    for i, (place, dtype, numbers) in enumerate(LIES[name]):
        shutil.copytree(WRITTEN / name.split("/")[0], tmp_path / str(i))
        file = tmp_path / str(i) / name.split("/")[1]
        content = bytearray(file.read_bytes())
        lie = np.array(numbers, dtype).tobytes()
        content[place : place + len(lie)] = lie
        assert content != file.read_bytes()
        file.write_bytes(content)
        (row,) = read_records(str(file.with_suffix(".bin") if file.suffix == ".idx" else file))
        assert row.error


INDEXES = CASES["indexes"]


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_of_any_other_content_is_one_error(tmp_path, name):
    """A chunk whose index is not understood is not read as tokens without a header either."""
    folder = tmp_path / name.split("/")[0]
    shutil.copytree(WRITTEN / folder.name, folder)
    whole = (folder / "index.json").read_text()
    changed = [*cut_index(whole)]
    for path in INDEXES[name]:
        for value in (None, [], {}, 18, "x", [[]], [5], 2**70, True):
            index = replaced(json.loads(whole), path, value)
            if index != json.loads(whole):
                changed.append(json.dumps(index))
    for text in changed:
        (folder / "index.json").write_text(text)
        (row,) = read_records(f"{tmp_path}/{name}")
        assert row.error, text[:300]


def cut_index(text):
    return text[: len(text) // 2], "[" * 100_000, "", "NaN"


def replaced(value, path, new):
    """Return a value of JSON with another one at the end of a path of keys."""
    if not path:
        return new
    value[path[0]] = replaced(value[path[0]], path[1:], new)
    return value


def test_a_header_of_numpy_that_lies_is_one_error(tmp_path):
    contents = [b"\x93NUMPY\x09\x00"]
    for case in CASES["headers of numpy"]:
        text = case.get("header", "").replace("MANY", case.get("many", "") * 9000)
        contents.append(npy(text) if text else npy_of(**case))
    for content in contents:
        (tmp_path / "a.npy").write_bytes(content)
        (row,) = read_records(f"{tmp_path}/a.npy")
        assert row.error, content[:200]


@pytest.mark.parametrize(
    "keys, named",
    [({"format": "messages"}, "data.format=messages"), ({"fields": {"text": "a"}}, "data.fields")],
)
def test_a_token_file_is_not_read_as_anything_else(problem, keys, named):
    assert named in problem(WRITTEN / "megatron", **keys)


def write_data_set(folder, number_type="int64", shards=1, **rows):
    """Save rows as `datasets` does; return its folder."""
    datasets = pytest.importorskip("datasets")
    kind = datasets.Sequence(datasets.Value(number_type))
    table = datasets.Dataset.from_dict(rows).cast_column("input_ids", kind)
    table.save_to_disk(f"{folder}/saved", num_shards=shards)
    return folder / "saved"


ONES = [[1] * len(document) for document in DOCUMENTS]


@pytest.mark.parametrize(
    "number_type, others, copied",
    [
        ("int32", {}, []),
        ("int64", {"attention_mask": ONES, "labels": DOCUMENTS, "token_type_ids": ONES}, []),
        ("int32", {"attention_mask": [ONES[0], [0, *ONES[1][1:]], *ONES[2:]]}, [1]),
        ("int64", {"labels": [[-100, -100, *DOCUMENTS[0][2:]], *DOCUMENTS[1:]]}, [0]),
        ("int64", {"note": ["a"] * len(DOCUMENTS)}, range(len(DOCUMENTS))),
    ],
)
def test_rows_of_datasets_whose_tokens_are_all_learnt_stay_in_their_file(
    tmp_path, store_of, number_type, others, copied
):
    rows = {"input_ids": DOCUMENTS, **others}
    lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    write_lines(tmp_path / "rows.jsonl", lines)
    mapped = store_of(write_data_set(tmp_path, number_type, **rows))
    plain = store_of(tmp_path / "rows.jsonl", format="tokens")
    assert mapped.fingerprint == plain.fingerprint
    assert documents(mapped) == documents(plain)
    for sample in range(len(DOCUMENTS)):
        assert np.array_equal(mapped.read(sample)[1], plain.read(sample)[1])
    assert len(mapped.tokens) == sum(len(documents(plain)[i]) for i in copied)


def test_documents_of_every_batch_and_shard_of_a_saved_data_set_are_found(tmp_path, store_of):
    rows = [[i % 250, *range(1 + i % 7)] for i in range(2500)]
    store = store_of(write_data_set(tmp_path, shards=3, input_ids=rows))
    assert documents(store) == rows
    assert len(store.tokens) == 0


@pytest.fixture
def prepare_files(tmp_path, program, monkeypatch):
    """Return a function that runs `prepare` in the test's folder, and returns what it says."""
    monkeypatch.chdir(tmp_path)
    usual = "prepare", "data=pretrain", "tokenizer.path=demo:bytes"
    return lambda path, *words, code=0: program(*usual, f"data.path={path}", *words, code=code)


@pytest.mark.parametrize("source", ["megatron", "mds_any", "text"])
@pytest.mark.parametrize("form", TOKEN_FORMS)
def test_prepare_writes_documents_in_any_form_and_reads_them_back(
    tmp_path, prepare_files, store_of, form, source
):
    path, expected = WRITTEN / source, DOCUMENTS
    if source == "text":
        path = tmp_path / "a.txt"
        path.write_text("one\n\ntwo\n\nthree\n\nfour")
        expected = documents(store_of(path))
    said = prepare_files(path, "out=tokens", f"form={form}")
    assert f"{len(expected)} documents of train" in said
    if form == "llmc":  # has the end in front of each document
        *others, last = ([END, *document] for document in expected)
        expected = [*others, last[:-1]]
    assert documents(store_of("tokens")) == expected


def test_what_is_written_for_megatron_is_what_megatron_writes_to_the_last_byte(
    tmp_path, prepare_files
):
    prepare_files(WRITTEN / "mds_bytes", "out=tokens", "form=megatron")
    for suffix in ("bin", "idx"):
        ours = tmp_path / f"tokens/train_text_document.{suffix}"
        theirs = WRITTEN / f"megatron/tokens_text_document.{suffix}"
        assert ours.read_bytes() == theirs.read_bytes()


def test_another_index_beside_the_same_tokens_is_other_data(tmp_path, prepare_files, store_of):
    others = [[*chain(*DOCUMENTS[:-1])], DOCUMENTS[-1]]
    rows = write_rows(tmp_path / "rows.jsonl", others)
    prepare_files(rows, "data.format=tokens", "out=two", "form=megatron")
    shutil.copytree(WRITTEN / "megatron", tmp_path / "data")
    assert documents(store_of("data")) == DOCUMENTS
    index = tmp_path / "data/tokens_text_document.idx"
    shutil.copy(tmp_path / "two/train_text_document.idx", index)
    assert documents(store_of("data")) == others


@pytest.mark.parametrize("form", TOKEN_FORMS)
def test_what_is_held_out_is_written_apart_and_is_not_trained_on_unasked(
    tmp_path, prepare_files, store_of, problem, form
):
    (tmp_path / "a.txt").write_text("\n\n".join(f"text {i}" for i in range(200)))
    prepare_files("a.txt", "data.validation=0.2", "out=tokens", f"form={form}")
    every, train, held_out = (
        [[token for token in document if token != END] for document in documents(store_of(path))]
        for path in ("a.txt", "tokens/*train*", "tokens/*val*")
    )
    assert sorted(train + held_out) == sorted(every)
    assert 20 < len(held_out) < 60
    text = problem("tokens")
    assert "holds several splits: train val" in text
    assert "train*" in text


def test_shards_of_llm_c_hold_a_round_number_of_tokens(tmp_path, prepare_files, store_of):
    with inject.setting("shard_tokens", 100):
        prepare_files(WRITTEN / "megatron", "out=tokens", "form=llmc")
    shards = sorted((tmp_path / "tokens").glob("*.bin"))
    assert [shard.name for shard in shards] == [f"tokens_train_{i:06}.bin" for i in (1, 2, 3)]
    read = [np.fromfile(shard, "<u2", offset=1024).tolist() for shard in shards]
    assert [len(tokens) for tokens in read] == [100, 100, 65]
    assert [*chain(*read)] == STREAM
    assert sum(len(tokens) - 1 for tokens in documents(store_of("tokens"))) == len(FLAT) - 3


def test_tokens_that_are_not_learnt_are_not_written(tmp_path, prepare_files):
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    chats = ["data.format=auto", "data.loss_on=assistant", "data.too_long=drop"]
    how = [*chats, "data.packing=best_fit", "out=tokens", "form=olmo"]
    said = prepare_files("chats.jsonl", *how, code=2)
    assert "1 sample with tokens that are not learnt" in said
    assert not (tmp_path / "tokens").exists()
