"""Tasks about images: the same likelihoods and answers as transformers' own model gives."""

import numpy as np
import pytest
import torch
from image_models import load, make_image_folder, write_pictures
from PIL import Image
from texts import turn
from world import write_json, write_lines
from zoo import make_folder

from fsdp_trainer.data.images.image_files import ImageFiles
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.records.images import Image as Named

pytest.importorskip("lm_eval")

TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {items}
test_split: test
doc_to_text: 'say. <image>{{{{question}}}}'
doc_to_image: images
doc_to_target: answer
{more}
"""
MORE = {
    "choice": """output_type: multiple_choice
doc_to_choice: '{{choices}}'
metric_list:
  - metric: acc""",
    "written": """output_type: generate_until
generation_kwargs:
  until: ['~']
  max_gen_toks: 12
metric_list:
  - metric: exact_match""",
}
CHOICES = ["a thing", "another one", "x"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Return a folder with six pictures, whose paths in a task are relative to its data."""
    folder = tmp_path_factory.mktemp("tasks")
    write_pictures(folder / "pictures", 6)
    return folder


def task_of(folder, name, rows):
    items, file = folder / f"{name}.jsonl", folder / f"{name}.yaml"
    write_lines(items, rows)
    file.write_text(TASK.format(name=name, items=items, more=MORE[name]))
    return str(file)


def inputs_of(folder, model, question, image, chat=False):
    """Return what transformers' own processor makes of a question with an image."""
    processor = ImageProcessor(str(model)).processor
    text = f"say. {processor.image_token}{question}"
    if chat:
        parts = [{"type": "text", "text": "say. "}, {"type": "image"}]
        chat = [turn("user", [*parts, {"type": "text", "text": question}])]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
    picture = Image.open(folder / image)
    return processor, processor(text=[text], images=[picture], return_tensors="pt")


def best_choice(theirs, folder, model, question, image):
    """Return the choice that transformers' model finds most likely after a question."""
    processor, inputs = inputs_of(folder, model, question, image)
    scores = []
    for choice in CHOICES:
        tokens = torch.tensor(
            [processor.tokenizer(f" {choice}", add_special_tokens=False).input_ids]
        )
        given = dict(inputs) | {"input_ids": torch.cat([inputs["input_ids"], tokens], 1)}
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            if name in given:
                more = torch.full_like(tokens, int(name == "attention_mask"))
                given[name] = torch.cat([given[name], more], 1)
        logits = theirs(**given).logits[0, -tokens.shape[1] - 1 : -1]
        scores.append(logits.log_softmax(-1).gather(1, tokens.T).sum().item())
    return max(range(len(CHOICES)), key=scores.__getitem__)


@torch.no_grad()
def test_choices_about_images_are_those_of_transformers_also_during_a_training(
    evaluate, train, tmp_path, pictures
):
    """The expected answers are right in all items but one. Ranks have unequally many; a training
    has one rank."""
    model = make_image_folder(tmp_path / "qwen3_vl", "qwen3_vl")
    theirs = load(model)
    rows = []
    for i in range(5):
        image, question = f"pictures/{i}.png", f"what is in number {i * i}?"
        best = best_choice(theirs, pictures, model, question, image)
        answer = (best + (i == 2)) % len(CHOICES)
        rows.append({"question": question, "images": [image], "choices": CHOICES, "answer": answer})
    task = task_of(pictures, "choice", rows)
    words = "implementation=transformers sharded=true rows=2"
    said = evaluate(model, [task], words, ranks=2)
    assert said["choice"]["acc"] == pytest.approx(0.8)

    chats = pictures / "chats.jsonl"
    content = [{"type": "image", "image": "pictures/1.png"}, {"type": "text", "text": "what?"}]
    answer = turn("assistant", "a thing")
    write_json(chats, {"messages": [turn("user", content), answer]})
    own = (
        f"model.init_from={model} data.path={chats} batch.seq_len=128 batch.rows=2"
        " train.steps=1 optim.lr=0 precision=fp32 launch.device=cpu"
    )
    run = train("run", own, f"evaluation.tasks=[{task}]", base=[])
    assert run.metrics[-1]["tasks"]["choice/acc"] == pytest.approx(0.8)


@torch.no_grad()
def test_answers_about_images_are_those_of_transformers(evaluate, tmp_path, pictures):
    model = make_image_folder(tmp_path / "llava", "llava")
    theirs = load(model)
    rows = []
    for i in range(3):
        processor, inputs = inputs_of(pictures, model, f"{i}?", f"pictures/{i}.png", chat=True)
        length = inputs["input_ids"].shape[1]
        tokens = theirs.generate(**inputs, max_new_tokens=12, do_sample=False)[0, length:]
        text = processor.tokenizer.decode(tokens, skip_special_tokens=True)
        rows.append({"question": f"{i}?", "images": [f"pictures/{i}.png"], "answer": text})
    task = task_of(pictures, "written", rows)
    said = evaluate(model, [task], "sharded=true rows=1 chat=true", ranks=2)
    assert said["written"]["exact_match"] == 1


def test_a_task_with_images_that_do_not_fit_is_refused(evaluate, tmp_path, pictures):
    row = {"question": "<image>?", "images": ["pictures/0.png"], "choices": CHOICES, "answer": 0}
    model = make_image_folder(tmp_path / "llava", "llava")
    gemma = make_image_folder(tmp_path / "gemma3", "gemma3")
    wrong = {
        "use  implementation=transformers": (row | {"question": "?"}, gemma),
        "has 1 image, and the chat template shows 2": (row, model),
        "pictures/none.png": (row | {"question": "?", "images": ["pictures/none.png"]}, model),
        "the model reads only text": (row | {"question": "?"}, make_folder(tmp_path / "text")),
    }
    for number, (message, (item, folder)) in enumerate(wrong.items()):
        task = task_of(pictures, "choice", [item])
        refused = evaluate(folder, [task], code=2)
        assert message in refused, number
        assert "choice, item 0" in refused, number


def test_pictures_that_code_of_a_task_gives_keep_their_numbers_and_how_they_are_turned(tmp_path):
    from fsdp_trainer.evaluation.harness import as_files

    exif = Image.Exif()
    exif[0x112] = 6
    numbers = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
    Image.fromarray(numbers).save(tmp_path / "turned.png", exif=exif)
    turned, files = Image.open(tmp_path / "turned.png"), ImageFiles(tmp_path)
    assert (read_picture(files, as_files(turned)) == np.rot90(numbers, -1)).all()
    deep = Image.fromarray(numbers[..., 0].astype(np.uint16) * 256)
    [content] = as_files([deep])
    assert (read_picture(files, content)[..., 0] == numbers[..., 0]).all()


def read_picture(files, content):
    """Return the numbers of an image that are read from the bytes of its file."""
    return np.asarray(files.opened(Named(content=content))[1])
