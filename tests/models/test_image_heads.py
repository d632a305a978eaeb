"""Heads on models that read images, against transformers' classes and processors."""

import json
from base64 import b64encode
from itertools import accumulate

import numpy as np
import pytest
import torch
import transformers
from folders import copy_rows
from heads import STEP
from image_models import make_image_folder, write_pictures
from PIL import Image
from safetensors.torch import load_file
from starlette.testclient import TestClient
from stored import assert_byte_equal
from transformers import AutoModel, AutoModelForImageTextToText
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from world import read_json, read_lines, verify, write_lines

from fsdp_trainer.apps.chat.app import make_app
from fsdp_trainer.apps.chat.readings import ServedReader
from fsdp_trainer.config.methods import ObjectiveChoice
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.methods.contrast import StepTexts, loss_of_texts
from fsdp_trainer.methods.text_reader import TextReader

OURS = ["model.implementation=transformers", "precision=fp32", *STEP, "batch.seq_len=160"]
SHOWN = {"qwen": "<|vision_start|><|image_pad|><|vision_end|>", "gemma3": "<start_of_image>"}
HEADS = {
    "classify": ("ForSequenceClassification", GenericForSequenceClassification),
    "rerank": ("ForSequenceClassification", GenericForSequenceClassification),
    "tag": ("ForTokenClassification", GenericForTokenClassification),
}
FILES = {"classify": "classes", "rerank": "lists", "tag": "tags", "embed": "queries"}
CASES = [
    ("qwen2_5_vl", "classify", 1), ("gemma3", "classify", 2), ("qwen3_vl", "embed", 2),
    ("llava", "rerank", 2), ("qwen3_5", "tag", 2),
]  # fmt: skip
"""Kinds, objectives, and ranks, to which two rows are dealt."""


@pytest.fixture
def data(tmp_path):
    """Return a function that returns the file of rows for an objective, beside its pictures."""
    write_pictures(tmp_path / "pictures", 5)

    def file(objective):
        return copy_rows(tmp_path / f"{FILES[objective]}_with_images.jsonl")

    return file


def class_of(folder, objective):
    """Return transformers' class with a head, made of its generic one where it has none."""
    base = AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    if objective == "embed":
        return type(base)
    ending, generic = HEADS[objective]
    name = type(base).__name__.removesuffix("Model") + ending
    parent = next(c for c in type(base).__mro__ if c.__name__.endswith("PreTrainedModel"))
    return getattr(transformers, name, None) or type(name, (generic, parent), {})


def with_head(folder, objective, names, tmp_path):
    """Return a folder of the model with a head of random weights, as transformers saves it."""
    after = tmp_path / "start"
    make_image_folder(after, folder.name)
    if objective == "embed":
        return folder
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    whole.config.id2label = dict(enumerate(names))
    whole.config.label2id = {name: i for i, name in enumerate(names)}
    torch.manual_seed(1)
    model = class_of(folder, objective)._from_config(whole.config, dtype=torch.float32)
    model.model.load_state_dict(whole.model.state_dict())
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(after)
    return after


def parts_of(value):
    """Return a text of a row with <image> for each of its images, and their files."""
    if isinstance(value, str):
        return value, []
    if isinstance(value, dict):
        return f"<image>{value.get('text', '')}", [value["image"]]
    texts = [part.get("text", "<image>") for part in value]
    return "".join(texts), [part["image"] for part in value if "image" in part]


class Theirs:
    """transformers' model and processor of a folder."""

    def __init__(self, folder, objective):
        self.kind = read_json(folder / "config.json")["model_type"]
        self.model = class_of(folder, objective).from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = ImageProcessor(str(folder)).processor

    def inputs(self, text, files, folder):
        shown = SHOWN.get(self.kind[:4] if "qwen" in self.kind else self.kind, "<image>")
        pictures = [Image.open(folder / file) for file in files]
        text = text.replace("<image>", shown)
        return self.processor(text=[text], images=pictures or None, return_tensors="pt")

    def output(self, value, folder):
        return self.model(**self.inputs(*parts_of(value), folder))


def loss_of_classes(theirs, rows, folder):
    losses, names = [], theirs.model.config.label2id
    for row in rows:
        text, files = parts_of(row["text"])
        if "<image>" not in text and row.get("images"):
            text = f"<image>{text}"
        second, more = parts_of(row.get("text_pair", ""))
        inputs = theirs.inputs(text + second, [*files, *row.get("images", []), *more], folder)
        losses.append(theirs.model(**inputs, labels=torch.tensor([names[row["label"]]])).loss)
    return torch.stack(losses).mean()


