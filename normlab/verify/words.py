"""What the words of `normlab verify` ask to be verified."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from normlab.config import RunConfig
from normlab.errors import ConfigError
from normlab.norms.base import NormConfig
from normlab.verify.check import Check
from normlab.verify.run import of_plugins, of_run

OF_A_RUN = ("norm", "placement", "model", "init", "plugins")
"""The parts of a run that `verify` checks; an override of another part has no effect."""
NOT_CHECKED = {field.name for field in dataclasses.fields(RunConfig)} - set(OF_A_RUN)


def checks_of(config: RunConfig, overrides: Sequence[str], presets: Sequence[NormConfig]) -> Iterator[Check]:
    """Return the checks of a run, or of all that its plugins register where the overrides name the plugins alone.

    Args:
        config: The run's.
        overrides: Those of the command line. One that chooses a config of the user's, as +experiment=mine, is of a run.
        presets: Those of norms.

    Raises:
        ConfigError: An override has no effect on what is verified.
    """
    parts = {word: re.split(r"[.=@]", word.lstrip("+"), maxsplit=1)[0].strip() for word in overrides}
    only_plugins = bool(config.plugins) and set(parts.values()) <= {*NOT_CHECKED, "model", "init", "plugins", "hydra"}
    without_effect = {*NOT_CHECKED, "model", "init"} if only_plugins else NOT_CHECKED
    if idle := [word for word, part in parts.items() if part in without_effect]:
        known = "plugins" if only_plugins else ", ".join(OF_A_RUN)
        add = "; name a norm or a placement, or leave it out" if only_plugins else "; leave it out"
        raise ConfigError(f"{' '.join(idle)}: has no effect on what is verified ({known} have){add}")
    return of_plugins(config.plugins) if only_plugins else of_run(config, presets)
