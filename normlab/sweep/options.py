"""How a sweep is run: what the words after `sweep.` set. None of it changes what a run is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from normlab.errors import ConfigError, nearest
from normlab.options import check, option


@dataclass(kw_only=True, slots=True)
class SweepOptions:
    """This sweep among others, and how it goes about its runs."""

    name: str | None = option(None, longest=100)
    """What it is called, and its folder in results/sweeps; made of what is swept and a hash of the runs unless set."""
    pack: str = "auto"
    """Most runs that train as one stacked computation: a number, off for one, or auto for what proves fastest."""
    on: str = option("local", choices=("local",))
    """Where it runs: local, processes on this machine."""
    jobs: int = option(1, at_least=1, at_most=1024)
    """Packs at once; unless OMP_NUM_THREADS is set they share the cores evenly."""
    timeout_minutes: float = option(30.0, above=0, at_most=525_600)
    """A pack that for so long writes nothing, neither to a run's record nor to its log, is taken to hang and ended."""

    def validate(self) -> None:
        """Hold everything against its limits.

        Raises:
            ConfigError: Naming the word, what was seen, and what to do.
        """
        check(self, "sweep.")
        if self.name is not None and not re.fullmatch(r"\w[\w.+=-]*", self.name):
            raise ConfigError(f"sweep.name={self.name}: is to name a folder; use letters, digits and . _ + = - only")
        if self.pack in ("auto", "off"):
            return
        if not self.pack.isdecimal() or int(self.pack) < 1:
            close = nearest({"false": "off", "none": "off"}.get(self.pack.lower(), self.pack), ("auto", "off"))
            raise ConfigError(f"sweep.pack={self.pack}: choose auto, off, or a number of runs from 1 on{close}")
        self.pack = str(int(self.pack))

    @property
    def largest_pack(self) -> int:
        """Most runs in a pack, where nothing is tried."""
        return int(self.pack) if self.pack.isdecimal() else 1
