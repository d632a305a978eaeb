"""Users' own Python files: their import, the names in them, and where an error is in them."""

import ast
import hashlib
import importlib.util
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType


def place_of(error: BaseException) -> str:
    """Return " (FILE:LINE)" of the last line of users' own code that led to an error, else ""."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "purelib"))]
    own = [f for f in frames if not f.filename.startswith((*libraries, "<"))]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""


def import_file(file: Path) -> ModuleType:
    """Return the module in a file, which is run once, and again after it has changed."""
    return _imported(file, file.read_bytes())


@cache
def _imported(file: Path, _content: bytes) -> ModuleType:
    name = f"own_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names_in(file: Path) -> list[str]:
    """Return the names that a Python file defines or imports, without running it.

    Raises OSError, or SyntaxError.
    """
    return _defined(ast.parse(file.read_bytes()).body)


def _defined(nodes: Iterable[ast.AST]) -> list[str]:
    names = []
    for node in nodes:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.append(node.name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
            case ast.If() | ast.Try() | ast.ExceptHandler() | ast.With():
                names += _defined(ast.iter_child_nodes(node))
            case ast.Import() | ast.ImportFrom():
                names += [alias.asname or alias.name for alias in node.names]
    return names
