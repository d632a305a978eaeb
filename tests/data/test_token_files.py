"""Files that other tools have tokenized are trained on where they lie, document by document.

The folders in `token_files` were written by the libraries that own the formats.
"""

import json
import shutil
import struct
from itertools import chain, pairwise

import inject
import numpy as np
import pytest
from folders import REPO

from fsdp_trainer.cli import main
from fsdp_trainer.config.data_files import TOKEN_FORMS
from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.order.row_order import RowOrder
from fsdp_trainer.data.store.token_cache import prepare
from fsdp_trainer.data.templates.chat_template import load_template
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

WRITTEN = REPO / "tests" / "data" / "token_files"
DOCUMENTS = json.loads((WRITTEN / "documents.json").read_text())
END = 258
"""The end token of `demo:bytes`, at the end of each document."""
FLAT = [token for document in DOCUMENTS for token in document]
LLM_C_2, LLM_C_4 = (20240520, 1, "<u2"), (20240801, 7, "<u4")


def prepared(root, path, seq_len=64, **data):
    """Return the prepared data of a path, with the keys of data=pretrain."""
    keys = {"format": "text", "loss_on": "all", "too_long": "split", "packing": "stream", **data}
    tokenizer = load_tokenizer("demo:bytes")
    return prepare(
        Data(path=str(path), **keys), Batch(seq_len=seq_len), tokenizer,
        load_template(None, tokenizer), root / "cache",
    )  # fmt: skip


def documents(store):
    return [store.read(i)[0].tolist() for i in range(len(store))]


def in_order(store):
    """Return the documents of a store in the order of DOCUMENTS, whose first tokens all differ."""
    place = {tuple(document): i for i, document in enumerate(DOCUMENTS)}
    return sorted(documents(store), key=lambda document: place.get(tuple(document), -1))


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


def problem(root, path, **data):
    with pytest.raises(UserError) as caught:
        prepared(root, path, **data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "is_copied"),
    [
        ("megatron", False), ("megatron_sentences", False), ("mds_bytes", False),
        ("mds_int32", False), ("mds_any", False), ("mds_zstd", True), ("litdata", False),
        ("litdata_numpy", False), ("litdata_items", False), ("litdata_zstd", True),
    ],
)  # fmt: skip
def test_documents_are_those_that_another_tool_wrote_and_stay_in_its_files(
    tmp_path, name, is_copied
):
    (store,) = prepared(tmp_path, WRITTEN / name).train
    assert in_order(store) == DOCUMENTS
    for i in range(len(store)):
        tokens, weights = store.read(i)
        assert weights.tolist() == [0, *[1] * (len(tokens) - 1)]
    assert len(store.tokens) == (store.token_count if is_copied else 0)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("train.bin", write_flat),
        ("train.bin", lambda path, tokens: write_flat(path, tokens, "<u4")),
        ("part-0-00000.npy", write_flat),
        ("part-0-00000.npy", lambda path, tokens: write_flat(path, tokens, "<u4")),
        ("a.npy", lambda path, tokens: np.save(path, np.array(tokens, np.int32))),
        ("train.bin", lambda path, tokens: write_flat(path, tokens, "<i8")),
    ],
)
def test_files_of_tokens_alone_are_cut_behind_each_end_token(tmp_path, name, write):
    write(tmp_path / name, FLAT)
    (store,) = prepared(tmp_path, tmp_path / name).train
    assert documents(store) == DOCUMENTS
    assert len(store.tokens) == 0


@pytest.mark.parametrize("kind", [LLM_C_2, LLM_C_4])
def test_a_file_of_llm_c_teaches_each_token_of_the_stream_from_the_one_before_it(tmp_path, kind):
    stream = [token for document in DOCUMENTS for token in (END, *document[:-1])]
    path = write_llm_c(tmp_path / "fineweb_train_000001.bin", stream, kind)
    (store,) = prepared(tmp_path, path).train
    learnt = []
    for tokens in documents(store):
        learnt += [*pairwise(tokens)]
    assert learnt == [*pairwise(stream)]


