"""The result of one check, and functions that make one."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from normlab.base.errors import NormlabError, counted, is_out_of_memory
from normlab.base.plugins import files_in_use, plugin_line

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `normlab verify`."""

    subject: str
    """The entry that is checked: `norm rmsnorm`, `placement pre`."""
    claim: str
    passed: bool
    result: str
    """The largest error and its tolerance; after a failure the expected and the actual value."""
    reference_kind: str = ""
    """For a comparison: external, identity or self (`norms.base.NormConfig.reference_kind`)."""
    skipped: bool = False
    """Whether this machine cannot make the check; `passed` is true then, and `result` is the reason."""

    def __str__(self) -> str:
        state = "ok  " if self.passed else "FAIL"
        if self.skipped:
            state = "skip"
        return f"{state}  {self.subject}: {self.claim}  {self.result}".rstrip()


def check_equal(subject: str, claim: str, expected: object, actual: object, note: str = "") -> Check:
    """Return the check that two values are equal; the result ends with the note."""
    is_equal = actual == expected
    result = str(actual) if is_equal else f"expected {expected}, found {actual}"
    if note:
        result += f" ({note})"
    return Check(subject, claim, is_equal, result)


def check_no_problems(subject: str, claim: str, problems: Sequence[str], result: str = "") -> Check:
    """Return the check that there are no problems; `result` is shown if it passes."""
    return Check(subject, claim, not problems, "; ".join(problems) or result)


def fails_on_error(claim: str) -> Callable[[F], F]:
    """Make a check of an argument `subject` fail, with this claim, if a plugin makes it raise an exception.

    Without plugins the exception is a bug of normlab, and is raised.

    Args:
        claim: May have fields with the arguments of the check, such as `{norm.verified_by}`.
    """

    def decorate(check: F) -> F:
        signature = inspect.signature(check)

        def failure(error: Exception | SystemExit, *args: Any, **options: Any) -> Check:
            if isinstance(error, NormlabError) or is_out_of_memory(error) or not files_in_use():
                raise error
            arguments = signature.bind(*args, **options).arguments
            where = plugin_line(error)
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            result = reason if where is None else f"{where}: {reason}"
            return Check(arguments["subject"], claim.format(**arguments), passed=False, result=result)

        @wraps(check)
        def single(*args: Any, **options: Any) -> Check:
            try:
                return check(*args, **options)
            except (Exception, SystemExit) as error:  # a plugin may raise anything
                return failure(error, *args, **options)

        @wraps(check)
        def several(*args: Any, **options: Any) -> Iterator[Check]:
            try:
                yield from check(*args, **options)
            except (Exception, SystemExit) as error:  # a plugin may raise anything
                yield failure(error, *args, **options)

        wrapper: Any = several if inspect.isgeneratorfunction(check) else single
        return wrapper

    return decorate


@dataclass(slots=True)
class LargestError:
    """The largest error of many comparisons, where it occurs, and the two numbers there."""

    tolerance: float
    count: int = 0
    error: float = 0.0
    failure: str = ""
    """The message about the largest error, if that exceeds the tolerance."""

    def compare(self, actual: Tensor, expected: Tensor, location: str, scale: float = 1.0) -> None:
        """Add a comparison, with the error max |actual - expected| / scale. NaN counts as infinite."""
        if actual.shape != expected.shape:
            self.fail(f"expected shape {list(expected.shape)}, found {list(actual.shape)}, for {location}")
            return
        self.count += 1
        actual, expected = actual.detach().double().flatten(), expected.detach().double().flatten()
        difference = (actual - expected).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        index = int(difference.argmax())
        error = float(difference[index]) / scale
        # After a failure without a number, whose error counts as infinite, no comparison is shown.
        if error > self.error and not math.isinf(self.error):
            self.error = error
            if error > self.tolerance:
                self.failure = (
                    f"expected {float(expected[index]):.9g}, found {float(actual[index]):.9g} for {location} "
                    f"(error {error:.1e}, tolerance {self.tolerance:.0e})"
                )

    def fail(self, failure: str) -> None:
        """Add a failed comparison without a number; only the first such failure is shown."""
        self.count += 1
        if not math.isinf(self.error):
            self.error, self.failure = math.inf, failure

    def check(self, subject: str, claim: str, reference_kind: str = "") -> Check:
        """Return the check that there was a comparison and that every error is within the tolerance."""
        passed = self.count > 0 and self.error <= self.tolerance
        comparisons = counted(self.count, "comparison")
        result = f"largest error {self.error:.1e} of {comparisons}, tolerance {self.tolerance:.0e}"
        if not passed:
            result = self.failure or "expected a comparison, found none"
        return Check(subject, claim, passed, result, reference_kind)
