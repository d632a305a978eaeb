"""The version of this package, as `--version`, checkpoints and the wheel have it."""

__version__ = "1.0.0rc1"
