"""A library that stands for a GPU which cannot compute, and its compilation."""

import re
import subprocess
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).with_name("no_gpu.c")
HEADERS = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/include"
DECLARED = re.compile(r"(?:CUDARTAPI|CUDARTAPI_CDECL|CUDAAPI) +(cu\w+) *\(")
DEFINED = re.compile(r"^\w[\w *]*?\*?(cu[a-zA-Z]\w+)\(", re.MULTILINE)
NEWER = re.compile(r"^#define (cu\w+) +(cu\w+_v\d+)", re.MULTILINE)


def build(folder: Path) -> Path:
    """Compile the library into `folder` with gcc. Return its path, for LD_PRELOAD."""
    folder.mkdir(parents=True, exist_ok=True)
    headers = "".join((HEADERS / name).read_text() for name in ("cuda_runtime_api.h", "cuda.h"))
    newer = dict(NEWER.findall(headers))
    own = set(DEFINED.findall(SOURCE.read_text()))
    own |= {newer[name] for name in own & newer.keys()}
    names = {newer.get(name, name) for name in DECLARED.findall(headers)} - own
    refused = folder / "refused.c"
    lines = [f'int {name}(void) {{ return no_gpu_refuses("{name}"); }}' for name in sorted(names)]
    refused.write_text("int no_gpu_refuses(const char *);\n" + "\n".join(lines) + "\n")
    library = folder / "libcuda.so.1"
    # the name makes it the driver, too, which is opened by this name
    flags = ["-shared", "-fPIC", "-w", f"-I{HEADERS}", f"-Wl,-soname,{library.name}"]
    subprocess.run(["gcc", *flags, str(SOURCE), str(refused), "-o", str(library)], check=True)
    return library
