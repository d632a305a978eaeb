"""Models that read images, against transformers' own model, processor and AdamW."""

import json
import re
from functools import partial
from pathlib import Path

import inject
import numpy as np
import pytest
import torch
from image_models import CONFIGS, make_image_folder, write_pictures
from other_models import adamw_steps
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from world import verify

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.apps.quickstart.quickstart_shapes import PICTURES, drawn, held_out
from fsdp_trainer.cli import main
from fsdp_trainer.config.verbs import GenerateConfig
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.order.packing import best_fit
from fsdp_trainer.data.records.messages import read_turns

STEPS = 10
SEQ_LEN = 160
OPTIMIZER = ["optim.lr=1e-3", "optim.eps=1e-5", "optim.weight_decay=0.1", "optim.grad_clip=null"]
SGD = ["optim=sgd", "optim.lr=1", "optim.momentum=0", "optim.weight_decay=0", "train.steps=1"]
SETTINGS = [
    "model.implementation=transformers",
    "precision=fp32",
    f"batch.seq_len={SEQ_LEN}",
    "batch.micro_rows=1",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "checkpoint.export_hf=true",
    "checkpoint.every=null",
    "launch.watchdog=false",
]
ENDS = "<|im_end|>"


def image(name):
    place = name if isinstance(name, Path) else f"pictures/{name}"
    return {"type": "image", "image": str(place)}


def text(words):
    return {"type": "text", "text": words}


def chats_of(names):
    """Return chats with no, one, or two images in a turn, and one with images in two turns."""
    questions = [
        [image(names[0]), text("what is it?")],
        "just words?",
        [text("look: "), image(names[1]), text(" and "), image(names[2])],
        [image(names[3]), text("and now?")],
        "again only words, some more of them?",
    ]
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": f"it is {i * i}!"}]
        for i, question in enumerate(questions)
    ]
    second = {"role": "user", "content": [image(names[4]), text("this?")]}
    chats.append([*chats[0], second, {"role": "assistant", "content": "the other"}])
    return chats


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a file of chats, and the chats; the pictures are in a folder beside the file."""
    folder = tmp_path_factory.mktemp("images")
    chats = chats_of(write_pictures(folder / "pictures", 5))
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return file, chats


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a model of each kind."""
    root = tmp_path_factory.mktemp("models")
    return {kind: make_image_folder(root / kind, kind) for kind in CONFIGS}


