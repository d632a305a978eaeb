"""The verb `quickstart` with task=search: a model learns to find the answers to questions."""

import json
import random
from dataclasses import replace
from pathlib import Path

import torch

from fsdp_trainer.apps.quickstart.quickstart_rl import start
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.verbs import QuickstartConfig
from fsdp_trainer.config.yaml_text import table_beside
from fsdp_trainer.data.prepared_data import build_tokenizer
from fsdp_trainer.methods.text_reader import TextReader
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.initialize import initialize_weights
from fsdp_trainer.models.from_config.resolve import resolve_model

TABLE = table_beside(__file__, "quickstart.yaml")["search"]
CHANGES = TABLE["changes"]
ROWS, HELD_OUT = 4000, 1000
NEXT = """
Where the files are
  {data}/questions.jsonl             the questions, each with its answer
  {run}/metrics.jsonl                recall_1, mrr … of every step
  {run}/hf/                          SentenceTransformer("{run}/hf")

What to type next (a server of embeddings; your own questions, first looked at)
  fsdp-trainer chat {run}
  fsdp-trainer preview objective=embed data.path=questions.jsonl model.init_from=FOLDER_OR_HUB_ID
  fsdp-trainer objective=embed data.path=questions.jsonl model.init_from=FOLDER_OR_HUB_ID
"""


def quickstart_search(cfg: QuickstartConfig) -> int:
    root = Path(cfg.root)
    data = root / "search-data"
    pairs = [pair(ROWS + i) for i in range(min(cfg.questions, HELD_OUT))]
    write_data(data, pairs)
    overrides = [*TABLE["training"], f"run.root={root}", f"data.path={data}/questions.jsonl"]
    overrides += [f"train.steps={cfg.steps}"] if cfg.steps else []
    right, example = search(untrained(overrides), pairs)
    before = f"before training: {right} of {len(pairs)} held-out answers are found first"
    print(f"{before}, e.g. {example}\n", flush=True)
    if code := start(overrides):
        return code
    right, example = search(TextReader.load(root / "search" / "hf"), pairs)
    print(f"\n{before}")
    print(f"after training:  {right} of {len(pairs)}, by the exported folder, e.g. {example}")
    print(NEXT.format(run=root / "search", data=data), end="")
    return 0


def untrained(overrides: list[str]) -> TextReader:
    cfg = compose("train", overrides)
    tokenizer = build_tokenizer(cfg.tokenizer, None)
    config = resolve_model(cfg.model, tokenizer.vocab_size).with_pooling(cfg.objective.pooling)
    model = Decoder(replace(config, tie_word_embeddings=False))
    initialize_weights(model, cfg.run.seed)
    return TextReader(model, tokenizer, torch.device("cpu"))


def search(reader: TextReader, pairs: list[tuple[str, str]]) -> tuple[int, str]:
    """Return the number of questions whose answer is the first of all, and an example.

    The example is a question with the answer that is first, a right one if there is one.
    """
    questions, answers = (reader.vectors(reader.encode(each)) for each in zip(*pairs, strict=True))
    first = (questions @ answers.T).argmax(1).tolist()
    right = [place == answer for place, answer in enumerate(first)]
    place = right.index(True) if any(right) else 0
    return sum(right), f"{pairs[place][0]!r} → {pairs[first[place]][1]!r}"


def write_data(folder: Path, held_out: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    pairs = (each for each in map(pair, range(ROWS)) if each not in held_out)
    rows = [{"question": question, "answer": answer} for question, answer in pairs]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pair(number: int) -> tuple[str, str]:
    """Return a question and its answer. Those from ROWS on are held out."""
    chance = random.Random(number)
    name, things, happens = (
        chance.choice(words) for words in (TABLE["names"], TABLE["things"], [*CHANGES])
    )
    first = chance.randint(10, 99)
    other = chance.randint(2, first)
    sign = CHANGES[happens]
    question = f"{name} has {first} {things} and {happens} {other}. How many {things} has {name}?"
    sum_of_both = f"{first} {'+' if sign > 0 else '-'} {other} = {first + sign * other}"
    return question, f"{sum_of_both}: {name} has {first + sign * other} {things} now."
