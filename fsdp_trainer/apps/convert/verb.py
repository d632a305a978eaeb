"""The verb `convert`: another trainer's configuration file as a recipe."""

from pathlib import Path

from fsdp_trainer.apps.convert.converter import convert, recipe_text
from fsdp_trainer.apps.convert.foreign_file import read_foreign_file
from fsdp_trainer.config.verbs import ConvertConfig


def convert_verb(cfg: ConvertConfig) -> int:
    """Print the recipe; return the exit code. Raises UserError."""
    file = read_foreign_file(Path(str(cfg.source)).expanduser())
    print(recipe_text(convert(file, cfg.world_size)), end="")
    return 0
