"""Plugins: Python files of the user that register norms, placements and init rules.

Reads and runs the files, and records which file, in which version, registered each name.
"""

import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from normlab.base.errors import ConfigError
from normlab.base.parsing import read_at_most
from normlab.base.source_text import code_of

LARGEST_PLUGIN = 2**22
COUNTER = "_updates"
"""How the name of a buffer ends into which the training step writes the number of updates made."""
_PLUGIN = "normlab_plugin_"
"""Prefix of the module names of plugins; the rest is the SHA-256 of the file."""
_owner: dict[tuple[str, str], str] = {}
"""The module of the plugin that registered a (kind, name) last; empty for the package."""
_replaced: set[str] = set()
"""Modules of plugins whose names another version of the file has replaced; they must run again to be used."""
_requested: set[str] = set()
"""The modules of the plugins of the last call of `run_plugins`."""
_current = ""
"""The module of the plugin that is running now; empty if none is."""
_versions: dict[str, str] = {}
"""The version of each plugin that has run, by its module."""
_claimed: set[tuple[str, str]] = set()
"""What the plugin that is running now has registered."""


def claim_name(kind: str, name: str, *, known: bool, same: bool = True) -> None:
    """Record that the running plugin, or the package, registers `name`.

    A plugin replaces the names of another version of its file.

    Args:
        kind: norm, placement, init rule or study.
        name: The name to register.
        known: Whether the name is registered already.
        same: Whether the registered object may be the same one, as in a notebook whose cell runs again.

    Raises:
        ConfigError: The name is not an identifier, or it belongs to the package, to another object of the same file, or
            to another plugin of the same command.
    """
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        raise ConfigError(
            f"{kind} {name!r}: is not an identifier, and names are part of folder names; "
            "use letters, digits and underscores"
        )
    owner = _owner.get((kind, name), "")
    if _current:
        is_second = (kind, name) in _claimed
    else:
        is_second = known and not owner and not same
    if is_second:
        raise ConfigError(f"{kind} {name!r} is defined twice: rename one of them")
    if known and owner != _current:
        if not owner:
            raise ConfigError(f"{kind} {name!r} is defined by normlab itself: rename yours")
        # A plugin of an earlier command of this process, as in a notebook, does not count.
        if owner in _requested:
            raise ConfigError(f"{kind} {name!r} is defined by two plugins: rename one of them")
        _replaced.add(owner)
    _owner[kind, name] = _current
    _claimed.add((kind, name))


def version_of(kind: str, name: str, version: int) -> int | str:
    """Return the version of a registered computation, or that of its plugin (`Plugin.version`)."""
    return _versions.get(_owner.get((kind, name), ""), version)


def check_initial_values(kind: str, name: str, initial_values: object) -> None:
    """Raise ConfigError if `initial_values` does not map names of parameters to expressions."""
    is_valid = isinstance(initial_values, Mapping)
    if isinstance(initial_values, Mapping):
        for parameter, expression in initial_values.items():
            is_valid = is_valid and isinstance(parameter, str) and isinstance(expression, str)
    if not is_valid:
        raise ConfigError(
            f"{kind} {name!r}: initial_values is {initial_values!r:.60}, but must map each parameter's name to an "
            'expression; write initial_values: ClassVar[dict[str, str]] = {"gain": "[1] * D"}'
        )


def check_formula(kind: str, name: str, owner: str, formula: object) -> None:
    """Raise ConfigError if the class `owner` has no formula, which tables print and `verify` names."""
    if not (isinstance(formula, str) and formula.strip()):
        raise ConfigError(
            f"{kind} {name!r}: formula of {owner} is {formula!r:.60}, but must be a text; write "
            'formula = "x = ...", without a type in a class'
        )


def plugin_file(kind: str, name: str) -> str | None:
    """Return the name of the plugin that registered a name, or None if the package did."""
    module = sys.modules.get(_owner.get((kind, name), ""))
    if module is None:
        return None
    return Path(inspect.getfile(module)).name


def files_in_use() -> list[str]:
    """Return the names of the files of the last `run_plugins` that have registered a norm, a placement and the like."""
    files: dict[str, None] = {}
    for kind, name in registered_by_plugins():
        file = plugin_file(kind, name)
        if file is not None:
            files[file] = None
    return list(files)


