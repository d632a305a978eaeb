"""The verb `quickstart` with task=shapes: a small model learns to name drawn shapes."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.base.json_files import Json
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.verbs import GenerateConfig, QuickstartConfig
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.data.files.quickstart_data import TOKENIZER
from fsdp_trainer.data.images.image_files import pillow_module
from fsdp_trainer.data.records.messages import read_turns
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.launch.start import start_ranks
from fsdp_trainer.models.hf.read_architecture import missing_extra

TABLE = table_beside(__file__, "quickstart.yaml")["shapes"]
VISION, TEXT, COLOURS = TABLE["vision"], TABLE["text"], TABLE["colours"]
SIZE = VISION["image_size"]
"""Pixels of a side of a picture."""
PICTURES, HELD_OUT = 2000, 100
MARK = "<image>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NEXT = """
Where the files are
  {data}/                            the pictures, and chats.jsonl about them
  {run}/metrics.jsonl, checkpoints/  what happened; the same command resumes
  {run}/hf/                          for transformers' AutoModelForImageTextToText

What to type next (ask about a picture; a chat in the browser; your own data, first looked at)
  fsdp-trainer generate {run} prompt='<image>What is it?' image={data}/0.png
  fsdp-trainer chat {run}
  fsdp-trainer preview model.init_from=FOLDER_OR_HUB_ID data.path=chats.jsonl
"""


def quickstart_shapes(cfg: QuickstartConfig) -> int:
    if problem := missing_extra("llava"):
        raise UserError("the model is one of transformers'", [problem])
    root = Path(cfg.root)
    data, start = root / "shapes-data", root / "shapes-start"
    draw_all(data)
    make_model(start)
    questions = [*held_out(data)][: cfg.questions]
    before, example = ask(Speaker.load(start), questions)
    n = len(questions)
    first = f"before training: {before} of {n} held-out pictures named"
    print(f"{first}, e.g. {example}\n", flush=True)
    overrides = [*TABLE["training"], f"run.root={root}", f"model.init_from={start}"]
    overrides.append(f"data.path={data}/chats.jsonl")
    overrides += [f"train.steps={cfg.steps}"] if cfg.steps else []
    if code := start_ranks(compose("train", overrides), overrides):
        return code
    after, example = ask(Speaker.load(root / "shapes" / "hf"), questions)
    print(f"\n{first}")
    print(f"after training:  {after} of {n}, asked of the exported folder, e.g. {example}")
    print(NEXT.format(run=root / "shapes", data=data), end="")
    return 0


def ask(speaker: Speaker, questions: list[tuple[Path, str]]) -> tuple[int, str]:
    """Return the number of pictures that are named rightly, and an example.

    questions: files and the names of what is drawn.
    """
    prompts = [speaker.ask(read_turns([question(file.resolve())])) for file, _ in questions]
    answers = [each[0].strip() for each in speaker.say_all(prompts, GenerateConfig(max_tokens=24))]
    right = [answer == name for answer, (_, name) in zip(answers, questions, strict=True)]
    place = right.index(True) if any(right) else 0
    return sum(right), f"{questions[place][0].name} ({questions[place][1]}) → {answers[place]!r}"


def question(file: Path | str) -> Json:
    return {"role": "user", "content": [{"type": "image", "image": str(file)}, "What is it?"]}


def draw_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(PICTURES + HELD_OUT):
        picture, name = drawn(number)
        picture.save(folder / f"{number}.png")
        turns = [question(f"{number}.png"), {"role": "assistant", "content": name}]
        rows.append(json.dumps({"messages": turns}) + "\n")
    (folder / "chats.jsonl").write_text("".join(rows[:PICTURES]))


def held_out(folder: Path) -> Iterator[tuple[Path, str]]:
    for number in range(PICTURES, PICTURES + HELD_OUT):
        yield folder / f"{number}.png", drawn(number)[1]


def drawn(number: int) -> tuple[Any, str]:
    """Return a picture with one shape, at a place and of a size of its own, and its name."""
    from PIL import ImageDraw

    chance = random.Random(number)
    shape, colour = chance.choice(TABLE["shapes"]), chance.choice([*COLOURS])
    size = chance.randint(18, 26)
    x, y = chance.randint(1, SIZE - size - 1), chance.randint(1, SIZE - size - 1)
    light = chance.randint(225, 255)
    picture = pillow_module().new("RGB", (SIZE, SIZE), (light, light, light))
    pen, fill = ImageDraw.Draw(picture), tuple(COLOURS[colour])
    box, third = (x, y, x + size, y + size), size // 3
    if shape == "circle":
        pen.ellipse(box, fill)
    elif shape == "square":
        pen.rectangle(box, fill)
    elif shape == "triangle":
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill)
    else:
        pen.rectangle((x + third, y, x + size - third, y + size), fill)
        pen.rectangle((x, y + third, x + size, y + size - third), fill)
    return picture, f"a {colour} {shape}"


def make_model(folder: Path, vision: Json = VISION, text: Json = TEXT) -> None:
    """Write a LLaVA with random weights, a tokenizer of bytes, and a processor of images.

    vision, text: sizes of its parts.
    """
    import torch
    import transformers
    from transformers import AutoModelForImageTextToText, LlavaConfig
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = load_tokenizer(TOKENIZER, [MARK])
    ends = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    size = vision["image_size"]
    config = LlavaConfig(
        vision_config=vision,
        text_config=text | ends | {"vocab_size": tokenizer.vocab_size},
        image_token_index=int(tokenizer.backend.token_to_id(MARK) or 0),
        vision_feature_layer=-1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    transformers.logging.disable_progress_bar()  # one file of a megabyte
    model.save_pretrained(folder)
    tokenizer.save(folder, TEMPLATE)
    crop = {"height": size, "width": size}
    CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=crop).save_pretrained(folder)
    own = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision["patch_size"],
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (folder / "processor_config.json").write_text(json.dumps(own))
