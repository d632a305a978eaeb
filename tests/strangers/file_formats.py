"""Every format of a file that the program reads: a valid small input, the reader, the right value.

A value is {name: bytes}: tensors, or the tokens of all documents one after the other. A reader is
what a user would call, in this process: `load_model`, or a verb of the command line.
"""

import contextlib
import csv
import gzip
import io
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from folders import TESTS
from mutations import (
    BYTES,
    Mutation,
    change_json,
    change_safetensors,
    compress_bomb,
)
from tables import rows
from texts import write_sentencepiece
from world import SMALL, read_json, write_json
from zoo import make_folder

from fsdp_trainer.checkpoint.atomic_files import describe, manifest_text, read_manifest
from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.cli import main
from fsdp_trainer.data.tokens.tokenizer import load_tokenizer
from fsdp_trainer.errors import UserError

Value = dict[str, bytes]
Change = Callable[[bytes, random.Random], Mutation]
END = 258
"""The end token of `demo:bytes`."""
TEXTS = [f"{i} is a number, and {i * i} its square" for i in range(12)]


class Refusal(Exception):
    """The command line ended with another exit code than 0. code, text: that code, and stderr."""

    def __init__(self, code, text):
        super().__init__(code, text)
        self.code, self.text = code, text


@dataclass(frozen=True)
class FileFormat:
    """A kind of file.

    write: writes a valid input into a folder. read: returns its value, or raises. files: pattern of
    the files that are changed. right: returns what an independent reader makes of the folder.
    """

    name: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Value]
    files: str
    changes: Sequence[Change] = tuple(BYTES)
    right: Callable[[Path], Value] | None = None
    numbers: bool = False
    """The value's bytes lie in the file: a bit that is flipped there is flipped in the value."""
    checked: bool = False
    """The file has checksums: no other value than that of the valid input is ever right."""
    in_order: Callable[[Value], Value] = dict
    """Returns a value in the form in which `right` and `read` are compared."""
    same_names: bool = True
    """False if a description beside the numbers may say that there are fewer of them."""
    seal: Callable[[Path], Any] = bool
    """Called with the changed folder: writes checksums anew, as whoever changes a file can."""
    codes: tuple[int, ...] = (2,)
    """Exit codes with which an input is refused."""


# --- readers


def of_model(folder):
    """Return the weights of a model's folder, as bytes."""
    return bytes_of(dict(load_model(folder).named_weights()))


def bytes_of(tensors):
    return {
        name: tensor.detach().float().contiguous().numpy().tobytes()
        for name, tensor in tensors.items()
    }