def test_a_shard_that_begins_within_a_document_loses_nothing(tmp_path):
    stream = [token for document in DOCUMENTS for token in (END, *document[:-1])][10:]
    (store,) = prepared(tmp_path, write_llm_c(tmp_path / "a.bin", stream)).train
    assert sum(len(tokens) - 1 for tokens in documents(store)) == len(stream) - 1


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
@pytest.mark.parametrize("name", ["megatron", "litdata_items", "train.bin"])
def test_rows_are_those_of_the_same_tokens_in_rows_of_json(tmp_path, name, packing):
    path = WRITTEN / name
    if name == "train.bin":
        path = write_flat(tmp_path / name, FLAT)
    rows = tmp_path / "rows.jsonl"
    (linked,) = prepared(tmp_path, path).train
    rows.write_text("\n".join(json.dumps({"input_ids": ids}) for ids in documents(linked)))
    (copied,) = prepared(tmp_path, rows, format="tokens").train
    assert linked.fingerprint == copied.fingerprint
    for store in (linked, copied):
        store.orders = RowOrder(store, 32, packing, True, 0)
    assert linked.orders.rows_per_epoch == copied.orders.rows_per_epoch
    indices = np.arange(2 * linked.orders.rows_per_epoch)
    ours, others = (store.orders.read_rows(indices) for store in (linked, copied))
    assert ours.documents == others.documents
    for field in ("tokens", "positions", "labels", "weights"):
        assert np.array_equal(getattr(ours, field), getattr(others, field)), field
    totals = [store.orders.totals(0, len(indices)) for store in (linked, copied)]
    assert totals[0] == totals[1]


@pytest.mark.parametrize("name", ["megatron", "mds_int32", "train.bin", "llm_c.bin"])
def test_a_file_that_many_processes_share_gives_the_same_documents(tmp_path, name):
    path = WRITTEN / name
    if name == "train.bin":
        path = write_flat(tmp_path / name, FLAT)
    if name == "llm_c.bin":
        path = write_llm_c(tmp_path / name, [END, *FLAT])
    (whole,) = prepared(tmp_path / "whole", path).train
    with inject.setting("smallest_part", 70):
        (parts,) = prepared(tmp_path / "parts", path).train
    assert documents(parts) == documents(whole)
    assert [parts.where(i) for i in range(len(parts))] == [
        whole.where(i) for i in range(len(whole))
    ]


@pytest.mark.parametrize(
    ("named", "lengths"), [(None, [6, 3]), (END, [6, 3]), (65, [4, 5]), ("<|im_end|>", [6, 3])]
)
def test_documents_end_at_the_token_that_data_end_of_text_names(tmp_path, named, lengths):
    path = write_flat(tmp_path / "a.bin", [1, 2, 3, 65, 4, END, 5, 6, END])
    (store,) = prepared(tmp_path, path, end_of_text=named).train
    assert store.lengths.tolist() == lengths


@pytest.mark.parametrize("named", ["<|none|>", 260])
def test_an_end_of_text_that_the_tokenizer_lacks_is_refused(tmp_path, named):
    path = write_flat(tmp_path / "a.bin", FLAT)
    text = problem(tmp_path, path, end_of_text=named)
    assert f"data.end_of_text={named}" in text
    assert "data.end_of_text='<|im_end|>'" in text


def test_a_document_without_an_end_is_cut_and_no_prediction_is_lost(tmp_path):
    stream = [i % 200 for i in range(1000)]
    with inject.setting("largest_document", 300):
        (store,) = prepared(tmp_path, write_flat(tmp_path / "a.bin", stream)).train
    learnt = []
    for tokens in documents(store):
        learnt += [*pairwise(tokens)]
    assert learnt == [*pairwise(stream)]
    assert max(store.lengths) == 300


@pytest.mark.parametrize("named", ["tokens_text_document", "*", "*.bin"])
def test_a_data_set_of_megatron_is_named_as_megatron_names_it(tmp_path, named):
    (store,) = prepared(tmp_path, WRITTEN / "megatron" / named).train
    assert documents(store) == DOCUMENTS


def test_samples_too_long_are_dropped_or_cut_as_others_are(tmp_path):
    path = write_flat(tmp_path / "a.bin", FLAT)
    best_fit = {"packing": "best_fit", "max_lost": 1.0}
    (dropped,) = prepared(tmp_path, path, too_long="drop", **best_fit).train
    assert documents(dropped) == [d for d in DOCUMENTS if len(d) <= 64]
    (cut,) = prepared(tmp_path, path, too_long="truncate", **best_fit).train
    assert documents(cut) == [d[:64] for d in DOCUMENTS]


def test_a_share_of_the_documents_is_held_out_and_stays_in_its_file(tmp_path):
    everything = [[i, i + 1, END] for i in range(1, 100)]
    path = write_flat(tmp_path / "a.bin", [token for one in everything for token in one])
    data = prepared(tmp_path, path, validation=0.3)
    both = [*documents(data.train[0]), *documents(data.validation)]
    assert sorted(both) == everything
    assert 10 < len(data.validation) < 50
    assert len(data.validation.tokens) == 0


