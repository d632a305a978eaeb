"""A run with adapters: what it begins with, keeps, sends and stores, and what it goes on from."""

import inject
import pytest
import torch
from stored import assert_same_end, newest, save_tensors, stored, tensors
from world import SPIKY, read_json
from zoo import HF, make_folder

SMALL_STEPS = "tokenizer.path=demo:bytes schedule=constant optim.lr=3e-3"
LORA = ["adapter=lora adapter.rank=4"]
DORA = ["adapter=dora adapter.rank=4"]


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder of two blocks of width 32."""
    return make_folder(tmp_path / "hf")


@pytest.fixture
def adapt(train, folder):
    """A training from the folder."""

    def start(name, *how, **options):
        return train(name, f"model.init_from={folder}", SMALL_STEPS, *how, base=HF, **options)

    return start


def test_adapters_begin_as_pefts_and_alike_on_every_number_of_ranks(adapt, folder):
    how = [*DORA, "train.steps=1 optim.lr=0"]
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


def test_only_gradients_of_adapters_are_sent_and_nothing_frozen_has_a_state(ledger):
    run = ledger.run("adapters")
    state = stored(newest(run))
    weights = {name: tensor for name, tensor in state.items() if name.startswith("weights/")}
    trained = sum(tensor.nbytes for tensor in weights.values())
    for called, *_ in run.steps:
        sent = [size for _, _, op, size, *_ in called if op == "reduce_scatter"]
        assert sum(sent) == trained, "one micro-batch"
    assert all("lora_" in name for name in state if "step" not in name)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert sum(tensor.nbytes for tensor in state.values()) == pytest.approx(3 * trained, rel=0.02)
    assert "adapt  LoRA on 14 layers (q_proj, k_proj" in run.out
    assert "rank 16, scale 2;" in run.out


def print_frozen(trainer):
    print(
        "frozen", {str(p.dtype) for p in trainer.runner.model.parameters() if not p.requires_grad}
    )


@pytest.mark.parametrize("base, dtype", [("auto", "bfloat16"), ("fp32", "float32")])
def test_frozen_weights_are_kept_in_the_format_of_their_base(adapt, base, dtype):
    how = f"precision.param_dtype=bfloat16 adapter.base={base} train.steps=0"
    run = adapt("run", *LORA, how, seam=inject.with_trainer(print_frozen))
    assert f"frozen {{'torch.{dtype}'}}" in run.out
    assert f"frozen weights in {dtype}" in run.out


def test_an_adapter_is_read_and_exported_although_its_base_was_moved(adapt, folder, world):
    first = adapt("first", *LORA, "train.steps=2")
    moved = folder.rename(folder.with_name("moved"))
    how = f"adapter.init_from={first.folder} model.init_from={moved} train.steps=0"
    again = adapt("again", how)
    trained = {name: t for name, t in stored(newest(first)).items() if name.startswith("weights/")}
    read = stored(newest(again))
    assert trained
    assert all(torch.equal(tensor, read[name]) for name, tensor in trained.items())
    out = folder.with_name("exported")
    world.command("export", f"source={first.folder} out={out} form=adapter")
    assert (out / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    "how", [[*DORA, "adapter.also=[norms]"], ["train.freeze=['*embed_tokens*']"]]
)
def test_a_run_resumes_bitwise_with_its_base_in_another_folder(adapt, folder, how):
    common = [*how, "batch.rows=4 batch.micro_rows=1"]
    whole = adapt("whole", *common, "train.steps=2", ranks=2)
    adapt("run", *common, "train.steps=1", ranks=2)
    moved = folder.rename(folder.with_name("moved"))
    run = adapt("run", *common, f"model.init_from={moved} train.steps=2", ranks=2)
    assert f"model.init_from was {folder}, is {moved}" in run.out
    assert_same_end(run, whole)
    recorded = read_json(newest(run) / "trainer.json")["frozen"]
    assert recorded["source"] == str(moved)


@pytest.mark.parametrize("how", [LORA, []])
def test_a_folder_of_another_architecture_is_no_moved_base(adapt, folder, tmp_path, how):
    adapt("run", *how, "train.steps=1")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    another = make_folder(tmp_path / "another", rope_parameters=rope)
    err = adapt("run", *how, f"model.init_from={another} train.steps=2", code=2).err
    assert "rope_theta was 10000.0 in its config.json, and is 500000.0" in err
    assert "checkpoint.allow_changes=[model.init_from]" in err


def test_another_base_is_refused(adapt, folder, tmp_path):
    adapt("run", *LORA, "train.steps=1")
    another = make_folder(tmp_path / "another")
    other_weights = {name: 1.5 * tensor for name, tensor in tensors(folder).items()}
    save_tensors(another, other_weights)
    err = adapt("run", *LORA, f"model.init_from={another} train.steps=2", code=2).err
    assert "the frozen weights have changed" in err
    assert str(another) in err


def test_new_magnitudes_cannot_be_frozen(adapt):
    """Checkpoints hold no frozen parameters, and no other file has them."""
    how = [*DORA, "train.freeze=['*.lora_magnitude_vector'] train.steps=2"]
    err = adapt("run", *how, code=2).err
    assert "model.layers.0.self_attn.q_proj.lora_magnitude_vector" in err
    assert "a resume would not find it" in err


def test_other_adapters_are_refused_or_gone_on_with_where_that_can_be(adapt):
    adapt("run", *LORA, "train.steps=1")
    allowed = "checkpoint.allow_changes=[adapter]"
    for how in (["adapter=lora adapter.rank=2"], DORA, []):
        assert "'checkpoint.allow_changes=[adapter." in adapt("run", *how, code=2).err
        err = adapt("run", *how, allowed, code=2, ranks=2).err
        assert "the weights are not those of" in err
    how = LORA
    for step, change in ((2, "adapter.alpha=8"), (3, "adapter.also=[norms]")):
        how = [*how, change]
        steps = f"train.steps={step}"
        assert "'checkpoint.allow_changes=[adapter." in adapt("run", *how, steps, code=2).err
        run = adapt("run", *how, steps, allowed, ranks=2)
        assert run["step"][-1] == step
    frozen = read_json(newest(run) / "trainer.json")["frozen"]
    alphas = {alpha for _, alpha in frozen["adapters"]["layers"].values()}
    assert alphas == {8.0}, "exports scale by what was trained last"


def test_a_run_is_rewound_with_frozen_weights_that_have_moved(train, folder):
    how = [*SPIKY, *LORA, "train.on_spike=rewind tokenizer.path=demo:bytes"]
    how += ["train.rewind_margin=8"]
    options = {"base": HF, "seam": inject.garbage()}
    train("spiky", *how, f"model.init_from={folder} train.steps=13", **options)
    moved = folder.rename(folder.with_name("moved"))
    run = train("spiky", *how, f"model.init_from={moved} train.steps=21", **options)
    [rewind] = run.event("rewind")
    assert rewind["to"] <= 12, "to a checkpoint that names the folder of before"
    assert run["step"] == list(range(1, 22))