def run(*words):
    """Run a command line, of which a text may have several words, in this process; return its
    output. Raises Refusal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([one for word in words for one in str(word).split()])
    if code:
        raise Refusal(code, err.getvalue())
    return out.getvalue()


def of_documents(path, *words, tokenizer="demo:bytes"):
    """Return the tokens of all documents of a path, in their order."""
    out = run(
        f"preview data=pretrain data.path={path} tokenizer.path={tokenizer}",
        f"data.cache={path.parent / 'cache'} preview.format=json preview.rows=1",
        "batch.seq_len=400000 data.shuffle=false data.packing=stream model=tiny",
        "model.max_position_embeddings=400000",
        *words,
    )
    return {"tokens": np.array(json.loads(out.splitlines()[0])["tokens"], np.int64).tobytes()}


def of_folder(folder):
    """Return the tokens of a folder of token files."""
    return of_documents(folder / "data")


def of_file(name, *words):
    """Return the reader of one file of documents."""
    return lambda folder: of_documents(folder / name, *words)


def of_texts(texts):
    """Return the tokens that these texts have as documents. Raises NoOpinion if they are none."""
    if not all(isinstance(text, str) for text in texts):
        raise NoOpinion
    tokenizer = load_tokenizer("demo:bytes")
    flat = [token for text in texts if text for token in (*tokenizer.encode(text), END)]
    return {"tokens": np.array(flat, np.int64).tobytes()}


# --- independent readers


class NoOpinion(Exception):
    """An independent reader cannot say what is right, only that the input can be read."""


def rows_of(lines):
    """Return the texts of JSON lines."""
    rows = [json.loads(line) for line in lines.split("\n") if line.strip()]
    if any(type(row) is not dict or row.keys() != {"text"} for row in rows):
        raise NoOpinion
    return [row["text"] for row in rows]


def by_json(name):
    opened = {".gz": gzip.decompress, ".zst": by_zstd}.get(Path(name).suffix, bytes)
    return lambda folder: of_texts(rows_of(opened((folder / name).read_bytes()).decode()))


def by_csv(folder):
    rows = list(csv.DictReader((folder / "a.csv").read_text().splitlines(keepends=True)))
    if any(row.keys() != {"text"} for row in rows):
        raise NoOpinion
    return of_texts([row["text"] for row in rows])


def by_arrow(folder):
    import pyarrow
    import pyarrow.parquet

    if (folder / "a.parquet").exists():
        table = pyarrow.parquet.read_table(folder / "a.parquet")
    else:
        with pyarrow.OSFile(f"{folder}/a.arrow") as file:
            table = pyarrow.ipc.open_file(file).read_all()
    table.validate(full=True)
    if table.column_names != ["text"]:
        raise NoOpinion
    return of_texts(table["text"].to_pylist())


def by_safetensors(folder):
    from safetensors.torch import load_file

    return bytes_of(load_file(folder / "model.safetensors"))


def by_torch(folder):
    return bytes_of(torch.load(folder / "pytorch_model.bin", weights_only=True))


def by_gguf(folder):
    """Return the numbers that the package gguf reads, in any order: it has other names."""
    import gguf

    tensors = gguf.GGUFReader(folder / "a.gguf").tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).tobytes() for t in tensors}


def sorted_rows(value):
    """Return all numbers by 16, sorted: rows of queries and keys lie elsewhere in a GGUF file."""
    numbers = b"".join(value.values())
    return {"rows": b"".join(sorted(numbers[i : i + 64] for i in range(0, len(numbers), 64)))}


def by_tokens(folder):
    return {"tokens": np.fromfile(folder / "a.bin", "<u2").astype(np.int64).tobytes()}


def by_zstd_chunks(folder):
    """Read only whether each chunk can be read: no checksum holds what it unpacks to."""
    for file in folder.glob("data/*.zst*"):
        by_zstd(file.read_bytes())
    raise NoOpinion


def by_npy(folder):
    numbers = np.load(folder / "a.npy", allow_pickle=False)
    if numbers.ndim != 1:
        raise NoOpinion
    return {"tokens": numbers.astype(np.int64).tobytes()}


def by_zstd(content):
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.BufferReader(content), "zstd").read()


# --- valid inputs


def model_folder(folder, **options):
    """Write a model whose every weight is random, so that no two rows of numbers are the same."""
    make_folder(folder, vocab_size=264, num_hidden_layers=1, **options)
    return folder


def write_torch(folder):
    from safetensors.torch import load_file

    model_folder(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def write_gguf(folder):
    model_folder(folder / "hf")
    run(f"export source={folder / 'hf'} out={folder / 'a.gguf'} form=gguf dtype=f32")
    shutil.rmtree(folder / "hf")


def train_in(folder, steps):
    """Train a small model on texts, into `folder/run`."""
    write_lines(folder / "a.jsonl")
    run(
        *("train", *SMALL, f"data=pretrain data.path={folder / 'a.jsonl'}"),
        f"tokenizer.path=demo:bytes run.root={folder} run.name=run train.steps={steps}",
        f"data.cache={folder / 'cache'} launch.device=cpu checkpoint.export_hf=false",
    )


def write_own(folder):
    """Train a step, whose checkpoint is the input."""
    train_in(folder, 1)
    (checkpoint,) = (folder / "run/checkpoints").glob("step-*")
    checkpoint.rename(folder / "checkpoint")
    shutil.rmtree(folder / "run")


def of_own(folder):
    """Return the weights of a checkpoint, which `verify` has called whole."""
    run("verify", f"source={folder / 'checkpoint'}")
    return of_model(folder / "checkpoint")


def seal_own(folder):
    """Write a checkpoint's manifest anew."""
    checkpoint = folder / "checkpoint"
    manifest = read_manifest(checkpoint)
    manifest["files"] = describe(checkpoint, manifest["files"])
    (checkpoint / "MANIFEST.json").write_text(manifest_text(manifest))


