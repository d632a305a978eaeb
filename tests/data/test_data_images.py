"""Images in the data: every form that rows have, what is stored of them, and what is refused."""

import base64
import json
import os
import re
import shutil
from collections import Counter

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_models import make_image_folder, write_pictures
from PIL import Image
from refused import refusal, refused
from texts import BYTES, turn
from tokenizers import Tokenizer, processors
from transformers.image_utils import load_image

from fsdp_trainer.config.schema import Batch, Data
from fsdp_trainer.data.data_statistics import summary_lines
from fsdp_trainer.data.images.image_files import ImageFiles
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.media.kinds import reader_of
from fsdp_trainer.data.prepared import prepare
from fsdp_trainer.data.prepared_data import build_template
from fsdp_trainer.data.records.images import Image as Named
from fsdp_trainer.data.store import findings
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

ANSWER = turn("assistant", "a!")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_image_folder(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5_vl")


@pytest.fixture
def folder(tmp_path):
    """Return a folder with four pictures in `pictures`."""
    write_pictures(tmp_path / "pictures", 4)
    return tmp_path


@pytest.fixture
def prepared(model, folder, jsonl):
    """Return `prepared(*rows, **keys of data)`, which prepares the rows of a file in `folder`."""

    def make(*rows, name="rows.jsonl", model=model, **keys):
        if rows:
            jsonl(*rows, name=name)
        data = Data(**{"path": f"{folder}/{name}", **keys})
        tokenizer = load_tokenizer(model)
        reader = reader_of(ImageProcessor(str(model)), folder / "cache")
        template, root = build_template(data, tokenizer), folder / "cache"
        kind = keys.get("kind")
        return prepare(data, Batch(seq_len=256), tokenizer, template, root, None, kind, reader)

    return make


def content_of(store, sample=0):
    """Return the text of a sample without the tokens of images, and its images' digests."""
    tokens, _ = store.read(sample)
    text = BYTES.decode([int(t) for t in tokens if t < 256])
    return text, [image.file.digest for image in store.media(sample)]


def saying(*contents, **columns):
    """Return a row of questions with these contents, each with the answer."""
    pairs = [(turn("user", content), ANSWER) for content in contents]
    return {"messages": [turn for pair in pairs for turn in pair]} | columns


def asking(*parts, **columns):
    return saying([*parts], **columns)


def image(place):
    return {"type": "image", "image": place}


def text(words):
    return {"type": "text", "text": words}


ROW = asking(image("pictures/0.png"), text("q"))


def bytes_of(folder, name="0.png"):
    return (folder / "pictures" / name).read_bytes()


PARTS = """
{"type": "image", "image": "AT"}
{"type": "image", "image": "FOLDER/AT"}
{"type": "image", "image": "file://FOLDER/AT"}
{"type": "image", "image": "BASE64"}
{"type": "image", "image": "IN_LINES"}
{"type": "image_url", "image_url": {"url": "data:image/png;base64,IN_LINES"}}
{"type": "image", "path": "AT"}
{"type": "image_url", "image_url": {"url": "data:image/png;base64,BASE64"}}
{"type": "input_image", "image_url": "data:image/png;base64,BASE64"}
"""
ROWS = """
{"messages": [{"role": "user", "content": [{"type": "image"}, WHAT]}, ANSWER], "images": ["AT"]}
{"messages": [{"role": "user", "content": "<image>what?"}, ANSWER], "images": ["AT"]}
{"messages": [{"role": "user", "content": "what?"}, ANSWER], "images": ["AT"]}
{"messages": [{"role": "user", "content": "what?", "images": ["AT"]}, ANSWER]}
{"conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "a!"}], "image": "AT"}
{"prompt": "<image>what?", "completion": "a!", "images": ["AT"]}
{"instruction": "what?", "output": "a!", "image": "AT"}
"""  # noqa: E501 - rows as they stand in a file


def test_all_forms_of_an_image_give_the_same_sample(prepared, folder):
    """A part of a question, or a row."""
    texts = {
        "AT": "pictures/0.png",
        "FOLDER": str(folder),
        "BASE64": base64.b64encode(bytes_of(folder)).decode(),
        "IN_LINES": json.dumps(base64.encodebytes(bytes_of(folder)).decode())[1:-1],
        "WHAT": json.dumps(text("what?")),
        "ANSWER": json.dumps(ANSWER),
    }
    given = re.sub("|".join(texts), lambda name: texts[name[0]], PARTS + ROWS)
    rows = [json.loads(line) for line in given.split("\n") if line]
    rows = [asking(row, text("what?")) if "type" in row else row for row in rows]
    stores = [prepared(row, name=f"{i}.jsonl").train[0] for i, row in enumerate(rows)]
    expected = content_of(stores[0])
    assert len(expected[1]) == 1
    for store, row in zip(stores, rows, strict=True):
        assert content_of(store) == expected, row


def test_a_table_with_bytes_is_read(prepared, folder):
    pictures = [{"bytes": bytes_of(folder, f"{i}.png"), "path": "elsewhere.png"} for i in range(3)]
    rows = [saying("<image>what?", images=[picture]) for picture in pictures]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    [store] = prepared(name="rows.parquet").train
    assert len(store) == 3
    assert len({content_of(store, i)[1][0] for i in range(3)}) == 3
    assert store.media(0)[0].file.path.startswith(f"{folder}/cache/images")


def test_images_stand_where_the_turns_have_them_and_are_not_supervised(prepared, model):
    parts = [text("see "), image("pictures/0.png"), text(" and "), image("pictures/1.png")]
    data = prepared(saying(parts, [image("pictures/2.png"), text("more")]), loss_on="all")
    [store] = data.train
    (tokens, weights), token = store.read(0), ImageProcessor(str(model)).token
    places = np.flatnonzero(tokens == token)
    assert [image.tokens for image in store.media(0)] == [6, 12, 12], "in parts of 8 × 8 pixels"
    assert len(places) == 30
    assert f"3 images, {30 / len(tokens):.1%} of the tokens" in summary_lines(data, 256)
    assert not weights[places].any()
    assert [os.path.basename(i.file.path) for i in store.media(0)] == ["0.png", "1.png", "2.png"]


def test_both_answers_of_a_pair_have_the_images_of_the_prompt(prepared):
    user = turn("user", [image("pictures/0.png"), text("which?")])
    chosen, rejected = (turn("assistant", answer) for answer in ("yes", "no"))
    row = {"chosen": [user, chosen], "rejected": [user, rejected]}
    [store] = prepared(row).train
    assert len(store) == 2
    assert store.media(0) == store.media(1) != []


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("none.png", None, "the image none.png does not exist"),
        ("text.png", b"no picture at all", "the image text.png cannot be decoded"),
        (
            "a.eps",
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
            "is none of PNG",
        ),
        ("big.png", (10_000, 10_000), "10,000 × 10,000 pixels, and at most 67,108,864"),
        ("bomb.png", (20_000, 20_000), "could be decompression bomb"),
        ("half.png", "half", "the image half.png cannot be decoded"),
        ("empty.png", b"", "the image empty.png cannot be decoded: it is empty"),
        (
            "thin.png",
            Image.new("RGB", (1, 300)),
            "the image thin.png of 1 × 300 pixels is refused by the model's",
        ),
        ("map.tiff", Image.new("I", (24, 20), 10**5), "numbers from 100,000 to 100,000"),
    ],
)
def test_an_image_that_cannot_be_read_is_named_with_file_and_line(
    prepared, folder, name, content, reason
):
    content = bytes_of(folder)[:400] if content == "half" else content
    content = Image.new("1", content) if isinstance(content, tuple) else content
    if isinstance(content, Image.Image):
        content.save(folder / name)
    elif content is not None:
        (folder / name).write_bytes(content)
    bad = asking(image(name), text("q"))
    (problem,) = refused(prepared, ROW, bad).problems
    assert problem.what == f"{folder}/rows.jsonl:2"
    assert reason in problem.reason
    [skipped] = prepared(ROW, bad, on_error="skip").train
    assert len(skipped) == 1


