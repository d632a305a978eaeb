"""Imports of torch, and of what needs it, in less time."""

import ctypes
import gc
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SYMPY_NEEDS = ("cmath", "decimal", "unicodedata")
"""Modules used by sympy that are shared libraries: they would wait for the dynamic linker while it
loads libtorch."""


@contextmanager
def importing_torch() -> Iterator[None]:
    """Within, import torch and modules that need it.

    They create 300,000 objects that live for ever. Searching them for garbage during the imports
    would take a tenth of the start, so the collector is off, and they are frozen afterwards.
    """
    is_first, was_enabled = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        if is_first and sys.platform == "linux":
            import_sympy_beside_libtorch()
        yield
    finally:
        if was_enabled:
            gc.enable()
    if is_first:
        gc.freeze()


def import_sympy_beside_libtorch() -> None:
    """Import sympy, which torch's compiler needs, while a thread loads torch's library."""
    for name in SYMPY_NEEDS:
        importlib.import_module(name)
    threading.Thread(target=load_libtorch).start()
    importlib.import_module("sympy")


def load_libtorch() -> None:
    """Load torch's largest shared library, so that `import torch` finds it loaded.

    Loading it is a fifth of the import and runs no Python. launch.env must be set before, since
    OpenMP, which is loaded as well, reads its variables. Does nothing for a GPU build, whose many
    libraries torch must load in its own order. A failure is harmless: torch then loads it itself.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    folder = Path(torch.origin).parent / "lib"
    if any((folder / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip", "xpu")):
        return
    # calling a C function releases the GIL; ctypes.CDLL(path) does not
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype = ctypes.c_void_p
    if dlopen(os.fsencode(folder / "libtorch_global_deps.so"), os.RTLD_LAZY | os.RTLD_GLOBAL):
        dlopen(os.fsencode(folder / "libtorch_cpu.so"), os.RTLD_LAZY)