def copied(source, name=""):
    """Return what copies a folder of tests that another tool has written."""
    return lambda folder: shutil.copytree(TESTS / source, folder / name, dirs_exist_ok=True)


def write_lines(file):
    pack = {".gz": gzip.compress, ".zst": pack_zstd}.get(file.suffix, bytes)
    file.write_bytes(pack("".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()))


def lines_in(name):
    return lambda folder: write_lines(folder / name)


def pack_zstd(content):
    import pyarrow

    return pyarrow.compress(content, "zstd", asbytes=True)


def write_csv(folder):
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in TEXTS)])


def write_parquet(folder):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "a.parquet")


def write_arrow(folder):
    import pyarrow

    table = pyarrow.table({"text": TEXTS})
    with pyarrow.ipc.new_file(folder / "a.arrow", table.schema) as file:
        file.write_table(table)


def flat_tokens():
    documents = read_json(TESTS / "data/token_files/documents.json")
    return np.array([token for document in documents for token in document])


def write_flat(folder):
    flat_tokens().astype("<u2").tofile(folder / "a.bin")


def write_packed_tokens(folder):
    (folder / "a.bin.gz").write_bytes(gzip.compress(flat_tokens().astype("<u2").tobytes()))


def write_npy(folder):
    np.save(folder / "a.npy", flat_tokens().astype("<u2"))


def write_llm_c(folder):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(flat_tokens())
    content = header.tobytes() + flat_tokens().astype("<u2").tobytes()
    (folder / "a.bin").write_bytes(content)


def write_tokenizer(folder):
    load_tokenizer("demo:bytes").save(folder / "tokenizer")
    write_lines(folder / "a.jsonl")


def by_tokenizers(folder):
    """Read only whether the tokenizer can be read: which token ends a text is in other files."""
    import tokenizers

    tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    raise NoOpinion


def write_pieces(folder):
    write_sentencepiece(folder / "a.model")
    write_lines(folder / "a.jsonl")


def with_tokenizer(name):
    return lambda folder: of_documents(folder / "a.jsonl", tokenizer=f"{folder}/{name}")


def by_sentencepiece(folder):
    """Return the tokens of SentencePiece's own library."""
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor()
    model.Load(f"{folder}/a.model")
    flat = [token for text in TEXTS for token in (*model.EncodeAsIds(text), model.eos_id())]
    return {"tokens": np.array(flat, np.int64).tobytes()}


def write_image(folder):
    import PIL.Image

    noise = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    PIL.Image.fromarray(noise).save(folder / "a.png")
    PIL.Image.fromarray(noise).save(folder / "a.webp")
    PIL.Image.fromarray(noise).save(folder / "a.gif")


def of_images(folder):
    from fsdp_trainer.data.files.sources import RecordError
    from fsdp_trainer.data.images.image_files import decoded

    try:
        return {
            file.name: decoded(file.read_bytes(), file.name).tobytes()
            for file in sorted(folder.glob("a.*"))
        }
    except RecordError as error:  # a row that cannot be used, which the program reports by name
        raise UserError(str(error)) from None


def by_pillow(folder):
    import PIL.Image

    return {
        file.name: PIL.Image.open(file).convert("RGB").tobytes()
        for file in sorted(folder.glob("a.*"))
    }


RECIPE = b"""\
# @package _global_
defaults:
  - override /precision: fp32
data: {path: demo:backwards}
tokenizer: {path: "demo:bytes"}
train: {steps: 7}
optim: {lr: 0.001}
"""


