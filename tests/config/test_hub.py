"""Models by their name on the hub; a folder that the test makes stands in for the download."""

import json
import shutil
import sys

import pytest
from world import read_json
from zoo import make_folder


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that knows `org/tiny`; gives the patterns of each download."""
    make_folder(tmp_path / "theirs", num_hidden_layers=1, vocab_size=260)
    requests = []

    def snapshot_download(name, allow_patterns=None, local_files_only=False):
        assert name == "org/tiny", f"no such model: {name}"
        if local_files_only:
            return str(max(tmp_path.glob("fetched-*"), key=lambda path: path.stat().st_mtime_ns))
        requests.append(allow_patterns)
        fetched = tmp_path / f"fetched-{len(requests)}"
        with_weights = "*.safetensors" in allow_patterns
        left_out = None if with_weights else shutil.ignore_patterns("*.safetensors")
        shutil.copytree(tmp_path / "theirs", fetched, ignore=left_out)
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return requests


SHORT = [
    "data.path=demo:backwards", "batch.seq_len=64", "batch.rows=2", "precision=fp32",
    "launch.device=cpu", "checkpoint.export_hf=true",
]  # fmt: skip


def test_preview_of_a_hub_model_fetches_no_weights(hub, program):
    words = ["preview.format=json", "preview.rows=1", *SHORT[:2]]
    assert json.loads(program("preview", "model.init_from=org/tiny", *words))["row"] == 0
    assert hub
    assert not any("*.safetensors" in patterns for patterns in hub)


def test_training_starts_from_a_hub_model_and_its_adapter_names_it(hub, tmp_path, program):
    def losses(name, *words):
        losses.said = program(f"run.name={name}", *SHORT, *words)
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    lora = ["adapter=lora", "adapter.rank=4"]
    first = losses("hub", "model.init_from=org/tiny", *lora, "train.steps=1")
    assert first == losses("folder", f"model.init_from={tmp_path}/theirs", *lora, "train.steps=1")
    for fetched in tmp_path.glob("fetched-*"):
        shutil.rmtree(fetched)  # it is not kept for ever
    adapter = tmp_path / "runs/hub/adapter"
    config = read_json(adapter / "adapter_config.json")
    assert config["base_model_name_or_path"] == "org/tiny"
    assert len(losses("hub", "model.init_from=org/tiny", *lora, "train.steps=2")) == 2
    program("export", f"source={adapter}", f"out={tmp_path / 'merged'}")
    losses("again", f"adapter.init_from={adapter}", "train.steps=1")
    assert "from org/tiny" in losses.said


def test_without_the_extra_it_says_what_to_install(hub, program, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    said = program("model.init_from=org/tiny", "data.path=demo:backwards", code=2)
    assert "fsdp_trainer[hub]" in said