def test_a_processor_that_takes_no_image_is_named_whatever_happens_to_bad_rows(
    prepared, model, folder, monkeypatch
):
    def refuse(self, picture):
        raise ValueError("no size for it")

    monkeypatch.setattr(ImageProcessor, "_text", refuse)
    (problem,) = refused(prepared, ROW, on_error="skip").problems
    assert "its processor takes no image: no size for it" in problem.reason
    assert problem.what == str(model)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tiff"])
def test_a_picture_is_turned_as_transformers_turns_it(folder, kind):
    whole = Image.open(folder / "pictures/1.png")
    files, exif = ImageFiles(folder / "cache"), Image.Exif()
    for orientation in range(1, 9):
        exif[0x112] = orientation
        path = folder / f"{orientation}.{kind}"
        whole.save(path, exif=exif)
        expected = load_image(str(path))
        for named in (Named(str(path)), Named(content=path.read_bytes())):
            file, picture = files.opened(named)
            assert file.size == files.find(named, "").size == expected.size
            assert (np.asarray(picture) == np.asarray(expected)).all(), orientation


def colours(*shape, high=256, dtype=np.uint8):
    return (np.random.default_rng(0).random(shape) * high).astype(dtype)


SIXTEEN = colours(20, 24, high=65536, dtype=np.uint16)
FRACTIONS = colours(20, 24, high=1, dtype=np.float32)
RGB, RGBA = Image.fromarray(colours(20, 24, 3)), Image.fromarray(colours(20, 24, 4))
LOST = {  # picture, its form and options: what is said, and the numbers if not transformers'
    "transparent": (RGBA, "png", {}, "images_transparent", None),
    "grey_and_transparent": (RGBA.convert("LA"), "png", {}, "images_transparent", None),
    "palette": (RGB.quantize(16), "png", {"transparency": 3}, "images_transparent", None),
    "opaque": (RGB.convert("RGBA"), "png", {}, None, None),
    "ink": (RGB.convert("CMYK"), "tiff", {}, None, None),
    "16_bits": (Image.fromarray(SIXTEEN), "png", {}, "images_scaled", SIXTEEN >> 8),
    "16_bits_of_8": (Image.fromarray(colours(20, 24, dtype=np.uint16)), "png", {}, None, None),
    "32_bits": (
        Image.fromarray(SIXTEEN.astype(np.int32)), "tiff", {}, "images_scaled", SIXTEEN >> 8
    ),
    "fractions": (
        Image.fromarray(FRACTIONS), "tiff", {}, "images_scaled", (FRACTIONS * 255).round()
    ),
    "animation": (
        RGB, "gif", {"save_all": True, "append_images": [RGBA]}, "images_first_frame", None
    ),
    "telephone": (RGB, "mpo", {"save_all": True, "append_images": [RGB]}, None, None),
    "broken_exif": (RGB, "png", {"exif": b"Exif\0\0MM" + b"\x99" * 9}, "images_not_turned", RGB),
}  # fmt: skip


