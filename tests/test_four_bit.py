"""What adapter.base=nf4 promises: the blocks' matrices in 4.25 bits a number, and training on them
as on the numbers that they stand for."""

import pytest
import torch

from fsdp_trainer.checkpoint.four_bit import as_trained_on, encoded
from fsdp_trainer.checkpoint.stream import Chunk, TensorOnDisk
from fsdp_trainer.models.four_bit import LEVELS, decode, encode, encoded_columns


def test_a_number_becomes_the_nearest_level_of_its_block():
    numbers = torch.randn(3, 128)
    largest = numbers.view(3, 2, 64).abs().amax(2, keepdim=True).bfloat16().float()
    levels = torch.tensor(LEVELS)
    nearest = (numbers.view(3, 2, 64, 1) / largest.unsqueeze(3) - levels).abs().argmin(3)
    decoded = decode(encode(numbers), 128, torch.float32)
    assert torch.equal(decoded, (levels[nearest] * largest).view(3, 128))


def test_normal_numbers_take_4_25_bits_and_lose_nine_per_cent():
    numbers = torch.randn(512, 4096, generator=torch.Generator().manual_seed(0)) * 0.02
    codes = encode(numbers)
    assert codes.nbytes * 8 / numbers.numel() == 4.25
    error = decode(codes, 4096, torch.float32) - numbers
    assert error.norm() / numbers.norm() == pytest.approx(0.0919, abs=2e-4)


@pytest.mark.parametrize("columns", [1, 2, 63, 64, 65, 130])
def test_any_number_of_columns_can_be_encoded(columns):
    numbers = torch.randn(5, columns)
    codes = encode(numbers)
    assert codes.shape == (5, encoded_columns(columns))
    decoded = decode(codes, columns, torch.float32)
    whole = torch.nn.functional.pad(numbers, (0, -columns % 64))
    expected = decode(encode(whole), whole.shape[1], torch.float32)[:, :columns]
    assert torch.equal(decoded, expected)


def test_zeros_stay_zeros_and_a_bad_number_is_seen():
    numbers = torch.zeros(2, 128)
    numbers[0, 70] = torch.nan
    decoded = decode(encode(numbers), 128, torch.bfloat16)
    assert decoded[0, 64:].isnan().all()
    assert not decoded[0, :64].any()
    assert not decoded[1].any()


def test_rows_are_encoded_alike_however_they_are_read(tmp_path):
    numbers = torch.randn(50, 70).bfloat16()
    file = tmp_path / "numbers"
    file.write_bytes(numbers.view(torch.uint8).numpy().tobytes())
    whole = (slice(0, 50), slice(0, 70))
    on_disk = TensorOnDisk(torch.bfloat16, (50, 70), [Chunk(file, 0, whole)])
    buffer = torch.empty(50 * 140, dtype=torch.uint8)
    codes, rounded = encoded(on_disk), as_trained_on(on_disk, torch.bfloat16)
    for first, last in ((0, 50), (0, 17), (17, 50), (49, 50)):
        expected = encode(numbers)[first:last]
        assert torch.equal(codes.read_rows(first, last, buffer), expected)
        decoded = decode(expected, 70, torch.bfloat16)
        assert torch.equal(rounded.read_rows(first, last, buffer), decoded)
