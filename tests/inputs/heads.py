"""Data for heads that give texts numbers, and the gradients of a run's first step."""

import torch
import transformers
from folders import copy_rows
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BertTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from world import write_lines as write_rows
from zoo import MODELS

WORDS = {"fruit": "apple pear plum", "grain": "rye oats rice", "root": "beet leek yam"}


def write_classes(folder):
    """Write texts with one label, with several, and with a number."""
    for name in ("classes", "several", "numbers"):
        copy_rows(folder / f"{name}.jsonl")


def write_tags(folder):
    """Write words with labels of entities, some of them none, and answers with labels of steps."""
    for name in ("tags", "steps"):
        copy_rows(folder / f"{name}.jsonl")


def write_even(folder):
    """Write a row for each kind of head, in which all texts have the same number of tokens."""
    names = [chr(97 + i % 26) * 100 for i in range(48)]
    even = {
        "labels": lambda i, name: {"text": name, "label": "ab"[i * i % 3 % 2]},
        "questions": lambda i, name: {"query": name, "positive": name[::-1]},
        "ranks": lambda i, name: {
            "query": name,
            "documents": [name[:20], "x" * 20],
            "scores": [1, 0],
        },
        "words": lambda i, name: {"tokens": [name, name], "ner_tags": ["O", "B-X"]},
        "similar": lambda i, name: {"sentence1": name, "sentence2": name[::-1], "score": i},
    }
    for kind, row in even.items():
        rows = [row(i, name) for i, name in enumerate(names)]
        write_rows(folder / f"even_{kind}.jsonl", rows)


def write_queries(folder):
    """Write queries with one or two documents that answer them, and up to two others; scores."""
    for name in ("queries", "lists", "alike"):
        copy_rows(folder / f"{name}.jsonl")


ENCODERS = MODELS["encoders"]
"""Options of small encoders by model_type."""


def make_encoder(folder, kind, head="MaskedLM"):
    """Write an encoder, whose head others will replace, and a tokenizer of characters."""
    specials = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    if not ENCODERS[kind]:
        specials[:2] = "[PAD]", "[CLS]"
    characters = [*map(chr, range(33, 127))]
    vocabulary = [*specials, *characters, *(f"##{one}" for one in characters)]
    numbered = {token: i for i, token in enumerate(vocabulary)}
    own = Tokenizer(WordPiece(numbered, unk_token="[UNK]"))
    own.pre_tokenizer = WhitespaceSplit()
    own.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[(name, numbered[name]) for name in ("[CLS]", "[SEP]")],
    )
    names = dict(zip(("cls", "pad", "sep", "unk"), sorted(specials[:4]), strict=True))
    described = {f"{name}_token": token for name, token in names.items()}
    published = PreTrainedTokenizerFast(tokenizer_object=own, **described)
    if kind == "bert":
        published = BertTokenizer(vocab=numbered, do_lower_case=False)
    published.save_pretrained(folder)
    sizes = dict(MODELS["encoder_sizes"])
    if kind == "distilbert":
        sizes["hidden_dim"] = sizes.pop("intermediate_size")
    config = CONFIG_MAPPING[kind](vocab_size=len(vocabulary), **sizes, **ENCODERS[kind])
    torch.manual_seed(0)
    auto = getattr(transformers, f"AutoModelFor{head}") if head else transformers.AutoModel
    auto.from_config(config).save_pretrained(folder)


STEP = [
    "optim=sgd", "optim.momentum=0", "optim.nesterov=false", "optim.weight_decay=0", "optim.lr=1",
    "optim.grad_clip=null", "schedule=constant", "schedule.warmup_steps=0", "train.steps=1",
    "batch.rows=64", "batch.across_epochs=false", "batch.micro_rows=1", "batch.seq_len=96",
    "checkpoint.export_hf=true",
]  # fmt: skip
"""One step over all of the data, by a plain update: its gradient is what the weights lose."""


def weights(run):
    return load_file(run.folder / "hf/model.safetensors")


def gradients(before, run):
    """Return the gradient of each weight in the only step of a run that began with `before`."""
    start, end = weights(before), weights(run)
    assert start.keys() == end.keys()
    return {name: start[name] - end[name] for name in start}
