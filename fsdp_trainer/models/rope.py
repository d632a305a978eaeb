"""Rotary position embedding in Hugging Face's half-rotation layout (Su et al. 2021), and its scalings for longer context."""

import math
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.models.config import ModelConfig


class Rope:
    """Turns positions into rotations. local: by rope_local_theta, unscaled, for the blocks with a window of a family that has one."""

    def __init__(self, config: ModelConfig, local: bool = False):
        self.scaling: dict[str, Any] = {} if local else config.rope_scaling or {}
        theta = config.rope_local_theta if local else config.rope_theta
        assert theta is not None
        exponent = (
            torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
        )
        plain = 1.0 / (theta**exponent)
        self.frequencies, self.strength = _scaled(plain, theta, config, self.scaling)
        self.long_from, self.long = None, self.frequencies
        if self.scaling.get("rope_type") == "longrope":
            self.long_from = self.scaling["original_max_position_embeddings"]
            self.long = plain / torch.tensor(self.scaling["long_factor"])
        self.dtype = torch.float32 if config.form.rope_in_float32 else None

    def __call__(
        self, positions: Tensor, dtype: torch.dtype, so_far: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine, each [batch, length, 1, rotary_dim], of positions [batch, length]. Angles are taken in float32.

        so_far: tokens of the one document in each row, generated ones included; None: several documents, whose positions restart.
        """
        if self.frequencies.device != positions.device:
            self.frequencies, self.long = (
                self.frequencies.to(positions.device),
                self.long.to(positions.device),
            )
        frequencies = self.frequencies
        if self.long_from is not None:
            length = (
                document_lengths(positions)
                if so_far is None
                else torch.full_like(positions, so_far)
            )
            frequencies = torch.where(
                length[..., None] > self.long_from, self.long, self.frequencies
            )
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        dtype = self.dtype or dtype
        return (angles.cos() * self.strength).to(dtype), (angles.sin() * self.strength).to(dtype)


def document_lengths(positions: Tensor) -> Tensor:
    """[batch, length]: of each token, the length of its document, which begins at position 0."""
    flat = positions.flatten()
    document = (flat == 0).cumsum(0) - 1
    return (
        torch.zeros_like(flat)
        .scatter_reduce(0, document, flat + 1, "amax")[document]
        .view_as(positions)
    )


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn queries or keys, [batch, length, heads, head_dim], by their positions; channels behind rotary_dim pass."""
    turned, rest = x[..., : cosine.shape[-1]], x[..., cosine.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = (turned * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _scaled(
    plain: Tensor, theta: float, config: ModelConfig, scaling: dict[str, Any]
) -> tuple[Tensor, float]:
    """Frequencies [rotary_dim / 2], and the factor on cosine and sine."""
    match scaling.get("rope_type", "default"):
        case "linear":
            return plain / scaling["factor"], 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, theta, config.rotary_dim, scaling), _yarn_strength(scaling)
        case "longrope":
            return plain / torch.tensor(scaling["short_factor"]), _longrope_strength(
                config, scaling
            )
    return plain, 1.0


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Slow channels are stretched by the factor, fast ones kept, those between interpolated (The Llama 3 Herd of Models, §3.4.2)."""
    low, high, original = (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    wavelength = 2 * math.pi / frequencies
    stretched = frequencies / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * stretched + smooth * frequencies
    scaled = torch.where(wavelength > original / low, stretched, frequencies)
    return torch.where(
        (wavelength <= original / low) & (wavelength >= original / high), between, scaled
    )


def _yarn(frequencies: Tensor, theta: float, dim: int, scaling: dict[str, Any]) -> Tensor:
    """Channels that turn fewer than beta_slow times within the original context are stretched, those that turn more than beta_fast times
    kept, those between interpolated by their index (Peng et al. 2023, §3.2)."""

    def channel(turns: float) -> float:
        return (
            dim
            * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling["factor"] * ramp + frequencies * (1 - ramp)


def _yarn_strength(scaling: dict[str, Any]) -> float:
    """Attention's temperature as a factor on queries and keys (Peng et al. 2023, §3.4)."""

    def strength(weight: float) -> float:
        return 0.1 * weight * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return strength(scaling["mscale"]) / strength(scaling["mscale_all_dim"])
    return strength(1.0)


def _longrope_strength(config: ModelConfig, scaling: dict[str, Any]) -> float:
    """Grows with the ratio of the new context to the original one (Ding et al. 2024, as Phi-3 uses it)."""
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or config.max_position_embeddings / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
