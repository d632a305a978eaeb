"""The content of a run's checkpoints."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_trainer.base.distributed import local_part
from fsdp_trainer.checkpoint.frozen_weights import Base
from fsdp_trainer.checkpoint.linked_files import LinkedFiles
from fsdp_trainer.checkpoint.state import optimizer_state, prepare_optimizer, weights
from fsdp_trainer.checkpoint.unread_tensors import Unread
from fsdp_trainer.models.decoder import Decoder
from fsdp_trainer.optim.offload.offloaded_optimizer import DiskOptimizer
from fsdp_trainer.optim.offload.weight_copies import weights_changed
from fsdp_trainer.optim.optimizer_interface import TrainerOptimizer
from fsdp_trainer.optim.outer_step import OuterStep
from fsdp_trainer.parallel.parallelize import reshard
from fsdp_trainer.training.data_source import DataSource, StoredRows
from fsdp_trainer.training.guard import Guard
from fsdp_trainer.training.loss_scale import LossScale
from fsdp_trainer.training.progress import Progress
from fsdp_trainer.training.weights import extra_state


@dataclass
class TrainState:
    """All that a checkpoint stores: the parts of a run that change, and the identity of the rest.

    The names of the tensors, and of the fields of `record`, are those in the files.
    """

    model: Decoder
    optimizer: TrainerOptimizer
    loss_scale: LossScale | None
    guard: Guard
    data: DataSource
    validation: StoredRows | None
    dtypes: dict[str, str]
    """Number formats in which the weights were imported, for the export."""
    base: Base | None
    """Location of the frozen weights, which checkpoints do not hold; None: checkpoints hold all."""
    digests: dict[str, str]
    """Digest of the second model's weights, by its role."""
    unread: Unread | None
    """Tensors that only the folder of the first weights has; None: it has none."""
    outer: OuterStep | None
    """The outer optimizer of groups that train by themselves; None: they do not."""

    def tensors(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors: weights, optimizer state, load of experts, loss scale."""
        tensors = weights(self.model) | optimizer_state(self.model, self.optimizer)
        return tensors | extra_state(self.model.balance, self.loss_scale, self.outer)

    def record(self, progress: Progress) -> dict[str, Any]:
        """Return the part of a checkpoint that is not tensors. Collective."""
        self.capture(progress)
        return {
            **asdict(progress),
            "total_steps": self.data.total_steps(progress),
            "dtypes": self.dtypes,
            "frozen": asdict(self.base) if self.base else None,
            "unread": asdict(self.unread) if self.unread else None,
            "data": self.data.fingerprint,
            "validation": self.validation_fingerprint,
            **self.digests,
        }

    @torch.no_grad()
    def take_over(
        self, parts: dict[str, Tensor], record: dict[str, Any], progress: Progress
    ) -> None:
        """Become the state of another group's rank with the same number.

        parts: its part of each of `tensors`. record: the result of `record` there. progress:
        changed in place.
        """
        prepare_optimizer(self.model, self.optimizer, parts, "another group")
        for name, tensor in self.tensors().items():
            local_part(tensor).copy_(parts[name])
        progress.take_over(Progress.from_stored(record))
        self.guard.load(progress)
        weights_changed(self.model)
        reshard(self.model)

    @property
    def linked(self) -> LinkedFiles | None:
        """Files with some of the tensors, which a checkpoint links; None: there are none."""
        return self.optimizer if isinstance(self.optimizer, DiskOptimizer) else None

    @property
    def validation_fingerprint(self) -> str | None:
        return self.validation.fingerprint if self.validation else None

    def capture(self, progress: Progress) -> None:
        """Copy the state of the guard and of the data source into `progress`. Collective."""
        for name, value in (self.guard.state() | self.data.state(progress)).items():
            setattr(progress, name, value)
