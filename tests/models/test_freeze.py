"""The promises of train.freeze: a frozen parameter is only computed with, and lies in one place."""

import math
import shutil

import pytest
import torch
from refused import refusal, refused
from safetensors.torch import load_file, save_file
from stored import newest, stored, tensors

from fsdp_trainer.checkpoint.load import load_model
from fsdp_trainer.config.layout import Layout
from fsdp_trainer.config.schema import Batch, Optim, Precision, Sharding
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.from_config.freeze import freeze, frozen_parameters
from fsdp_trainer.parallel.memory_check import StateSetup, least_memory

EMBEDDING = "train.freeze=[model.embed_tokens.*]"
BLOCKS = "train.freeze=['model.layers.*']"
SOME = "train.freeze=['model.embed_tokens.*','model.layers.0.*','*.q_proj.*']"


def decoder(**options):
    with torch.device("meta"):
        return Decoder(
            ModelConfig(
                vocab_size=50,
                hidden_size=32,
                head_dim=8,
                intermediate_size=88,
                num_hidden_layers=4,
                **options,
            )
        )


def test_a_pattern_freezes_what_it_names():
    model = decoder(tie_word_embeddings=False)
    freeze(model, ["model.embed_tokens.*", "model.layers.[0-1].*", "*.3.mlp.*_proj.weight"])
    frozen = set(frozen_parameters(model))
    assert "model.embed_tokens.weight" in frozen
    assert {name.split(".")[2] for name in frozen if "self_attn" in name} == {"0", "1"}
    assert {name for name in frozen if ".3." in name} == {
        f"model.layers.3.mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")
    }


@pytest.mark.parametrize("pattern", ["lm_head.*", "model.embed_tokens.weight"])
def test_a_tied_head_is_its_embedding(pattern):
    model = decoder(tie_word_embeddings=True)
    freeze(model, [pattern])
    assert list(frozen_parameters(model)) == ["model.embed_tokens.weight"]
    assert not model.lm_head.weight.requires_grad


def test_a_pattern_that_fits_nothing_names_what_it_may_have_meant():
    patterns = ["embed_tokens", "model.layers.9.*", "model.norm.wieght"]
    embedding, block, norm = refused(freeze, decoder(), patterns).problems
    assert "model.embed_tokens.weight" in embedding.reason
    assert "model.layers.9.*" in block.what
    assert "model.norm.weight" in norm.reason


def test_to_freeze_everything_is_refused():
    assert "nothing would be trained" in refusal(freeze, decoder(), ["*"])


@pytest.fixture
def base(ledger):
    """A run whose weights are where others begin."""
    return ledger.run("plain on two")


ROWS = ["batch.seq_len=64 batch.rows=4 batch.micro_rows=2"]
BF16 = [*ROWS, "precision=bf16"]


def begin_from(base):
    return [f"model=auto model.init_from={base.folder} tokenizer.path=demo:bytes"]


def test_a_frozen_weight_is_no_part_of_a_checkpoint_and_is_exported_as_it_was(train, base):
    how = [*begin_from(base), SOME, "train.steps=2 checkpoint.export_hf=true"]
    run = train("run", *how, ranks=2, base=BF16)
    before, after = stored(newest(base)), stored(newest(run))
    exported = tensors(run.folder / "hf")
    frozen = [name for name in exported if f"weights/{name}" not in after]
    assert {name.split(".")[1] for name in frozen} == {"embed_tokens", "layers"}
    assert not [name for name in after if any(frozen_name in name for frozen_name in frozen)]
    for name, weight in exported.items():
        rows = before[f"weights/{name}"][: len(weight)].to(weight.dtype)
        assert torch.equal(weight, rows) == (name in frozen), name
    assert " trained)" in run.out


def test_random_weights_that_are_frozen_are_drawn_again(train):
    run = train("run", SOME, "train.steps=2 checkpoint.export_hf=true sharding=ddp", ranks=2)
    loaded = load_model(run.folder).state_dict()
    for name, tensor in tensors(run.folder / "hf").items():
        assert torch.equal(loaded[name][: len(tensor)].to(tensor.dtype), tensor), name


def test_a_base_that_is_gone_or_has_changed_is_named(train, world, base, tmp_path):
    hf = tmp_path / "hf"
    shutil.copytree(base.folder / "hf", hf)
    how = [f"model.init_from={hf} model=auto tokenizer.path=demo:bytes", SOME]
    run = train("run", *how, "train.steps=2", base=ROWS)
    export = ["export", f"source={run.folder} out={tmp_path / 'out'}"]
    weights = hf / "model.safetensors"
    content = weights.read_bytes()
    changed = load_file(weights)
    changed["model.embed_tokens.weight"][1, 2] *= -1
    save_file(changed, weights, {"format": "pt"})
    err = train("run", *how, "train.steps=3", base=ROWS, ranks=2, code=2).err
    assert "the frozen weights have changed" in err
    assert "model.embed_tokens.weight" in err
    assert "have changed" in world.command(*export, code=2)[0].err
    weights.write_bytes(content)
    hf.rename(tmp_path / "elsewhere")
    assert str(hf) in world.command(*export, code=2)[0].err
    assert str(hf) in train("run", *how, "train.steps=3", base=ROWS, code=2).err
    hf.symlink_to(tmp_path / "elsewhere")
    world.command(*export)
    train("run", *how, "train.steps=3", base=ROWS, ranks=2)


def test_a_run_begins_from_a_frozen_run_and_its_base(train, base):
    """Copies of frozen weights are compared too."""
    two = "train.steps=2 train.check_every=1"
    middle = train("middle", *begin_from(base), SOME, two, base=ROWS, ranks=2)
    last = train("last", *begin_from(middle), BLOCKS, two, base=ROWS, ranks=2)
    first, second = load_model(middle.folder).state_dict(), load_model(last.folder).state_dict()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) == (".layers." in name), name
    assert not middle.event("corruption")


def test_what_is_frozen_changes_only_where_that_is_allowed(train):
    run = train("run", SOME, "train.steps=2")
    err = train("run", EMBEDDING, "train.steps=4", code=2).err
    assert "checkpoint.allow_changes=[train.freeze]" in err
    allowed = "checkpoint.allow_changes=[train.freeze]"
    more = train("run", EMBEDDING, allowed, "train.steps=4", ranks=2)
    names = {name for name in stored(newest(more)) if name.startswith("weights/")}
    assert "weights/model.layers.0.mlp.up_proj.weight" in names
    assert "weights/model.embed_tokens.weight" not in names
    assert more["step"] == [1, 2, 3, 4]
    err = train("run", SOME, allowed, "train.steps=5", code=2).err
    assert f"model.init_from={run.folder}" in err


def test_new_tokens_need_a_trained_embedding(train, base):
    tokens = "tokenizer.add_tokens=['<new>']"
    err = train("run", *begin_from(base), EMBEDDING, tokens, base=ROWS, code=2).err
    assert "they would never be trained" in err


def test_memory_has_no_gradient_moments_or_master_copy_of_a_frozen_parameter():
    """The plan's memory is compared for the layout "frozen" in tests/parallel/test_layouts.py."""
    model = decoder()
    freeze(model, ["model.layers.*"])
    items = least_memory(model, StateSetup(Layout(Sharding(), 2, Batch()), Precision(), Optim()))
    sizes = {item.name: item.size for item in items}
    assert sizes["frozen"] == sum(p.numel() for p in model.model.layers.parameters())
    assert math.isclose(sizes["moments"], 2 * sizes["weights"])
