"""A run with adapters: what it begins with, keeps, sends and stores, and what it goes on from."""

import contextlib
import json
import shutil
from unittest.mock import patch

import inject
import pytest
import torch
from safetensors.torch import save_file
from stored import assert_bitwise_equal, newest, stored, tensors
from world import SPIKY
from zoo import HF, make_folder

SMALL_STEPS = ["tokenizer.path=demo:bytes", "schedule=constant", "optim.lr=3e-3"]
LORA = ["adapter=lora", "adapter.rank=4"]
DORA = ["adapter=dora", "adapter.rank=4"]


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder of two blocks of width 32."""
    return make_folder(tmp_path / "hf")


@pytest.fixture
def adapt(train, folder):
    """A training from the folder."""

    def start(name, *how, **options):
        return train(name, f"model.init_from={folder}", *SMALL_STEPS, *how, base=HF, **options)

    return start


@pytest.mark.slow
def test_adapters_begin_as_pefts_and_alike_on_every_number_of_ranks(adapt, folder):
    how = [*DORA, "train.steps=1", "optim.lr=0"]
    alone, on_three = adapt("alone", *how), adapt("three", *how, ranks=3)
    start, other = stored(newest(alone)), stored(newest(on_three))
    assert all(torch.equal(start[name], other[name]) for name in start if "weights/" in name)
    base = tensors(folder)
    for layer in [name.removesuffix(".weight") for name in base if "proj" in name]:
        weights = f"weights/{layer}.lora"
        a = start[f"{weights}_A.weight"]
        bound = a.shape[1] ** -0.5
        assert a.shape[0] == 4
        assert 0.8 * bound < a.abs().max() < bound
        assert abs(a.std() / (bound / 3**0.5) - 1) < 0.15
        assert not start[f"{weights}_B.weight"].any()
        lengths = base[f"{layer}.weight"].norm(dim=1)
        torch.testing.assert_close(start[f"{weights}_magnitude_vector"], lengths)


@contextlib.contextmanager
def measured():
    """Print what a rank sends back, and what it keeps."""
    import torch.distributed as dist

    # as torch 2.13 calls it, and those before
    name = next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n))
    real, sent = getattr(dist, name), []

    def reduce_scatter(output, input, **options):
        sent.append(input.nbytes)
        return real(output=output, input=input, **options)

    def keep():
        model, optimizer = inject.trainer.model, inject.trainer.optimizer
        frozen = [p for p in model.parameters() if not p.requires_grad]
        trained = [p for p in model.parameters() if p.requires_grad]
        print("sent", sum(sent))
        print("frozen", {str(p.dtype) for p in frozen}, {p.grad for p in frozen})
        print("trained", {str(p.dtype) for p in trained}, sum(4 * p.numel() for p in trained))
        print("optimizer", len(optimizer.state) in (0, len(trained)))

    with (
        patch.object(dist, name, reduce_scatter),
        inject.with_trainer(),
        inject.at("clip", keep),
    ):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "frozen"),
    [
        (["precision.param_dtype=bfloat16"], "torch.bfloat16"),
        (["precision.param_dtype=bfloat16", "adapter.base=fp32"], "torch.float32"),
        (["adapter.base=bf16"], "torch.bfloat16"),
        (["adapter.base=auto"], "torch.float32"),
    ],
)
@pytest.mark.grid(2)
def test_only_gradients_of_adapters_are_sent_and_nothing_frozen_has_a_state(adapt, how, frozen):
    run = adapt("run", *LORA, *how, "train.steps=2", ranks=2, seam=measured)
    state = stored(newest(run))
    weights = {n: t for n, t in state.items() if n.startswith("weights/")}
    trained = sum(tensor.nbytes for tensor in weights.values())
    assert f"frozen {{'{frozen}'}} {{None}}" in run.out
    assert f"trained {{'torch.float32'}} {trained}" in run.out
    assert run.out.count("optimizer True") == 2
    assert f"sent {trained}\n" in run.out, "one micro-batch"
    assert f"sent {2 * trained}\n" in run.out
    assert all("lora_" in name for name in state if "step" not in name)
    assert sum(tensor.nbytes for tensor in state.values()) == pytest.approx(3 * trained, rel=0.02)
    assert f"frozen weights in {frozen.removeprefix('torch.')}" in run.out
    assert "adapt  LoRA on 14 layers (q_proj, k_proj" in run.out
    assert "rank 4, scale 8;" in run.out


@pytest.mark.slow
def test_a_run_goes_on_bitwise_and_on_another_number_of_ranks_but_for_rounding(adapt):
    common = [*DORA, "adapter.also=[norms]", "checkpoint.every=2", "batch.micro_rows=2"]
    whole = adapt("whole", *common, "train.steps=4", ranks=2)
    adapt("run", *common, "train.steps=2", ranks=2)
    shutil.copytree(whole.folder.parent / "run", whole.folder.parent / "other")
    run = adapt("run", *common, "train.steps=4", ranks=2)
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))
    other = adapt("other", *common, "train.steps=4", ranks=3)
    assert other.column("loss") == pytest.approx(whole.column("loss"), abs=1e-6, rel=0)


@pytest.mark.slow
def test_an_adapter_is_read_and_exported_although_its_base_was_moved(adapt, folder, world):
    first = adapt("first", *LORA, "train.steps=2")
    moved = folder.rename(folder.with_name("moved"))
    how = [f"adapter.init_from={first.folder}", f"model.init_from={moved}", "train.steps=0"]
    again = adapt("again", *how)
    trained = {name: t for name, t in stored(newest(first)).items() if name.startswith("weights/")}
    read = stored(newest(again))
    assert trained
    assert all(torch.equal(tensor, read[name]) for name, tensor in trained.items())
    out = folder.with_name("exported")
    world.command("export", f"source={first.folder}", f"out={out}", "form=adapter")
    assert (out / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("how", [LORA, ["train.freeze=['*embed_tokens*']"], []])
@pytest.mark.grid(1)
def test_a_run_resumes_with_its_base_in_another_folder(adapt, folder, how):
    common = [*how, "checkpoint.every=2", "checkpoint.keep=9"]
    whole = adapt("whole", *common, "train.steps=4")
    adapt("run", *common, "train.steps=2")
    moved = folder.rename(folder.with_name("moved"))
    run = adapt("run", *common, f"model.init_from={moved}", "train.steps=4")
    assert f"model.init_from was {folder}, is {moved}" in run.out
    assert_bitwise_equal(stored(newest(run)), stored(newest(whole)))
    recorded = json.loads((newest(run) / "trainer.json").read_text())["frozen"]
    assert not how or recorded["source"] == str(moved)


@pytest.mark.slow
@pytest.mark.parametrize("how", [LORA, []])
def test_a_folder_of_another_architecture_is_no_moved_base(adapt, folder, tmp_path, how):
    adapt("run", *how, "train.steps=1")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    another = make_folder(tmp_path / "another", rope_parameters=rope)
    err = adapt("run", *how, f"model.init_from={another}", "train.steps=2", code=2).err
    assert "rope_theta was 10000.0 in its config.json, and is 500000.0" in err
    assert "checkpoint.allow_changes=[model.init_from]" in err


@pytest.mark.slow
def test_another_base_is_refused(adapt, folder, tmp_path):
    adapt("run", *LORA, "train.steps=1")
    another = make_folder(tmp_path / "another")
    other_weights = {name: 1.5 * tensor for name, tensor in tensors(folder).items()}
    save_file(other_weights, another / "model.safetensors", {"format": "pt"})
    err = adapt("run", *LORA, f"model.init_from={another}", "train.steps=2", code=2).err
    assert "the frozen weights have changed" in err
    assert str(another) in err
    for file in another.glob("*.safetensors"):
        shutil.copy(file, folder)
    err = adapt("run", *LORA, "train.steps=2", code=2, ranks=2).err
    assert "the frozen weights have changed" in err
    assert "Traceback" not in err
    shutil.rmtree(folder)
    err = adapt("run", *LORA, "train.steps=2", code=2).err
    assert str(folder) in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_new_magnitudes_cannot_be_frozen(adapt):
    """Checkpoints hold no frozen parameters, and no other file has them."""
    how = [*DORA, "train.freeze=['*.lora_magnitude_vector']", "train.steps=2"]
    err = adapt("run", *how, code=2).err
    assert "model.layers.0.self_attn.q_proj.lora_magnitude_vector" in err
    assert "a resume would not find it" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ("adapter.alpha=8", ""),
        ("adapter.scaling=rslora", ""),
        ("adapter.also=[norms]", ""),
        ("adapter.rank=2", "the weights are not those of"),
        ("adapter.targets=[q_proj]", "the weights are not those of"),
        ("adapter=dora", "the weights are not those of"),
        ("adapter=none", "the weights are not those of"),
    ],
)
@pytest.mark.grid(1)
def test_other_adapters_are_refused_or_gone_on_with_where_that_can_be(adapt, change, refused):
    adapt("run", *LORA, "train.steps=1")
    key, _, value = change.partition("=")
    how = [word for word in LORA if word.partition("=")[0] != key and value != "none"]
    more = [*how, change, "train.steps=2"]
    err = adapt("run", *more, code=2).err
    assert "'checkpoint.allow_changes=[adapter." in err
    allowed = ["checkpoint.allow_changes=[adapter]"]
    run = adapt("run", *more, *allowed, code=2 if refused else 0, ranks=2)
    assert refused in run.err
    assert "Traceback" not in run.err
    if change == "adapter.alpha=8":
        frozen = json.loads((newest(run) / "trainer.json").read_text())["frozen"]
        alphas = {alpha for _, alpha in frozen["adapters"]["layers"].values()}
        assert alphas == {8.0}, "exports scale by what was trained last"


@pytest.mark.slow
@pytest.mark.further
def test_bad_numbers_and_spikes_are_seen_with_frozen_weights(adapt):
    run = adapt("bad", *LORA, "train.steps=4", ranks=2, seam=inject.bad_gradient())
    assert [event["step"] for event in run.event("skipped")] == [3]
    how = [*LORA, "train.steps=4", "train.check_every=2", "sharding=ddp"]
    checked = adapt("checked", *how, ranks=2)
    assert not checked.event("corruption")
    assert checked.column("step") == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.further
def test_a_run_is_rewound_with_frozen_weights_that_have_moved(train, folder):
    how = [*SPIKY, *LORA, "train.on_spike=rewind", "tokenizer.path=demo:bytes"]
    how += ["train.rewind_margin=8"]
    options = {"base": HF, "ranks": 2, "seam": inject.garbage()}
    train("spiky", *how, f"model.init_from={folder}", "train.steps=13", **options)
    moved = folder.rename(folder.with_name("moved"))
    run = train("spiky", *how, f"model.init_from={moved}", "train.steps=24", **options)
    [rewind] = run.event("rewind")
    assert rewind["to"] <= 12, "to a checkpoint that names the folder of before"
    assert run.column("step") == list(range(1, 25))
