"""Architectures that the decoder does not know, against transformers' own model and AdamW."""

import json
import os
from pathlib import Path

import pytest
import torch
from other_models import OTHERS, adamw_steps, make_other_folder
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.granitemoe.modeling_granitemoe import load_balancing_loss_func
from zoo import ZOO, make_folder

from fsdp_trainer.models.families import FAMILIES
from fsdp_trainer.models.hf.read_architecture import read_architecture

LENGTHS = (30, 34, 20, 44, 40, 24, 11, 53)
"""Tokens of the documents, of which pairs fill rows of 64."""
STEPS = 10
PAGE = Path(__file__).parents[2] / "docs" / "any-model.md"
FAMILIES_OF_ZOO = [family for family in FAMILIES if family in ZOO]
WORLDS = (1, 2, 4)
ON_ALL_WORLDS = ("gpt2", "granitemoe", "qwen3_next")
"""Architectures that each test run tries on all of WORLDS; EVERY=1 does so with all of them."""
OPTIMIZER = ["optim.lr=1e-3", "optim.eps=1e-5", "optim.weight_decay=0.1", "optim.grad_clip=null"]
SETTINGS = [
    "precision=fp32",
    "batch.seq_len=64",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "checkpoint.export_hf=true",
    "data.format=tokens",
    "checkpoint.every=null",
    "launch.watchdog=false",
]


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Return a file of tokens, and the documents in it as (tokens, is supervised)."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 256, (n,), generator=generator) for n in LENGTHS]
    masks = [torch.arange(n) % 3 > 0 for n in LENGTHS]
    file = tmp_path_factory.mktemp("tokens") / "tokens.jsonl"
    lines = [
        {"input_ids": text.tolist(), "labels": torch.where(mask, text, -100).tolist()}
        for text, mask in zip(texts, masks, strict=True)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file, list(zip(texts, masks, strict=True))


def loss_of(model, documents):
    """Return the mean negative log-likelihood of all supervised tokens, each document alone."""
    total, count = 0, 0
    for text, mask in documents:
        logits = model(text[None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits.float(), text[1:], reduction="none")
        total = total + (each * mask[1:]).sum()
        count += int(mask[1:].sum())
    return total / count


def load(folder):
    """Return transformers' model of a folder, which computes as in training but for dropout."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reference(folder, documents):
    """Return losses of some steps of AdamW, and the model after them."""
    model = load(folder)
    return adamw_steps(model, lambda model: loss_of(model, documents), STEPS), model


def parts_of(folder):
    """Return name and number format of each tensor of a folder."""
    parts = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            parts |= {name: tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    return parts


def overrides(folder, file, kind):
    """Return the settings of a run that reads all documents in each step."""
    rows = len(LENGTHS) // 2 if read_architecture(folder).packs else len(LENGTHS)
    return [f"model.init_from={folder}", f"data.path={file}", f"batch.rows={rows}", *SETTINGS]


def worlds_of(kind):
    """Return the numbers of ranks to try an architecture on."""
    if kind in ON_ALL_WORLDS or os.environ.get("EVERY"):
        return WORLDS
    return (WORLDS[list(OTHERS).index(kind) % len(WORLDS)],)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.grid(1)
def test_ten_steps_on_any_ranks_are_those_of_transformers_and_the_export_is_its_own(
    train, tmp_path, documents, kind
):
    file, texts = documents
    folder = make_other_folder(tmp_path / kind, kind)
    losses, model = reference(folder, texts)
    model.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs" / "model.safetensors")
    own = [*overrides(folder, file, kind), f"train.steps={STEPS}"]
    for ranks in worlds_of(kind):
        run = train(f"{kind}{ranks}", *own, *OPTIMIZER, ranks=ranks, base=[])
        assert run.column("loss") == pytest.approx(losses, abs=1e-5)
        actual = load_file(run.folder / "hf" / "model.safetensors")
        assert parts_of(run.folder / "hf") == parts_of(folder)
        for name, value in expected.items():
            assert (actual[name] - value).abs().max() < 1e-4, f"{name} on {ranks} ranks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.grid(2)
def test_each_gradient_is_that_of_transformers(train, tmp_path, documents, kind):
    file, texts = documents
    folder = make_other_folder(tmp_path / kind, kind)
    model = load(folder)
    loss_of(model, texts).backward()
    plain = ["optim=sgd", "optim.lr=1", "optim.momentum=0", "optim.weight_decay=0"]
    own = [*overrides(folder, file, kind), *plain, "optim.grad_clip=null", "train.steps=1"]
    run = train("step", *own, ranks=2, base=[])
    before, after = load(folder), load(run.folder / "hf")
    parameters = dict(after.named_parameters())
    for name, parameter in before.named_parameters():
        gradient = dict(model.named_parameters())[name].grad
        largest = gradient.abs().max().clamp_min(1e-3)
        error = (parameter - parameters[name] - gradient).abs().max()
        assert error <= 1e-5 * max(1.0, largest), f"{name}: {error:.1e} of {largest:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES_OF_ZOO)
@pytest.mark.grid(1)
def test_both_implementations_of_a_family_agree(train, tmp_path, documents, family):
    file, _ = documents
    # transformers gives the embedding of a padding token no gradient
    folder = make_folder(tmp_path / family, family, pad_token_id=None)
    plain = ["optim=sgd", "optim.lr=0.01", "optim.momentum=0", "optim.weight_decay=0"]
    own = [*overrides(folder, file, family), *plain, "optim.grad_clip=null", "train.steps=2"]
    runs = [
        train(name, *own, f"model.implementation={name}", ranks=2, base=[])
        for name in ("native", "transformers")
    ]
    assert runs[0].column("loss") == pytest.approx(runs[1].column("loss"), abs=1e-5)
    first, second = (load_file(run.folder / "hf" / "model.safetensors") for run in runs)
    assert first.keys() == second.keys()
    for name, value in first.items():
        scale = max(1.0, float(value.abs().max()))
        assert (value - second[name]).abs().max() <= 1e-4 * scale, name


@pytest.mark.slow
def test_the_load_balancing_loss_is_that_of_transformers(train, tmp_path, documents):
    file, texts = documents
    folder = make_other_folder(tmp_path / "experts", "granitemoe", num_hidden_layers=1)
    # the weights stay as they are, so that the load of the step before is that of the step
    still = ["optim.lr=1e-12", "loss.load_balancing=1", "train.steps=2"]
    run = train("still", *overrides(folder, file, "granitemoe"), *still, ranks=2, base=[])
    model = load(folder)
    with torch.no_grad():
        each = [model(t[None], output_router_logits=True).router_logits[0] for t, _ in texts]
    expected = load_balancing_loss_func((torch.cat(each),), num_experts=4, top_k=2)
    assert run.column("load_balancing_loss")[1] == pytest.approx(expected.item(), abs=1e-5)


def row_of_table(kind, folder):
    """Return a row of the table in docs/any-model.md."""
    config = read_architecture(folder)
    packing = "one document in a row"
    if config.packs:
        packing = "our attention" if config.documents_attention else "transformers' mask"
    factor = "" if config.logit_factor == 1 else "a factor of the logits"
    tied = "head tied to the embedding" if config.tie_word_embeddings else ""
    experts = "experts" if config.num_experts else ""
    parts = ", ".join(filter(None, [experts, factor, tied]))
    return f"| `{kind}` | {packing} | {parts} |"


@pytest.mark.further
def test_the_page_has_the_architectures_that_are_tested(tmp_path):
    rows = [row_of_table(kind, make_other_folder(tmp_path / kind, kind)) for kind in OTHERS]
    head = ["| `model_type` | packed documents are kept apart by | |", "|---|---|---|"]
    text = PAGE.read_text()
    start, end = (text.index(mark) for mark in ("<!-- table -->", "<!-- end of table -->"))
    table = "\n".join(["<!-- table -->", *head, *sorted(rows), ""])
    if os.environ.get("WRITE"):
        PAGE.write_text(text[:start] + table + text[end:])
    assert table == text[start:end], "run it with WRITE=1"
