"""Models that read images, against transformers' own model, processor and AdamW."""

import re
import shutil
from functools import partial
from pathlib import Path

import inject
import numpy as np
import pytest
import torch
from image_models import CONFIGS, load, write_pictures
from mtp_models import WEIGHT, Theirs, steps_of
from other_models import ADAMW, RUN, SGD, adamw_steps, log_probabilities, loss_of
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from stored import assert_byte_equal, checkpoint, save_tensors, stored, tensors
from texts import turn
from transformers import Gemma3ForSequenceClassification
from world import cli, edit_json, read_json, verify, write_lines

import fsdp_trainer
from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.apps.quickstart import quickstart_shapes
from fsdp_trainer.apps.quickstart.quickstart_shapes import drawn, held_out
from fsdp_trainer.base.safe_text import visible
from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.order.packing import best_fit
from fsdp_trainer.data.records.messages import read_turns
from fsdp_trainer.models.from_config.freeze import freeze

SEQ_LEN = 160
SETTINGS = [
    f"model.implementation=transformers batch.seq_len={SEQ_LEN}",
    "batch.micro_rows=1",
    *RUN,
]
ONE_STEP = [*SGD, "optim.lr=1 train.steps=1"]
ENDS = "<|im_end|>"


def image(name):
    place = name if isinstance(name, Path) else f"pictures/{name}"
    return {"type": "image", "image": str(place)}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return turn("user", content)


def assistant(words):
    return turn("assistant", words)


def chats_of(names):
    """Return chats with no, one, or two images in a turn, and one with images in two turns."""
    questions = [
        [image(names[0]), text("what is it?")],
        "just words?",
        [text("look: "), image(names[1]), text(" and "), image(names[2])],
        [image(names[3]), text("and now?")],
        "again only words, some more of them?",
    ]
    chats = [[user(words), assistant(f"it is {i * i}!")] for i, words in enumerate(questions)]
    return [*chats, [*chats[0], user([image(names[4]), text("this?")]), assistant("the other")]]


def write_rows(file, rows):
    write_lines(file, rows)
    return file


@pytest.fixture
def data(tmp_path):
    """Return a file of chats, and the chats; the pictures are in a folder beside the file."""
    chats = chats_of(write_pictures(tmp_path / "pictures", 5))
    return write_rows(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats]), chats


@pytest.fixture
def pairs(tmp_path):
    """Return a file of two answers to each of three prompts, and these as six chats."""
    write_pictures(tmp_path / "pictures", 3)
    prompts = [[user([image(f"{i}.png"), text("which?")])] for i in range(3)]
    prompts[1] = [user("no image here")]
    yes, no = [assistant("yes, it is")], [assistant("no!")]
    rows = [{"prompt": prompt, "chosen": yes, "rejected": no} for prompt in prompts]
    chats = [prompt + answer for prompt in prompts for answer in (yes, no)]
    return write_rows(tmp_path / "pairs.jsonl", rows), chats


def processed(processor, chat, folder, is_prompt=False):
    """Return what transformers' own processor makes of a chat."""
    rendered = processor.tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=is_prompt
    )
    parts = [part for turn in chat if isinstance(turn["content"], list) for part in turn["content"]]
    pictures = [Image.open(folder / p["image"]) for p in parts if p["type"] == "image"]
    return processor(text=[rendered], images=pictures or None, return_tensors="pt")


def samples_of(folder, file, chats):
    """Return the processor's inputs of each chat, and which tokens are answers."""
    processor, samples = ImageProcessor(str(folder)).processor, []
    end = processor.tokenizer.convert_tokens_to_ids(ENDS)
    for chat in chats:
        inputs = processed(processor, chat, file.parent)
        tokens = inputs["input_ids"][0]
        supervised = torch.zeros(len(tokens), dtype=torch.bool)
        for i in range(1, len(chat), 2):
            first = processed(processor, chat[:i], file.parent, True)["input_ids"].shape[1]
            last = first + int((tokens[first:] == end).nonzero()[0])
            supervised[first : last + 1] = True
        samples.append((inputs, supervised))
    return samples


def of(folder, file):
    return [f"model.init_from={folder} data.path={file}", *SETTINGS]


def overrides(folder, file, samples, *more):
    """Return the settings of a run that reads all samples in each step, packed."""
    lengths = np.array([inputs["input_ids"].shape[1] for inputs, _ in samples])
    rows = len(best_fit(lengths, SEQ_LEN).offsets) - 1
    assert rows < len(samples)
    return [
        f"model.init_from={folder} data.path={file} batch.rows={rows}",
        *SETTINGS,
        *more,
    ]


def exported(run):
    return tensors(run.folder / "hf")


