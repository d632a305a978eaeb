"""Interface of optimizers for training and checkpoints."""

from torch import Tensor, nn
from torch.optim import Optimizer


class TrainerOptimizer(Optimizer):
    """Base class of optimizers with an empty state to load into and a step that can be skipped.

    skips_on_device: True if `step` reads `found_inf`, a scalar on the device, and changes nothing
    if it is not 0.
    """

    skips_on_device: bool
    found_inf: Tensor | None = None
    divides_gradients = False
    """True if `step` divides the gradients by `grad_scale`, a float32 scalar on the device."""
    grad_scale: Tensor | None = None

    @property
    def updates_slices(self) -> bool:
        """True if some numbers of a parameter can be updated as if they were all of it."""
        return True

    def empty_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return a parameter's optimizer state filled with zeros, to be loaded in place."""
        raise NotImplementedError

    def step_unless(self, skip: Tensor) -> None:
        """Update the weights, or with `skip` keep weights, moments and step counts byte-equal.

        skip: bool scalar on the device. If the optimizer cannot read it there, this synchronises.
        """
        if self.skips_on_device:
            self.found_inf = skip.float()
            self.step()
        elif not skip.item():
            self.step()

    def fuse(self) -> None:
        """Update in as few passes over memory as a GPU can; the last bits may differ."""

    def divide_gradients(self, divisor: Tensor) -> None:
        """Let `step` divide the gradients by a scalar, if it `divides_gradients`."""
        self.grad_scale = divisor

    def begin_load(self) -> None:
        """Prepare for new weights and states, which are loaded in place. Collective."""

    def close(self) -> None:
        """Free what the optimizer has outside of this process's memory."""

    def set_learning_rate(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr
