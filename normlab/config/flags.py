"""The table of Hydra's flags that normlab's commands take, and their parser. Imports no Hydra."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from normlab.errors import ConfigError
from normlab.version import __version__

_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")

FLAGS: dict[tuple[str, ...], dict[str, Any]] = {
    ("--help", "-h"): {"action": "store_true", "help": "print the choices, the options and their defaults"},
    ("--hydra-help",): {"action": "store_true", "help": "print this help"},
    ("--version",): {"action": "version", "version": f"normlab {__version__}", "help": "print the version"},
    ("--config-dir", "-cd"): {"metavar": "DIR", "help": "folder of your own configs, searched after normlab's"},
    ("--config-name", "-cn"): {"metavar": "NAME", "help": "name of the primary config (default: train)"},
    ("--results-dir",): {"metavar": "DIR", "help": "folder of the results; same as results_dir=DIR"},
    ("--package", "-p"): {"metavar": "PART", "help": "with --cfg: the part to print, such as optim"},
    ("--resolve",): {"action": "store_true", "help": "with --cfg: replace interpolations by their values"},
    ("--run", "-r"): {"action": "store_true", "help": "train one run (the default)"},
    ("--multirun", "-m"): {"action": "store_true", "help": "train each run of a grid, with hydra/launcher=..."},
    ("--cfg", "-c"): {
        "choices": ("job", "hydra", "all"),
        "metavar": "job|hydra|all",
        "help": "print the config of the run, Hydra or both",
    },
    ("--info", "-i"): {"nargs": "?", "const": "all", "choices": _INFO, "help": "print how Hydra composes the config"},
}
"""The names of each flag, as in Hydra, and its settings in argparse."""

_EXCLUSIVE = ("--run", "--multirun", "--cfg", "--info")
"""Flags that exclude each other."""

TRAIN_ONLY = ("--hydra-help", "--run", "--multirun")
"""Flags that only `train` takes."""


def flag_parser() -> argparse.ArgumentParser:
    """Return the parser of overrides and flags."""
    parser = argparse.ArgumentParser("normlab train", add_help=False)
    parser.error = _reject_flag
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="option=value, such as norm=rmsnorm")
    exclusive = parser.add_mutually_exclusive_group()
    for names, settings in FLAGS.items():
        (exclusive if names[0] in _EXCLUSIVE else parser).add_argument(*names, **settings)
    return parser


def _reject_flag(message: str) -> NoReturn:
    raise ConfigError(f"{message}; --help lists the flags")