@pytest.mark.parametrize("kind, ranks", [*zip(CONFIGS, (1, 2, 2, 1, 3), strict=True)])
def test_each_gradient_is_that_of_transformers(train, folders, data, kind, ranks):
    """Rows are packed. Of three ranks some have no image."""
    file, chats = data
    samples = samples_of(folders(kind), file, chats)
    model = load(folders(kind))
    loss_of(model, samples).backward()
    own = overrides(folders(kind), file, samples, *ONE_STEP)
    run = train("step", *own, ranks=ranks, base=[])
    after = dict(load(run.folder / "hf").named_parameters())
    before = dict(load(folders(kind)).named_parameters())
    changed = 0
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        largest = gradient.abs().max().clamp_min(1e-3)
        error = (before[name] - after[name] - gradient).abs().max()
        assert error <= 2e-5 * max(1.0, largest), f"{name}: {error:.1e} of {largest:.1e}"
        changed += ("vis" in name or "project" in name) and bool(gradient.any())
    assert changed > 10, "tower and projector are trained"


def test_a_head_for_a_further_token_sees_images_as_transformers_module_does(
    train, folders, tmp_path, data
):
    file, chats = data
    folder = shutil.copytree(folders("qwen3_5"), tmp_path / "in")
    theirs = Theirs(load(folder))
    before = theirs.save_head(folder)
    text = read_json(folder / "config.json")["text_config"]
    edit_json(folder / "config.json", text_config=text | {"mtp_num_hidden_layers": 1})
    before |= {name: p.detach().clone() for name, p in theirs.main.named_parameters()}
    samples = samples_of(folder, file, chats)
    _, further = steps_of(theirs, samples, 1, 1.0)
    own = overrides(folder, file, samples, *ONE_STEP, f"objective.mtp={WEIGHT}")
    run = train("step", *own, ranks=2, base=[])
    assert run["mtp_loss"] == pytest.approx(further.tolist(), rel=1e-5)
    after = exported(run) | dict(load(run.folder / "hf").named_parameters())
    expected = theirs.head(torch.Tensor.detach) | dict(theirs.main.named_parameters())
    for name, value in expected.items():
        gradient = before[name] - value
        error = (after[name] - value).abs().max()
        assert error <= 2e-5 * max(1.0, gradient.abs().max()), name


def test_a_step_without_any_image_changes_nothing_of_the_tower(train, folders, tmp_path, data):
    """All ranks go through the tower, in the first step one with images and one without."""
    _, chats = data
    both = [{"messages": chats[i]} for i in (0, 1, 4, 1)]
    file = write_rows(tmp_path / "both.jsonl", both)
    own = [*of(folders("llava"), file), *SGD, "optim.lr=0.1 train.steps=2 checkpoint.every=1"]
    own += ["data.packing=none data.shuffle=false batch.rows=2"]
    run = train("run", *own, ranks=2, base=[])
    start = load(folders("llava")).state_dict()
    first, second = (
        {name.removeprefix("weights/"): value for name, value in stored(checkpoint(run, n)).items()}
        for n in (1, 2)
    )
    towers = [name for name in start if "vision_tower" in name or "projector" in name]
    assert any((start[name] != first[name]).any() for name in towers)
    assert all(torch.equal(first[name], second[name]) for name in towers)
    others = start.keys() - set(towers)
    assert any((first[name] != second[name]).any() for name in others)


def run_of(train, name, folder, file, *more, ranks=1, **options):
    own = [*of(folder, file), "optim.lr=1e-2", *more]
    return train(name, *own, ranks=ranks, base=[], **options)


def test_a_run_that_is_stopped_ends_bitwise_as_an_uninterrupted_one_and_is_verified(
    train, folders, data
):
    """Stops in the middle of an epoch. Then worker processes load the images, and all blocks of the
    language model and of the tower are computed again."""
    place = (folders("qwen3_vl"), data[0])
    rows = "batch.rows=2 data.packing=none checkpoint.every=1"
    whole = run_of(train, "whole", *place, rows, "train.steps=4")
    run_of(train, "run", *place, rows, "train.steps=2")
    other = "data.workers=1 activation_checkpoint=full"
    run = run_of(train, "run", *place, rows, "train.steps=4", other)
    assert run.event("resume")[0]["step"] == 2
    assert run["loss"] == whole["loss"]
    weights, hf = exported(run), run.folder / "hf"
    assert_byte_equal(exported(whole), weights)

    said = verify(f"source={run.folder} hf={hf} data={data[0]}")
    assert said.count("equal") == 2
    assert "logits with an image equal" in said
    with torch.no_grad():
        expected = loss_of(load(hf), samples_of(hf, *data)).item()
    assert float(re.search(r"loss ([\d.]+) on", said)[1]) == pytest.approx(expected, abs=1e-4)
    doubled = {n: 2 * w for n, w in weights.items() if "vis" in n and w.ndim == 2}
    save_tensors(hf, weights | doubled)
    assert "logits with an image DIFFER" in verify(f"source={run.folder} hf={hf}", code=3)


