"""Export of a run, a checkpoint, an adapter's merged model or a Hugging Face folder as GGUF."""

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory

from fsdp_trainer.base.counted import counted
from fsdp_trainer.base.safe_text import safe
from fsdp_trainer.checkpoint.exports.adapter_export import export_adapter
from fsdp_trainer.checkpoint.exports.hf_folder import exportable
from fsdp_trainer.checkpoint.exports.other_tools import as_folder
from fsdp_trainer.config.new_folder import writing_export
from fsdp_trainer.config.paths import is_adapter
from fsdp_trainer.config.verbs import GGUF_NUMBERS, ExportConfig
from fsdp_trainer.errors import UserError

SAME = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""GGUF's names of torch's number formats."""
DEFAULT = "bf16"


def export_gguf(cfg: ExportConfig) -> int:
    """Write `out`, a FILE.gguf, and return the exit code. Raises UserError and RunFailed."""
    if importlib.util.find_spec("gguf") is None:
        reason = "needs the package of llama.cpp's authors:  pip install 'fsdp_trainer[gguf]'"
        raise UserError("GGUF cannot be written", "form=gguf", reason)
    # an optional package
    from fsdp_trainer.interop.weights.gguf_file import write_gguf

    source, out = Path(str(cfg.source)).expanduser(), Path(str(cfg.out)).expanduser()
    require_new_file(out)
    if cfg.form == "gguf_adapter":
        return export_gguf_adapter(cfg, source, out)
    numbers = SAME.get(cfg.dtype or DEFAULT, cfg.dtype or DEFAULT)
    with (
        writing_export(out, "FILE.gguf"),
        as_folder(source, out, "bfloat16" if numbers == "bf16" else "float32") as folder,
    ):
        left_out = write_gguf(folder, out, numbers)
    if left_out:
        print(safe(f"not in the export: {counted(len(left_out), 'tensor')} such as {left_out[0]}"))
    print(f"exported {source} to {out}")
    return 0


def export_gguf_adapter(cfg: ExportConfig, source: Path, out: Path) -> int:
    """Write the adapter of a run, a checkpoint or a PEFT folder; return the exit code."""
    # an optional package
    from fsdp_trainer.interop.weights.gguf_adapter import write_gguf_adapter

    numbers = SAME.get(cfg.dtype or "f32", cfg.dtype or "f32")
    if numbers == "q8_0":
        raise UserError(
            "there is no GGUF of it",
            "dtype=q8_0",
            "an adapter's matrices are narrow: use f32, f16 or bf16",
        )
    with writing_export(out, "FILE.gguf"):
        if is_adapter(source):
            write_gguf_adapter(source, out, numbers)
        else:
            checkpoint = exportable(str(source), "adapter")
            with TemporaryDirectory(prefix=".adapter-", dir=out.parent) as aside:
                folder = Path(aside) / out.stem
                export_adapter(checkpoint, folder, "float32", "stacked")
                write_gguf_adapter(folder, out, numbers)
    print(f"exported the adapter of {source} to {out}")
    return 0


def require_new_file(out: Path) -> None:
    if out.suffix != ".gguf":
        raise UserError(
            "an export as GGUF is one file",
            f"out={out}",
            "is no FILE.gguf, such as  out=model.gguf",
        )
    if out.exists():
        raise UserError(
            "something would be overwritten",
            f"out={out}",
            "exists; choose another file or delete it",
        )


def require_number_format(cfg: ExportConfig) -> None:
    if cfg.dtype in GGUF_NUMBERS:
        raise UserError(
            "a Hugging Face folder has torch's number formats",
            f"dtype={cfg.dtype}",
            "only counts with  form=gguf",
        )
