"""Documents in a packed row are computed as they are alone."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fsdp_trainer.apps.prove.proof.certificate import Checked, compared
from fsdp_trainer.apps.prove.proof.evidence import Evidence
from fsdp_trainer.checkpoint.load import read_model
from fsdp_trainer.data.order.row_order import Rows
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.training.batches import Assembler, BatchOptions

NAME = "packed = alone"
LIMIT = 2e-5
"""Largest difference of a log-probability or a score, as a share of the largest one."""
ADVICE = "documents see each other: use  data.packing=none  and report it"


def check(evidence: Evidence) -> Iterator[Checked]:
    """Compare the scores of the first step's tokens in packed rows and document by document."""
    if evidence.small.plain.objective.method.samples or evidence.config.reads_images:
        return  # answers and images are compared with transformers, which reads them alone
    model = read_model(evidence.plain.checkpoints[-1], is_checked=True)
    rows = evidence.rows_of_step(1)
    pooling = evidence.config.pooling or ("last" if evidence.config.scores else "")
    packed = scores(model, rows, pooling)
    alone = torch.cat([scores(model, one, pooling) for one in documents_as_rows(rows)])
    error = float((packed - alone).abs().max() / alone.abs().max().clamp_min(1e-20))
    count = sum(map(len, rows.documents))
    largest = max(map(len, rows.documents))
    detail = f"{len(alone)} scores of {count} documents, up to {largest} in a row, and each alone"
    yield compared(NAME, error, LIMIT, detail, ADVICE)


@torch.no_grad()
def scores(model: Decoder, rows: Rows, pooling: str) -> Tensor:
    device = torch.device("cpu")
    options = BatchOptions(len(rows.documents), 0, 1, device, pooling=pooling)
    assembler = Assembler(rows.tokens.shape[1], 1, options)
    batch = assembler.assemble(rows)
    own = model(batch).scores
    values = own.log_probability if own.numbers is None else own.numbers
    supervised = int((rows.labels != -100).sum()) if not pooling else sum(map(len, rows.documents))
    return values[:supervised]


def documents_as_rows(rows: Rows) -> Iterator[Rows]:
    for row, lengths in enumerate(rows.documents):
        for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            alone, part = Rows.empty(1, length), slice(start, start + length)
            for name in ("tokens", "labels", "weights", "positions"):
                getattr(alone, name)[0, :length] = getattr(rows, name)[row, part]
            alone.positions[0, :length] = np.arange(length)
            yield replace(alone, documents=[[length]])
