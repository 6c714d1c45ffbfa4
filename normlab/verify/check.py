"""The result of one check, and the largest of many errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of `normlab verify`."""

    subject: str
    """What is checked: `norm rmsnorm`, `placement pre`."""
    claim: str
    """The property that must hold."""
    passed: bool
    result: str
    """The largest error and its tolerance, or what differs."""
    reference_kind: str = ""
    """For a comparison: external, identity or self (`norms.base.NormConfig.reference_kind`)."""

    def __str__(self) -> str:
        """Return the line that `normlab verify` prints."""
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.subject}: {self.claim}  {self.result}".rstrip()

    def row(self) -> dict[str, Any]:
        """Return the object that `normlab verify --json` prints."""
        return {
            "of": self.subject, "check": self.claim, "passed": self.passed, "seen": self.result,
            "kind": self.reference_kind,
        }  # fmt: skip


@dataclass(slots=True)
class LargestError:
    """The largest error of many comparisons, and where it occurs."""

    tolerance: float
    error: float = 0.0
    location: str = ""
    count: int = 0

    def add(self, error: float, location: str) -> None:
        """Count one more comparison; NaN counts as infinite."""
        self.count += 1
        if error != error:
            error = float("inf")
        if error > self.error:
            self.error, self.location = error, location

    @property
    def passed(self) -> bool:
        """Whether there was a comparison and every error is within the tolerance."""
        return self.count > 0 and self.error <= self.tolerance

    def __str__(self) -> str:
        """Return the error, the number of comparisons and the tolerance; after a failure also the location."""
        if self.count == 0:
            return "nothing was compared"
        text = f"largest error {self.error:.1e} of {self.count} comparisons, tolerance {self.tolerance:.0e}"
        return text if self.passed else f"{text}, at {self.location}"

    def check(self, subject: str, claim: str, reference_kind: str = "") -> Check:
        """Return the check that all errors are within the tolerance."""
        return Check(subject=subject, claim=claim, reference_kind=reference_kind, passed=self.passed, result=str(self))