def part_of(name):
    if "merger" in name or "projector" in name:
        return "projector"
    return "vision" if "vis" in name else "language"


def test_a_part_can_be_frozen_by_its_name(train, folders, data):
    for kind in CONFIGS:
        model = fsdp_trainer.load_model(folders(kind), implementation="transformers")
        for part in ("vision", "projector", "language"):
            model.requires_grad_(True)
            freeze(model, [part])
            assert all(p.requires_grad == (part_of(n) != part) for n, p in model.named_parameters())
    more = "train.freeze=[vision] batch.rows=2 train.steps=1"
    run = run_of(train, "run", folders("qwen3_vl"), data[0], more)
    before, after = (
        dict(load(each).named_parameters()) for each in (folders("qwen3_vl"), run.folder / "hf")
    )
    changed = {part_of(name) for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"projector", "language"}


@pytest.mark.parametrize("kind, targets", [("llava", "all"), ("qwen3_vl", "[all,vision]")])
def test_adapters_are_on_the_language_model_and_on_the_tower_if_asked(
    train, folders, data, kind, targets
):
    """peft gives the merged model's logits. LLaVA's tower has layers with the same last names."""
    how = ["adapter=lora adapter.rank=2 batch.rows=2 train.steps=2"]
    how += [f"adapter.targets={targets} checkpoint.merge=true"]
    run = run_of(train, "run", folders(kind), data[0], *how)
    tensors = load_file(run.folder / "adapter/adapter_model.safetensors")
    assert any("language_model" in name for name in tensors)
    assert any("vis" in name for name in tensors) == (targets != "all")
    inputs, _ = samples_of(folders(kind), *data)[2]
    adapted = PeftModel.from_pretrained(load(folders(kind)), run.folder / "adapter")
    with torch.no_grad():
        expected, merged = (m(**inputs).logits for m in (adapted, load(run.folder / "hf")))
        assert (expected - load(folders(kind))(**inputs).logits).abs().max() > 1e-3
    assert (expected - merged).abs().max() < 1e-5


def change(folder):
    for file in folder.glob("*.png"):
        Image.new("RGB", (40, 40)).save(file)


def test_an_image_that_changes_during_a_run_ends_all_ranks_with_its_name(train, folders, data):
    more = "batch.rows=2 train.steps=3"
    fault = inject.at(None, partial(change, data[0].parent / "pictures"))
    run = run_of(train, "run", folders("llava"), data[0], more, ranks=2, seam=fault, code=2)
    said = "".join(rank.err for rank in run.ranks)
    assert "pictures/" in said
    assert "has changed since it was tokenized: start again" in said


def test_what_does_not_read_images_refuses_them(train, folders, data):
    """Gemma 3's language model alone is this decoder's own."""
    own = f"model.init_from={folders('gemma3')} data.path={data[0]} precision=fp32"
    run = train("run", own, "train.steps=1 batch.seq_len=128", base=[], code=2)
    assert "chats.jsonl:1" in run.err
    assert "model.implementation=transformers" in run.err


def test_steps_of_preferences_about_images_are_those_of_transformers(train, folders, pairs):
    folder, (file, chats) = folders("qwen2_5_vl"), pairs
    own = [*of(folder, file), *ADAMW, "objective=dpo objective.beta=0.5"]
    own += ["batch.rows=3 data.packing=none train.steps=2"]
    run = train("run", *own, ranks=2, base=[])
    samples, model = samples_of(folder, file, chats), load(folder)

    def scores(model):
        each = [(log_probabilities(model, inputs) * mask[1:]).sum() for inputs, mask in samples]
        return torch.stack(each).view(-1, 2)

    before = scores(model).detach()

    def loss(model):
        gain = scores(model) - before
        return -torch.nn.functional.logsigmoid(0.5 * (gain[:, 0] - gain[:, 1])).mean()

    assert run["loss"] == pytest.approx(adamw_steps(model, loss, 2), abs=1e-5)
    after = dict(load(run.folder / "hf").named_parameters())
    for name, value in model.named_parameters():
        assert (after[name] - value).abs().max() < 1e-4, name


