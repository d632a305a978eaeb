"""Images in the data: every form that rows have, what is stored of them, and what is refused."""

import base64
import json
import os
import struct
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from zlib import crc32

import numpy as np
import pytest
from image_models import make_image_folder, write_pictures
from PIL import Image

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.images.sample_images import ImageReader
from fsdp_trainer.data.prepared_data import build_template
from fsdp_trainer.data.store.data_statistics import summary_lines
from fsdp_trainer.data.store.token_cache import prepare
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

ANSWER = {"role": "assistant", "content": "a!"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_image_folder(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5_vl")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with four pictures in `pictures`."""
    write_pictures(tmp_path / "pictures", 4)
    return tmp_path


@pytest.fixture
def prepared(model, folder):
    """Return `prepared(*rows, **keys of data)`, which prepares the rows of a file in `folder`."""

    def make(*rows, name="rows.jsonl", **keys):
        if rows:
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = Data(**{"path": str(folder / name), **keys})
        tokenizer = load_tokenizer(str(model))
        reader = ImageReader(ImageProcessor(str(model)), folder / "cache")
        template, root = build_template(data, tokenizer), folder / "cache"
        kind = keys.get("kind")
        return prepare(data, Batch(seq_len=256), tokenizer, template, root, None, kind, reader)

    return make


def content_of(store, sample=0):
    """Return the text of a sample without the tokens of images, and its images' digests."""
    tokenizer, (tokens, _) = load_tokenizer("demo:bytes"), store.read(sample)
    text = tokenizer.decode([int(t) for t in tokens if t < 256])
    return text, [image.file.digest for image in store.images(sample)]


def asking(*parts):
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER]}


def image(place):
    return {"type": "image", "image": place}


def text(words):
    return {"type": "text", "text": words}


def bytes_of(folder, name="0.png"):
    return (folder / "pictures" / name).read_bytes()


@pytest.mark.slow
def test_all_forms_of_an_image_give_the_same_sample(prepared, folder):
    plain = base64.b64encode(bytes_of(folder)).decode()
    at, url = "pictures/0.png", f"data:image/png;base64,{plain}"
    absolute = f"{folder}/{at}"
    said = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "a!"}]
    rows = [
        asking(image(at), text("what?")),
        asking(image(absolute), text("what?")),
        asking(image(f"file://{absolute}"), text("what?")),
        asking(image(plain), text("what?")),
        asking({"type": "image", "path": at}, text("what?")),
        asking({"type": "image_url", "image_url": {"url": url}}, text("what?")),
        asking({"type": "input_image", "image_url": url}, text("what?")),
        asking({"type": "image"}, text("what?")) | {"images": [at]},
        {"messages": [{"role": "user", "content": "<image>what?"}, ANSWER], "images": [at]},
        {"messages": [{"role": "user", "content": "what?"}, ANSWER], "images": [at]},
        {"messages": [{"role": "user", "content": "what?", "images": [at]}, ANSWER]},
        {"conversations": said, "image": at},
        {"prompt": "<image>what?", "completion": "a!", "images": [at]},
        {"instruction": "what?", "output": "a!", "image": at},
    ]
    for i, row in enumerate(rows):
        [store] = prepared(row, name=f"{i}.jsonl").train
        if not i:
            expected = content_of(store)
            assert len(expected[1]) == 1
        assert content_of(store) == expected, row


@pytest.mark.slow
def test_a_table_with_bytes_is_read(prepared, folder):
    table = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [
        {
            "messages": [{"role": "user", "content": "<image>what?"}, ANSWER],
            "images": [{"bytes": bytes_of(folder, f"{i}.png"), "path": "elsewhere.png"}],
        }
        for i in range(3)
    ]
    pyarrow.parquet.write_table(table.Table.from_pylist(rows), folder / "rows.parquet")
    [store] = prepared(name="rows.parquet").train
    assert len(store) == 3
    assert len({content_of(store, i)[1][0] for i in range(3)}) == 3
    assert store.images(0)[0].file.path.startswith(str(folder / "cache" / "images"))


def test_images_stand_where_the_turns_have_them_and_are_not_supervised(prepared, model):
    parts = (text("see "), image("pictures/0.png"), text(" and "), image("pictures/1.png"))
    second = {"role": "user", "content": [image("pictures/2.png"), text("more")]}
    row = asking(*parts)
    row["messages"] += [second, ANSWER]
    data = prepared(row, loss_on="all")
    [store] = data.train
    (tokens, weights), token = store.read(0), ImageProcessor(str(model)).token
    places = np.flatnonzero(tokens == token)
    assert [image.tokens for image in store.images(0)] == [6, 12, 12], "in parts of 8 × 8 pixels"
    assert len(places) == 30
    assert f"3 images, {30 / len(tokens):.1%} of the tokens" in summary_lines(data, 256)
    assert not weights[places].any()
    assert [os.path.basename(i.file.path) for i in store.images(0)] == ["0.png", "1.png", "2.png"]


