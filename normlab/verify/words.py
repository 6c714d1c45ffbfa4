"""What the words of `normlab verify` ask to be verified."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from normlab.config import RunConfig
from normlab.errors import ConfigError
from normlab.norms.base import NormConfig
from normlab.verify.check import Check
from normlab.verify.run import of_plugins, of_run

OF_A_RUN = ("norm", "placement", "model", "init", "plugins")
"""What a run's words may begin with: nothing else changes what is verified."""
CHOICES = ("norm", "placement")
"""What a run is told by: plugins without either are verified themselves, whatever they register."""


def checks_of(config: RunConfig, words: Sequence[str], presets: Sequence[NormConfig]) -> Iterator[Check]:
    """The checks of a run, or of its plugins where its words name neither norm nor placement.

    Args:
        config: What the words make.
        words: Of the command line.
        presets: Those of norms.

    Raises:
        ConfigError: A word has no effect on what is verified.
    """
    chosen = {word: re.split(r"[.=@]", word.lstrip("+"), maxsplit=1)[0].strip() for word in words}
    only_plugins = bool(config.plugins) and not set(CHOICES) & set(chosen.values())
    known = ("plugins",) if only_plugins else OF_A_RUN
    if idle := [word for word, part in chosen.items() if part not in known]:
        add = "; name a norm or a placement, or leave it out" if only_plugins else "; leave it out"
        raise ConfigError(f"{' '.join(idle)}: has no effect on what is verified ({', '.join(known)} have){add}")
    return of_plugins(config.plugins) if only_plugins else of_run(config, presets)
