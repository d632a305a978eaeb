"""The head for a further token: held against transformers' own module, on any ranks, in exports."""

import json

import pytest
import torch
import torch.nn.functional as F
from gradients import (
    WEIGHTS,
    assert_near,
    learnt_documents,
    packed_batch,
    stored_gradients,
    zero_if_none,
)
from mtp_models import WEIGHT, Theirs, named, steps_of
from other_models import RUN, SGD, make_other
from refused import refusal
from stored import assert_byte_equal, save_tensors, tensors
from tables import rows
from transformers.core_model_loading import revert_weight_conversion
from world import cli, edit_json, read_json, split, write_lines
from zoo import make_model

import fsdp_trainer
from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.mtp import LOGPROBS
from fsdp_trainer.training.objective import CrossEntropy

COUNT = {"qwen3_5_text": "mtp_num_hidden_layers"}
"""The key of config.json that counts heads, if it is not num_nextn_predict_layers."""


def folder_with_head(folder, kind):
    """Write a folder with a head; return it, transformers' model, and the head's tensors."""
    is_native = kind == "deepseek_v3"
    theirs = Theirs(make_model(kind, vocab_size=264) if is_native else make_other(kind))
    theirs.main.config.architectures = [type(theirs.main).__name__]
    theirs.main.save_pretrained(folder)
    load_tokenizer("demo:bytes").save(folder)
    edit_json(folder / "config.json", **{COUNT.get(kind, "num_nextn_predict_layers"): 1})
    return folder, theirs, theirs.save_head(folder)


def tensors_of(theirs, view):
    """Return what `view` gives of each parameter by its name in a folder: the model, the head."""
    return revert_weight_conversion(theirs.main, named(theirs.main, view)), theirs.head(view)


KINDS = ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_gradient_with_the_head_is_that_of_transformers_own_module(tmp_path, kind):
    folder, theirs, _ = folder_with_head(tmp_path, kind)
    ours = fsdp_trainer.load_model(folder, mtp=True).requires_grad_(True)
    ours.mtp_weight = WEIGHT
    value, scores, auxiliary = ours(packed_batch(), CrossEntropy(WEIGHTS))
    value.backward()
    loss, further = torch.zeros(()), torch.zeros(())
    for alone, scored in learnt_documents():
        logits, drafted = theirs.logits(input_ids=alone)
        for place, target, weight in scored:
            loss = loss + weight * F.cross_entropy(logits[place], target)
            if place:
                further = further + weight * F.cross_entropy(drafted[place - 1], target)
    (loss + WEIGHT * further).backward()
    assert value.item() == pytest.approx((loss + WEIGHT * further).item(), rel=1e-5)
    assert -(scores.log_probability * WEIGHTS).sum() == pytest.approx(loss.item(), rel=1e-5)
    assert -(auxiliary[LOGPROBS] * WEIGHTS).sum() == pytest.approx(further.item(), rel=1e-5)
    main, head = tensors_of(theirs, zero_if_none)
    wanted, gradients = main | head, stored_gradients(ours)
    copies = {name for name in gradients if name.endswith(("embed_tokens.weight", "head.weight"))}
    copies -= {"model.embed_tokens.weight", "lm_head.weight"}
    assert_near({name: gradients[name] for name in gradients.keys() - copies}, wanted)
    assert all(wanted[name].any() for name in head if "bias" not in name and "experts" not in name)


FULL = "activation_checkpoint=full batch.micro_rows=1"
STEPS = [
    ("deepseek_v3", 4, "sharding.expert=2 batch.micro_rows=1"),
    ("glm4_moe", 1, "batch.micro_rows=4"),
    ("glm4_moe", 4, f"sharding=hsdp sharding.replicas=2 {FULL}"),
    *((kind, 2, FULL) for kind in KINDS[2:]),
]
"""Kinds, ranks, and how they compute."""


