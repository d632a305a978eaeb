"""Export of a run, a checkpoint, an adapter's merged model or a Hugging Face folder as GGUF."""

import importlib.util
from pathlib import Path

from fsdp_trainer.checkpoint.export_other import as_folder
from fsdp_trainer.config.verbs import GGUF_NUMBERS, ExportConfig
from fsdp_trainer.errors import Problem, RunFailed, UserError

SAME = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""GGUF's names of torch's number formats."""
DEFAULT = "bf16"


def export_gguf(cfg: ExportConfig) -> int:
    """Write `out`, a FILE.gguf, and return the exit code. Raises UserError and RunFailed."""
    if importlib.util.find_spec("gguf") is None:
        reason = "needs the package of llama.cpp's authors:  pip install 'fsdp_trainer[gguf]'"
        raise UserError("GGUF cannot be written", [Problem("form=gguf", reason)])
    # an optional package
    from fsdp_trainer.checkpoint.formats.gguf_file import write_gguf

    source, out = Path(str(cfg.source)).expanduser(), Path(str(cfg.out)).expanduser()
    require_new_file(out)
    numbers = SAME.get(cfg.dtype or DEFAULT, cfg.dtype or DEFAULT)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with as_folder(source, out, "bfloat16" if numbers == "bf16" else "float32") as folder:
            write_gguf(folder, out, numbers)
    except OSError as error:
        raise RunFailed(f"cannot write the export {out}: {error}. Use  out=FILE.gguf") from None
    print(f"exported {source} to {out}")
    return 0


def require_new_file(out: Path) -> None:
    """Raise UserError unless `out` is the name of a new GGUF file."""
    if out.suffix != ".gguf":
        problem = Problem(f"out={out}", "is no FILE.gguf, such as  out=model.gguf")
        raise UserError("an export as GGUF is one file", [problem])
    if out.exists():
        problem = Problem(f"out={out}", "exists; choose another file or delete it")
        raise UserError("something would be overwritten", [problem])


def require_number_format(cfg: ExportConfig) -> None:
    """Raise UserError for a number format that only GGUF has, with another form."""
    if cfg.dtype in GGUF_NUMBERS:
        problem = Problem(f"dtype={cfg.dtype}", "only counts with  form=gguf")
        raise UserError("a Hugging Face folder has torch's number formats", [problem])
