"""Other ways to send fully_shard's messages: from a second copy, and in 8-bit numbers."""

import pytest
import torch
import torch.distributed as dist

from fsdp_trainer.base import eight_bit_messages
from fsdp_trainer.base.distributed import ALL_GATHER, REDUCE_SCATTER
from fsdp_trainer.base.eight_bit_messages import BYTES, decode, encode
from fsdp_trainer.parallel.gloo_messages import DirectAllGather, DirectReduceScatter
from fsdp_trainer.parallel.quantized_messages import QuantizedAllGather, QuantizedReduceScatter

ROUNDING = 1 + 2**-18
"""Factor on a bound for what float32 rounds in scale and product."""


def test_a_message_in_eight_bits_is_wrong_by_at_most_half_a_scale(monkeypatch):
    numbers = torch.randn(3, 1000, dtype=torch.float64) * torch.logspace(-30, 4, 1000)
    encoded = encode(numbers)
    assert encoded.shape == (3, 4 * 256 * BYTES)
    decoded = torch.empty(3, 1000)
    decode(encoded, decoded)
    blocks = torch.nn.functional.pad(numbers, (0, 24)).view(3, 4, 256)
    allowed = (blocks.abs().amax(-1, keepdim=True) / 254).expand(blocks.shape).reshape(3, -1)
    wrong = (decoded - numbers).abs() / allowed[:, :1000]
    assert 0.9 < wrong.max() <= ROUNDING
    monkeypatch.setattr(eight_bit_messages, "CHUNK", 256)
    assert torch.equal(encode(numbers), encoded)
    again = torch.empty(3, 1000)
    decode(encoded, again)
    assert torch.equal(again, decoded)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_makes_its_block_so(bad):
    numbers = torch.ones(1, 600)
    numbers[0, 300] = bad
    decoded = torch.empty(1, 600)
    decode(encode(numbers), decoded)
    assert decoded.isfinite()[0].tolist() == [True] * 256 + [False] * 256 + [True] * 88


def exchanged(feedback):
    """Return this rank's weights and gradients, what is gathered, and three sums of gradients."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    weights = torch.randn(700, generator=generator)
    gradients = torch.randn(ranks * 700, generator=generator)
    gathered = torch.empty(ranks * 700)
    QuantizedAllGather(ranks)(gathered, weights, dist.group.WORLD)
    reduce = QuantizedReduceScatter(feedback)
    sums = []
    for _ in range(3):
        total = torch.empty(700)
        reduce(total, gradients, dist.group.WORLD, dist.ReduceOp.SUM)
        sums.append(total)
    return weights, gradients, gathered, sums


def bound(numbers):
    """Return how far any of the numbers may be off."""
    return numbers.abs().max().item() / 254 * ROUNDING


@pytest.mark.parametrize("ranks", [2, 3])
def test_gathered_weights_and_reduced_gradients_are_within_their_bounds(world, ranks):
    """Against sums in float64."""
    each = world.call(ranks, exchanged, False)
    weights = torch.cat([own for own, *_ in each])
    gradients = torch.stack([own.double() for _, own, *_ in each])
    exact = gradients.sum(0).view(ranks, -1)
    allowed = sum(bound(own) for own in gradients)
    for rank, (_, _, gathered, sums) in enumerate(each):
        assert torch.equal(gathered, each[0][2]), "all ranks compute with the same weights"
        assert 0 < (gathered - weights).abs().max() <= bound(weights)
        assert torch.equal(sums[0], sums[2])
        assert 0 < (sums[0] - exact[rank]).abs().max() <= allowed


def test_with_error_feedback_the_errors_of_several_steps_do_not_add_up(world):
    each, plain = world.call(2, exchanged, True), world.call(2, exchanged, False)
    exact = sum(own.double() for _, own, *_ in each).view(2, -1)
    for rank in range(2):
        wrong, without = (
            (sum(ranks[rank][3]) - 3 * exact[rank]).abs().max() for ranks in (each, plain)
        )
        assert wrong < 0.5 * without


def sent_directly():
    """Return (direct, gloo's own) pairs of what is gathered and what is summed."""
    dist.init_process_group("gloo")
    rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    pairs = []
    for size in (1, 700, 2**18 + 8, 2**18 + 9):
        addends = torch.randn(ranks * size, generator=torch.Generator().manual_seed(rank))
        gathered, sums = torch.empty(2, ranks * size), torch.empty(2, size)
        DirectAllGather()(gathered[0], addends[:size], world)
        ALL_GATHER(gathered[1], addends[:size])
        DirectReduceScatter()(sums[0], addends, world, dist.ReduceOp.SUM)
        REDUCE_SCATTER(sums[1], addends.clone())
        pairs += [gathered, sums]
    return pairs


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_ranks_send_directly_has_the_bits_of_gloos_own_messages(world, ranks):
    for pairs in world.call(ranks, sent_directly):
        assert all(torch.equal(direct, own) for direct, own in pairs)