def test_what_a_picture_loses_is_said_and_its_numbers_are_right(prepared, folder):
    rows = []
    for name, (picture, form, options, _, numbers) in LOST.items():
        path = folder / f"{name}.{form}"
        picture.save(path, **options)
        rows.append(asking(image(path.name), text(name)))
        _, shown = ImageFiles(folder / "cache").opened(Named(str(path)))
        expected = np.asarray(load_image(str(path)) if numbers is None else numbers)
        if expected.ndim == 2:
            expected = np.repeat(expected[..., None], 3, 2)
        assert (np.asarray(shown) == expected).all(), name
    [store] = prepared(*rows).train
    counted = {key: store.counts[key] for key in store.counts if key in findings.KINDS}
    assert counted == Counter(one[3] for one in LOST.values() if one[3])
    lines = [f"{folder}/rows.jsonl:{1 + [*LOST].index(name)}" for name in ("16_bits", "32_bits")]
    assert store.examples["images_scaled"][:2] == lines


def test_a_first_token_that_processors_add_and_the_template_does_not_is_said(
    prepared, model, folder
):
    rows = [saying([image("pictures/0.png"), text("q")])]
    assert not prepared(*rows).train[0].counts.get("no_first_token")
    shutil.copytree(model, folder / "adds")
    tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
    first = [("<|pad|>", tokenizer.token_to_id("<|pad|>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<|pad|> $A", special_tokens=first)
    tokenizer.save(f"{folder}/adds/tokenizer.json")
    assert prepared(*rows, model=folder / "adds").train[0].counts["no_first_token"] == 1


def test_rows_whose_images_and_places_differ_are_refused(prepared):
    for empty in (None, []):
        assert "has 0 images, and its turns have places for 1" in refusal(
            prepared, saying("<image>?", images=empty)
        )
    for content in ("<image> or <image>?", "<image> or \ufffc?"):
        assert "has 1 image, and its turns have places for 2" in refusal(
            prepared, saying(content, images=["pictures/0.png"])
        )


def test_an_image_that_was_changed_is_tokenized_again(prepared, folder):
    [before] = prepared(ROW).train
    first = before.media(0)
    [same] = prepared(ROW).train
    assert same.fingerprint == before.fingerprint
    Image.new("RGB", (64, 64)).save(folder / "pictures/0.png")
    [after] = prepared(ROW).train
    assert after.fingerprint != before.fingerprint
    assert after.media(0)[0].tokens != first[0].tokens
    os.remove(folder / "pictures/0.png")
    assert "does not exist" in refusal(prepared, ROW)


def test_the_same_rows_beside_other_pictures_are_other_data(prepared, folder):
    [before] = prepared(ROW).train
    elsewhere = folder / "elsewhere"
    write_pictures(elsewhere / "pictures", 1, size=(64, 64))
    [after] = prepared(ROW, name="elsewhere/rows.jsonl").train
    assert after.media(0)[0].file.path == f"{elsewhere}/pictures/0.png"
    assert after.fingerprint != before.fingerprint


def test_a_sample_that_is_cut_ends_before_an_image_that_is_cut(prepared):
    first = [image("pictures/0.png"), text("q")]
    second = [text("x" * 212), image("pictures/1.png")]
    [store] = prepared(saying(first, second), too_long="truncate").train
    tokens, _ = store.read(0)
    assert [image.tokens for image in store.media(0)] == [6]
    assert 240 < len(tokens) < 256


def test_images_at_urls_are_fetched_once_also_beside_a_remote_file(prepared, folder):
    url, store = "memory://bucket/images", fsspec.filesystem("memory")
    rows = [asking(image(place), "q") for place in ("pictures/0.png", f"{url}/pictures/1.png")]
    for name in ("0.png", "1.png"):
        store.pipe(f"/bucket/images/pictures/{name}", bytes_of(folder, name))
    store.pipe("/bucket/images/rows.jsonl", "\n".join(map(json.dumps, rows)).encode())
    try:
        [remote] = prepared(path=f"{url}/rows.jsonl").train
        files = [image.file for image in remote.all_media()]
        assert [os.path.basename(file.path) for file in files] == ["0.png", "1.png"]
        assert all(f"{folder}/cache/remote" in file.path for file in files)
        [local] = prepared(rows[1], name="local.jsonl").train
        assert content_of(local) == content_of(remote, 1)
        assert [image.file for image in local.all_media()] == files[1:], "with its time of change"
        with pytest.raises(UserError, match=f"the image {url}/none.png there is no such file"):
            prepared(asking(image(f"{url}/none.png"), "q"), name="missing.jsonl")
    finally:
        store.rm("/bucket", recursive=True)
