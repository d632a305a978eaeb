"""The interface that training and checkpoints expect of an optimizer."""

from torch import Tensor, nn
from torch.optim import Optimizer


class TrainerOptimizer(Optimizer):
    """An optimizer with an empty state to load into, and a step that can be skipped.

    skips_on_device: whether `step` reads `found_inf`, a scalar on the device, and changes nothing
    if that is not 0.
    """

    skips_on_device: bool
    found_inf: Tensor | None = None

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what the optimizer remembers of a parameter, all zero, to be loaded in place."""
        raise NotImplementedError

    def step_unless(self, skip: Tensor) -> None:
        """Update the weights, or leave weights, moments and step counts byte-equal where `skip`.

        skip: bool scalar on the device. An optimizer that cannot read it there waits for it here.
        """
        if self.skips_on_device:
            self.found_inf = skip.float()
            self.step()
        elif not skip.item():
            self.step()

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the coming step, in all groups."""
        for group in self.param_groups:
            group["lr"] = lr
