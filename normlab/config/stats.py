"""The `stats.` options: which statistics a run measures, and how often."""

from dataclasses import dataclass

from normlab.base.errors import ConfigError, unknown
from normlab.base.options import option
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import CORE, EXTENDED, TIERS


@dataclass(kw_only=True, slots=True)
class StatsConfig:
    """The statistics that a run measures. None of these options changes training."""

    preset: str = option("", "The preset of these options; a label only.", identity=False)
    tiers: list[str] = option(
        [CORE], identity=False,
        help="Tiers of statistics: core, in the step itself; extended, in a pass over a fixed batch; probe, at the "
        "start, half and end.",
    )  # fmt: skip
    also: list[str] = option(
        [], "More statistics to measure (`normlab list stats`); a derived one adds its inputs.", identity=False
    )
    every: int | None = option(
        None, "Steps between two measured steps, from step 0 on; default 10.", at_least=1, at_most=10**9, identity=False
    )
    extended_every: int | None = option(
        None, at_least=1, at_most=10**9, identity=False,
        help="Steps between two passes over the fixed batch, the first before step 0; default 200.",
    )  # fmt: skip

    def resolve(self) -> None:
        """Fill in the default cadences.

        Raises:
            ConfigError: A name is unknown, or an option has no effect.
        """
        for field, kind, allowed in (("tiers", "tier", TIERS), ("also", "statistic", STATISTICS)):
            for name in getattr(self, field):
                if name not in allowed:
                    raise ConfigError(f"stats.{field}={name}: " + unknown(kind, name, allowed))
        # A derived statistic is measured if its inputs are.
        measured = self._of_tiers()
        for name in self.also:
            if _inputs(name) <= measured:
                raise ConfigError(f"stats.also={name}: has no effect, since it is measured already; leave it out")
        # A cadence has no effect on a tier without statistics, such as the extended ones with stats=core.
        for field, tier, default in (("every", CORE, 10), ("extended_every", EXTENDED, 200)):
            value = getattr(self, field)
            if self.names(tier):
                if value is None:
                    setattr(self, field, default)
            elif value is not None:
                raise ConfigError(
                    f"stats.{field}={value}: has no effect, since no {tier} statistic is measured; set "
                    f"stats={'core' if tier == CORE else 'full'}"
                )

    def names(self, tier: str) -> frozenset[str]:
        names = self._of_tiers().union(*map(_inputs, self.also))
        return frozenset(name for name in names if STATISTICS[name].tier == tier)

    def _of_tiers(self) -> set[str]:
        """Return the statistics of the chosen tiers that are measured and not derived."""
        return {name for name, entry in STATISTICS.items() if entry.tier in self.tiers and entry.derive is None}


def _inputs(name: str) -> set[str]:
    """Return the inputs of a derived statistic; for a measured statistic itself."""
    return set(STATISTICS[name].needs) or {name}