def loss_of_lists(theirs, rows, folder):
    losses = []
    for row in rows:
        scores = []
        for document in row["documents"]:
            text, images = row["query"] + document, row.get("images", [])
            inputs = theirs.inputs(text, images[: text.count("<image>")], folder)
            scores.append(theirs.model(**inputs).logits[0, 0])
        wanted = torch.tensor(row["scores"]).float()
        shares = wanted.softmax(0) if 0.5 in row["scores"] else wanted / wanted.sum()
        losses.append(-(shares * torch.stack(scores).log_softmax(0)).sum())
    return torch.stack(losses).mean()


def loss_of_tags(theirs, rows, folder):
    total, count, names = 0, 0, theirs.model.config.label2id
    for row in rows:
        words, files = " ".join(row["tokens"]), row.get("images", [])
        inputs = theirs.inputs("<image>" * len(files) + words, files, folder)
        ids = inputs["input_ids"][0]
        # a byte is a token
        begins = [0, *accumulate(len(word) + 1 for word in row["tokens"])]
        places = [len(ids) - len(words) + begin for begin in begins[:-1]]
        labels = torch.full_like(ids, -100)
        labels[places] = torch.tensor([names[tag] for tag in row["tags"]])
        logits = theirs.model(**inputs).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        count += len(places)
    return total / count


def vectors_of(theirs, rows, folder):
    vectors, kinds = [], []
    for row in rows:
        texts = [(0, row["query"])]
        for kind, name in ((1, "positive"), (2, "negative")):
            given = row.get(name, [])
            texts += [(kind, one) for one in (given if isinstance(given, list) else [given])]
        for kind, value in texts:
            state = theirs.output(value, folder).last_hidden_state[0, -1]
            vectors.append(torch.nn.functional.normalize(state.double(), dim=0))
            kinds.append(kind)
    return torch.stack(vectors), torch.tensor(kinds)


def loss_of_queries(theirs, rows, folder):
    vectors, kinds = vectors_of(theirs, rows, folder)
    nothing, same = torch.full(kinds.shape, torch.nan), torch.arange(float(len(kinds)))
    texts = StepTexts(vectors, kinds, nothing, same, len(rows))
    return loss_of_texts(texts, ObjectiveChoice(temperature=0.05)) / len(rows)


LOSSES = {
    "classify": loss_of_classes, "rerank": loss_of_lists, "tag": loss_of_tags,
    "embed": loss_of_queries,
}  # fmt: skip


