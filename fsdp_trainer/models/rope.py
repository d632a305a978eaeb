"""Rotary position embedding (Su et al. 2021) and its scalings for longer context.

Channels are in Hugging Face's half-rotation layout.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import to_device
from fsdp_trainer.models.attention import PackedAttention
from fsdp_trainer.models.config import ModelConfig

Scaling = dict[str, Any]


class Rope:
    """Map from positions to the cosines and sines of their angles.

    local: uses rope_local_theta without scaling, for blocks with a window.
    """

    def __init__(self, config: ModelConfig, local: bool = False):
        scaling: Scaling = {} if local else config.rope_scaling or {}
        theta = config.rope_local_theta if local else config.rope_theta
        assert theta is not None
        channels = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float()
        plain = 1.0 / (theta ** (channels / config.rotary_dim))
        kind = scaling.get("rope_type", "default")
        self.frequencies = FREQUENCIES[kind](plain, theta, scaling)
        self.attention_factor = 1.0
        if kind in FACTORS:
            given = scaling.get("attention_factor")
            computed = FACTORS[kind](config.max_position_embeddings, scaling)
            self.attention_factor = computed if given is None else given
        self.long_from: int | None = None
        self.long = self.frequencies
        if kind == "longrope":
            self.long_from = scaling["original_max_position_embeddings"]
            self.long = plain / torch.tensor(scaling["long_factor"])
        self.dtype = torch.float32 if config.family_spec.rope_in_float32 else None

    def __call__(
        self, positions: Tensor, dtype: torch.dtype, layout: PackedAttention
    ) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, each [batch, length, 1, rotary_dim], from float32 angles.

        positions: [batch, length]; layout: provides the documents' lengths, by which longrope
        chooses its frequencies.
        """
        if self.frequencies.device != positions.device:
            self.frequencies = to_device(self.frequencies, positions.device)
            self.long = to_device(self.long, positions.device)
        frequencies = self.frequencies
        if self.long_from is not None:
            is_long = layout.document_lengths(positions)[..., None] > self.long_from
            frequencies = torch.where(is_long, self.long, self.frequencies)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(-2)
        cosine = angles.cos() * self.attention_factor
        sine = angles.sin() * self.attention_factor
        return cosine.to(self.dtype or dtype), sine.to(self.dtype or dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the first rotary_dim channels of queries or keys [batch, length, heads, head_dim]."""
    rotary = x[..., : cosine.shape[-1]]
    rest = x[..., cosine.shape[-1] :]
    first, second = rotary.chunk(2, dim=-1)
    rotated = (rotary * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _llama3(frequencies: Tensor, theta: float, scaling: Scaling) -> Tensor:
    """Stretch slow channels, keep fast ones, and interpolate in between.

    See The Llama 3 Herd of Models, §3.4.2.
    """
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    stretched = frequencies / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    interpolated = (1 - smooth) * stretched + smooth * frequencies
    scaled = torch.where(wavelength > original / low, stretched, frequencies)
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, interpolated, scaled)


def _yarn(frequencies: Tensor, theta: float, scaling: Scaling) -> Tensor:
    """Stretch slow channels, keep fast ones, and interpolate in between by channel index.

    Slow: fewer than beta_slow rotations within the original context; fast: more than beta_fast
    (Peng et al. 2023, §3.2).
    """
    dim = 2 * len(frequencies)
    original = scaling["original_max_position_embeddings"]

    def channel(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = channel(scaling.get("beta_fast") or 32)
    high = channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    channels = torch.arange(dim // 2).float()
    ramp = ((channels - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling["factor"] * ramp + frequencies * (1 - ramp)


def yarn_temperature(factor: float, weight: float = 1.0) -> float:
    """Return the attention temperature as a factor on queries and keys (Peng et al. 2023, §3.4).

    factor: ratio of the new context to the original one.
    """
    return 0.1 * weight * math.log(max(1.0, factor)) + 1.0


def _yarn_factor(context: int, scaling: Scaling) -> float:
    """Return the temperature, or DeepSeek's quotient of two temperatures."""
    factor = scaling["factor"]
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        of_all = yarn_temperature(factor, scaling["mscale_all_dim"])
        return yarn_temperature(factor, scaling["mscale"]) / of_all
    return yarn_temperature(factor)


def _longrope_factor(context: int, scaling: Scaling) -> float:
    """Return a factor that grows with the ratio of the new context to the original one.

    See Ding et al. 2024; used by Phi-3.
    """
    original = scaling["original_max_position_embeddings"]
    factor = scaling.get("factor") or context / original
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))


FREQUENCIES: dict[str, Callable[[Tensor, float, Scaling], Tensor]] = {
    "default": lambda frequencies, theta, scaling: frequencies,
    "linear": lambda frequencies, theta, scaling: frequencies / scaling["factor"],
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": lambda frequencies, theta, scaling: (
        frequencies / torch.tensor(scaling["short_factor"])
    ),
}
"""Functions from (plain frequencies, theta, scaling) to frequencies [rotary_dim / 2]."""
FACTORS: dict[str, Callable[[int, Scaling], float]] = {
    "yarn": _yarn_factor,
    "longrope": _longrope_factor,
}
"""Functions from (max_position_embeddings, scaling) to the factor on cosine and sine."""
