"""The length of another trainer's run: samples of a step, steps of an epoch and of the run."""

import math

from fsdp_trainer.interop.convert.foreign_file import ForeignFile
from fsdp_trainer.interop.convert.translation import as_number, is_off

MICRO = ("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu")
"""Samples of a device's micro-batch; of GRPO answers."""
ACCUMULATED = ("gradient_accumulation_steps", "gradient_accumulation")
GROUP = 8
"""TRL's own number of answers to a prompt."""


def accumulated(file: ForeignFile) -> int:
    times = file.value(*ACCUMULATED)
    micro, whole = file.value("micro_batch_size"), file.value("batch_size")
    if times is None and micro and whole and file.tool == "axolotl":
        return int(whole) // int(micro)
    return int(times or 1)


def group_size(file: ForeignFile) -> int:
    return int(file.own("num_generations") or GROUP)


def samples_of_step(file: ForeignFile) -> int | None:
    """Return the samples of an optimizer step, of GRPO its prompts; None if the file has none."""
    micro = file.value(*MICRO)
    if micro is None:
        return None
    samples = int(micro) * accumulated(file) * file.ranks
    return samples // group_size(file) if file.method == "grpo" else samples


def max_steps(file: ForeignFile) -> int | None:
    steps = as_number(file.value("max_steps"))
    return steps if isinstance(steps, int) and steps > 0 else None


def epochs_of(file: ForeignFile) -> float:
    return float(file.value("num_train_epochs", "num_epochs", "epochs") or 1)


def is_packed(file: ForeignFile) -> bool:
    names = ("packing", "sample_packing", "neat_packing", "dataset.packed")
    return any(not is_off(file.value(name) or False) for name in names)


def held_out(file: ForeignFile) -> float:
    return float(file.value("val_set_size", "val_size") or 0)


def trained_samples(file: ForeignFile) -> int | None:
    if file.samples is None:
        return None
    share = held_out(file)
    return file.samples - math.ceil(share * file.samples if share < 1 else share)


def steps_of_epoch(file: ForeignFile) -> int | None:
    samples, of_step = trained_samples(file), samples_of_step(file)
    if samples is None or not of_step or is_packed(file):
        return None
    if file.method == "grpo":  # its sampler leaves out what does not fill a generation
        return samples // of_step
    return math.ceil(samples / of_step)


def steps_of_run(file: ForeignFile) -> int | None:
    of_epoch = steps_of_epoch(file)
    if max_steps(file) or of_epoch is None:
        return max_steps(file)
    if file.tool == "axolotl":  # axolotl/utils/trainer.py: calculate_total_num_steps
        samples, of_step = trained_samples(file), samples_of_step(file)
        assert samples is not None
        assert of_step
        return math.ceil(samples * epochs_of(file) / of_step)
    return math.ceil(epochs_of(file) * of_epoch)


def warm_up_share(file: ForeignFile) -> float:
    """Return the share of all steps that the warm-up takes; 0: it is counted in steps."""
    number = float(as_number(file.value("warmup_steps") or 0))
    return 0.0 if number >= 1 else number or float(as_number(file.value("warmup_ratio") or 0))


def warm_up_steps(file: ForeignFile, steps: int | None) -> int | None:
    """Return the steps of the warm-up in a run of `steps`; None if nobody knows them."""
    if str(file.value("lr_scheduler_type", "lr_scheduler")) == "constant":
        return 0  # transformers' schedule without a warm-up
    share = warm_up_share(file)
    if not share:
        return int(as_number(file.value("warmup_steps") or 0))
    if steps is None:
        return None
    if file.tool != "axolotl" or file.value("warmup_steps"):
        return math.ceil(steps * share)
    down = int(share * steps)  # axolotl/core/builders/base.py: _configure_warmup_and_logging
    down = min(down, 100) if "warmup_ratio" in file.implied else down
    return 2 if down == 1 else down