def load(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


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


def loss_of(model, samples):
    """Return the mean negative log-likelihood of all supervised tokens, each sample alone."""
    total, count = 0, 0
    for inputs, supervised in samples:
        logits = model(**inputs).logits[0, :-1]
        targets = inputs["input_ids"][0, 1:]
        each = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        total = total + (each * supervised[1:]).sum()
        count += int(supervised[1:].sum())
    return total / count


def reference(folder, samples):
    """Return losses of some steps of AdamW, and the weights after them."""
    model = load(folder)
    losses = adamw_steps(model, lambda model: loss_of(model, samples), STEPS)
    return losses, dict(model.named_parameters())


def overrides(folder, file, samples, *more):
    """Return the settings of a run that reads all samples in each step, packed."""
    lengths = np.array([inputs["input_ids"].shape[1] for inputs, _ in samples])
    rows = len(best_fit(lengths, SEQ_LEN).offsets) - 1
    assert rows < len(samples)
    return [
        f"model.init_from={folder}",
        f"data.path={file}",
        f"batch.rows={rows}",
        *SETTINGS,
        *more,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.further
def test_ten_steps_on_any_ranks_are_those_of_transformers(train, folders, data, kind):
    """Rows are packed. On 4 ranks some have no image."""
    file, chats = data
    samples = samples_of(folders[kind], file, chats)
    losses, expected = reference(folders[kind], samples)
    own = overrides(folders[kind], file, samples, *OPTIMIZER, f"train.steps={STEPS}")
    for ranks in (1, 2, 4):
        run = train(f"{kind}{ranks}", *own, ranks=ranks, base=[])
        assert run.column("loss") == pytest.approx(losses, abs=1e-5)
        actual = dict(load(run.folder / "hf").named_parameters())
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert (actual[name] - value).abs().max() < 1e-4, f"{name} on {ranks} ranks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.grid(1)
def test_each_gradient_is_that_of_transformers(train, folders, data, kind):
    file, chats = data
    samples = samples_of(folders[kind], file, chats)
    model = load(folders[kind])
    loss_of(model, samples).backward()
    own = overrides(folders[kind], file, samples, *SGD, "optim.grad_clip=null")
    run = train("step", *own, ranks=2, base=[])
    after = dict(load(run.folder / "hf").named_parameters())
    before = dict(load(folders[kind]).named_parameters())
    changed = 0
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        largest = gradient.abs().max().clamp_min(1e-3)
        error = (before[name] - after[name] - gradient).abs().max()
        assert error <= 2e-5 * max(1.0, largest), f"{name}: {error:.1e} of {largest:.1e}"
        changed += ("vis" in name or "project" in name) and bool(gradient.any())
    assert changed > 10, "tower and projector are trained"


@pytest.mark.further
def test_a_step_without_any_image_changes_nothing_of_the_tower(train, folders, tmp_path, data):
    """All ranks go through the tower, in the first step one with images and one without."""
    _, chats = data
    write_pictures(tmp_path / "pictures", 5)
    both = [chats[0], chats[1], chats[4], chats[1]]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in both))
    own = [f"model.init_from={folders['llava']}", f"data.path={tmp_path}/chats.jsonl"]
    own += ["data.packing=none", "data.shuffle=false", "batch.rows=2", *SETTINGS, *SGD]
    runs = [
        train(f"run{steps}", *own, "optim.lr=0.1", f"train.steps={steps}", ranks=2, base=[])
        for steps in (1, 2)
    ]
    start, first, second = (
        load_file(folder / "model.safetensors")
        for folder in (folders["llava"], *(run.folder / "hf" for run in runs))
    )
    towers = [name for name in first if "vision_tower" in name or "projector" in name]
    assert any((start[name] != first[name]).any() for name in towers)
    assert all(torch.equal(first[name], second[name]) for name in towers)
    others = first.keys() - set(towers)
    assert any((first[name] != second[name]).any() for name in others)


