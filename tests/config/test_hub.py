"""Models by their name on the hub; a folder that the test makes stands in for the download."""

import json
import shutil
import sys

import pytest
import torch

from fsdp_trainer.cli import main
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that knows `org/tiny`; gives the patterns of each download."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=260, **sizes)).save_pretrained(tmp_path / "theirs")
    load_tokenizer("demo:bytes").save(tmp_path / "theirs")
    requests = []

    def snapshot_download(name, allow_patterns=None, local_files_only=False):
        assert name == "org/tiny", f"no such model: {name}"
        if local_files_only:
            return str(max(tmp_path.glob("fetched-*"), key=lambda path: path.stat().st_mtime_ns))
        requests.append(allow_patterns)
        fetched = tmp_path / f"fetched-{len(requests)}"
        shutil.copytree(
            tmp_path / "theirs",
            fetched,
            ignore=lambda _, names: [
                n
                for n in names
                if "*.safetensors" not in allow_patterns and n.endswith(".safetensors")
            ],
        )
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return requests


@pytest.mark.slow
def test_preview_of_a_hub_model_fetches_no_weights(hub, capsys):
    assert (
        main(
            [
                "preview",
                "model.init_from=org/tiny",
                "data.path=demo:backwards",
                "batch.seq_len=64",
                "preview.format=json",
                "preview.rows=1",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["row"] == 0
    assert hub
    assert not any("*.safetensors" in patterns for patterns in hub)


@pytest.mark.slow
def test_training_starts_from_a_hub_models_weights(hub, tmp_path):
    shared = [
        "data.path=demo:backwards",
        "batch.seq_len=64",
        "batch.rows=2",
        "train.steps=1",
        "precision=fp32",
        "launch.device=cpu",
    ]
    assert main(["model.init_from=org/tiny", "run.name=hub", *shared]) == 0
    assert main([f"model.init_from={tmp_path}/theirs", "run.name=folder", *shared]) == 0
    losses = [
        json.loads((tmp_path / "runs" / name / "metrics.jsonl").read_text())["loss"]
        for name in ("hub", "folder")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.further
def test_a_hub_models_adapter_names_it_and_finds_it_again(hub, tmp_path, capsys):
    shared = [
        "data.path=demo:backwards",
        "batch.seq_len=64",
        "batch.rows=2",
        "precision=fp32",
        "launch.device=cpu",
        "checkpoint.export_hf=true",
    ]
    start = ["model.init_from=org/tiny", "adapter=lora", "adapter.rank=4", "run.name=hub"]
    assert main([*start, *shared, "train.steps=1"]) == 0
    for fetched in tmp_path.glob("fetched-*"):
        shutil.rmtree(fetched)  # it is not kept for ever
    assert main([*start, *shared, "train.steps=2"]) == 0
    adapter = tmp_path / "runs" / "hub" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/tiny"
    assert main(["export", f"source={adapter}", f"out={tmp_path / 'merged'}"]) == 0
    assert main(["verify", f"source={adapter}", f"hf={tmp_path / 'merged'}"]) == 0
    assert main([f"adapter.init_from={adapter}", "run.name=again", *shared, "train.steps=1"]) == 0
    assert "from org/tiny" in capsys.readouterr().out


def test_a_model_that_cannot_be_fetched_is_named(hub, capsys):
    assert main(["model.init_from=org/none", "data.path=demo:backwards"]) == 2
    assert "model.init_from=org/none" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(hub, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["model.init_from=org/tiny", "data.path=demo:backwards"]) == 2
    assert "fsdp_trainer[hub]" in capsys.readouterr().err
