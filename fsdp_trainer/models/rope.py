"""Rotary position embedding in Hugging Face's half-rotation layout (Su et al. 2021), with linear and Llama 3.1's scaling."""

import math

import torch
from torch import Tensor

from fsdp_trainer.models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] float32: the angle by which each pair of channels turns per position."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "linear":
        return frequencies / scaling["factor"]
    if scaling.get("rope_type") == "llama3":
        return _llama3(frequencies, scaling)
    return frequencies


def _llama3(frequencies: Tensor, scaling: dict) -> Tensor:
    """Slow channels are stretched by the factor, fast ones kept, those between interpolated (The Llama 3 Herd of Models, §3.4.2)."""
    low, high, original = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    stretched = frequencies / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched + smooth * frequencies
    scaled = torch.where(wavelength > original / low, stretched, frequencies)
    return torch.where((wavelength <= original / low) & (wavelength >= original / high), between, scaled)


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [batch, length, 1, head_dim], of positions [batch, length]. Angles are taken in float32."""
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn queries or keys, [batch, length, heads, head_dim], by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
