"""fsdp_trainer.json in an export: what it was made of, and which adapters are merged into it."""

from pathlib import Path

from fsdp_trainer.base.json_files import Json, read_object
from fsdp_trainer.checkpoint.atomic_files import checksum, read_manifest
from fsdp_trainer.config.paths import MANIFEST, find_checkpoint, is_adapter
from fsdp_trainer.errors import UserError
from fsdp_trainer.models.adapters.peft_config import WEIGHTS_FILE

ORIGIN = "fsdp_trainer.json"


def origin(source: Path, dtype: str | None) -> Json:
    """Return what an export records of its source, a checkpoint or a PEFT folder.

    The checksum tells checkpoints of the same step in different branches of a run apart.
    """
    if is_adapter(source):
        return {"adapter_crc32": checksum(source / WEIGHTS_FILE), "dtype": dtype}
    return {
        "step": read_manifest(source).get("step"),
        "manifest_crc32": checksum(source / MANIFEST),
        "dtype": dtype,
    }


def read_origin(folder: Path) -> Json:
    try:
        return read_object(folder / ORIGIN, "this folder's origin is not known")
    except UserError:
        return {}


def identity(adapter: Path) -> list[str]:
    """Return the identifiers of an adapter: of its checkpoint and of its PEFT file."""
    if not is_adapter(adapter):
        return [f"checkpoint {checksum(adapter / MANIFEST)}"]
    weights = adapter / WEIGHTS_FILE
    names = [f"file {checksum(weights)}"] if weights.is_file() else []
    crc = read_origin(adapter).get("manifest_crc32")
    return names + ([f"checkpoint {crc}"] if crc is not None else [])


def merged_into(folder: Path) -> list[str]:
    merged = read_origin(folder).get("merged", [])
    return [name for name in merged if isinstance(name, str)] if isinstance(merged, list) else []


def refuse_merging_twice(adapter: Path, base: Path) -> None:
    """Raise UserError if a base model is an export that has this adapter in it already."""
    adapter = find_checkpoint(adapter) or adapter
    if set(identity(adapter)) & set(merged_into(base)):
        text = (
            f"already contains the adapter in {adapter}: merging it twice would give another model."
            "\nUse it without the adapter, or name the base model that was trained"
        )
        raise UserError("the adapter would be merged twice", str(base), text)
