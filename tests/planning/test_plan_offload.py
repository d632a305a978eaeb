"""`plan` counts as much in each place of states as a real run has there, within 1%."""

from functools import partial

import inject
import pytest
from recipe import planned
from world import SMALL, read_json, split, write_json

from fsdp_trainer.checkpoint.shards import ALIGNED
from fsdp_trainer.optim.offload.parts import SLICED_BYTES

WIDE = "model.hidden_size=256 model.head_dim=64 model.vocab_multiple=4 train.steps=1"


def measure(written, trainer):
    """Write the bytes that a rank has of files, copies and weights; all have as much."""
    optimizer, model = trainer.runner.optimizer, trainer.runner.model
    files = sum(file.stat().st_size for file in optimizer._folder.glob("*.states"))
    copies = sum(copy.nbytes for copy in optimizer._copies._copies.values())
    weights = sum(p.to_local().nbytes for p in model.parameters())
    sizes = {"files": files, "copies": copies, "weights": weights}
    write_json(written, sizes | {"tensors": len(optimizer.places())})


def test_files_copies_and_gradients_are_as_large_as_planned(train, tmp_path):
    words = [WIDE, "precision.param_dtype=bfloat16", "optim.offload=disk"]
    written = tmp_path / "written"
    train("run", *words, ranks=2, seam=inject.with_trainer(partial(measure, written)))
    real = read_json(written)
    given = [word.split("=")[0] for word in split(words)]
    base = [word for word in SMALL if word.split("=")[0] not in given]
    own = "tokenizer.path=demo:bytes plan.gpu=h100 plan.world_size=2"
    memory = planned(*base, own, *words).memory
    around = real["files"] - memory.disk  # the frame of each tensor, and what aligns it
    assert 0 < around <= 2 * ALIGNED * real["tensors"]
    assert memory.peak.bytes["parameters"] == pytest.approx(real["copies"], rel=0.01)
    buffers = 3 * min(memory.disk, SLICED_BYTES)
    assert memory.host - buffers == pytest.approx(real["weights"], rel=0.01)