@pytest.mark.parametrize("kind", CONFIGS)
def test_answers_about_images_are_those_of_transformers(folders, tmp_path, kind):
    """Three prompts of different lengths are answered together, one of them with two images."""
    folder = folders(kind)
    names = [tmp_path / name for name in write_pictures(tmp_path, 2)]
    first = [image(names[0]), text("what is it?")]
    second = [image(names[1]), text("and "), image(names[0]), text("?")]
    speaker = Speaker.load(folder, implementation="transformers")
    processor, model = ImageProcessor(str(folder)).processor, load(folder)
    prompts, expected = [], []
    for parts in (first, second, "no image?"):
        prompts.append(speaker.ask(read_turns([user(parts)])))
        inputs = processed(processor, [user(parts)], tmp_path, True)
        stops = [*speaker.tokenizer.stop_ids]
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=stops)
        new = tokens[0, inputs["input_ids"].shape[1] :].tolist()
        expected.append(speaker.tokenizer.decode([t for t in new if t not in stops]))
    answers = speaker.say_all(prompts, GenerateConfig(max_tokens=12))
    assert [each[0] for each in answers] == expected
    words = ["generate", f"source={folder} prompt=<image>what is it? max_tokens=12"]
    words.append("implementation=transformers")
    assert cli(*words, f"image={names[0]}").out == visible(expected[0]) + "\n"


def test_a_prompt_whose_images_do_not_fit_is_refused(folders, tmp_path):
    [name] = write_pictures(tmp_path, 1)
    words = ["generate", f"source={folders('llava')} max_tokens=2"]
    assert (
        "has 1 image, and its turns have places for 2"
        in cli(*words, f"prompt=<image> and <image>? image={tmp_path / name}", code=2).err
    )
    assert "there is no" in cli(*words, f"prompt=what? image={tmp_path}/none.png", code=2).err
    Image.new("LA", (9, 9)).save(tmp_path / "clear.png")
    assert (
        "warning: 1 image with transparent pixels"
        in cli(*words, f"prompt=what? image={tmp_path}/clear.png").err
    )


def test_what_reads_only_text_refuses_images(train, folders, pairs):
    how = "objective=grpo batch.rows=2 objective.rewards=[exact] objective.max_new_tokens=8"
    run = run_of(train, "run", folders("llava"), pairs[0], how, code=2)
    assert "pairs.jsonl:1" in run.err
    assert "not by objective=grpo" in run.err


def test_a_reward_model_reads_the_images_of_prompts(train, folders, pairs):
    """The run's loss is that of transformers' scores of both answers."""
    file, chats = pairs
    how = "objective=reward batch.rows=3 optim.lr=1e-9 train.steps=1"
    run = run_of(train, "run", folders("gemma3"), file, how, ranks=2)
    processor, scores = ImageProcessor(str(folders("gemma3"))).processor, []
    model = Gemma3ForSequenceClassification.from_pretrained(
        run.folder / "hf", dtype=torch.float32
    ).eval()
    for chat in chats:
        inputs = processed(processor, chat, file.parent)
        scores.append(model(**inputs).logits[0, 0])
    chosen, rejected = torch.stack(scores).view(-1, 2).T
    loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    assert run["loss"] == pytest.approx([loss.item()], rel=1e-5)
    assert "equal" in verify(f"source={run.folder} hf={run.folder}/hf")


def test_the_quickstart_asks_about_held_out_pictures(world, tmp_path, monkeypatch):
    def start_ranks(_recipe, words):
        return world.command("train", *words)[0].code

    known = {drawn(number)[0].tobytes() for number in range(quickstart_shapes.PICTURES)}
    of_others = range(quickstart_shapes.PICTURES, quickstart_shapes.PICTURES + 100)
    assert not known & {drawn(number)[0].tobytes() for number in of_others}
    monkeypatch.setattr(quickstart_shapes, "PICTURES", 40)
    monkeypatch.setattr(quickstart_shapes, "start_ranks", start_ranks)
    words = ["quickstart", f"task=shapes root={tmp_path}"]
    out = cli(*words, "steps=2 questions=2").out
    assert "warm-up" not in out, "a share of the steps"
    assert "before training: 0 of 2 held-out pictures named" in out
    assert "of 2, asked of the exported folder" in out
    assert (tmp_path / "shapes/hf/processor_config.json").is_file()
    rows = (tmp_path / "shapes-data/chats.jsonl").read_text()
    assert not [file for file, _ in held_out(tmp_path / "shapes-data") if file.name in rows]


def other_states(real, states, count):
    return [1.5 * each for each in real(states, count)]


def test_images_that_are_computed_differently_are_refused_with_the_difference(train, folders, data):
    seam = inject.around("image_states", other_states)
    run = run_of(train, "run", folders("llava"), data[0], "train.steps=1", seam=seam, code=2)
    assert "logits of a text with an image differ from transformers' own by" in run.err
