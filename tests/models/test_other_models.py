"""Architectures that the decoder does not know, against transformers' own model and AdamW."""

import json
import os
import sys
from pathlib import Path

import packed_kernels
import pytest
import torch
import yaml
from foreign import of
from forked import Forked
from gradients import assert_gradients_are_those_of
from other_models import (
    ADAMW,
    OTHERS,
    RUN,
    adamw_steps,
    loss_of,
    make_other,
    make_other_folder,
)
from plain import LENGTHS
from safetensors import safe_open
from stored import tensors
from transformers.models.granitemoe.modeling_granitemoe import load_balancing_loss_func
from zoo import ZOO, make_model

import fsdp_trainer
from fsdp_trainer.config.parts.families import FAMILIES
from fsdp_trainer.models.hf.hf_config import absurd_count
from fsdp_trainer.models.hf.read_architecture import read_architecture

STEPS = 3
PAGE = Path(__file__).parents[2] / "docs/any-model.md"
FAMILIES_OF_ZOO = [family for family in FAMILIES if family in ZOO]
SETTINGS = ["batch.seq_len=64 train.steps=2 data.format=tokens", *RUN]


def parts_of(folder):
    """Return name and number format of each tensor of a folder."""
    parts = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            parts |= {name: tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    return parts


def overrides(folder, file):
    """Return the settings of a run that reads all documents in each step."""
    rows = len(LENGTHS) // 2 if read_architecture(folder).packs else len(LENGTHS)
    return [f"model.init_from={folder} data.path={file} batch.rows={rows}", *SETTINGS]


RUNS = yaml.safe_load("""
gpt2: [2, activation_checkpoint=full batch.micro_rows=1, resid_pdrop=0.1]
granitemoe: [2, sharding=hsdp sharding.replicas=2, GraniteMoeForCausalLM]
qwen3_next:
- 2
- activation_checkpoint=selective sharding.accumulate=unsharded batch.micro_rows=1
- documents of a row are computed one by one in Qwen3NextGatedDeltaNet
mamba: [1, launch.watchdog=false, computed by transformers' class MambaForCausalLM]
cohere2: [2, sharding.cpu_offload=true sharding.blocks_per_unit=2, Cohere2]
""")
"""Ranks, how they compute, and what the start says, by model_type."""


@pytest.mark.parametrize("kind", RUNS)
def test_steps_on_any_ranks_are_those_of_transformers_and_the_export_is_its_own(
    train, tmp_path, documents, kind
):
    file, samples = documents
    folder = make_other_folder(tmp_path / kind, kind)
    model = of(folder)
    losses = adamw_steps(model, lambda model: loss_of(model, samples), STEPS)
    model.save_pretrained(tmp_path / "theirs")
    expected = tensors(tmp_path / "theirs")
    ranks, how, said = RUNS[kind]
    own = [*overrides(folder, file), f"train.steps={STEPS}", *ADAMW, how]
    run = train("run", *own, ranks=ranks, base=[])
    assert run["loss"] == pytest.approx(losses, abs=1e-5)
    actual = tensors(run.folder / "hf")
    assert parts_of(run.folder / "hf") == parts_of(folder)
    for name, value in expected.items():
        assert (actual[name] - value).abs().max() < 1e-4, name
    assert said in run.out


@pytest.mark.parametrize("kind", ["mamba2", "minimax", "apertus"])
def test_classes_with_float32_between_16_bit_weights_train_as_under_autocast(
    train, tmp_path, documents, kind
):
    file, samples = documents
    folder = make_other_folder(tmp_path / kind, kind)

    def loss(model):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, samples)

    losses = adamw_steps(of(folder), loss, STEPS)
    own = [*overrides(folder, file), f"train.steps={STEPS}", *ADAMW]
    own[own.index("precision=fp32")] = "precision=bf16"
    more = "activation_checkpoint=full batch.micro_rows=1"
    run = train("run", *own, more, ranks=2, base=[])
    assert run["loss"] == pytest.approx(losses, rel=3e-3)


@pytest.mark.parametrize("kind", OTHERS)
def test_each_gradient_is_that_of_transformers(tmp_path, kind):
    theirs = make_other(kind)
    theirs.save_pretrained(tmp_path)
    ours = fsdp_trainer.load_model(tmp_path).requires_grad_(True)
    assert_gradients_are_those_of(theirs, ours, 1e-5)


