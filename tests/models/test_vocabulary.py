"""The vocabulary: padding that nothing sees, rows for new tokens, and the language model of a
folder that also knows images."""

import re
import shutil

import pytest
import torch
import transformers
from refused import refusal
from stored import assert_byte_equal, assert_near, save_tensors, tensors
from texts import exchange_tokens
from world import read_json, write_json
from zoo import HF, make_folder

import fsdp_trainer
from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.checkpoint.formats.stored_tensors import StoredTensors
from fsdp_trainer.config.paths import find_checkpoint
from fsdp_trainer.config.schema import Model
from fsdp_trainer.data.prepared_data import new_rows
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.models.from_config.resolve import resolve_with_tokenizer

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "hf", tie_word_embeddings=True)


def digest_of(run):
    return weights_digest(find_checkpoint(run.folder))


def test_padding_changes_no_loss_and_no_export_and_can_be_another_in_the_next_stage(train):
    how = "model.tie_word_embeddings=false train.steps=3 checkpoint.export_hf=true"
    plain = train("plain", how, ranks=2)
    padded = train("padded", how, "model.vocab_multiple=100", ranks=2)
    assert StoredTensors(find_checkpoint(padded.folder)).shapes[f"weights/{EMBEDDING}"] == (300, 32)
    assert_near(padded, plain, "loss", "grad_norm", rel=1e-6)
    ours, theirs = tensors(padded.folder / "hf"), tensors(plain.folder / "hf")
    assert ours[EMBEDDING].shape == ours["lm_head.weight"].shape == (260, 32)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    assert ours.keys() == theirs.keys()
    assert read_json(padded.folder / "hf/config.json")["vocab_size"] == 260
    start = f"model.init_from={padded.folder} model.vocab_multiple=7 train.steps=0"
    following = train("next", start, base=HF, ranks=2)
    assert digest_of(following) == digest_of(padded)
    weights, again = (
        fsdp_trainer.load_model(run.folder).state_dict() for run in (padded, following)
    )
    assert_byte_equal(again, weights)


def test_rows_are_not_taken_away(train, folder):
    fewer = f"model.init_from={folder} model.vocab_size=200 train.steps=1"
    refused = train("run", fewer, base=HF, code=2)
    assert "model.vocab_size=200" in refused.err
    assert "264 rows" in refused.err


def test_a_tokenizer_that_is_too_large_is_told_how_to_grow(train, tmp_path):
    how = f"model.init_from={make_folder(tmp_path / 'small', vocab_size=200)} train.steps=1"
    grown = "model.vocab_size=260"
    refused = train("run", how, base=HF, code=2).err
    assert grown in refused
    assert "200" in refused
    assert train("grown", how, grown, base=HF)["step"] == [1]


def test_tokens_that_the_tokenizer_lacks_are_added_to_it_and_to_the_model(train, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|turn|>{{ m.content }}<|done|>{% endfor %}{% if "
        "add_generation_prompt %}<|turn|>{% endif %}"
    )
    small = make_folder(tmp_path / "small", vocab_size=260)
    how = [f"model.init_from={small} data.template={template} train.steps=2"]
    how += ["tokenizer.add_tokens=['<|turn|>','<|im_end|>','<|done|>']"]
    hf = train("run", *how, "checkpoint.export_hf=true", base=HF, ranks=2).folder / "hf"
    assert tensors(hf)[EMBEDDING].shape[0] == 262
    assert read_json(hf / "config.json")["vocab_size"] == 262
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf)
    assert tokenizer.encode("a<|turn|>b<|done|>", add_special_tokens=False)[1::2] == [260, 261]
    model = transformers.AutoModelForCausalLM.from_pretrained(hf)
    assert model.get_input_embeddings().weight.shape[0] == 262
    refused = train("chatml", "data.template=llama3 train.steps=1", code=2)
    assert "tokenizer.add_tokens=['<|start_header_id|>'" in refused.err


def test_tokens_that_only_a_description_names_get_rows_if_the_others_fit(tmp_path):
    model = Model(name="auto", init_from=str(make_folder(tmp_path / "small", vocab_size=260)))
    load_tokenizer("demo:bytes").save(tmp_path / "tokens")
    named = {"eos_token": "<|im_end|>", "extra_special_tokens": ["<think>", "</think>"]}
    write_json(tmp_path / "tokens/tokenizer_config.json", named)
    tokenizer = load_tokenizer(tmp_path / "tokens")
    count, new = tokenizer.vocab_size, len(tokenizer.new)
    assert resolve_with_tokenizer(model, count, False, new).vocab_size == 262
    assert "2 tokens with no row" in new_rows(tokenizer, 260)[0]
    assert new_rows(tokenizer, 262) == []
    assert "more than the model's embedding has rows" in refusal(
        resolve_with_tokenizer, model, count, False, 1
    )


PREFIXES = [
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "lm_head."),
]
"""Of decoder and head beside a tower, as published at different times."""


def test_of_a_gemma_3_with_images_the_language_model_is_trained(train, tmp_path):
    text = make_folder(tmp_path / "text", family="gemma3", tie_word_embeddings=False)
    folder = tmp_path / "both"
    shutil.copytree(text, folder)
    described = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": read_json(folder / "config.json"),
        "vision_config": {},
    }
    write_json(folder / "config.json", described)
    weights, expected = tensors(text), fsdp_trainer.load_model(text).state_dict()
    for prefix, head in PREFIXES:
        renamed = {
            re.sub(r"^model\.", prefix, re.sub(r"^lm_head\.", head, n)): t
            for n, t in weights.items()
        }
        images = ("vision_tower.x.weight", "multi_modal_projector.mm_input_projection_weight")
        renamed |= {name: torch.zeros(4, 4) for name in images}
        save_tensors(folder, renamed)
        read = fsdp_trainer.load_model(folder).state_dict()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    how = f"model.init_from={folder} train.steps=0 checkpoint.export_hf=true"
    run = train("run", how, base=HF, ranks=2)
    assert_byte_equal(tensors(run.folder / "hf"), weights)
    described = read_json(run.folder / "hf/config.json")
    assert described["model_type"] == "gemma3_text"
    assert described["architectures"] == ["Gemma3ForCausalLM"]


def test_another_tokenizer_than_the_models_is_told(train, folder, tmp_path):
    exchange_tokens(shutil.copy(folder / "tokenizer.json", tmp_path / "other.json"))
    how = f"model.init_from={folder} train.steps=0"
    for path, said in ((folder, False), (tmp_path / "other.json", True)):
        run = train(f"run{said}", how, f"tokenizer.path={path}", base=HF)
        assert ("2 of 260 ids are other tokens" in run.out) == said
