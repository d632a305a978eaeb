"""An export form: a NumPy archive of all weights, beside the model's configuration.

    fsdp-trainer export source=runs/quickstart out=exported form=numpy_form.py:write

from this folder. `out` appears only when it is complete.
"""

import shutil

import numpy


def write(out, folder, tensors):
    """Called once. folder: the model as a Hugging Face folder; tensors: by name, on the CPU."""
    numpy.savez(out / "weights.npz", **{name: each.float() for name, each in tensors.items()})
    shutil.copy(folder / "config.json", out)