@pytest.mark.parametrize("family", FAMILIES_OF_ZOO)
def test_each_gradient_of_a_family_is_that_of_transformers_if_its_class_computes_it(
    tmp_path, family
):
    # transformers gives the embedding of a padding token no gradient
    theirs = make_model(family, pad_token_id=None)
    theirs.save_pretrained(tmp_path)
    ours = fsdp_trainer.load_model(tmp_path, implementation="transformers").requires_grad_(True)
    assert_gradients_are_those_of(theirs, ours)


def test_the_load_balancing_loss_is_that_of_transformers(train, tmp_path, documents):
    file, samples = documents
    folder = make_other_folder(tmp_path / "experts", "granitemoe", num_hidden_layers=1)
    # the weights stay as they are, so that the load of the step before is that of the step
    still = "optim.lr=1e-12 loss.load_balancing=1"
    run = train("still", *overrides(folder, file), still, ranks=2, base=[])
    model = of(folder)
    with torch.no_grad():
        outputs = [model(**each, output_router_logits=True) for each, _ in samples]
    logits = torch.cat([output.router_logits[0] for output in outputs])
    expected = load_balancing_loss_func((logits,), num_experts=4, top_k=2)
    assert run["load_balancing_loss"][1] == pytest.approx(expected.item(), abs=1e-5)


def row_of_table(kind, folder):
    """Return a row of the table in docs/any-model.md."""
    config = read_architecture(folder)
    packing = "one document in a row"
    if config.packs:
        packing = "our attention" if config.documents_attention else "transformers' mask"
        if config.document_layers:
            attends = config.num_attention_heads > 1
            packing = f"{packing}, other layers" * attends or "all layers"
            packing += " document by document"
    factor = "" if config.logit_factor == 1 else "a factor of the logits"
    tied = "head tied to the embedding" if config.tie_word_embeddings else ""
    experts = "experts" if config.num_experts else ""
    parts = ", ".join(filter(None, [experts, factor, tied]))
    return f"| `{kind}` | {packing} | {parts} |"


def test_kernels_for_packed_documents_are_used_where_they_give_the_same(tmp_path):
    """Stand-ins of their packages are used, whose functions refuse what the kernels refuse."""
    wanted = {
        "qwen3_5_text": "cu_seq_lens_q",
        "kimi_linear": "cu_seqlens",
        "mamba2": "",  # has a kernel of a third package, which is not installed
    }
    folders = [make_other_folder(tmp_path / kind, kind) for kind in wanted]
    script = [sys.executable, "-m", packed_kernels.__name__, *map(str, folders)]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = Forked(script, tmp_path / "log", paths)
    run.wait()
    lines = [json.loads(line) for line in run.said.splitlines() if line.startswith("[")]
    assert len(lines) == len(wanted), run.said
    for (kind, name), (arguments, reason, difference) in zip(wanted.items(), lines, strict=True):
        assert arguments == ([name, "seq_idx"] if name else []), f"{kind}: {reason}"
        assert difference < 2e-5, kind
        assert ("get boundaries" if name else "fsdp_trainer[fla]") in reason


def test_widths_and_the_experts_of_doge_are_no_absurd_numbers_of_modules():
    widths = {"shared_expert_intermediate_size": 20480, "vocab_size_per_layer_input": 262144}
    assert absurd_count({**widths, "expert_dim": 20480, "num_experts": 16384}) is None
    assert absurd_count({"text_config": {"num_experts": 10**6}}).what == "num_experts=1000000"


def test_the_page_has_the_architectures_that_are_tested(tmp_path):
    rows = []
    for kind in OTHERS:
        model = make_other(kind)
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(tmp_path / kind)
        rows.append(row_of_table(kind, tmp_path / kind))
    head = ["| `model_type` | packed documents are kept apart by | |", "|---|---|---|"]
    text = PAGE.read_text()
    start, end = (text.index(mark) for mark in ("<!-- table -->", "<!-- end of table -->"))
    table = "\n".join(["<!-- table -->", *head, *sorted(rows), ""])
    if os.environ.get("WRITE"):
        PAGE.write_text(text[:start] + table + text[end:])
    assert table == text[start:end], "run it with WRITE=1"