def write_axolotl(folder):
    (folder / "a.yaml").write_bytes(AXOLOTL)


def write_recipe(folder):
    (folder / "recipe").mkdir()
    (folder / "recipe/mine.yaml").write_bytes(RECIPE)


def of_recipe(folder):
    """Compose a recipe; its keys may be any that a user could write."""
    run("train", "--config-dir", folder, "--cfg", "job", "+recipe=mine")
    return {}


AXOLOTL = b"""\
base_model: NousResearch/Llama-3.2-1B
datasets:
  - path: rows.jsonl
    type: alpaca
sequence_len: 2048
micro_batch_size: 2
learning_rate: 0.0002
adapter: lora
lora_r: 16
"""


def of_conversion(folder):
    run("convert", folder / "a.yaml")
    return {}


def write_records(folder):
    """Write the records of a run that `report` shows."""
    train_in(folder, 2)
    shutil.rmtree(folder / "run/checkpoints")


def of_report(folder):
    run("report", f"source={folder / 'run'}", f"out={folder / 'report.html'}")
    assert b"</html>" in (folder / "report.html").read_bytes()
    return {}


def write_adapter(folder):
    """Write an adapter of one matrix as peft does, beside the model that it changes."""
    from safetensors.torch import save_file

    model_folder(folder / "base")
    adapter = folder / "adapter"
    adapter.mkdir()
    description = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4,
        "target_modules": ["o_proj"], "base_model_name_or_path": f"{folder}/base",
    }  # fmt: skip
    write_json(adapter / "adapter_config.json", description)
    rows, columns = load_model(folder / "base").named_weights()[CHANGED].shape
    shapes = {"lora_A": (2, columns), "lora_B": (rows, 2)}
    name = f"base_model.model.{CHANGED.removesuffix('weight')}"
    parts = {f"{name}{part}.weight": torch.randn(shape) for part, shape in shapes.items()}
    save_file(parts, adapter / "adapter_model.safetensors")


CHANGED = "model.layers.0.self_attn.o_proj.weight"


def of_adapter(folder):
    """Return the weights that the adapter leaves as they are."""
    weights = of_model(folder / "adapter")
    del weights[CHANGED]
    return weights


TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% generation %}{{ m['content'] | trim }}"
    "{% endgeneration %}{{ eos_token }}{% endfor %}"
)


def write_template(folder):
    load_tokenizer("demo:bytes").save(folder / "tokenizer", TEMPLATE)
    (folder / "a.jsonl").write_text('{"prompt": "one?", "completion": "two"}\n')


def of_template(folder):
    """Render a chat; a template may render it in any way."""
    run(
        f"preview data.path={folder / 'a.jsonl'} tokenizer.path={folder / 'tokenizer'}",
        f"data.cache={folder / 'cache'} preview.format=json preview.rows=1 model=tiny",
    )
    return {}


JSON = (*BYTES, *[change_json] * 12)
"""Changes of a JSON file: half of them leave it readable."""


CHANGES = {
    "": BYTES,
    "json": JSON,
    "header": (*BYTES, *[change_safetensors] * 8),
    "bomb": (*BYTES, compress_bomb),
}


def sharded(folder):
    return model_folder(folder, shard="40KB")


def part(text):
    """Return a function of this file by its name; called, if arguments follow."""
    name, *words = text.split()
    return globals()[name](*words) if words else globals()[name]