def run_of(train, name, folder, file, *more, ranks=1, **options):
    own = [f"model.init_from={folder}", f"data.path={file}", *SETTINGS, "optim.lr=1e-2"]
    return train(name, *own, *more, ranks=ranks, base=[], **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
@pytest.mark.grid(1)
@pytest.mark.further
def test_a_run_is_verified_with_an_image_and_its_loss_is_that_of_transformers(
    train, folders, data, kind
):
    run = run_of(train, "run", folders[kind], data[0], "batch.rows=4", "train.steps=1")
    exported = run.folder / "hf"
    said = verify(f"source={run.folder}", f"hf={exported}", f"data={data[0]}")
    assert said.count("equal") == 2
    assert "logits with an image equal" in said
    with torch.no_grad():
        expected = loss_of(load(exported), samples_of(exported, *data)).item()
    assert float(re.search(r"loss ([\d.]+) on", said)[1]) == pytest.approx(expected, abs=1e-4)
    weights = load_file(exported / "model.safetensors")
    doubled = {n: 2 * w for n, w in weights.items() if "vis" in n and w.ndim == 2}
    save_file(weights | doubled, exported / "model.safetensors")
    assert "logits with an image DIFFER" in verify(f"source={run.folder}", f"hf={exported}", code=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
@pytest.mark.grid(1)
@pytest.mark.further
def test_packed_rows_are_unpacked_ones(train, folders, data, kind):
    file, chats = data
    samples = samples_of(folders[kind], file, chats)
    packed = overrides(folders[kind], file, samples, *SGD)
    alone = [word for word in packed if not word.startswith("batch.rows=")]
    alone += ["data.packing=none", f"batch.rows={len(chats)}"]
    weights = [
        load_file(train(name, *words, base=[]).folder / "hf" / "model.safetensors")
        for name, words in (("packed", packed), ("alone", alone))
    ]
    for name, value in weights[0].items():
        assert (value - weights[1][name]).abs().max() < 1e-5, name


@pytest.mark.slow
@pytest.mark.further
def test_a_run_that_is_stopped_ends_bitwise_as_an_uninterrupted_one(train, folders, data):
    """Stops in the middle of an epoch; then worker processes load the images."""
    rows = ["batch.rows=2", "data.packing=none", "checkpoint.every=1"]
    whole = run_of(train, "whole", folders["qwen3_vl"], data[0], *rows, "train.steps=4", ranks=2)
    run_of(train, "run", folders["qwen3_vl"], data[0], *rows, "train.steps=2", ranks=2)
    more = ["train.steps=4", "data.workers=2"]
    run = run_of(train, "run", folders["qwen3_vl"], data[0], *rows, *more, ranks=2)
    assert run.event("resume")[0]["step"] == 2
    assert run.column("loss") == whole.column("loss")
    ends = [load_file(each.folder / "hf" / "model.safetensors") for each in (whole, run)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def changed_parts(folder, run):
    """Return which parts of a model a run has changed."""
    before, after = (dict(load(each).named_parameters()) for each in (folder, run.folder / "hf"))
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    return {
        "projector" if "merger" in name else "vision" if "visual" in name else "language"
        for name in changed
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", ["vision", "projector", "language"])
@pytest.mark.further
def test_a_part_can_be_frozen_by_its_name(train, folders, data, part):
    more = [f"train.freeze=[{part}]", "batch.rows=2", "train.steps=2"]
    run = run_of(train, part, folders["qwen3_vl"], data[0], *more, ranks=2)
    assert changed_parts(folders["qwen3_vl"], run) == {"vision", "projector", "language"} - {part}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "targets"), [("llava", "all"), ("qwen3_vl", "[all,vision]")])
@pytest.mark.further
def test_adapters_are_on_the_language_model_and_on_the_tower_if_asked(
    train, folders, data, kind, targets
):
    """peft gives the merged model's logits. LLaVA's tower has layers with the same last names."""
    how = ["adapter=lora", "adapter.rank=2", "batch.rows=2", "train.steps=2"]
    how += [f"adapter.targets={targets}", "checkpoint.merge=true"]
    run = run_of(train, "run", folders[kind], data[0], *how, ranks=2)
    tensors = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    assert any("language_model" in name for name in tensors)
    assert any("vis" in name for name in tensors) == (targets != "all")
    inputs, _ = samples_of(folders[kind], *data)[2]
    adapted = PeftModel.from_pretrained(load(folders[kind]), run.folder / "adapter")
    with torch.no_grad():
        expected, merged = (m(**inputs).logits for m in (adapted, load(run.folder / "hf")))
        assert (expected - load(folders[kind])(**inputs).logits).abs().max() > 1e-3
    assert (expected - merged).abs().max() < 1e-5


def change(folder):
    for file in folder.glob("*.png"):
        Image.new("RGB", (40, 40)).save(file)


@pytest.mark.slow
@pytest.mark.further
def test_an_image_that_changes_during_a_run_ends_all_ranks_with_its_name(
    train, folders, tmp_path, data
):
    names = write_pictures(tmp_path / "pictures", 5)
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats_of(names)))
    more = ["batch.rows=2", "train.steps=3"]
    fault = inject.at(None, partial(change, tmp_path / "pictures"))
    run = run_of(train, "run", folders["llava"], file, *more, ranks=2, seam=fault, code=2)
    said = "".join(rank.err for rank in run.ranks)
    assert "pictures/" in said
    assert "has changed since it was tokenized: start again" in said


@pytest.mark.slow
def test_what_does_not_read_images_refuses_them(train, folders, data):
    """Gemma 3's language model alone is this decoder's own."""
    own = [f"model.init_from={folders['gemma3']}", f"data.path={data[0]}", "precision=fp32"]
    run = train("run", *own, "train.steps=1", "batch.seq_len=128", base=[], code=2)
    assert "chats.jsonl:1" in run.err
    assert "model.implementation=transformers" in run.err


