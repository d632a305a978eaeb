"""Weights and moments in fewer bits: what is stored, how it is rounded, and that neither ranks,
restarts nor skipped steps change it."""

import math
from unittest.mock import patch

import inject
import pytest
import torch
import torch.distributed as dist
from stored import newest, stored
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_trainer.checkpoint.state import optimizer_state, weights
from fsdp_trainer.config.schema import Optim
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.initialize import initialize_weights
from fsdp_trainer.optim.eight_bit import decode, encode, table, values
from fsdp_trainer.optim.optimizers import build_optimizer
from fsdp_trainer.optim.stochastic_rounding import (
    element_numbers,
    key_of,
    random_bits,
    round_to_bfloat16,
)

FORMATS = {
    "fused": (torch.float32, {}),
    "foreach": (torch.float32, {"implementation": "foreach"}),
    "bfloat16 moments": (torch.float32, {"state_dtype": "bfloat16"}),
    "8-bit moments": (torch.float32, {"state_dtype": "8bit"}),
    "bfloat16": (torch.bfloat16, {}),
    "bfloat16 to nearest": (torch.bfloat16, {"rounding": "nearest"}),
    "bfloat16 weights": (torch.bfloat16, {"state_dtype": "float32"}),
    "bfloat16, 8-bit moments": (torch.bfloat16, {"state_dtype": "8bit"}),
}
TORCHS = (
    "fused",
    "foreach",
    "bfloat16 to nearest",
)  # the CPU kernel computes the last few numbers of a rank another way
OURS = [name for name in FORMATS if name not in TORCHS]
EIGHT_BIT = ["model.hidden_size=64", "model.intermediate_size=128", "optim=adamw_8bit"]
FOREACH = ["optim.implementation=foreach"]
PURE = ["precision.master_dtype=bfloat16"]


def middle(dtype=torch.float32):
    """A decoder with matrices whose rows have blocks of 64 and of 128 numbers, one of an odd number
    of rows."""
    model = Decoder(
        ModelConfig(
            vocab_size=77,
            hidden_size=64,
            head_dim=16,
            intermediate_size=128,
            num_hidden_layers=1,
            family="qwen3",
        )
    )
    initialize_weights(model, 0)
    return model.to(dtype)


def set_gradients(model, step, dtype, rank=0, ranks=1):
    """The same numbers for every sharding, some of them tiny, some zero."""
    for i, p in enumerate(model.parameters()):
        whole = (
            torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            .mul_(0.01)
            .pow(3)
        )
        whole[0] = 0
        p.grad = torch.zeros_like(p)
        (p.grad.to_local() if ranks else p.grad).copy_(
            torch.chunk(whole, ranks)[rank] if ranks else whole
        )


