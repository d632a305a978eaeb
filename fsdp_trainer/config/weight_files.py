"""Which files of a Hugging Face folder have its weights. Does not import torch."""

from pathlib import Path

from fsdp_trainer.base.folders import is_inside
from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.errors import UserError


def weight_files(folder: Path, single: str, index: str) -> list[Path]:
    """Return the files with the weights; empty if there is neither of these two. Raises UserError.

    As in transformers, a file `single` counts before an index that does not name it.
    """
    whole, table = folder / single, folder / index
    if not table.is_file():
        return [whole] if whole.is_file() else []
    names = _names_in(table)
    if whole.is_file() and single not in names:
        return [whole]
    return sorted(folder / name for name in names)


def _names_in(table: Path) -> set[str]:
    title = "cannot read the index of the weights"
    names = read_object(table, title).get("weight_map")
    if not isinstance(names, dict):
        reason = "has no weight_map, an object with the file of each tensor"
        raise UserError(title, str(table), reason)
    others = [name for name in names.values() if not isinstance(name, str)]
    files = set() if others else {*names.values()}  # each is checked once: tensors are many
    others += sorted(name for name in files if not is_inside(name))
    if others:
        reason = f"{str(others[0])[:80]!r} is not a file of this folder"
        raise UserError(title, str(table), reason)
    return files