@pytest.mark.parametrize("kind, ranks, how", STEPS)
def test_steps_and_the_exported_head_are_transformers_on_any_ranks(
    train, tmp_path, documents, kind, ranks, how
):
    folder, theirs, head = folder_with_head(tmp_path / "in", kind)
    before = set(tensors(folder))
    file, samples = documents
    loss, further = steps_of(theirs, samples, 2, 0.1)
    words = [
        *(f"model.init_from={folder}", f"data.path={file}", "data.format=tokens", "batch.rows=4"),
        *("batch.seq_len=64", f"objective.mtp={WEIGHT}", *SGD, "optim.lr=0.1", *RUN),
    ]
    run = train("run", *words, "train.steps=2", how, ranks=ranks, base=[])
    assert run["loss"] == pytest.approx(loss.tolist(), abs=1e-5)
    assert run["mtp_loss"] == pytest.approx(further.tolist(), abs=1e-5)
    assert run["objective"] == pytest.approx((loss + WEIGHT * further).tolist(), abs=1e-5)
    exported = tensors(run.folder / "hf")
    main, own = tensors_of(theirs, torch.Tensor.detach)
    assert exported.keys() == before
    for name, value in (main | own).items():
        assert (exported[name] - value).abs().max() < 1e-4, name
    for name in head.keys() - own.keys():  # copies of embedding and output head
        end = name.rpartition("shared_head.head.")[2] if "shared_head" in name else ""
        same = "lm_head.weight" if end else "model.embed_tokens.weight"
        assert torch.equal(exported[name], exported[same])
    config = read_json(run.folder / "hf/config.json")
    assert config[COUNT.get(kind, "num_nextn_predict_layers")] == 1
    assert not any(key.startswith("fsdp_trainer") for key in config)
    if ranks == 1:  # a stop in between changes no bit; the next run keeps the head
        train("half", *words, "train.steps=1", how, base=[])
        again = train("half", *words, "train.steps=2", how, base=[])
        resumed = tensors(again.folder / "hf")
        assert_byte_equal(resumed, exported)
        plain = [word for word in split(words) if not word.startswith(("objective.", "model."))]
        source = f"model.init_from={run.folder}"
        next_run = train("next", *plain, source, "train.steps=1", base=[])
        assert "it stays as it is" in next_run.out
        after = tensors(next_run.folder / "hf")
        assert all(torch.equal(after[name], exported[name]) for name in own)
        assert not torch.equal(after["lm_head.weight"], exported["lm_head.weight"])


DEEPSEEK = (
    "tokenizer.path=demo:bytes model=tiny model.family=deepseek_v3 model.num_key_value_heads=4"
    " model.head_dim=48"
)
REFUSED = rows("""
sharding.tensor=2 → Use  sharding.tensor=1  or  objective.mtp=0
sharding.context=2 → Use  sharding.context=1  or  objective.mtp=0
sharding.pipeline=2 → Use  sharding.pipeline=1  or  objective.mtp=0
adapter=lora → Use  adapter=none  or  objective.mtp=0
objective=dpo → only counts with  objective=sft
model.family=llama → llama has no head that is computed; deepseek_v3, glm4_moe
""")


@pytest.mark.parametrize("word, part", REFUSED)
def test_what_cannot_be_is_refused_by_name(word, part):
    words = split([DEEPSEEK, "data.path=demo:backwards objective.mtp=0.1"])
    compose("train", words)
    others = [each for each in words if each[:12] != word[:12]]
    assert part in refusal(compose, "train", [*others, word])


def test_folders_whose_head_cannot_be_trained_are_refused(tmp_path):
    folder, _, head = folder_with_head(tmp_path, "deepseek_v3")
    stored = tensors(folder)
    (copy,) = (name for name in head if name.endswith("shared_head.head.weight"))
    save_tensors(folder, stored | {copy: stored[copy] + 1})
    with pytest.raises(
        UserError, match=r"differs from lm_head.weight, and an MTP head that shares"
    ):
        fsdp_trainer.load_model(folder, mtp=True)
    fsdp_trainer.load_model(folder)
    for count in (0, 2):
        edit_json(folder / "config.json", num_nextn_predict_layers=count)
        with pytest.raises(UserError, match=f"counts {count} MTP heads, and one is computed"):
            fsdp_trainer.load_model(folder, mtp=True)


def test_generate_counts_the_drafts_of_a_trained_head(train, tmp_path):
    texts = tmp_path / "texts.jsonl"
    write_lines(texts, [{"text": "abcdefgh" * 7}])
    words = [
        *(f"data.path={texts}", "data.format=text", DEEPSEEK, "model.num_hidden_layers=2"),
        *("model.hidden_size=64", "batch.seq_len=64", "batch.rows=1", "optim.lr=1e-2"),
        *("train.steps=40", "objective.mtp=1", "data.max_lost=1", *RUN),
    ]
    run = train("run", *words, base=[])
    assert run["mtp_loss"][0] > 5 > 1 > run["mtp_loss"][-1]
    question = "prompt=abcdefghabc raw=true max_tokens=20 mtp=true"
    for source in (run.folder, run.folder / "hf"):
        assert (
            "MTP head: 19 of 19 drafted tokens accepted (100.0%)"
            in cli("generate", f"source={source}", question).out
        )
    line = json.loads(cli("generate", f"source={run.folder}", question, "format=json").out)
    assert (line["drafted"], line["accepted"], line["text"][:5]) == (19, 19, "defgh")
    assert (
        "only counts with  temperature=0"
        in cli("generate", f"source={run.folder}", question, "temperature=1", code=2).err
    )
