"""Small models for images, made by transformers, with their processors, and pictures to show."""

from pathlib import Path

import numpy as np
import torch
from folders import table
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from world import read_json, write_json
from zoo import MODELS

from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

WRITTEN = table("inputs/image_models.yaml")
TOKENS = WRITTEN["tokens"]
CONFIGS = MODELS["with_images"]
"""Sizes by model_type."""
TURN = "<|im_start|>{{ m.role }}\n%s<|im_end|>\n"
PARTS = (
    "{%% if m.content is string %%}{{ m.content }}{%% else %%}{%% for p in m.content %%}"
    "{%% if p.type == 'image' %%}%s{%% else %%}{{ p.text }}{%% endif %%}{%% endfor %%}{%% endif %%}"
)


def template_of(kind):
    """Return a chat template that shows images as the model's own does."""
    turn = TURN % (PARTS % WRITTEN["marks"][kind])
    end = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    return "{% for m in messages %}" + turn + "{% endfor %}" + end


def image_processor_of(kind):
    """Return a small processor of images."""
    if kind == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    if kind == "llava":
        size = {"height": 16, "width": 16}
        return CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    edges = {"shortest_edge": 64, "longest_edge": 1024}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=edges)


def make_image_model(kind):
    """Return transformers' model of a model_type with random weights, in float32."""
    tokenizer = load_tokenizer("demo:bytes", TOKENS)
    numbers = {token: tokenizer.backend.token_to_id(token) for token in TOKENS}
    own = {name: numbers[token] for name, token in WRITTEN["numbered"][kind].items()}
    config = CONFIG_MAPPING[kind](**CONFIGS[kind], **own)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data.normal_(0, 0.1)  # Gemma's projector
        elif parameter.ndim > 1:
            parameter.data.mul_(3)  # so that pictures matter
    return model.eval()


def load(folder):
    """Return transformers' model of a folder."""
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def make_image_folder(folder, kind):
    """Write a model for images with tokenizer and processor; return the folder."""
    make_image_model(kind).save_pretrained(folder)
    load_tokenizer("demo:bytes", TOKENS).save(folder)
    image_processor_of(kind).save_pretrained(folder)
    file = Path(folder) / "tokenizer_config.json"
    settings = read_json(file)
    (Path(folder) / "chat_template.jinja").write_text(template_of(kind))
    if named := WRITTEN["named"].get(kind):
        settings |= {"extra_special_tokens": named, **named}
    write_json(file, settings)
    if processor := WRITTEN["processors"].get(kind):
        write_json(Path(folder) / "processor_config.json", processor)
    return folder


def write_pictures(folder, count, size=(24, 20)):
    """Write coloured noise as PNG files of different sizes; return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for i in range(count):
        numbers = np.random.default_rng(i)
        shape = (size[1] + 4 * (i % 3), size[0] + 8 * (i % 2), 3)
        Image.fromarray(numbers.integers(0, 256, shape, np.uint8)).save(folder / f"{i}.png")
        names.append(f"{i}.png")
    return names