def test_token_files_and_texts_are_packed_together(tmp_path):
    write_flat(tmp_path / "a.bin", FLAT)
    (tmp_path / "b.txt").write_text("hello")
    (store,) = prepared(tmp_path, tmp_path, seq_len=512).train
    hello = [*load_tokenizer("demo:bytes").encode("hello"), END]
    assert sorted(documents(store)) == sorted([*DOCUMENTS, hello])
    rows = RowOrder(store, 512, "best_fit", False, 0)
    assert rows.read(0).tokens[: sum(map(len, DOCUMENTS))].tolist() == FLAT


def test_another_index_beside_the_same_tokens_is_other_data(tmp_path):
    shutil.copytree(WRITTEN / "megatron", tmp_path / "data")
    (before,) = prepared(tmp_path, tmp_path / "data").train
    index = tmp_path / "data" / "tokens_text_document.idx"
    lengths = [len(FLAT) - 9, 9]
    index.write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 2, 3)
        + np.array(lengths, "<i4").tobytes()
        + np.array([0, 2 * lengths[0], 0, 1, 2], "<i8").tobytes()
    )
    (after,) = prepared(tmp_path, tmp_path / "data").train
    assert (len(before), len(after)) == (len(DOCUMENTS), 2)


def cut(name, size):
    def make(tmp_path):
        shutil.copytree(WRITTEN / name.split("/")[0], tmp_path / name.split("/")[0])
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:size])
        return path.with_suffix(".bin") if path.suffix == ".idx" else path

    return make