def answer_log_probability(model, processor, prompt, answer, folder):
    """Return Σ log-probability of an answer to a prompt with images."""
    whole = processed(processor, [*prompt, {"role": "assistant", "content": answer}], folder)
    tokens = whole["input_ids"][0]
    first = processed(processor, prompt, folder, True)["input_ids"].shape[1]
    end = processor.tokenizer.convert_tokens_to_ids(ENDS)
    last = first + int((tokens[first:] == end).nonzero()[0])
    scores = model(**whole).logits[0, :-1].log_softmax(-1)
    each = scores.gather(1, tokens[1:, None])[:, 0]
    return each[first - 1 : last].sum()


@pytest.mark.slow
@pytest.mark.further
def test_a_step_of_preferences_about_images_is_that_of_transformers(train, folders, data, tmp_path):
    write_pictures(tmp_path / "pictures", 3)
    prompts = [[{"role": "user", "content": [image(f"{i}.png"), text("which?")]}] for i in range(3)]
    prompts[1][0]["content"] = "no image here"
    turns = [{"role": "assistant", "content": words} for words in ("yes, it is", "no!")]
    rows = [{"prompt": p, "chosen": turns[:1], "rejected": turns[1:]} for p in prompts]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = folders["qwen2_5_vl"]
    own = [f"model.init_from={folder}", f"data.path={file}", *SETTINGS, *SGD, "optim.lr=0.1"]
    own += ["objective=dpo", "objective.beta=0.5", "batch.rows=3", "data.packing=none"]
    run = train("run", *own, "optim.grad_clip=null", "train.steps=2", ranks=2, base=[])

    processor, model, losses = ImageProcessor(str(folder)).processor, load(folder), []
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), None
    for _ in range(2):
        scores = torch.stack(
            [
                torch.stack(
                    [answer_log_probability(model, processor, prompt, turn["content"], tmp_path)
                     for turn in turns]
                )
                for prompt in prompts
            ]
        )  # fmt: skip
        before = scores.detach() if before is None else before
        gain = (scores - before)[:, 0] - (scores - before)[:, 1]
        loss = -torch.nn.functional.logsigmoid(0.5 * gain).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert run.column("loss") == pytest.approx(losses, abs=1e-5)
    after = dict(load(run.folder / "hf").named_parameters())
    for name, value in model.named_parameters():
        assert (after[name] - value).abs().max() < 1e-4, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.grid(1)
def test_answers_about_images_are_those_of_transformers(
    train, folders, data, tmp_path, kind, capsys
):
    """Three prompts of different lengths are answered together, one of them with two images."""
    run = run_of(train, "run", folders[kind], data[0], "batch.rows=2", "train.steps=1")
    folder = run.folder / "hf"
    names = [tmp_path / name for name in write_pictures(tmp_path, 2)]
    first = [image(names[0]), text("what is it?")]
    second = [image(names[1]), text("and "), image(names[0]), text("?")]
    speaker = Speaker.load(run.folder)
    processor, model = ImageProcessor(str(folder)).processor, load(folder)
    prompts, expected = [], []
    for parts in (first, second, "no image?"):
        turn = {"role": "user", "content": parts}
        prompts.append(speaker.ask(read_turns([turn])))
        inputs = processed(processor, [turn], tmp_path, True)
        stops = [*speaker.tokenizer.stop_ids]
        tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=stops)
        new = tokens[0, inputs["input_ids"].shape[1] :].tolist()
        expected.append(speaker.tokenizer.decode([t for t in new if t not in stops]))
    answers = speaker.say_all(prompts, GenerateConfig(max_tokens=12))
    assert [each[0] for each in answers] == expected
    capsys.readouterr()
    words = ["generate", f"source={run.folder}", "prompt=<image>what is it?", "max_tokens=12"]
    assert main([*words, f"image={names[0]}"]) == 0
    assert capsys.readouterr().out == expected[0] + "\n"