def five_steps(dtype, options):
    """Return the whole weights and the moments' bytes after five steps, the third of them skipped,
    on every rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 0)
    model = middle(dtype)
    if ranks:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = build_optimizer(model, Optim(lr=1e-2, weight_decay=0.1, **options), seed=7)
    for step in range(1, 6):
        set_gradients(model, step, dtype, rank, ranks)
        optimizer.step_unless(torch.tensor(step == 3))
    state = weights(model) | optimizer_state(model, optimizer)
    return {
        name: t.full_tensor().clone() if hasattr(t, "full_tensor") else t.clone()
        for name, t in state.items()
    }


def five_steps_in_all_formats():
    return {name: five_steps(*FORMATS[name]) for name in OURS}


def sharded_steps():
    dist.init_process_group("gloo")
    return five_steps_in_all_formats()


def assert_equal_states(got, expected):
    """Weights and moments by name, of each format."""
    assert got.keys() == expected.keys()
    for name, state in expected.items():
        assert got[name].keys() == state.keys(), name
        for key, value in state.items():
            assert value.dtype == got[name][key].dtype, (name, key)
            assert torch.equal(value, got[name][key]), (name, key)


@pytest.fixture(scope="module")
def of_one_process():
    """Return what one process gives, which must stay as it is."""
    return five_steps_in_all_formats()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.grid(1)
def test_the_same_gradients_give_the_same_bits_on_any_number_of_ranks(world, of_one_process, ranks):
    assert_equal_states(world.call(ranks, sharded_steps)[0], of_one_process)


@pytest.mark.slow
@pytest.mark.further
def test_chunks_change_nothing(of_one_process):
    with inject.setting("optimizer_chunk", {"cpu": 256}):
        assert_equal_states(five_steps_in_all_formats(), of_one_process)


LAYOUTS = {
    "columns": ((2,), [Shard(1)]),
    "rows and columns": ((2, 2), [Shard(0), Shard(1)]),
    "columns and rows": ((2, 2), [Shard(1), Shard(0)]),
    "columns, replicated": ((2, 2), [Replicate(), Shard(1)]),
}
"""The shape of a mesh, and how every matrix lies on it."""
SHAPES = {
    "large": (7, 1024),
    "middle": (3, 512),
    "narrow": (9, 20),
    "experts": (2, 3, 512),
    "vector": (11,),
}


def steps_of_layout(layout):
    """Return what each format gives, on every rank."""
    mesh = None
    if layout:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", LAYOUTS[layout][0])
    return {name: steps_of_any_layout(*FORMATS[name], layout, mesh) for name in OURS}


def steps_of_any_layout(dtype, options, layout, mesh):
    """The whole weights and moments after five steps, the third of them skipped."""
    model = nn.ParameterDict()
    places = LAYOUTS[layout][1] if layout else []

    def placed(whole):
        """Experts are sharded by the dimension in the middle."""
        own = places if whole.ndim > 1 else [Replicate()] * len(places)
        return distribute_tensor(whole, mesh, own) if layout else whole

    for name, size in SHAPES.items():
        whole = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
        model[name] = nn.Parameter(placed(whole))
    optimizer = build_optimizer(model, Optim(lr=1e-2, weight_decay=0.1, **options), seed=7)
    for step in range(1, 6):
        for i, p in enumerate(model.values()):
            generator = torch.Generator().manual_seed(100 * step + i)
            p.grad = placed((torch.randn(p.shape, generator=generator) * 0.01).to(dtype))
        optimizer.step_unless(torch.tensor(step == 3))
    state = weights(model) | optimizer_state(model, optimizer)
    return {
        name: t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
        for name, t in state.items()
    }


@pytest.fixture(scope="module")
def unsharded():
    return steps_of_layout(None)


@pytest.mark.parametrize(
    "layout", ["columns", *(pytest.param(one, marks=pytest.mark.slow) for one in [*LAYOUTS][1:])]
)
@pytest.mark.further
def test_the_same_gradients_give_the_same_bits_where_columns_are_sharded(world, unsharded, layout):
    together = world.call(math.prod(LAYOUTS[layout][0]), steps_of_layout, layout)[0]
    assert_equal_states(together, unsharded)


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


@pytest.mark.parametrize("name", FORMATS)
def test_a_skipped_step_leaves_every_byte_whatever_the_format(name):
    dtype, options = FORMATS[name]
    model = middle(dtype)
    optimizer = build_optimizer(model, Optim(lr=0.1, weight_decay=0.1, **options))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step_unless(torch.tensor(False))
    before = [t.clone() for t in (weights(model) | optimizer_state(model, optimizer)).values()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step_unless(torch.tensor(True))
    after = (weights(model) | optimizer_state(model, optimizer)).values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step_unless(torch.tensor(False))
    assert not torch.equal(before[0], next(iter(after)))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fused", 8),
        ("foreach", 8),
        ("bfloat16 moments", 4),
        ("8-bit moments", 2.05),
        ("bfloat16", 4),
        ("bfloat16, 8-bit moments", 2.05),
    ],
)
def test_moments_take_the_bytes_that_are_promised(name, wanted):
    dtype, options = FORMATS[name]
    model = Decoder(
        ModelConfig(
            vocab_size=99, hidden_size=256, head_dim=64, intermediate_size=512, num_hidden_layers=2
        )
    )
    initialize_weights(model, 0)
    model.to(dtype)
    optimizer = build_optimizer(model, Optim(**options))
    set_gradients(model, 1, dtype, ranks=0)
    optimizer.step()
    moments = sum(
        t.nbytes
        for name, t in optimizer_state(model, optimizer).items()
        if not name.endswith("/step")
    )
    assert moments / model.config.parameters() == pytest.approx(wanted, rel=0.01)


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


def test_eight_bits_hold_a_block_to_two_hundredths_and_zero_exactly():
    for signed in (True, False):
        numbers = torch.randn(64, 128) * torch.logspace(-15, 5, 64)[:, None]
        numbers = (numbers if signed else numbers**2).flatten()
        numbers[:200] = 0
        codes, scale = encode(numbers.view(64, 128), signed)
        again = decode(codes, scale, signed).flatten()
        assert codes.dtype == torch.uint8
        assert scale.shape == (64, 1)
        assert torch.equal(again[:200], numbers[:200])
        assert (
            (again - numbers).view(64, 128).norm(dim=1) <= 0.02 * numbers.view(64, 128).norm(dim=1)
        ).all()
        assert len(set(values(signed))) == 256


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
        assert torch.equal(
            encode(shares.view(-1, 256), signed)[0].flatten().int(),
            torch.bucketize(shares, middles, out_int32=True),
        )


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


@pytest.mark.slow
@pytest.mark.parametrize("how", [[*EIGHT_BIT, *PURE], ["optim=adamw_bf16"], FOREACH], ids=str)
@pytest.mark.grid(1)
def test_a_run_goes_on_bitwise_in_every_format(train, how):
    common = [*how, "schedule=constant", "batch.micro_rows=3"]
    train("run", *common, "train.steps=2", ranks=2)
    again, whole = (
        train("run", *common, "train.steps=3", ranks=2),
        train("whole", *common, "train.steps=3", ranks=2),
    )
    assert again.column("loss") == whole.column("loss")
    assert_same(stored(newest(again)), stored(newest(whole)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "before", "after"), [(EIGHT_BIT, 2, 1), (EIGHT_BIT, 1, 4), (PURE, 1, 4)], ids=str
)
@pytest.mark.further
def test_a_run_goes_on_on_another_world_in_every_format(train, how, before, after):
    """If weights are bfloat16, moments are too."""
    common = [*how, "schedule=constant", "batch.micro_rows=1"]
    train("run", *common, "train.steps=2", ranks=before)
    again, whole = (
        train("run", *common, "train.steps=4", ranks=after),
        train("whole", *common, "train.steps=4", ranks=before),
    )
    assert again.column("loss") == pytest.approx(whole.column("loss"), rel=2e-3)


@pytest.mark.slow
def test_a_checkpoint_in_the_background_holds_eight_bit_moments_too(train):
    how = [*EIGHT_BIT, "schedule=constant", "train.steps=2"]
    assert_same(
        *(stored(newest(train(mode, *how, f"checkpoint={mode}"))) for mode in ("sync", "async"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [FOREACH, pytest.param(EIGHT_BIT, marks=pytest.mark.slow)], ids=str)
@pytest.mark.grid(1)
def test_a_bad_gradient_on_one_rank_skips_the_step_everywhere_in_every_format(train, how):
    common = ["train.steps=4", "checkpoint.every=1", "checkpoint.keep=9", "batch.micro_rows=1"]
    run = train("run", *common, *how, ranks=2, seam=inject.bad_gradient())
    two, three, four = (stored(run.folder / "checkpoints" / f"step-0000000{i}") for i in (2, 3, 4))
    assert_same(two, three)
    assert all(t.isfinite().all() for t in four.values())
    assert not torch.equal(two["weights/model.norm.weight"], four["weights/model.norm.weight"])


@pytest.mark.slow
def test_implementations_agree_and_may_change_on_the_way(train):
    how = ["schedule=constant", "train.steps=3"]
    runs = [train(name, *how, f"optim.implementation={name}") for name in ("fused", "foreach")]
    assert runs[0].column("loss") == pytest.approx(runs[1].column("loss"), rel=1e-5)
    for run, other in zip(runs, ("foreach", "fused"), strict=True):
        again = train(run.folder.name, *how, f"optim.implementation={other}", "train.steps=5")
        assert len(again.metrics) == 5


@pytest.mark.slow
def test_the_format_of_moments_may_change_between_floating_point_ones_when_allowed(train):
    train("run", *EIGHT_BIT[:2], "train.steps=2")
    refused = train("run", *EIGHT_BIT[:2], "train.steps=3", "optim=adamw_bf16", code=2)
    assert "optim.state_dtype" in refused.err
    allow = "checkpoint.allow_changes=[optim.state_dtype]"
    assert (
        len(train("run", *EIGHT_BIT[:2], "train.steps=3", "optim=adamw_bf16", allow).metrics) == 3
    )
    refused = train("run", *EIGHT_BIT, "train.steps=4", allow, code=2)
    assert "8-bit moments cannot" in refused.err
    assert "model.init_from=" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (["optim=adamw_8bit", "optim.implementation=fused"], "optim.implementation=auto"),
        ([*PURE, "optim.implementation=foreach"], "optim.rounding=nearest"),
        (["optim.rounding=nearest"], "only counts where something is kept in bfloat16"),
        (["optim.state_dtype=int4"], "8bit"),
    ],
    ids=str,
)
def test_formats_that_do_not_go_together_are_refused_with_what_would(train, how, message):
    assert message in train("run", *how, code=2).err


@pytest.mark.slow
@pytest.mark.further
def test_rounding_to_nearest_stalls_where_stochastic_rounding_goes_on(train):
    how = [
        "train.steps=30",
        "schedule=constant",
        "optim.lr=2e-4",
        "optim.grad_clip=null",
        "optim.weight_decay=0",
    ]
    exact = train("exact", *how).column("loss")
    gaps = {}
    for rounding in ("stochastic", "nearest"):
        losses = train(
            rounding, *how, "precision.master_dtype=bfloat16", f"optim.rounding={rounding}"
        ).column("loss")
        gaps[rounding] = (
            sum(abs(a - b) for a, b in zip(losses[-10:], exact[-10:], strict=True)) / 10
        )
    assert gaps["stochastic"] < 0.3 * gaps["nearest"], gaps


def assert_same(a, b):
    """Raise AssertionError if two arrays differ, even of bfloat16, which numpy does not know."""
    assert a.keys() == b.keys()
    assert any("exp_avg_sq" in name for name in a)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.slow
@pytest.mark.further
def test_ranks_without_a_row_of_a_matrix_take_part(train):
    few = [
        *EIGHT_BIT,
        "model.family=qwen3",
        "model.head_dim=2",
        "model.num_attention_heads=2",
        "model.num_key_value_heads=1",
    ]
    common = [*few, "train.steps=3", "batch.micro_rows=1", "schedule=constant"]
    one, four = (train(str(ranks), *common, ranks=ranks) for ranks in (1, 4))
    assert four.column("loss") == pytest.approx(one.column("loss"), rel=1e-4)
