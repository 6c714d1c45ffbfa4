"""Plugins: Python files of the user that register norms, placements and init rules.

Reads and runs the files, keeps which file registered which name, and tells versions of the same file apart.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from normlab.errors import ConfigError
from normlab.parsing import read_at_most

LARGEST_PLUGIN = 2**22
"""Most bytes of a plugin."""
_PLUGIN = "normlab_plugin_"
"""How the modules of plugins begin."""
_superseded: set[str] = set()
"""Modules of plugins whose names another version of them has taken; to have them back they must run again."""
_owner: dict[tuple[str, str], str] = {}
"""Which plugin registered a name of a kind; the empty string for the package."""
_running = ""
"""The plugin that is being run, if any."""
_together: set[str] = set()
"""The plugins that were last asked for at once."""


def claim(kind: str, name: str, *, known: bool, same: bool) -> None:
    """Note that whoever is running registers `name`; another version of the same plugin is superseded.

    Args:
        kind: What it names: norm, placement, init rule.
        name: The name.
        known: Whether it is registered already.
        same: Whether what is registered is the very thing.

    Raises:
        ConfigError: The name is no plain identifier, is the package's, or that of something else in the same file or of
            another plugin that was asked for together with this one.
    """
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        raise ConfigError(
            f"{kind} {name!r}: a name is a word after {kind}= and a part of a folder's name; "
            "give it one of letters, digits and underscores"
        )
    owner = _owner.get((kind, name), "")
    if known and owner == _running and not same:
        raise ConfigError(f"{kind} {name!r} is defined twice: give the new one another name")
    if known and owner != _running:
        if not owner:
            raise ConfigError(f"{kind} {name!r} is normlab's own: give yours another name")
        if owner in _together:
            raise ConfigError(f"{kind} {name!r} is defined by two of the plugins: give one of them another name")
        _superseded.add(owner)
    _owner[kind, name] = _running


def version_of(kind: str, name: str, version: int) -> int | str:
    """Return the version of a registered computation: the number, or for a plugin the SHA-256 of its file."""
    return _owner.get((kind, name), "").removeprefix(_PLUGIN) or version


def check_starts(kind: str, name: str, starts: object) -> None:
    """Refuse a `starts` that does not map the names of parameters to expressions.

    Raises:
        ConfigError: With the value seen, and a line to write instead.
    """
    if isinstance(starts, Mapping) and all(isinstance(part, str) for item in starts.items() for part in item):
        return
    seen = f"{starts!r:.60}" if isinstance(starts, str | Mapping) else f"of type {type(starts).__name__}"
    raise ConfigError(
        f"{kind} {name!r}: starts is {seen}, and must map each parameter's name to an expression; "
        f"write {starts_line({'gain': '[1] * D'})}"
    )


def starts_line(starts: Mapping[str, str]) -> str:
    """Return the line of Python that declares where parameters start."""
    items = ", ".join(f'"{name}": "{start}"' for name, start in starts.items())
    return f"starts: ClassVar[dict[str, str]] = {{{items}}}"


def plugin_file(kind: str, name: str) -> str | None:
    """The user's own file that registered a name of a kind; None where it is the package's."""
    module = sys.modules.get(_owner.get((kind, name), ""))
    return None if module is None else Path(inspect.getfile(module)).name


def registered_by_plugins() -> list[tuple[str, str]]:
    """What the plugins that were last asked for have registered: its kind and its name."""
    return [thing for thing, owner in _owner.items() if owner in _together]


@dataclass(frozen=True, slots=True)
class Plugin:
    """A user's Python file as it was read; these bytes are what runs, whatever becomes of the file."""

    path: Path
    content: bytes

    @property
    def sha256(self) -> str:
        """SHA-256 of the content, in hex."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def module(self) -> str:
        """The name of its module, which is of the content alone."""
        return f"{_PLUGIN}{self.sha256}"

    @property
    def has_run(self) -> bool:
        """Whether this process has run these very bytes."""
        return self.module in sys.modules


def read_plugins(paths: Sequence[str | Path]) -> list[Plugin]:
    """Read plugins without running them.

    Raises:
        ConfigError: A file is missing, too large, no Python file, or cannot be read.
    """
    plugins: list[Plugin] = []
    for name in paths:
        path = Path(name).expanduser()
        try:
            if not path.is_file():
                raise ConfigError(
                    f"plugins: no file {str(name)!r}; give the path of a Python file that registers a norm"
                )
            if path.suffix != ".py":
                raise ConfigError(f"plugins: {str(name)!r} is no Python file; its name must end in .py")
            plugins.append(Plugin(path, read_at_most(path, LARGEST_PLUGIN)))
        except OSError as error:
            raise ConfigError(f"plugins: {name} cannot be read ({error.strerror}); make it readable") from error
        except ValueError as error:
            raise ConfigError(f"plugins: {name} {error}; give the path of a Python file") from error
    return plugins


def load_plugins(paths: Sequence[str]) -> None:
    """Run Python files of the user's, so that what they register is known.

    Only for files that the user names; the copies in a run's folder are another's until the user trusts them
    (`train.load`).

    Raises:
        ConfigError: A file is missing, cannot be read, or raises; the message says where.
    """
    run_plugins(read_plugins(paths))


def run_plugins(plugins: Sequence[Plugin]) -> None:
    """Run plugins; one that has run is run again only where another version of it has taken its names since.

    The bytes that were read are compiled: Python's own import would prefer a `__pycache__` beside the file, which holds
    code that nobody sees.

    Raises:
        ConfigError: One of them raises; the message says where.
    """
    global _running
    _together.clear()
    _together.update(plugin.module for plugin in plugins)
    for plugin in plugins:
        name, path = plugin.module, plugin.path
        if plugin.has_run and name not in _superseded:
            continue
        module = ModuleType(name)
        module.__file__ = str(path.absolute())
        sys.modules[name] = module
        _superseded.discard(name)
        _running = name
        try:
            exec(compile(plugin.content, module.__file__, "exec", dont_inherit=True), vars(module))  # noqa: S102
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            line = _line_in(path.absolute(), error)
            raise ConfigError(f"plugins: {path}{line}: {type(error).__name__}: {error}; mend the file") from error
        finally:
            _running = ""


def plugin_line(error: BaseException) -> str | None:
    """Which line of a user's own file an exception came through last, as `FILE line N`; None if through none."""
    found, frame = None, error.__traceback__
    while frame is not None:
        if str(frame.tb_frame.f_globals.get("__name__", "")).startswith(_PLUGIN):
            found = f"{Path(frame.tb_frame.f_code.co_filename).name} line {frame.tb_lineno}"
        frame = frame.tb_next
    return found


def _line_in(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f" line {error.lineno}"
    line, frame = "", error.__traceback__
    while frame is not None:
        if Path(frame.tb_frame.f_code.co_filename) == path:
            line = f" line {frame.tb_lineno}"
        frame = frame.tb_next
    return line
