"""The version of this package, as `--version`, checkpoints and the wheel have it."""

__version__ = "0.7.0.dev0"