def registered_by_plugins() -> list[tuple[str, str]]:
    """Return each (kind, name) that the plugins of the last `run_plugins` registered."""
    return [kind_and_name for kind_and_name, owner in _owner.items() if owner in _requested]


def hint_of_empty_plugins() -> str:
    """Return a hint with the plugins of the last `run_plugins` that registered nothing, and "" if there is none.

    It begins the message about a name that is unknown, because such a plugin may have forgotten to register it.
    """
    files: list[str] = []
    for name in _requested.difference(_owner.values()):
        module = sys.modules.get(name)  # None for one that raised an error
        if module is not None:
            files.append(Path(inspect.getfile(module)).name)
    if not files:
        return ""
    return (
        f"nothing is registered in {', '.join(sorted(files))} (add @register_norm, register_placement or @init_rule); "
    )


@dataclass(frozen=True, slots=True)
class Plugin:
    """A user's Python file. `run_plugins` runs `content`, even if the file has changed since."""

    path: Path
    content: bytes

    @property
    def sha256(self) -> str:
        """Of the exact bytes, on which trust depends."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def version(self) -> str:
        """SHA-256 of the code without comments and blank lines, on which the ids of its runs depend."""
        return hashlib.sha256(code_of(self.content).encode()).hexdigest()

    @property
    def module(self) -> str:
        """Name of the module, which depends on the content only."""
        return f"{_PLUGIN}{self.sha256}"

    @property
    def has_run(self) -> bool:
        """Whether this process has run exactly these bytes."""
        return self.module in sys.modules


def read_plugins(paths: Sequence[str | Path]) -> list[Plugin]:
    """Read plugins without running them.

    Raises:
        ConfigError: A file is missing, too large, not a Python file, or cannot be read.
    """
    plugins: list[Plugin] = []
    for name in paths:
        path = Path(name).expanduser()
        try:
            if path.suffix != ".py":
                raise ValueError("is not a Python file")
            plugins.append(Plugin(path, read_at_most(path, LARGEST_PLUGIN)))
        except (OSError, ValueError) as error:
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"cannot be read ({error.strerror})"
            raise ConfigError(f"plugins: {name} {reason}; give the path of a readable Python file") from error
    return plugins


def load_plugins(paths: Sequence[str]) -> None:
    """Read and run the user's plugins, which register norms, placements and init rules.

    Copies in a run's folder are not trusted and are loaded by `loaded_run`.

    Raises:
        ConfigError: A file is missing, cannot be read, or raises; the message names the line.
    """
    run_plugins(read_plugins(paths))


def run_plugins(plugins: Sequence[Plugin]) -> None:
    """Run plugins; one that has run before only if another version has replaced its names since.

    This function compiles `content`, because Python's import would prefer a `__pycache__` beside the file.

    Raises:
        ConfigError: A plugin raises; the message names the line.
    """
    global _current
    _requested.clear()
    _requested.update(plugin.module for plugin in plugins)
    for plugin in plugins:
        name, path = plugin.module, plugin.path
        if plugin.has_run and name not in _replaced:
            continue
        # Dataclasses and pickle look the module of a class up in `sys.modules` while its code runs.
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = str(path.absolute())
        _replaced.discard(name)
        _claimed.clear()
        _current = name
        try:
            code = compile(plugin.content, module.__file__, "exec", dont_inherit=True)
            _versions[name] = plugin.version
            exec(code, vars(module))  # noqa: S102
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            # A syntax error is raised before any line of the file runs, so no traceback has it.
            if isinstance(error, SyntaxError):
                where = f" line {error.lineno}"
            else:
                where = plugin_line(error) or ""
            raise ConfigError(
                f"plugins: {path}{where.removeprefix(path.name)}: {type(error).__name__}: {error}; fix the file"
            ) from error
        finally:
            _current = ""


def plugin_line(error: BaseException) -> str | None:
    """Return the last plugin line in an exception's traceback as `FILE line N`, or None."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if str(frame.tb_frame.f_globals.get("__name__", "")).startswith(_PLUGIN):
            line = f"{Path(frame.tb_frame.f_code.co_filename).name} line {frame.tb_lineno}"
        frame = frame.tb_next
    return line
