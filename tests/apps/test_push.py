"""Exports on the hub, of which a server on this machine is the stand-in, and their model cards."""

import json
import shutil
from base64 import b64decode
from dataclasses import asdict

import pytest
from huggingface_hub import ModelCard
from json_server import JsonServer
from tables import rows

from fsdp_trainer.config.composing.compose import compose
from fsdp_trainer.config.paths import checkpoint_configuration


class Hub:
    """Repositories of a hub: files by name, and objects of large files by digest."""

    def __init__(self):
        self.private, self.files, self.objects, self.uploads = {}, {}, {}, []
        self.breaks_off, self.old = False, []

    def answer(self, path, body, headers):
        name = path.removeprefix("/api/models/")
        if path == "/api/repos/create":
            return self.create(f"{body['organization']}/{body['name']}", body)
        if path.startswith("/objects/"):
            return self.receive(path.removeprefix("/objects/"), body)
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self.action(o) for o in body["objects"]]}
        if "/preupload/" in path:
            return 200, {"files": [upload_mode(file["path"]) for file in body["files"]]}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if path.endswith("/commit/main"):
            return self.commit(map(json.loads, body.splitlines()))
        return 200, {
            "id": name,
            "private": self.private[name],
            "sha": "0" * 40,
            "siblings": self.old,
        }

    def create(self, name, body):
        if name in self.private:
            return 409, {"url": f"{self.url}/{name}"}
        self.private[name] = bool(body.get("private")) or body.get("visibility") == "private"
        return 200, {"url": f"{self.url}/{name}"}

    def receive(self, oid, content):
        self.uploads.append(oid)
        if self.breaks_off:
            return 501, {}
        self.objects[oid] = content
        return 200, {}

    def commit(self, lines):
        for line in lines:
            about = line["value"]
            if line["key"] == "file":
                self.files[about["path"]] = b64decode(about["content"])
            elif line["key"] == "lfsFile":
                self.files[about["path"]] = self.objects[about["oid"]]
        return 200, {"commitUrl": f"{self.url}/org/plain/commit/1", "commitOid": "1" * 40}

    def action(self, wanted):
        if wanted["oid"] in self.objects:
            return wanted
        return wanted | {"actions": {"upload": {"href": f"{self.url}/objects/{wanted['oid']}"}}}


def upload_mode(path):
    mode = "lfs" if path.endswith(".safetensors") else "regular"
    return {"path": path, "shouldIgnore": False, "uploadMode": mode}


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    server = JsonServer(hub.answer)
    hub.url = server.url
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield hub
    server.close()


def test_a_run_is_pushed_with_its_card_privately_and_goes_on_after_a_broken_upload(
    hub, ledger, program
):
    run = ledger.run("plain").folder
    hub.breaks_off = True
    assert "Type the same again" in program("push", run, "to=org/plain", code=1)
    assert not hub.files
    hub.breaks_off = False
    said = program("push", run, "to=org/plain")
    sent = [*hub.uploads]
    program("push", run, "to=org/plain")
    assert hub.uploads == sent  # what the hub has is not sent again
    assert hub.private == {"org/plain": True}
    assert hub.files == {file.name: file.read_bytes() for file in (run / "hf").iterdir()}
    assert "private" in said


def test_an_adapter_names_a_base_that_others_have(hub, ledger, program):
    words = "push", ledger.run("adapter").folder / "adapter", "to=org/plain"
    assert "base=org/name" in program(*words, code=2)
    program(*words, "base=org/base")
    config = json.loads(hub.files["adapter_config.json"])
    assert config["base_model_name_or_path"] == "org/base"
    assert ModelCard(hub.files["README.md"].decode()).data.base_model == "org/base"


def test_nothing_secret_and_nothing_foreign_is_pushed(hub, ledger, tmp_path, program, monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "correct-horse-battery")
    monkeypatch.setenv("LONG_TOKEN", "correct-horse" * 30)  # longer than names of files may be
    wrong = {
        "config.json": f"hf_{'a' * 34}", "a.txt": "correct-horse-battery", "b.md": str(tmp_path),
        "c.py": "https://me:secret@host/x", "d.pt": "pickle",
        "e.txt": "-----BEGIN PRIVATE KEY-----",
    }  # fmt: skip
    (tmp_path / "elsewhere.txt").write_text("not yours")
    for number, (name, text) in enumerate(wrong.items()):
        folder = tmp_path / str(number)
        shutil.copytree(ledger.run("plain").folder / "hf", folder)
        (folder / name).write_text(text)
        message = program("push", folder, "to=org/plain", code=2)
        assert name in message
        assert "correct-horse" not in message
    (folder / "e.txt").unlink()
    (folder / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    assert "link out of the folder" in program("push", folder, "to=org/plain", code=2)
    (folder / "link.txt").unlink()
    (folder / ".git").mkdir()
    (folder / ".git/config.json").write_text("correct-horse-battery")
    hub.private |= {"org/open": False, "org/old": True}
    hub.old = [{"rfilename": name} for name in ("model-00001-of-2.safetensors", "config.json")]
    assert "other weights" in program("push", folder, "to=org/old", code=2)
    hub.old = []
    refused = {
        "to=org/open": "private=false", "to=open": "is no repository", "": "to=org/name",
        "to=org/plain base=org/base": "only counts for an adapter",
    }  # fmt: skip
    for words, said in refused.items():
        assert said in program("push", folder, *words.split(), code=2)
    assert "fsdp-trainer export" in program("push", tmp_path, "to=org/plain", code=2)
    assert not hub.uploads
    program("push", folder, "to=org/open", "private=false")
    assert ".git/config.json" not in hub.files


def test_a_model_card_says_what_was_trained_and_names_no_folder_of_this_machine(ledger, tmp_path):
    for name, part, tag, library in rows("""
plain → hf → text-generation → transformers
adapter → adapter → text-generation → peft
reward → hf → text-classification → transformers
"""):
        run = ledger.run(name)
        card = ModelCard.load(run.folder / part / "README.md")
        assert (card.data.pipeline_tag, card.data.library_name) == (tag, library)
        assert card.data.license is None
        assert card.data.tags[0] == "fsdp_trainer"
        assert str(run.folder.parent) not in card.text
        assert f"| {run.metrics[-1]['loss']:.4f} |" in card.text
        assert "  eps: " not in card.text
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(card.text.rpartition("```yaml")[2].rpartition("```")[0])
        again = compose("train", [f"+recipe={recipe}", "tokenizer.path=demo:bytes"], inputs=False)
        written = checkpoint_configuration(run.folder)
        for group in ("adapter", "batch", "objective", "optim", "precision", "schedule"):
            assert asdict(getattr(again, group)) == written[group]
        assert ("chats.jsonl" if name != "reward" else "pairs.jsonl") in card.text
