"""Folders of models, honest and damaged ones, and what `prove` says of them.

`make prove-faults` damages them in more ways: tools/prove_faults.py.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tables import rows
from world import command, edit_json
from zoo import make_folder

from fsdp_trainer.data.tokens.tokenizer import load_tokenizer

WEIGHTS = "model.safetensors"
OUTPUT = "model.layers.0.self_attn.o_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
Edit = Callable[[Path], Any]


def set_keys(name, **keys):
    """Return an edit of keys in a JSON file."""
    return lambda folder: edit_json(folder / name, **keys)


def set_tensors(change, name=WEIGHTS):
    """Return an edit of the tensors in a file."""

    def edit(folder):
        tensors = load_file(folder / name)
        change(tensors)
        whole = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(whole, folder / name, {"format": "pt"})

    return edit


def into_gguf(folder):
    """Write a folder's model into a GGUF file, which is all that stays."""
    from fsdp_trainer.interop.weights.gguf_file import write_gguf

    write_gguf(folder, folder.parent / "model.gguf", "f32")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder.parent / "model.gguf").rename(folder / "model.gguf")


def pad_with_an_end(folder):
    """Name a token for padding with which texts end."""
    ends = load_tokenizer(str(folder)).encode(".")
    set_keys("config.json", pad_token_id=ends[-1])(folder)


def other_turns(folder):
    """Let the template write no line's end after a role."""
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace(r"['role'] + '\n'", "['role']"))


def half_merged(tensors, base):
    """Halve what an adapter has changed."""
    tensors.update({name: base[name] + (t - base[name]) / 2 for name, t in tensors.items()})


@dataclass(frozen=True)
class FolderFault:
    """A folder of `write_folders`, how it is damaged, its reference, and the check that says so."""

    source: str
    edit: Edit
    reference: str
    check: str


other_base_of_rope = set_keys(
    "config.json", rope_parameters={"rope_type": "default", "rope_theta": 1e6}
)
FOLDERS = {
    "transposed export": FolderFault(
        "base",
        set_tensors(lambda t: t.update({OUTPUT: t[OUTPUT].T.reshape(t[OUTPUT].shape)})),
        "base",
        "reference: matrices",
    ),
    "RoPE lost in a GGUF file": FolderFault(
        "base",
        lambda folder: [edit(folder) for edit in (other_base_of_rope, into_gguf)],
        "base",
        "reference: config.json",
    ),
    "misnamed compressed tensor": FolderFault(
        "compressed",
        set_tensors(lambda t: t.update({"o.weight": t.pop(OUTPUT)})),
        "",
        "tensors",
    ),
    "scales of another compression": FolderFault(
        "compressed",
        set_tensors(lambda t: t[f"{UP}_scale"].mul_(1.1)),
        "base",
        "reference: numbers in few bits",
    ),
    "padding that ends a text": FolderFault("classifier", pad_with_an_end, "", "logits"),
    "template of another model": FolderFault(
        "base", other_turns, "base", "reference: chat template"
    ),
    "merged with another scale": FolderFault(
        "merged",
        lambda folder: set_tensors(
            lambda t: half_merged(t, load_file(folder.parent / "base" / WEIGHTS))
        )(folder),
        "adapter",
        "merged: share of the adapter",
    ),
}
HONEST = rows("""
adapter → base
merged → adapter
gguf → base
base → gguf
compressed → base
classifier → base
head adapter → base
drafts → drafts
""")
"""Folders and references of which `prove` may say nothing."""


def write_folders(out):
    """Write a base, in shards, in 8 bits, with another head; adapters, and one merged."""
    import transformers
    from peft import LoraConfig, get_peft_model

    from fsdp_trainer.apps.prove.proof.small_folder import add_head
    from fsdp_trainer.checkpoint.exports.compressed_export import write_compressed

    ends = json.dumps({"eos_token_id": [258, 256]})
    for name, size in (("base", "1GB"), ("shards", "50KB")):
        make_folder(out / name, "qwen3", shard=size)
        (out / name / "generation_config.json").write_text(ends)
    make_folder(out / "drafts", "deepseek_v3")
    (out / "drafts/generation_config.json").write_text(ends)
    set_keys("config.json", num_nextn_predict_layers=1)(out / "drafts")
    add_head(out / "drafts")
    for name in ("merged", "gguf", "classifier"):
        shutil.copytree(out / "base", out / name)
    into_gguf(out / "gguf")
    (out / "compressed").mkdir()
    write_compressed(out / "base", out / "compressed", "int8", None)
    scorer = transformers.AutoModelForSequenceClassification
    scorer.from_pretrained(out / "base", num_labels=3).save_pretrained(out / "classifier")
    head = {"use_dora": True, "modules_to_save": ["lm_head"]}
    for out_name, more in (("head adapter", head), ("adapter", {})):
        model = transformers.AutoModelForCausalLM.from_pretrained(out / "base")
        targets = ["q_proj", "v_proj"]
        options = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **more)
        adapted = get_peft_model(model, options)
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, 0, 0.02)
        adapted.save_pretrained(out / out_name)
    adapted.merge_and_unload().save_pretrained(out / "merged")
    (out / "merged/generation_config.json").write_text(ends)


def wrong_in_folder(source, reference):
    """Return the checks of a folder that are not ok."""
    given = [f"reference={reference}"] if reference else []
    return wrong_of(command(["prove", f"source={source}", *given, "format=json"], None))


def wrong_of(result):
    """Return the names of the checks that are not ok, from what `prove` printed as JSON."""
    if result.code not in (0, 3):
        return [f"exit {result.code}: {result.err[-800:]}"]
    wrong = [check["name"] for check in json.loads(result.out)["checks"] if not check["ok"]]
    assert result.code == (3 if wrong else 0), result
    return wrong


def wrong_with(fault, folders):
    """Return the checks of a copy of a folder with a fault that are not ok."""
    damaged = folders / "damaged"
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(folders / fault.source, damaged)
    fault.edit(damaged)
    return wrong_in_folder(damaged, folders / fault.reference if fault.reference else None)
