"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of `normlab verify`."""

    of: str
    """What was checked: `norm rmsnorm`, `placement pre`."""
    check: str
    """What is held to hold."""
    passed: bool
    seen: str
    """What was seen: the largest error and its tolerance, or what differs."""
    kind: str = ""
    """Of a comparison: external, identity or self (`norms.base.NormConfig.oracle_kind`)."""

    def row(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


@dataclass(slots=True)
class Worst:
    """The largest of many errors, and where it was."""

    tolerance: float
    error: float = 0.0
    at: str = ""
    count: int = 0

    def add(self, error: float, at: str) -> None:
        """Count another one; what is not a number is the largest of all."""
        self.count += 1
        if error != error:
            error = float("inf")
        if error > self.error:
            self.error, self.at = error, at

    @property
    def passed(self) -> bool:
        """Whether all of them, and at least one, stayed within the tolerance."""
        return self.count > 0 and self.error <= self.tolerance

    def __str__(self) -> str:
        """The numbers, and where it failed the place."""
        if self.count == 0:
            return "nothing was compared"
        text = f"largest error {self.error:.1e} of {self.count} comparisons, tolerance {self.tolerance:.0e}"
        return text if self.passed else f"{text}, at {self.at}"