def test_both_answers_of_a_pair_have_the_images_of_the_prompt(prepared):
    user = {"role": "user", "content": [image("pictures/0.png"), text("which?")]}
    chosen, rejected = ({"role": "assistant", "content": answer} for answer in ("yes", "no"))
    row = {"chosen": [user, chosen], "rejected": [user, rejected]}
    [store] = prepared(row).train
    assert len(store) == 2
    assert store.images(0) == store.images(1) != []


def head_of_png(width, height):
    """Return the head of a PNG file, which gives its size, without pixels."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", b"")]
    chunks = [
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc32(kind + content))
        for kind, content in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.png", None, "the image none.png does not exist"),
        ("text.png", b"no picture at all", "the image text.png cannot be decoded"),
        ("big.png", head_of_png(10_000, 10_000), "10,000 × 10,000 pixels, and at most 67,108,864"),
        ("bomb.png", head_of_png(20_000, 20_000), "could be decompression bomb"),
        ("half.png", "half", "the image half.png cannot be decoded"),
    ],
)
def test_an_image_that_cannot_be_read_is_named_with_file_and_line(
    prepared, folder, name, content, reason
):
    content = bytes_of(folder)[:400] if content == "half" else content
    if content is not None:
        (folder / name).write_bytes(content)
    good = asking(image("pictures/0.png"), text("q"))
    with pytest.raises(UserError) as error:
        prepared(good, asking(image(name), text("q")))
    (problem,) = error.value.problems
    assert problem.what == f"{folder}/rows.jsonl:2"
    assert reason in problem.reason
    skipped = prepared(good, asking(image(name), text("q")), on_error="skip")
    assert [len(store) for store in skipped.train] == [1]


def test_rows_whose_images_and_places_differ_are_refused(prepared):
    for content in ("<image> or <image>?", "<image> or \ufffc?"):
        row = {"messages": [{"role": "user", "content": content}, ANSWER]}
        with pytest.raises(UserError) as error:
            prepared(row | {"images": ["pictures/0.png"]})
        assert "has 1 images, and its turns have places for 2" in error.value.problems[0].reason


@pytest.mark.slow
def test_an_image_that_was_changed_is_tokenized_again(prepared, folder):
    row = asking(image("pictures/0.png"), text("q"))
    [before] = prepared(row).train
    first = before.images(0)
    [same] = prepared(row).train
    assert same.fingerprint == before.fingerprint
    Image.new("RGB", (64, 64)).save(folder / "pictures" / "0.png")
    [after] = prepared(row).train
    assert after.fingerprint != before.fingerprint
    assert after.images(0)[0].tokens != first[0].tokens
    os.remove(folder / "pictures" / "0.png")
    with pytest.raises(UserError) as error:
        prepared(row)
    assert "does not exist" in error.value.problems[0].reason


def test_the_same_rows_beside_other_pictures_are_other_data(prepared, folder, tmp_path):
    row = asking(image("pictures/0.png"), text("q"))
    [before] = prepared(row).train
    elsewhere = folder / "elsewhere"
    write_pictures(elsewhere / "pictures", 1, size=(64, 64))
    [after] = prepared(row, name="elsewhere/rows.jsonl").train
    assert after.images(0)[0].file.path == str(elsewhere / "pictures" / "0.png")
    assert after.fingerprint != before.fingerprint


def test_a_sample_that_is_cut_ends_before_an_image_that_is_cut(prepared):
    row = asking(image("pictures/0.png"), text("q"))
    row["messages"] += [
        {"role": "user", "content": [text("x" * 212), image("pictures/1.png")]},
        ANSWER,
    ]
    [store] = prepared(row, too_long="truncate").train
    tokens, _ = store.read(0)
    assert [image.tokens for image in store.images(0)] == [6]
    assert 240 < len(tokens) < 256


@pytest.mark.slow
def test_images_at_urls_are_fetched_once_also_beside_a_remote_file(prepared, folder, model):
    pytest.importorskip("aiohttp")
    requests = []

    class Handler(SimpleHTTPRequestHandler):
        """Serves the folder, and keeps the paths of all requests with a body."""

        def do_GET(self):
            requests.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        rows = [asking(image(place), "q") for place in ("pictures/0.png", f"{url}/pictures/1.png")]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        [store] = prepared(path=f"{url}/rows.jsonl").train
        names = [os.path.basename(image.file.path) for image in store.all_images()]
        assert names == ["0.png", "1.png"]
        assert all(str(folder / "cache" / "remote") in i.file.path for i in store.all_images())
        before = len([path for path in requests if "pictures" in path])
        [other] = prepared(*rows[1:], name="local.jsonl").train
        assert content_of(other) == content_of(store, 1)
        assert len([path for path in requests if "pictures" in path]) == before
        with pytest.raises(UserError) as error:
            prepared(asking(image(f"{url}/none.png"), "q"), name="missing.jsonl")
        assert f"the image {url}/none.png there is no such file" in error.value.problems[0].reason
    finally:
        server.shutdown()
        server.server_close()
