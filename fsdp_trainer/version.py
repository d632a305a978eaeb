"""The version of this package, as `--version`, checkpoints and the wheel have it."""

__version__ = "0.1.0"