@pytest.mark.parametrize("kind, objective, ranks", CASES)
def test_heads_read_images_as_transformers_classes_do(
    train, folders, data, tmp_path, kind, objective, ranks
):
    """Loss and each gradient, packed; exports load there."""
    file = data(objective)
    rows, labels = read_lines(file), ["LABEL_0"]
    if objective == "classify":
        labels = ["cat", "cow", "dog"]
    if objective == "tag":
        labels = ["B-L", "B-P", "O"]
    start = with_head(folders(kind), objective, labels, tmp_path)
    theirs = Theirs(start, objective)
    loss = LOSSES[objective](theirs, rows, tmp_path)
    loss.backward()
    words = [f"objective={objective}", f"model.init_from={start}", f"data.path={file}", *OURS]
    smallest = 1.0 if kind == "qwen3_5" else 0.1  # its recurrence rounds sums over all tokens
    run = train("run", *words, f"batch.micro_rows={2 // ranks}", ranks=ranks, base=[])
    assert run["objective"] == pytest.approx([loss.item()], rel=2e-6)
    reader = class_of(run.folder / "hf", objective)
    after, about = reader.from_pretrained(
        run.folder / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(about.values()), about
    assert read_json(run.folder / "hf/config.json")["architectures"] == [reader.__name__]
    before = Theirs(start, objective).model.state_dict()
    changed = 0
    for name, parameter in theirs.model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        error = (before[name] - after.get_parameter(name) - gradient).abs() - 1.2e-7
        largest = gradient.abs().max()
        about = f"{name}: {error.max():.1e} of {largest:.1e}"
        assert error.max() <= 1e-5 * largest.clamp_min(smallest), about
        changed += ("vis" in name or "project" in name) and bool(gradient.any())
    assert changed > 10, "tower and projector are trained"


def run_of(train, name, folder, file, objective, *more, **options):
    words = [f"objective={objective}", f"model.init_from={folder}", f"data.path={file}", *OURS]
    return train(name, *words, *more, base=[], **options)


def part(folder, name):
    """Return an image as a request holds it."""
    content = b64encode((folder / name).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def test_adapters_resume_and_the_server_gives_their_numbers(train, folders, data, tmp_path):
    """Packed and in another number of ranks; the merged export is what the server of a run gives.
    A held-out share has images too."""
    file = data("classify")
    write_lines(file, read_lines(file) * 4)
    words = "adapter=lora adapter.rank=2 checkpoint.merge=true batch.rows=2 data.validation=0.2"
    own = [*words.split(), "checkpoint.every=1", "optim.lr=0.1", "train.validate_every=2"]
    place = folders("qwen2_5_vl"), file, "classify"
    whole = run_of(train, "whole", *place, *own, "train.steps=2")
    run_of(train, "run", *place, *own, "train.steps=1")
    run = run_of(train, "run", *place, *own, "train.steps=2")
    assert run["objective"] == whole["objective"]
    assert_byte_equal(load_file(whole.folder / "hf/model.safetensors"), weights_of(run))
    said = verify(f"source={run.folder}", f"hf={run.folder}/hf")
    assert said.count(" equal ") == 2
    assert "numbers with an image equal" in said
    assert verify(f"source={run.folder}", f"hf={run.folder}/adapter").count(" equal ") == 2
    theirs = Theirs(run.folder / "hf", "classify")
    card = (run.folder / "adapter/README.md").read_text()
    code = card.partition("```python")[2].partition("```")[0]
    code, _, processor = code.rpartition("processor =")
    assert processor == ' AutoProcessor.from_pretrained("BASE")\n', "which needs torchvision"
    names = {}
    exec(code.replace("FOLDER", f"{run.folder}/adapter").replace("BASE", str(place[0])), names)
    shown = theirs.inputs("<image>what is it?", ["pictures/1.png"], tmp_path)
    with torch.no_grad():
        logits = [one(**shown).logits[0] for one in (names["model"].eval(), theirs.model)]
    assert logits[0].tolist() == pytest.approx(logits[1].tolist(), abs=1e-5)
    reader = TextReader.load(run.folder)
    client = TestClient(
        make_app(ServedReader("model", None, 0, "", reader)), base_url="http://127.0.0.1"
    )
    text = {"type": "text", "text": "what is it?"}
    shown = {"content": [part(tmp_path, "pictures/1.png"), text]}
    given = [shown, "what is it?", [shown, "and?"]]
    answer = client.post("/v1/classify", json={"input": given})
    texts = ["<image>what is it?", "what is it?", "<image>what is it?and?"]
    for text, one in zip(texts, answer.json()["data"], strict=True):
        files = ["pictures/1.png"] * text.count("<image>")
        with torch.no_grad():
            logits = theirs.model(**theirs.inputs(text, files, tmp_path)).logits[0]
        assert one["probs"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
    place = {"content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}
    refused = client.post("/v1/classify", json={"input": [place]})
    assert "should be a data URL" in refused.text


def weights_of(run):
    return load_file(run.folder / "hf/model.safetensors")


def test_pages_are_found_by_their_images(train, world, folders, tmp_path):
    """A row without documents has its images in their place. Equal tokens are no equal images."""
    (tmp_path / "pictures").mkdir(exist_ok=True)
    for i in range(4):
        noise = np.random.default_rng(i).integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"pictures/{i}.png")
    pages = [{"query": f"page {i}", "image": f"pictures/{i}.png"} for i in range(4)]
    file = tmp_path / "pages.jsonl"
    write_lines(file, pages)
    held_out = [f"data.validation={file}", "train.validate_every=1", "optim.lr=0.01"]
    run = run_of(train, "run", folders("qwen2_5_vl"), file, "embed", *held_out)
    words = ["evaluate", str(run.folder), f"tasks=[{file}]", "format=json"]
    said = world.command(*words, f"mined={tmp_path}/hard.jsonl", "hardest=2", ranks=2)[0]
    metrics = json.loads(said.out)["pages"]
    for name in ("recall_1", "mrr"):
        assert metrics[name] == pytest.approx(run.metrics[-1][f"validation_{name}"])
    (image,) = read_lines(tmp_path / "hard.jsonl")[2]["positive"][0]
    assert image == {"type": "image", "image": str(tmp_path / "pictures/2.png")}
    again = run_of(train, "again", run.folder / "hf", tmp_path / "hard.jsonl", "embed")
    assert again["objective"][0] > 0


def test_images_of_heads_that_cannot_be_read_are_refused(train, folders, data, tmp_path):
    file = data("classify")
    place = folders("qwen2_5_vl"), file, "classify"
    rows = read_lines(file)
    for change, reason in (
        ({"images": []}, "has 0 images, and its turns have places for 1"),
        ({"text": "<|image_pad|>"}, "its text shows 2"),
        ({"images": ["pictures/none.png"]}, "none.png does not exist"),
        ({"text": {"body": "what?"}}, "should be a text or its media"),
    ):
        write_lines(file, [rows[0] | change, *rows[1:]])
        assert reason in run_of(train, "run", *place, code=2).err
    write_lines(file, rows)
    cut = "data.too_long=truncate batch.seq_len=32 data.max_lost=1"
    run = run_of(train, "cut", *place, *cut.split())
    assert "1 dropped" in run.out, "an image would be cut"
    text = run_of(
        train, "text", folders("gemma3"), file, "classify", "model.implementation=auto", code=2
    )
    assert "reads only text" in text.err
    assert "holds pictures ('images'), and only text is read" in text.err
