"""The parts of a run that exist before its model is built."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_trainer.base.recorded import recorded
from fsdp_trainer.checkpoint.assets import write_hf_assets
from fsdp_trainer.config.durations import parse_duration
from fsdp_trainer.config.paths import model_folder
from fsdp_trainer.config.schema import TrainConfig
from fsdp_trainer.config.yaml_text import dump_yaml
from fsdp_trainer.data.records.record_formats import OF_HEADS
from fsdp_trainer.launch.rollout_link import RolloutLink
from fsdp_trainer.launch.world import World
from fsdp_trainer.models.config import ModelConfig
from fsdp_trainer.models.from_config.setup import ModelSetup
from fsdp_trainer.observe.observer import Observer
from fsdp_trainer.parallel.dims import Dims
from fsdp_trainer.training.setup.run_inputs import RunInputs
from fsdp_trainer.training.stopping.stop import StopSignals


@dataclass(frozen=True)
class RunSetup:
    """Configuration, inputs, ranks and records of a run, on one rank.

    It groups what a training method and the parts of the trainer are made from. model_setup: of the
    model in training. compiled: True if models are compiled. folder: the run's folder. link: to the
    ranks that generate rollouts.
    """

    cfg: TrainConfig
    inputs: RunInputs
    model_setup: ModelSetup
    world: World
    dims: Dims
    compiled: bool
    folder: Path
    signals: StopSignals
    observer: Observer
    link: RolloutLink | None = None

    @property
    def config(self) -> ModelConfig:
        return self.model_setup.config

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def model_device(self) -> torch.device:
        """The device on which weights, gradients and optimizer states are kept."""
        elsewhere = self.cfg.optim.offload != "none"
        return torch.device("cpu") if elsewhere else self.frozen_model_device

    @property
    def frozen_model_device(self) -> torch.device:
        return torch.device("cpu") if self.cfg.sharding.cpu_offload else self.device

    @property
    def timeout(self) -> float:
        return parse_duration(self.cfg.launch.timeout)

    def write_assets(self, folder: Path, state: dict[str, Any]) -> None:
        """Write the configuration and a Hugging Face folder without weights into a checkpoint."""
        cfg, inputs = self.cfg, self.inputs
        (folder / "config.yaml").write_text(dump_yaml(recorded(cfg)))
        source = model_folder(inputs.init_from) if inputs.init_from else None
        chosen = cfg.data.template or cfg.data.template_args
        as_it_came = inputs.tokenizer.chat_templates and not chosen
        template = None if as_it_came else inputs.template.exported
        if cfg.objective.method.reads in OF_HEADS:  # no template has been used
            template = {}
        dtype = state["dtypes"]["default"]
        prompts = cfg.data.prompts
        write_hf_assets(
            folder / "hf", self.config, inputs.tokenizer, template, dtype, source, prompts
        )
