"""The verb `convert`: another trainer's configuration file as a recipe."""

from fsdp_trainer.config.verbs import ConvertConfig
from fsdp_trainer.interop.convert.converter import convert, recipe_text
from fsdp_trainer.interop.convert.foreign_file import read_source


def convert_verb(cfg: ConvertConfig) -> int:
    """Print the recipe; return the exit code. Raises UserError."""
    file = read_source(str(cfg.source))
    print(recipe_text(convert(file, cfg.world_size)), end="")
    return 0
