"""A run that begins with another tool's optimizer states goes on as that tool would have.

The folders in `titan_checkpoints` were written by torchtitan on two ranks, which also went on.
"""

import math
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from folders import TESTS
from foreign import Evil
from safetensors.torch import load_file
from stored import assert_byte_equal, checkpoint, newest, tensors
from tables import rows
from world import read_json, write_lines

from fsdp_trainer.checkpoint.formats.tensor_files import read_whole
from fsdp_trainer.checkpoint.other_states import read_states
from fsdp_trainer.models.hf.read_architecture import read_architecture

WRITTEN = TESTS / "checkpoint/titan_checkpoints"
ZERO = TESTS / "checkpoint/zero_checkpoints"
ROWS = read_json(WRITTEN / "rows.json")
STEPS, KEPT = 6, 3
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
KEYS = [
    f"data=pretrain tokenizer.path={WRITTEN / 'tokenizer'} precision=fp32",
    f"batch.rows=4 batch.micro_rows=2 batch.seq_len=16 train.steps={STEPS}",
    "optim.lr=1e-2 schedule.name=constant schedule.warmup_steps=0", "optim.grad_clip=1.0",
]  # fmt: skip


@pytest.fixture
def go_on(world, tmp_path):
    """Return `go_on(weights, states, *overrides)`: a run on the rows that the fixtures are of."""
    data = tmp_path / "rows.jsonl"
    write_lines(data, ({"input_ids": row} for row in ROWS))

    def train(weights, states, *overrides, name="run", **options):
        begin = f"model.init_from={weights} optim.init_from={states} data.path={data}"
        return world.train(tmp_path / name, *KEYS, begin, *overrides, base=[], **options)

    return train


def close(numbers, others):
    return torch.allclose(torch.tensor(numbers), torch.tensor(others), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "release, ranks, words",
    [
        ("0.2", 3, ["optim.offload=cpu"]),
        ("0.3", 2, ["optim.offload=disk sharding.tensor=2"]),
    ],
)
def test_a_run_of_torchtitans_goes_on_without_a_bump(go_on, release, ranks, words):
    folder = WRITTEN / f"torchtitan-{release}"
    run = go_on(folder, folder, *words, ranks=ranks)
    uninterrupted = read_json(folder / "losses.json")
    assert run["step"] == [4, 5, 6]
    assert close(run["loss"], uninterrupted[KEPT:])
    assert f"AdamW goes on after step {KEPT}" in run.out
    assert "learning rate 0.01 before, 0.01 next" in run.out


def test_a_resumed_run_needs_the_states_no_more_and_ends_as_an_uninterrupted_one(go_on, tmp_path):
    folder = tmp_path / "titan"
    shutil.copytree(WRITTEN / "torchtitan-0.3", folder)
    held_out = tmp_path / "held-out.jsonl"
    write_lines(held_out, [{"input_ids": ROWS[0][::-1]}])
    how = (
        "schedule.name=cosine schedule.min_ratio=0.1 checkpoint.every=1 checkpoint.keep=9"
        f" data.validation={held_out} train.validate_every=2"
    )
    run = go_on(folder, folder, how)
    assert [event["step"] for event in run.event("evaluation")] == [3, 4, 6]
    halfway = 0.1 + 0.9 * (1 + math.cos(math.pi * 3 / STEPS)) / 2
    assert run["lr"][0] == pytest.approx(1e-2 * halfway)
    uninterrupted = tensors(newest(run))
    for step in (5, 6):
        shutil.rmtree(checkpoint(run, step))
    for file in folder.glob("*.distcp"):
        file.unlink()
    again = go_on(folder, folder, how)
    assert "resumes after step 4" in again.out
    assert again["step"] == [4, 5, 6]
    assert_byte_equal(tensors(newest(run)), uninterrupted)


def trained_elsewhere(folder, form):
    """Train on all ranks; save after some steps, and return the losses of all.

    form: `fsdp1`, saved in parts as accelerate does; `file`: without sharding, in one file.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    clip = torch.nn.utils.clip_grad_norm_
    if form == "fsdp1":
        model = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
        kind = StateDictType.SHARDED_STATE_DICT
        FSDP.set_state_dict_type(model, kind, ShardedStateDictConfig())
        clip = FSDP.clip_grad_norm_
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    own = torch.tensor(ROWS).chunk(dist.get_world_size())[dist.get_rank()]
    losses = []
    for step in range(1, STEPS + 1):
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        clip(model if form == "fsdp1" else model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if step == KEPT and form == "fsdp1":
            states = FSDP.optim_state_dict(model, optimizer)
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "pytorch_model_fsdp_0")
            dcp.save({"optimizer": states}, checkpoint_id=folder / "optimizer_0")
        elif step == KEPT:
            named = {name: optimizer.state[p] for name, p in model.named_parameters()}
            groups = optimizer.state_dict()["param_groups"]
            torch.save(model.state_dict(), folder / "pytorch_model_fsdp.bin")
            torch.save({"state": named, "param_groups": groups}, folder / "optimizer.bin")
    return losses


@pytest.mark.parametrize("form, ranks", [("fsdp1", 2), ("file", 1)])
def test_a_run_of_accelerates_goes_on_without_a_bump(world, go_on, tmp_path, form, ranks):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shutil.copyfile(WRITTEN / "torchtitan-0.2/config.json", folder / "config.json")
    losses = world.call(ranks, trained_elsewhere, folder, form)[0]
    run = go_on(folder, folder, ranks=2)
    assert close(run["loss"], losses[KEPT:])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_moments_of_zero_are_those_that_deepspeed_gathers(stage):
    """DeepSpeed gathers them in stage 3; the other stages have trained alike."""
    expected = load_file(ZERO / "stage_3/moments")
    folder = ZERO / f"stage_{stage}"
    states = read_states(folder, read_architecture(folder))
    assert states.step == 2
    assert states.options["betas"] == (0.9, 0.999)
    read = {
        f"{name} {moment}": read_whole(tensor, 0, tensor.shape[0])
        for moment, of_names in states.moments.items()
        for name, tensor in of_names.items()
    }
    assert read.keys() == expected.keys()
    for name, moment in expected.items():
        error = (read[name] - moment).norm() / moment.norm()
        assert error == 0 if stage == 3 else error < 1e-6, name


def moments(weight, **others):
    zeros = torch.zeros_like(weight)
    return {"step": torch.tensor(3.0), "exp_avg": zeros, "exp_avg_sq": zeros} | others


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda named: named.pop("lm_head.weight"), "lm_head.weight has no exp_avg"),
        (
            lambda named: named.update({"model.norm.weight": moments(torch.ones(7))}),
            "has shape [7]; the model has [16]",
        ),
        (
            lambda named: named["model.norm.weight"].update(step=4.0),
            "has not one number of steps for all parameters: 3, 4",
        ),
        (
            lambda named: [named.update({str(i): named.pop(n)}) for i, n in enumerate([*named])],
            "has numbers for its parameters (0), not names",
        ),
        (lambda named: named.clear(), "holds no states of AdamW"),
    ],
)
def test_states_that_do_not_fit_are_refused_with_the_reason(go_on, tmp_path, change, reason):
    weights = WRITTEN / "torchtitan-0.2"
    config = transformers.AutoConfig.from_pretrained(weights)
    model = transformers.AutoModelForCausalLM.from_config(config)
    named = {name: moments(parameter.data) for name, parameter in model.named_parameters()}
    change(named)
    torch.save({"state": named}, tmp_path / "optimizer.bin")
    run = go_on(weights, tmp_path, code=2)
    assert reason in " ".join(run.err.split())
    assert not (run.folder / "checkpoints").exists()


REFUSED = rows("""
FOLDER → train.steps=3 → To train as many more:  train.steps=6
FOLDER → optim.state_dtype=8bit → Use  optim.state_dtype=float32
FOLDER → adapter=lora → Use  adapter=none
FOLDER → optim=lion → only counts with  optim=adamw
FOLDER → model.init_from=null model=tiny → Add  model.init_from=
OWN → run.seed=0 → Use  checkpoint.resume=OWN
HERE/tokenizer → run.seed=0 → has no optimizer states
HERE/nowhere → run.seed=0 → there is no such file or folder
HERE/rows.json → run.seed=0 → is no file of torch.save
""")


@pytest.mark.parametrize("states, overrides, reason", REFUSED)
def test_what_cannot_go_on_is_refused_with_what_to_type(go_on, ledger, states, overrides, reason):
    folder, own = WRITTEN / "torchtitan-0.3", str(ledger.run("plain").folder)
    for name, place in (("FOLDER", folder), ("OWN", own), ("HERE", WRITTEN)):
        states, reason = (text.replace(name, str(place)) for text in (states, reason))
    assert reason in go_on(folder, states, overrides, code=2).err


def test_options_that_could_run_code_are_left_out(tmp_path, capsys):
    states = {"model.norm.weight": moments(torch.ones(16)), "other": moments(torch.ones(2))}
    dcp.save(
        {"optimizer": {"state": states, "param_groups": [{"lr": Evil()}]}},
        checkpoint_id=tmp_path / "optimizer_0",
    )
    read = read_states(tmp_path, read_architecture(WRITTEN / "torchtitan-0.2"))
    assert (read.step, read.options) == (3, {})
    assert "code of others" not in capsys.readouterr().out