FORMATS = [
    FileFormat(
        name,
        part(write),
        part(read),
        files,
        CHANGES[changes.removeprefix("numbers").strip()],
        part(right) if right != "none" else None,
        numbers="numbers" in changes,
    )
    for name, write, read, files, right, changes in rows("""
# name → write → read → files → right → numbers, and how files are changed
safetensors → model_folder → of_model → model.safetensors → by_safetensors → numbers header
safetensors index → sharded → of_model → model.safetensors.index.json → none → json
torch → write_torch → of_model → pytorch_model.bin → by_torch → numbers
DCP → copied checkpoint/titan_checkpoints/torchtitan-0.3 → of_model → *.distcp → none → numbers
DCP description → copied checkpoint/titan_checkpoints/torchtitan-0.3 → of_model → .metadata
  → none →
ZeRO → copied checkpoint/zero_checkpoints/stage_2 → of_model → global_step2/*_states.pt → none
  → numbers
ZeRO stage 3 → copied checkpoint/zero_checkpoints/stage_3 → of_model → global_step2/*_states.pt
  → none → numbers
Megatron → copied checkpoint/megatron_checkpoints/stacked → of_model → iter_0000010/* → none
  → numbers
PEFT → write_adapter → of_adapter → adapter/*.safetensors → none → header
PEFT's description → write_adapter → of_adapter → adapter/*.json → none → json
chat template → write_template → of_template → tokenizer/*.jinja → none →
megatron → copied data/token_files/megatron data → of_folder → data/* → none → numbers
mds_int32 → copied data/token_files/mds_int32 data → of_folder → data/* → none → numbers
mds_zstd → copied data/token_files/mds_zstd data → of_folder → data/*.zst* → by_zstd_chunks
  → numbers
litdata → copied data/token_files/litdata data → of_folder → data/* → none → numbers
litdata_items → copied data/token_files/litdata_items data → of_folder → data/* → none → numbers
litdata_zstd → copied data/token_files/litdata_zstd data → of_folder → data/*.zst*
  → by_zstd_chunks → numbers
npy → write_npy → of_file a.npy → a.npy → by_npy → numbers
tokens → write_flat → of_file a.bin data.format=tokens → a.bin → by_tokens → numbers
llm.c → write_llm_c → of_file a.bin → a.bin → none → numbers
tokens in gzip → write_packed_tokens → of_file a.bin.gz → a.bin.gz → none → bomb
JSON lines → lines_in a.jsonl → of_file a.jsonl → a.jsonl → by_json a.jsonl → json
JSON lines in gzip → lines_in a.jsonl.gz → of_file a.jsonl.gz → a.jsonl.gz → by_json a.jsonl.gz
  → bomb
JSON lines in zstd → lines_in a.jsonl.zst → of_file a.jsonl.zst → a.jsonl.zst
  → by_json a.jsonl.zst →
CSV → write_csv → of_file a.csv → a.csv → by_csv →
Parquet → write_parquet → of_file a.parquet → a.parquet → by_arrow →
Arrow → write_arrow → of_file a.arrow → a.arrow → by_arrow →
tokenizer.json → write_tokenizer → with_tokenizer tokenizer → tokenizer/tokenizer.json
  → by_tokenizers → json
SentencePiece → write_pieces → with_tokenizer a.model → a.model → by_sentencepiece →
images → write_image → of_images → a.* → by_pillow →
recipe → write_recipe → of_recipe → recipe/mine.yaml → none →
convert → write_axolotl → of_conversion → a.yaml → none →
records of a run → write_records → of_report → run/* → none → json
""")
]
FORMATS += [
    FileFormat("config.json", model_folder, of_model, "config.json", changes=JSON,
               same_names=False),
    FileFormat("GGUF", write_gguf, lambda folder: of_model(folder / "a.gguf"), "a.gguf",
               numbers=True, right=by_gguf, in_order=sorted_rows),
    FileFormat("own checkpoint", write_own, of_own, "checkpoint/*", checked=True, codes=(2, 3)),
    FileFormat("own checkpoint sealed anew", write_own, of_own, "checkpoint/[!M]*",
               numbers=True, seal=seal_own, codes=(2, 3)),
    FileFormat("JSON of own checkpoint", write_own, of_own, "checkpoint/[!M]*.json", changes=JSON,
               seal=seal_own, codes=(2, 3)),
    FileFormat("cache of data", lines_in("a.jsonl"), of_file("a.jsonl"), "cache/**/*",
               checked=True),
]  # fmt: skip
