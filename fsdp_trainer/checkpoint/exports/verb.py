"""The verb `export`: a folder of Hugging Face's, PEFT's or another tool's form, or a GGUF file."""

from pathlib import Path

from fsdp_trainer.base.folders import NewFolders
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.checkpoint.exports.adapter_export import export_adapter
from fsdp_trainer.checkpoint.exports.compressed_export import export_compressed
from fsdp_trainer.checkpoint.exports.gguf_export import export_gguf, require_number_format
from fsdp_trainer.checkpoint.exports.hf_folder import export_checkpoint, exportable
from fsdp_trainer.checkpoint.exports.other_tools import export_other
from fsdp_trainer.config.new_folder import new_folder, writing_export
from fsdp_trainer.config.verbs import ExportConfig
from fsdp_trainer.errors import UserError


def export(cfg: ExportConfig) -> int:
    """Run the verb: `source=` a run, a checkpoint or a PEFT folder, `out=` the folder to write."""
    new_folders = NewFolders(Path(str(cfg.out)).expanduser().parent)
    try:
        return write_export(cfg)
    except BaseException:
        new_folders.delete_empty()
        raise


def write_export(cfg: ExportConfig) -> int:
    if cfg.form in ("gguf", "gguf_adapter"):
        return export_gguf(cfg)
    require_settings_of_form(cfg)
    if cfg.form == "compressed":
        return export_compressed(cfg)
    if cfg.form not in ("merged", "adapter"):
        return export_other(cfg)
    source = exportable(str(cfg.source), cfg.form)
    out = new_folder(str(cfg.out))
    notes: list[str] = []
    with writing_export(out):
        if cfg.form == "adapter":
            export_adapter(source, out, cfg.dtype, cfg.experts)
        else:
            notes = export_checkpoint(source, out, cfg.dtype, cfg.shard_gib, cfg.merge_into)
    print(*map(safe, notes), f"exported {source} to {out}", sep="\n")
    return 0


def require_settings_of_form(cfg: ExportConfig) -> None:
    if cfg.form != "merged" and cfg.merge_into != "original":
        raise UserError(
            "nothing is merged in this way",
            f"merge_into={cfg.merge_into}",
            "only counts with  form=merged",
        )
    if cfg.form != "adapter" and cfg.experts != "stacked":
        raise UserError(
            "a merged model has no adapters",
            f"experts={cfg.experts}",
            "only counts with  form=adapter",
        )
    if cfg.form != "compressed" and cfg.quantization:
        raise UserError(
            "nothing is quantised in this form",
            f"quantization={cfg.quantization}",
            "only counts with  form=compressed",
        )
    require_number_format(cfg)
