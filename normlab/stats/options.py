"""Which statistics a run measures, and how often: what the words after `stats.` set."""

from __future__ import annotations

from dataclasses import dataclass

from normlab.errors import ConfigError, unknown
from normlab.options import option
from normlab.stats import extended, head, norms, parameters, probe, stream  # noqa: F401  (their statistics are known from here on)
from normlab.stats.statistic import CORE, EXTENDED, PROBE, STATISTICS, TIERS

OF_ADAM = ("adam_rms", "adam_eps_frac", "sharpness_pre")
"""Statistics that only Adam has."""
OF_EXAMPLES = ("gns", "gns_trace", "gns_square")
"""Statistics that compare the gradients of at least two independent examples."""


@dataclass(kw_only=True, slots=True)
class StatsConfig:
    """What is measured inside a run. None of it changes what is trained."""

    preset: str = option("", identity=False)
    """The preset that these options came from; a label only."""
    tiers: list[str] = option([CORE], identity=False)
    """Whole sets: core, read in the step itself; extended, in a pass over a fixed batch; probe, at a few moments."""
    also: list[str] = option([], identity=False)
    """Statistics to measure besides those sets (`normlab list stats`); a derived one adds those that it needs."""
    without: list[str] = option([], identity=False)
    """Statistics to leave out; a derived one leaves out those that it alone needs."""
    every: int | None = option(None, at_least=1, at_most=10**9, identity=False)
    """Steps between two that are measured, the first one among them; 10 unless set."""
    extended_every: int | None = option(None, at_least=1, at_most=10**9, identity=False)
    """Steps between two passes over the fixed batch, the first before step 0; 200 unless set."""

    probe_share: float | None = option(None, above=0, at_most=1, identity=False)
    """Share of a run that its probes may take; 0.03 unless set. As many moments are probed as fit."""

    def resolve(self) -> None:
        """Fill in the cadences, and refuse what has no effect.

        Raises:
            ConfigError: A name is none that is known, or changes nothing.
        """
        for word, names, known in (
            ("tiers", self.tiers, TIERS), ("also", self.also, STATISTICS), ("without", self.without, STATISTICS)
        ):  # fmt: skip
            for name in names:
                if name not in known:
                    raise ConfigError(f"stats.{word}={name}: " + unknown("name", name, known))
        measured = self._of_tiers()
        for name in self.also:
            if _needs(name) <= measured:
                raise ConfigError(f"stats.also={name}: has no effect, it is measured anyway; leave it out")
        measured = measured.union(*map(_needs, self.also))
        for name in self.without:
            if not _needs(name) <= measured:
                raise ConfigError(f"stats.without={name}: has no effect, it is not measured; leave it out")
            if not _needed_alone(name):
                needs = ", ".join(sorted(_needs(name)))
                raise ConfigError(
                    f"stats.without={name}: has no effect, other statistics need {needs} too; leave it out"
                )
        for word, tier, usual in (("every", CORE, 10), ("extended_every", EXTENDED, 200), ("probe_share", PROBE, 0.03)):
            given = getattr(self, word)
            if self.names(tier):
                setattr(self, word, usual if given is None else given)
            elif given is not None:
                raise ConfigError(
                    f"stats.{word}={given}: has no effect, none of those statistics is measured; set "
                    f"stats={'core' if tier == CORE else 'full'}"
                )

    def names(self, tier: str) -> frozenset[str]:
        """The statistics of a tier that are measured."""
        chosen = self._of_tiers().union(*map(_needs, self.also)).difference(*map(_needed_alone, self.without))
        return frozenset(name for name in chosen if STATISTICS[name].tier == tier)

    def _of_tiers(self) -> set[str]:
        """What is measured of the chosen tiers, and so not what is derived."""
        return {name for name, one in STATISTICS.items() if one.tier in self.tiers and one.derive is None}


def _needs(name: str) -> set[str]:
    """The measured statistics that a statistic is read from: itself, unless it is derived."""
    return set(STATISTICS[name].needs) or {name}


def _needed_alone(name: str) -> set[str]:
    """Those of them that no other derived statistic needs; itself, unless it is derived."""
    others = [one.needs for one in STATISTICS.values() if one.name != name]
    return _needs(name).difference(*others) if STATISTICS[name].needs else {name}
