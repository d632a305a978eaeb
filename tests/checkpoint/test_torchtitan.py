"""torchtitan itself reads an export for it. Runs where torchtitan is installed, 0.2 or 0.3."""

import importlib.util

import pytest
import torch
import torch.distributed.checkpoint as dcp
from folders import REPO
from foreign import of

pytest.importorskip("torchtitan", reason="needs torchtitan: pip install torchtitan triton")

pytestmark = pytest.mark.slow

WRITTEN = REPO / "tests" / "checkpoint" / "titan_checkpoints"


def new_model():
    """Return torchtitan's own model, of the sizes of the fixtures."""
    spec = importlib.util.spec_from_file_location("titan_write", WRITTEN / "write.py")
    write = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(write)
    model, _ = write.MODELS[write.release()]()
    return model


def test_torchtitans_model_computes_the_logits_of_the_folder_that_was_exported(world, tmp_path):
    folder, out = tmp_path / "hf", tmp_path / "titan"
    world.command("export", f"source={WRITTEN / 'torchtitan-0.2'}", f"out={folder}")
    world.command("export", f"source={folder}", f"out={out}", "form=torchtitan")
    model = new_model()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=out)
    model.load_state_dict(state)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(model(ids), of(folder)(ids).logits, atol=1e-5)
