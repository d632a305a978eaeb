"""A callback: stops nothing, changes nothing, writes what it is called with.

    torchrun --nproc_per_node=2 -m fsdp_trainer --import callback +recipe=quickstart

from this folder; or from Python:

    fsdp_trainer.train("+recipe=quickstart", imports=["callback"])
"""

import fsdp_trainer


@fsdp_trainer.register("callback", "diary")
class Diary(fsdp_trainer.Callback):
    """Writes a line of diary.txt in the run's folder for each thing that happens."""

    def write(self, run, text):
        """Append a line; only the first rank does."""
        if run.rank == 0:
            with (run.folder / "diary.txt").open("a") as file:
                file.write(text + "\n")

    def start(self, run):
        """Called before the first step."""
        self.write(run, f"{run.cfg.run.name} starts, world size {run.world_size}")

    def step(self, run, step):
        """Called after each step: its figures may still be on the device."""
        self.write(run, f"step {step}")

    def metrics(self, run, line):
        """Called with each line of metrics.jsonl."""
        self.write(run, f"loss of step {line['step']}: {line['loss']:.4f}")

    def validation(self, run, step, loss):
        """Called after each validation."""
        self.write(run, f"validation after step {step}: {loss:.4f}")

    def checkpoint(self, run, step, path):
        """Called when a checkpoint was committed."""
        self.write(run, f"checkpoint {path.name}")

    def end(self, run, reason, exit_code):
        """Called at the end."""
        self.write(run, f"{reason}, exit code {exit_code}")
