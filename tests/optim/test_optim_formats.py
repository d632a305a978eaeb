"""Weights and moments in fewer bits: what is stored, how it is rounded, what runs make of it."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from stored import assert_same_end
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_trainer.config.schema import Optim
from fsdp_trainer.errors import UserError
from fsdp_trainer.optim.eight_bit import decode, encode, table, values
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.optim.stochastic_rounding import (
    element_numbers,
    key_of,
    random_bits,
    round_to_bfloat16,
)

WIDE = "model.hidden_size=64 model.intermediate_size=128"
EIGHT_BIT = f"{WIDE} optim=adamw_8bit"
PURE = "precision.master_dtype=bfloat16"


def moments_of_a_cut_block():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    model = nn.ParameterDict(
        {"w": nn.Parameter(distribute_tensor(torch.ones(3, 64), mesh, [Shard(1)]))}
    )
    with pytest.raises(UserError) as refused:
        build_optimizer(model, Optim(state_dtype="8bit"))
    return str(refused.value)


def test_column_shards_that_would_cut_a_block_of_eight_bit_moments_are_refused(world):
    said = world.call(2, moments_of_a_cut_block)[0]
    assert "32 numbers would cut blocks of 64" in said
    assert "optim.state_dtype=bfloat16" in said


def test_numbers_of_elements_are_those_of_the_whole_beyond_two_to_the_thirtytwo():
    shape, cpu = torch.Size((1 << 20, 3, 1 << 13)), torch.device("cpu")
    part = (slice(700_000, 700_002), slice(1, 3), slice(100, 105))
    wanted = [
        ((row * 3 + middle) * (1 << 13) + column + 2**31) % 2**32 - 2**31
        for row in (700_000, 700_001)
        for middle in (1, 2)
        for column in range(100, 105)
    ]
    assert element_numbers(part, shape, 3, 14, cpu).tolist() == wanted[3:17]
    rows = (part[0], slice(0, 3), slice(0, 1 << 13))
    first = (700_000 * 3 * (1 << 13) + 5 + 2**31) % 2**32 - 2**31
    assert element_numbers(rows, shape, 5, 2, cpu).tolist() == [first, first + 1]


def test_stochastic_rounding_keeps_the_mean_and_chooses_only_neighbours():
    numbers = torch.randn(1 << 12) * torch.logspace(-30, 30, 1 << 12)
    total = torch.zeros(1 << 12, dtype=torch.float64)
    for step in range(1, 513):
        rounded = round_to_bfloat16(
            numbers.clone(),
            random_bits(
                key_of(0, "w"), torch.tensor(float(step)), torch.arange(1 << 12, dtype=torch.int32)
            ),
        )
        total += rounded.double()
        low = (numbers.view(torch.int32) & -0x10000).view(torch.float32)
        high = (low.view(torch.int32) + 0x10000).view(torch.float32)
        assert ((rounded == low) | (rounded == high)).all()
    off = (total / 512 / numbers.double() - 1) * 256  # in steps of bfloat16, at most
    assert abs(off.mean()) < 5e-3
    assert off.abs().max() < 0.25
    whole = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf")])
    assert torch.equal(
        round_to_bfloat16(whole.clone(), torch.full((5,), -1, dtype=torch.int32)).float(), whole
    )


def test_bits_are_a_function_of_place_step_and_name_and_look_random():
    def bits(name="w", step=3, first=0, count=1 << 16):
        numbers = torch.arange(first, first + count, dtype=torch.int32)
        return random_bits(key_of(0, name), torch.tensor(float(step)), numbers)

    whole = bits()
    assert torch.equal(bits(first=12345, count=99), whole[12345 : 12345 + 99])
    for other in (bits("v"), bits(step=4), bits(first=1), whole >> 16):
        pair = torch.stack([whole & 0xFFFF, other & 0xFFFF]).double()
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.02
        assert (pair[0] == pair[1]).double().mean() < 1e-3
    share = torch.stack([(whole >> i) & 1 for i in range(32)]).double().mean(1)
    assert (share - 0.5).abs().max() < 0.01


def test_codes_are_those_of_the_nearest_values():
    for signed in (True, False):
        known, _, _ = table(signed, torch.device("cpu"))
        middles = (known[1:] + known[:-1]) / 2
        close = torch.cat(
            [
                middles,
                middles.nextafter(torch.tensor(2.0)),
                middles.nextafter(torch.tensor(-2.0)),
                known,
                torch.randn(1 << 16),
            ]
        )
        shares = torch.cat([close if signed else close.abs(), torch.ones(256)])
        shares = shares[: len(shares) // 256 * 256].clamp(-1, 1)
        shares.view(-1, 256)[:, 0] = 1  # so that every scale is 1
        codes, scale = encode(shares.view(-1, 256), signed)
        assert torch.equal(codes.flatten().int(), torch.bucketize(shares, middles, out_int32=True))
        assert torch.equal(decode(codes, 3 * scale, signed), 3 * known[codes.int()])


def test_eight_bit_moments_are_torchaos():
    adam, quantisation = (
        pytest.importorskip("torchao.optim"),
        pytest.importorskip("torchao.optim.quant_utils"),
    )
    for signed in (True, False):
        assert torch.equal(
            torch.tensor(values(signed)), torch.tensor(quantisation.create_dynamic_map(signed))
        )
    ours, theirs, exact = (nn.Linear(64, 128, bias=False) for _ in range(3))
    for other in (theirs, exact):
        other.load_state_dict(ours.state_dict())
    mine = build_optimizer(ours, Optim(lr=1e-2, weight_decay=0.1, state_dtype="8bit"))
    plain = build_optimizer(exact, Optim(lr=1e-2, weight_decay=0.1))
    reference = adam.AdamW8bit(
        theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, block_size=64
    )
    with patch("torch.compile", lambda function, **options: function):
        for _ in range(10):
            gradient = torch.randn(128, 64)
            for model in (ours, theirs, exact):
                model.weight.grad = gradient.clone()
            for optimizer in (mine, plain, reference):
                optimizer.step()
    # a code next to a middle may fall to the other side, of few numbers
    assert (ours.weight - theirs.weight).norm() < 0.05 * (theirs.weight - exact.weight).norm()


def test_a_run_goes_on_bitwise_and_is_saved_alike_in_the_background(train):
    common = [EIGHT_BIT, PURE, "schedule=constant batch.rows=3"]
    train("run", *common, "train.steps=1", ranks=2)
    again = train("run", *common, "train.steps=2", ranks=2)
    whole = train("whole", *common, "train.steps=2 checkpoint=async", ranks=2)
    assert_same_end(again, whole)


def test_implementations_agree_and_may_change_on_the_way(train):
    how = "schedule=constant train.steps=2"
    runs = [train(name, how, f"optim.implementation={name}") for name in ("fused", "foreach")]
    assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], rel=1e-5)
    for run, other in zip(runs, ("foreach", "fused"), strict=True):
        again = train(run.folder.name, how, f"optim.implementation={other} train.steps=3")
        assert len(again.metrics) == 3


def test_the_format_of_moments_may_change_between_floating_point_ones_when_allowed(train):
    train("run", WIDE, "train.steps=2")
    other = f"{WIDE} train.steps=3 optim=adamw_bf16"
    assert "optim.state_dtype" in train("run", other, code=2).err
    allow = "checkpoint.allow_changes=[optim.state_dtype]"
    assert len(train("run", other, allow).metrics) == 3
    refused = train("run", EIGHT_BIT, "train.steps=4", allow, code=2)
    assert "8-bit moments cannot" in refused.err
    assert "model.init_from=" in refused.err


def test_rounding_to_nearest_stalls_where_stochastic_rounding_goes_on(train):
    how = ["train.steps=30 schedule=constant optim.lr=2e-4 optim.grad_clip=null"]
    how.append("optim.weight_decay=0")
    exact, gaps = train("exact", *how)["loss"], {}
    for rounding in ("stochastic", "nearest"):
        losses = train(rounding, *how, PURE, f"optim.rounding={rounding}")["loss"]
        pairs = zip(losses[-10:], exact[-10:], strict=True)
        gaps[rounding] = sum(abs(a - b) for a, b in pairs) / 10
    assert gaps["stochastic"] < 0.3 * gaps["nearest"], gaps