@pytest.mark.parametrize(
    ("make", "reason"),
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
def test_a_file_that_cannot_be_read_as_tokens_is_named_with_the_reason(tmp_path, make, reason):
    path = make(tmp_path)
    text = problem(tmp_path, path)
    assert reason in text
    assert path.name in text


@pytest.mark.parametrize(
    ("keys", "named"),
    [({"format": "messages"}, "data.format=messages"), ({"fields": {"text": "a"}}, "data.fields")],
)
def test_a_token_file_is_not_read_as_anything_else(tmp_path, keys, named):
    assert named in problem(tmp_path, WRITTEN / "megatron", **keys)


@pytest.mark.slow
def test_tokenized_rows_of_datasets_are_documents_and_their_masks_are_kept(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {
        "input_ids": [[1, 2, 3, 0], [4, 5, 6, 7]],
        "attention_mask": [[1, 1, 1, 0], [1, 1, 1, 1]],
        "labels": [[1, 2, 3, -100], [-100, -100, 6, 7]],
    }
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    (store,) = prepared(tmp_path, tmp_path / "saved").train
    assert documents(store) == [[1, 2, 3], [4, 5, 6, 7]]
    assert [store.read(i)[1].tolist() for i in (0, 1)] == [[0, 1, 1], [0, 0, 1, 1]]


ONES = [[1] * len(document) for document in DOCUMENTS]


@pytest.mark.parametrize("number_type", ["int32", "int64"])
@pytest.mark.parametrize(
    ("others", "copied"),
    [
        ({}, []),
        ({"attention_mask": ONES, "labels": DOCUMENTS, "token_type_ids": ONES}, []),
        ({"attention_mask": [ONES[0], [0, *ONES[1][1:]], *ONES[2:]]}, [1]),
        ({"labels": [[-100, -100, *DOCUMENTS[0][2:]], *DOCUMENTS[1:]]}, [0]),
        ({"note": ["a"] * len(DOCUMENTS)}, range(len(DOCUMENTS))),
    ],
)
def test_rows_of_datasets_whose_tokens_are_all_learnt_stay_in_their_file(
    tmp_path, others, copied, number_type
):
    datasets = pytest.importorskip("datasets")
    kind = datasets.Sequence(datasets.Value(number_type))
    rows = {"input_ids": DOCUMENTS, **others}
    table = datasets.Dataset.from_dict(rows).cast_column("input_ids", kind)
    table.save_to_disk(str(tmp_path / "saved"))
    as_json = tmp_path / "rows.jsonl"
    lines = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    as_json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (mapped,) = prepared(tmp_path, tmp_path / "saved").train
    (plain,) = prepared(tmp_path, as_json, format="tokens").train
    assert mapped.fingerprint == plain.fingerprint
    assert documents(mapped) == documents(plain)
    for sample in range(len(DOCUMENTS)):
        assert np.array_equal(mapped.read(sample)[1], plain.read(sample)[1])
    assert len(mapped.tokens) == sum(len(documents(plain)[i]) for i in copied)


@pytest.mark.slow
def test_documents_of_every_batch_and_shard_of_a_saved_data_set_are_found(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [[i % 250, *range(1 + i % 7)] for i in range(2500)]
    table = datasets.Dataset.from_dict({"input_ids": rows})
    table.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    (store,) = prepared(tmp_path, tmp_path / "saved").train
    assert documents(store) == rows
    assert len(store.tokens) == 0


def as_written(form, documents):
    """Return documents as a file of this form holds them, llm.c's with the end token in front."""
    if form != "llmc":
        return documents
    *others, last = [[END, *document] for document in documents]
    return [*others, last[:-1]]


def inner(document):
    return [token for token in document if token != END]


def run_prepare(capsys, *words):
    code = main(["prepare", "data=pretrain", "tokenizer.path=demo:bytes", *map(str, words)])
    return code, capsys.readouterr()


@pytest.mark.parametrize("source", ["megatron", "mds_any", "text"])
@pytest.mark.parametrize("form", TOKEN_FORMS)
def test_prepare_writes_documents_in_any_form_and_reads_them_back(
    tmp_path, capsys, monkeypatch, form, source
):
    monkeypatch.chdir(tmp_path)
    path, expected = WRITTEN / source, DOCUMENTS
    if source == "text":
        path = tmp_path / "a.txt"
        path.write_text("one\n\ntwo\n\nthree\n\nfour")
        expected = documents(prepared(tmp_path, path).train[0])
    code, said = run_prepare(capsys, f"data.path={path}", "out=tokens", f"form={form}")
    assert code == 0, said
    assert f"{len(expected)} documents of train" in said.out + said.err
    (store,) = prepared(tmp_path, tmp_path / "tokens").train
    assert documents(store) == as_written(form, expected)


def test_what_is_written_for_megatron_is_what_megatron_writes_to_the_last_byte(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [f"data.path={WRITTEN / 'mds_bytes'}", "out=tokens", "form=megatron"]
    assert run_prepare(capsys, *words)[0] == 0
    for suffix in ("bin", "idx"):
        ours = tmp_path / "tokens" / f"train_text_document.{suffix}"
        theirs = WRITTEN / "megatron" / f"tokens_text_document.{suffix}"
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("form", TOKEN_FORMS)
def test_what_is_held_out_is_written_apart_and_is_not_trained_on_unasked(
    tmp_path, capsys, monkeypatch, form
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n\n".join(f"text {i}" for i in range(200)))
    words = ["data.path=a.txt", "data.validation=0.2", "out=tokens", f"form={form}"]
    assert run_prepare(capsys, *words)[0] == 0
    every = documents(prepared(tmp_path, "a.txt").train[0])
    parts = [
        documents(prepared(tmp_path, f"tokens/*{part}*").train[0]) for part in ("train", "val")
    ]
    assert sorted(map(inner, parts[0] + parts[1])) == sorted(map(inner, every))
    assert 20 < len(parts[1]) < 60
    text = problem(tmp_path, "tokens")
    assert "holds several splits: train val" in text
    assert "train*" in text


def test_shards_of_llm_c_hold_a_round_number_of_tokens(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with inject.setting("shard_tokens", 100):
        words = [f"data.path={WRITTEN / 'megatron'}", "out=tokens", "form=llmc"]
        assert run_prepare(capsys, *words)[0] == 0
    shards = sorted((tmp_path / "tokens").glob("*.bin"))
    assert [shard.name for shard in shards] == [f"tokens_train_{i:06}.bin" for i in (1, 2, 3)]
    read = [np.fromfile(shard, "<u2", offset=1024).tolist() for shard in shards]
    assert [len(tokens) for tokens in read] == [100, 100, 65]
    assert [*chain(*read)] == [token for document in DOCUMENTS for token in (END, *document[:-1])]
    (store,) = prepared(tmp_path, "tokens").train
    assert sum(len(tokens) - 1 for tokens in documents(store)) == len(FLAT) - 3


CHATS = ["data.loss_on=assistant", "data.too_long=drop", "data.packing=best_fit"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["out=tokens"], "out=tokens  needs"),
        (["form=olmo"], "needs  out=FOLDER"),
        (["out=full", "form=olmo"], "out=full  exists"),
        (["out=tokens", "form=olmo", "prepare.shard=0/2"], "without  prepare.shard=0/2"),
        (["out=tokens", "form=parquet"], "form=parquet"),
        (
            ["out=tokens", "form=olmo", "data.path=chats.jsonl", "data.format=auto", *CHATS],
            "1 samples have tokens that are not learnt",
        ),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_is_left(
    tmp_path, capsys, monkeypatch, words, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    code, said = run_prepare(capsys, f"data.path={WRITTEN / 'megatron'}", *words)
    assert code == 2
    assert named in said.err
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "runs") == [
        "chats.jsonl",
        "full",
    ]
