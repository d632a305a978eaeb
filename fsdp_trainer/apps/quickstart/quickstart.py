"""The verb `quickstart`: train a small model from scratch in a minute or two and test it."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from fsdp_trainer.apps.generate import Speaker
from fsdp_trainer.apps.quickstart.quickstart_rl import quickstart_rl
from fsdp_trainer.apps.quickstart.quickstart_search import quickstart_search
from fsdp_trainer.apps.quickstart.quickstart_shapes import quickstart_shapes
from fsdp_trainer.apps.quickstart.quickstart_tools import quickstart_tools
from fsdp_trainer.base.process import OWN_ENDING
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.verbs import GenerateConfig, QuickstartConfig
from fsdp_trainer.data.files.quickstart_data import rows
from fsdp_trainer.data.prepared_data import build_template, build_tokenizer
from fsdp_trainer.launch.start import start_ranks
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.models.from_config.resolve import resolve_model

OTHERS: dict[str, Callable[[QuickstartConfig], int]] = {
    "sums": quickstart_rl,
    "shapes": quickstart_shapes,
    "tools": quickstart_tools,
    "search": quickstart_search,
}
"""The tasks besides `words`."""
NEXT = """
Where the files are
  {run}/metrics.jsonl, events.jsonl, config.yaml     what happened, step by step
  {run}/checkpoints/                                 the same command resumes from the newest
  {run}/hf/                                          \
AutoModelForCausalLM.from_pretrained("{run}/hf")

What to type next (a chat in the browser; your own data, first looked at, then trained on)
  fsdp-trainer chat {run}
  fsdp-trainer preview +recipe=quickstart data.path=chats.jsonl \
data.validation=null batch.seq_len=2048
  fsdp-trainer +recipe=qwen3_0_6b_sft data.path=chats.jsonl model.init_from=FOLDER_OR_HUB_ID
"""


def quickstart(cfg: QuickstartConfig) -> int:
    os.environ[OWN_ENDING] = "1"
    if cfg.task in OTHERS:
        return OTHERS[cfg.task](cfg)
    overrides = ["+recipe=quickstart", f"run.root={cfg.root}"]
    if cfg.steps:
        overrides.append(f"train.steps={cfg.steps}")
    recipe = compose("train", overrides)
    run = Path(cfg.root) / recipe.run.name
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.init_from)
    model = Decoder(resolve_model(recipe.model, tokenizer.vocab_size))
    initialize_weights(model, recipe.run.seed)
    questions = rows("demo:backwards/heldout")[: cfg.questions]
    n = len(questions)

    template = build_template(recipe.data, tokenizer)
    right, example = ask(Speaker(model, tokenizer, template), questions)
    before = f"before training: {right} of {n} held-out questions right"
    print(f"{before}, e.g. {example}\n", flush=True)
    if code := start_ranks(recipe, overrides):
        return code
    right, example = ask(Speaker.load(run / "hf"), questions)
    print(f"\n{before}")
    print(f"after training:  {right} of {n}, asked of the exported folder, e.g. {example}")
    print(NEXT.format(run=run), end="")
    return 0


@torch.no_grad()
def ask(speaker: Speaker, questions: list[dict]) -> tuple[int, str]:
    right: list[str] = []
    wrong: list[str] = []
    for row in questions:
        question, wanted = row["messages"]
        answer = "".join(speaker.answer([question], GenerateConfig(max_tokens=16)))
        correct = answer.strip() == wanted["content"]
        (right if correct else wrong).append(f"{question['content']!r} → {answer!r}")
    return len(right), (right + wrong)[0]
