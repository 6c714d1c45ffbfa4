"""The code that defines a thing, as text to be hashed: comments, docstrings and layout left out.

Also loads a user's own files, which define norms and placements like those of the package.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from normlab.errors import ConfigError


def code_of(module: ModuleType) -> str:
    """The code of a module and of those of its own package that its names come from, `base` left out.

    `base` is the contract; what a norm computes does not depend on it.
    """
    seen: dict[str, ModuleType] = {}
    _collect(module, module.__name__.rpartition(".")[0], seen)
    return "\n".join(_normalised(Path(inspect.getfile(seen[name]))) for name in sorted(seen))


def _collect(module: ModuleType, package: str, seen: dict[str, ModuleType]) -> None:
    if module.__name__ in seen or module.__name__.endswith(".base"):
        return
    seen[module.__name__] = module
    for value in list(vars(module).values()):
        origin = sys.modules.get(getattr(value, "__module__", None) or "")
        if origin is not None and package and origin.__name__.startswith(package + "."):
            _collect(origin, package, seen)


def _normalised(path: Path) -> str:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # pyright: ignore[reportAttributeAccessIssue]
    return ast.unparse(tree)


_superseded: set[str] = set()
"""Modules of plugins whose names another version of them has taken; to have them back they must run again."""


def supersede(module: str, by: str) -> None:
    """Note that a name which a module registered is now that of another module's."""
    if module != by:
        _superseded.add(module)


def load_plugins(paths: Sequence[str]) -> None:
    """Run Python files of the user's, so that what they register is known.

    A file that has run is run again only where another version of it has taken its names since.

    Raises:
        ConfigError: A file is missing, cannot be read, or raises; the message says where.
    """
    for word in paths:
        path = Path(word).expanduser()
        try:
            if not path.is_file():
                raise ConfigError(f"plugins: no file {word!r}; give the path of a Python file that registers a norm")
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"plugins: {word} cannot be read ({error.strerror}); make it readable") from error
        name = f"normlab_plugin_{hashlib.sha256(content).hexdigest()[:16]}"
        if name in sys.modules and name not in _superseded:
            continue
        spec = importlib.util.spec_from_file_location(name, path.absolute())
        if spec is None or spec.loader is None:
            raise ConfigError(f"plugins: {word!r} is no Python file; its name must end in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        _superseded.discard(name)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            line = _line_in(path.absolute(), error)
            raise ConfigError(f"plugins: {word}{line}: {type(error).__name__}: {error}; mend the file") from error


def _line_in(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f" line {error.lineno}"
    line, frame = "", error.__traceback__
    while frame is not None:
        if Path(frame.tb_frame.f_code.co_filename) == path:
            line = f" line {frame.tb_lineno}"
        frame = frame.tb_next
    return line
