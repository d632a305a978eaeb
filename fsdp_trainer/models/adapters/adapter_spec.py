"""The adapters of a model: adapted layers, ranks and scales. Does not import torch."""

import math
from dataclasses import dataclass
from typing import Any

from fsdp_trainer.config.parts.families import is_stacked
from fsdp_trainer.config.schema import Adapter, Precision

ALL_TARGETS = ("all", "all-linear")
A = "lora_A"
B = "lora_B"
MAGNITUDE = "lora_magnitude_vector"
"""PEFT's names: matrices A [rank, in] and B [out, rank], DoRA's magnitude of each row [out]."""
NF4 = "nf4"
BASE_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Number format of frozen weights by adapter.base; precision.param_dtype for other values."""


@dataclass(frozen=True)
class AdapterSpec:
    """The adapters of a model, as stored in checkpoints.

    kind: lora or dora. scaling: standard or rslora. base: format of the frozen weights, a value
    of adapter.base. layers: rank and alpha of each adapted layer, by module name; the stacked
    expert matrices of a block are keyed by parameter name.
    also: names of the parameters that are trained in full.
    """

    kind: str
    scaling: str
    base: str
    layers: dict[str, tuple[int, float]]
    also: tuple[str, ...] = ()

    def scale(self, layer: str) -> float:
        rank, alpha = self.layers[layer]
        return alpha / scale_divisor(rank, self.scaling == "rslora")

    def alpha_for(self, scale: float, rank: int) -> float:
        return scale * scale_divisor(rank, self.scaling == "rslora")

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "AdapterSpec":
        """Build the spec from the output of `asdict` after a round trip through JSON."""
        layers = {
            name: (int(rank), float(alpha)) for name, (rank, alpha) in stored["layers"].items()
        }
        return cls(**(stored | {"layers": layers, "also": tuple(stored["also"])}))


def scale_divisor(rank: int, is_rslora: bool) -> float:
    """Return what alpha is divided by: the rank, or √rank with rsLoRA (Kalajdzievski 2023, arXiv
    2312.03732).
    """
    return math.sqrt(rank) if is_rslora else rank


def matrix_name(layer: str) -> str:
    return layer if is_stacked(layer) else f"{layer}.weight"


def adapter_name(layer: str, tensor: str) -> str:
    """Return the name of a parameter of an adapter. tensor: A, B or MAGNITUDE.

    Those of experts are stacked like their matrices: A [experts, rank, in], B [experts, out, rank].
    """
    if is_stacked(layer):
        experts, _, matrix = layer.rpartition(".")
        return f"{experts}.{tensor}.{matrix}"
    return f"{layer}.{tensor}" if tensor == MAGNITUDE else f"{layer}.{tensor}.weight"


def frozen_dtype(precision: Precision, adapters: AdapterSpec | Adapter | None) -> str:
    """Return the torch name of the number format of frozen weights that are not in 4 bits."""
    base = adapters.base if adapters else "auto"
    return BASE_DTYPES.get(base, precision.param_dtype)
