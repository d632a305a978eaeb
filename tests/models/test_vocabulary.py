"""The vocabulary: padding that nothing sees, rows for new tokens, and the language model of a
folder that also knows images."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored import assert_byte_equal, tensors
from zoo import HF, make_folder

import fsdp_trainer
from fsdp_trainer.checkpoint.digest import weights_digest
from fsdp_trainer.checkpoint.stored_tensors import StoredTensors
from fsdp_trainer.config.paths import find_checkpoint

transformers = pytest.importorskip("transformers")
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "hf", tie_word_embeddings=True)


@pytest.mark.slow
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.grid(1)
def test_padding_changes_no_loss_and_no_export(train, tied):
    how = [
        f"model.tie_word_embeddings={tied}",
        "train.steps=6",
        "checkpoint.export_hf=true",
        "optim.weight_decay=0.1",
    ]
    plain = train("plain", *how, ranks=2)
    padded = train("padded", *how, "model.vocab_multiple=100", ranks=2)
    assert StoredTensors(find_checkpoint(padded.folder)).shapes[f"weights/{EMBEDDING}"] == (300, 32)
    for column in ("loss", "grad_norm"):  # the shards' rows differ, and with them the order of sums
        assert padded.column(column) == pytest.approx(plain.column(column), rel=1e-6)
    ours, theirs = tensors(padded.folder / "hf"), tensors(plain.folder / "hf")
    assert ours[EMBEDDING].shape == (260, 32)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    assert ours.keys() == theirs.keys()
    assert json.loads((padded.folder / "hf" / "config.json").read_text())["vocab_size"] == 260


def digest_of(run):
    return weights_digest(find_checkpoint(run.folder))


@pytest.mark.slow
@pytest.mark.further
def test_a_padded_run_goes_on_and_is_read_by_other_paddings(train):
    how = ["model.vocab_multiple=100", "model.initializer=depth", "schedule=constant"]
    whole = train("whole", *how, "train.steps=6", ranks=2)
    first = train("first", *how, "train.steps=3", ranks=2)
    train("first", *how, "train.steps=6", ranks=1)
    assert first.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
    weights = fsdp_trainer.load_model(first.folder).state_dict()
    for multiple in (1, 7, 128):
        next_stage = train(
            f"next{multiple}",
            f"model.init_from={first.folder}",
            f"model.vocab_multiple={multiple}",
            "train.steps=0",
            base=HF,
            ranks=2,
        )
        again = fsdp_trainer.load_model(next_stage.folder).state_dict()
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        assert digest_of(next_stage) == digest_of(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "multiple"), [(1, 1), pytest.param(2, 128, marks=pytest.mark.slow)]
)
def test_new_tokens_start_as_the_mean_of_the_others(train, folder, ranks, multiple):
    grown = [
        "model.vocab_size=300",
        f"model.vocab_multiple={multiple}",
        "train.steps=0",
        "checkpoint.export_hf=true",
    ]
    run = train("run", f"model.init_from={folder}", *grown, base=HF, ranks=ranks)
    before, after = tensors(folder)[EMBEDDING], tensors(run.folder / "hf")[EMBEDDING]
    assert after.shape == (300, 32)
    assert torch.equal(after[:264], before)
    assert torch.allclose(after[264:], before.mean(0), atol=1e-6)
    tokens = torch.randint(264, (1, 20), generator=torch.Generator().manual_seed(0))
    ours, theirs = (
        fsdp_trainer.load_model(path).logits(tokens) for path in (run.folder / "hf", folder)
    )
    assert ours.shape[-1] == 300
    assert torch.allclose(ours[..., :264], theirs, atol=1e-5)
    second = train("second", f"model.init_from={run.folder}", "train.steps=2", base=HF)
    assert second.column("step") == [1, 2]


def test_rows_are_not_taken_away(train, folder):
    refused = train(
        "run", f"model.init_from={folder}", "model.vocab_size=200", "train.steps=1", base=HF, code=2
    )
    assert "model.vocab_size=200" in refused.err
    assert "264 rows" in refused.err


@pytest.mark.slow
def test_a_tokenizer_that_is_too_large_is_told_how_to_grow(train, tmp_path):
    folder = make_folder(tmp_path / "small", vocab_size=200)
    refused = train("run", f"model.init_from={folder}", "train.steps=1", base=HF, code=2)
    assert "model.vocab_size=260" in refused.err
    assert train(
        "grown", f"model.init_from={folder}", "model.vocab_size=260", "train.steps=1", base=HF
    ).column("step") == [1]


@pytest.mark.slow
def test_tokens_that_the_tokenizer_lacks_are_added_to_it_and_to_the_model(train, folder, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|turn|>{{ m.content }}<|done|>{% endfor %}{% if "
        "add_generation_prompt %}<|turn|>{% endif %}"
    )
    lacking = [
        f"model.init_from={make_folder(tmp_path / 'small', vocab_size=260)}",
        f"data.template={template}",
        "train.steps=2",
    ]
    new = "tokenizer.add_tokens=['<|turn|>','<|im_end|>','<|done|>']"
    run = train("run", *lacking, new, "checkpoint.export_hf=true", base=HF, ranks=2)
    hf = run.folder / "hf"
    assert (
        tensors(hf)[EMBEDDING].shape[0]
        == json.loads((hf / "config.json").read_text())["vocab_size"]
        == 262
    )
    theirs = transformers.AutoTokenizer.from_pretrained(hf)
    assert theirs.encode("a<|turn|>b<|done|>", add_special_tokens=False)[1::2] == [260, 261]
    assert (
        transformers.AutoModelForCausalLM.from_pretrained(hf).get_input_embeddings().weight.shape[0]
        == 262
    )
    refused = train("chatml", "data.template=llama3", "train.steps=1", code=2)
    assert "tokenizer.add_tokens=['<|start_header_id|>'" in refused.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "prefix",
    [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")],
)
def test_of_a_gemma_3_with_images_the_language_model_is_trained(train, tmp_path, prefix):
    text = make_folder(tmp_path / "text", family="gemma3", tie_word_embeddings=False)
    folder = make_folder(tmp_path / "both", family="gemma3", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    renamed = {
        n.replace("model.", prefix[0], 1)
        if n.startswith("model.")
        else n.replace("lm_head.", prefix[1]): t
        for n, t in weights.items()
    }
    images = {
        "vision_tower.embeddings.weight": torch.zeros(4, 4),
        "multi_modal_projector.mm_input_projection_weight": torch.zeros(4, 4),
    }
    save_file(renamed | images, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    both = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": config,
        "vision_config": {},
    }
    (folder / "config.json").write_text(json.dumps(both))
    run = train(
        "run",
        f"model.init_from={folder}",
        "train.steps=0",
        "checkpoint.export_hf=true",
        base=HF,
        ranks=2,
    )
    assert_byte_equal(tensors(run.folder / "hf"), tensors(text))
    described = json.loads((run.folder / "hf" / "config.json").read_text())
    assert described["model_type"] == "gemma3_text"
    assert described["architectures"] == ["Gemma3ForCausalLM"]


@pytest.mark.slow
def test_another_tokenizer_than_the_models_is_told(train, folder, tmp_path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "other.json").write_text(json.dumps(tokenizer))
    for path, said in ((folder, False), (tmp_path / "other.json", True)):
        run = train(
            f"run{said}",
            f"model.init_from={folder}",
            f"tokenizer.path={path}",
            "train.steps=0",
            base=HF,
        )
        assert ("2 of 260 ids are other tokens" in run.out) == said