@pytest.mark.slow
def test_a_prompt_whose_images_do_not_fit_is_refused(folders, tmp_path, capsys):
    [name] = write_pictures(tmp_path, 1)
    words = ["generate", f"source={folders['llava']}", "max_tokens=2"]
    assert main([*words, "prompt=<image> and <image>?", f"image={tmp_path / name}"]) == 2
    assert "has 1 images, and its turns have places for 2" in capsys.readouterr().err
    assert main([*words, "prompt=what?", f"image={tmp_path}/none.png"]) == 2
    assert "there is no" in capsys.readouterr().err


WAYS = (
    "activation_checkpoint=full data.prefetch=2",
    "sharding=hsdp sharding.replicas=2 sharding.blocks_per_unit=2",
    "sharding=ddp sharding.reshard_after_forward=false",
    "data.pad_to_multiple=null batch.micro_rows=2",
)


ALIKE = ["batch.rows=4", "data.packing=none", "train.steps=2"]


@pytest.mark.slow
@pytest.mark.further
def test_ways_to_compute_change_nothing(train, folders, data):
    folder = folders["qwen3_vl"]
    expected = run_of(train, "plain", folder, data[0], *ALIKE, ranks=2).column("loss")
    for number, way in enumerate(WAYS):
        run = run_of(train, f"way{number}", folder, data[0], *ALIKE, *way.split(), ranks=2)
        assert run.column("loss") == pytest.approx(expected, abs=1e-5), way


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.further
def test_blocks_of_language_model_and_tower_that_are_computed_again_change_no_bit(
    train, folders, data, kind
):
    mode = "activation_checkpoint=" + ("selective" if kind == "gemma3" else "full")
    runs = [
        run_of(train, f"run{len(own)}", folders[kind], data[0], *ALIKE, *own)
        for own in ([], [mode])
    ]
    assert runs[0].column("loss") == runs[1].column("loss")


@pytest.mark.slow
@pytest.mark.further
def test_images_are_learned_in_sixteen_bits(train, folders, data):
    half = [word for word in SETTINGS if not word.startswith("precision=")]
    own = [f"model.init_from={folders['llava']}", f"data.path={data[0]}", *half, *ALIKE]
    assert all(5 < loss < 7 for loss in train("half", *own, ranks=2, base=[]).column("loss"))


@pytest.mark.slow
def test_what_reads_only_text_refuses_images(train, folders, tmp_path):
    write_pictures(tmp_path / "pictures", 1)
    prompt = [{"role": "user", "content": [image("0.png"), text("which?")]}]
    turns = [{"role": "assistant", "content": words} for words in ("yes, it is", "no!")]
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "chosen": turns[:1], "rejected": turns[1:]}))
    for name, more in (
        ("reward", []),
        ("grpo", ["objective.rewards=[exact]", "objective.max_new_tokens=8"]),
    ):
        how = [f"objective={name}", "batch.rows=2", "train.steps=1", *more]
        run = run_of(train, name, folders["llava"], file, *how, code=2)
        assert "pairs.jsonl:1" in run.err
        assert "not by objective=grpo or reward" in run.err


@pytest.mark.slow
@pytest.mark.further
def test_the_quickstart_asks_about_held_out_pictures_before_and_after(tmp_path, capsys):
    words = ["quickstart", "task=shapes", f"root={tmp_path}"]
    assert main([*words, "steps=3", "questions=4"]) == 0
    out = capsys.readouterr().out
    assert "before training: 0 of 4 held-out pictures named" in out
    assert "of 4, asked of the exported folder" in out
    assert (tmp_path / "shapes" / "hf" / "processor_config.json").is_file()
    rows = (tmp_path / "shapes-data" / "chats.jsonl").read_text()
    known = {drawn(number)[0].tobytes() for number in range(PICTURES)}
    for file, name in held_out(tmp_path / "shapes-data"):
        assert file.name not in rows
        assert Image.open(file).tobytes() not in known, name


def other_states(real, states, count):
    return [1.5 * each for each in real(states, count)]


@pytest.mark.slow
def test_images_that_are_computed_differently_are_refused_with_the_difference(train, folders, data):
    seam = inject.around("image_states", other_states)
    run = run_of(train, "run", folders["llava"], data[0], "train.steps=1", seam=seam, code=2)
    assert "logits of a text with an image differ from transformers' own by" in run.err
