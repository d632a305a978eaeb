"""Writes the folders beside this file with the libraries that own the formats.

pip install megatron-core==0.16.1 mosaicml-streaming==0.13.0 litdata==0.2.76
python tests/data/token_files/write.py
"""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from litdata import TokensLoader
from litdata.streaming.writer import BinaryWriter
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from streaming import MDSWriter

HERE = Path(__file__).parent
END = 258
"""The end token of `demo:bytes`."""


def new(name):
    shutil.rmtree(HERE / name, ignore_errors=True)
    return HERE / name


def write_megatron(name, documents, dtype, sequences):
    prefix = new(name) / "tokens_text_document"
    prefix.parent.mkdir()
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        cut = len(document) // sequences
        lengths = [*[cut] * (sequences - 1), len(document) - cut * (sequences - 1)]
        builder.add_document(document, lengths)
    builder.finalize(f"{prefix}.idx")


def write_mds(name, documents, column, encode, compression=None, **others):
    """others: kind and function from a number to the value, of more columns."""
    columns = {**{key: kind for key, (kind, _) in others.items()}, "tokens": column}
    folder = str(new(name))
    with MDSWriter(out=folder, columns=columns, compression=compression, size_limit=400) as writer:
        for number, document in enumerate(documents):
            values = {key: make(number) for key, (_, make) in others.items()}
            writer.write(values | {"tokens": encode(document)})


def write_litdata(name, documents, encode, loader=None, compression=None):
    size = {"chunk_size": 3} if loader is None else {"chunk_bytes": 300}
    level = {"compression_level": "chunk"} if compression else {}
    writer = BinaryWriter(
        str(new(name)), item_loader=loader, compression=compression, **size, **level
    )
    for number, document in enumerate(documents):
        writer[number] = encode(document)
    writer.done()
    writer.merge()
    for left_over in [*HERE.glob(f"{name}/*.lock"), *HERE.glob(f"{name}/0.*")]:
        left_over.unlink()


def main():
    random = np.random.default_rng(0)
    lengths = (5, 40, 3, 120, 17, 64, 9)
    documents = [[*random.integers(1, 250, n).tolist(), END] for n in lengths]
    (HERE / "documents.json").write_text(json.dumps(documents) + "\n")
    write_megatron("megatron", documents, np.uint16, 1)
    write_megatron("megatron_sentences", documents, np.int32, 2)
    write_mds("mds_bytes", documents, "bytes", lambda d: np.array(d, np.int64).tobytes())
    write_mds(
        "mds_int32", documents, "ndarray:int32", lambda d: np.array(d, np.int32),
        number=("int", int), title=("str", lambda number: "é" * number),
    )  # fmt: skip
    write_mds("mds_any", documents, "ndarray", lambda d: np.array(d, np.uint16))
    write_mds("mds_zstd", documents, "ndarray", lambda d: np.array(d, np.uint16), "zstd")
    write_litdata("litdata", documents, lambda d: torch.tensor(d, dtype=torch.int32),
                  TokensLoader())  # fmt: skip
    write_litdata("litdata_numpy", documents, lambda d: np.array(d, np.uint16), TokensLoader())
    write_litdata("litdata_items", documents,
                  lambda d: {"name": "x" * len(d), "input_ids": torch.tensor(d)})  # fmt: skip
    write_litdata("litdata_zstd", documents, lambda d: torch.tensor(d, dtype=torch.int32),
                  TokensLoader(), "zstd")  # fmt: skip


if __name__ == "__main__":
    main()
