"""A model and which of its weights are trained, resolved once by a process and handed on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from fsdp_trainer.config.paths import is_hub_id
from fsdp_trainer.config.schema import Adapter, Model
from fsdp_trainer.errors import Problem
from fsdp_trainer.models.adapters.adapter_spec import NF4, A, AdapterSpec, adapter_name
from fsdp_trainer.models.adapters.adapter_targets import four_bit_weights, resolve_adapters
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.models.four_bit_experts import quantize_weights
from fsdp_trainer.models.from_config.freeze import choose_trained, count_trained
from fsdp_trainer.models.from_config.resolve import block_problems, tensor_problems
from fsdp_trainer.models.hf.new_model import meta_decoder


@dataclass(frozen=True)
class WeightSource:
    """The origin of a model's first weights.

    folder: a local Hugging Face folder, run, checkpoint or PEFT folder; None: random weights, drawn
    from `seed`, as are all that the folder lacks. hub_id: name under which it was fetched, or "".
    adapter: PEFT folder, run or checkpoint whose adapters are continued; None: they are new.
    """

    seed: int = 0
    folder: Path | None = None
    hub_id: str = ""
    adapter: Path | None = None

    @classmethod
    def of(cls, model: Model, adapter: Adapter, folder: Path | None, seed: int) -> "WeightSource":
        named = model.init_from or ""
        continued = Path(adapter.init_from) if adapter.init_from else None
        return cls(seed, folder, named if is_hub_id(named) else "", continued)


@dataclass(frozen=True)
class ModelSetup:
    """A model, its adapters, and the parameters that are not trained.

    adapters: None if the weights themselves are trained. freeze: patterns of train.freeze. source:
    where the first weights come from.
    """

    config: ModelConfig
    adapters: AdapterSpec | None = None
    freeze: tuple[str, ...] = ()
    source: WeightSource = field(default_factory=WeightSource)

    @classmethod
    def resolve(
        cls,
        config: ModelConfig,
        adapter: Adapter,
        freeze: Sequence[str],
        source: WeightSource | None = None,
    ) -> "ModelSetup":
        """Return the setup of a model with the configured adapters.

        Raises UserError as `resolve_adapters` does.
        """
        adapters = resolve_adapters(adapter, config)
        return cls(config, adapters, tuple(freeze), source or WeightSource())

    @cached_property
    def model(self) -> Decoder:
        """The model on the meta device with adapters and requires_grad set, to be measured.

        Frozen matrices are in 4 bits if the adapters require it, all else is in float32. Raises
        UserError as `freeze` does.
        """
        model = meta_decoder(self.config)
        quantize_weights(model, four_bit_weights(model, self.adapters), torch.bfloat16)
        choose_trained(model, self.adapters, self.freeze)
        return model

    @cached_property
    def trained_numbers(self) -> int:
        return count_trained(self.model)

    def tensor_problems(self, ranks: int, length: int, moments: str) -> list[Problem]:
        """Return the problems of sharding model and rows of `length` tokens over a tensor group.

        moments: number format of the optimizer's moments.
        """
        in_four_bits = self.adapters is not None and self.adapters.base == NF4
        in_eight_bits = self.trains_rows if moments == "8bit" else lambda module: False
        return tensor_problems(self.config, ranks, length) or block_problems(
            self.config, ranks, in_four_bits, in_eight_bits
        )

    def trains_rows(self, module: str) -> bool:
        """Return True if the module's matrix or its adapter's A is trained in any block.

        module: name of the module within a block.
        """
        blocks = range(self.config.num_hidden_layers)
        layers = [f"model.layers.{block}.{module}" for block in blocks]
        names = {n for layer in layers for n in (f"{layer}.weight", adapter_name(layer, A))}
        return any(p.requires_grad for name, p in self.model.named_parameters() if name in names)
