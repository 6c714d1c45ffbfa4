"""scripts/init_laws.py: laws and claims are judged correctly on known profiles."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import init_laws
import pytest
from laws.claims import CLAIMS, DEPTHS, Claim, compared
from laws.expected import LAWS
from laws.profiles import CASES, Case, Cases, of, over, power

RESULTS = Path(__file__).parent.parent / "results"


def cases_of(**exponents: float) -> Cases:
    """Return every case with numbers that are powers of L."""
    curves = {"stream": 0.0, "first": 0.0, "last": 0.0} | exponents
    return {
        case: Case(list(DEPTHS), *([depth ** curves[name] for depth in DEPTHS] for name in ("stream", "first", "last")))
        for case in CASES
    }


def claim(*claimed: float | tuple[float, float] | None, tolerance: float = 0.15) -> Claim:
    return Claim("a number", claimed, of("pre", "last"), tolerance)


def test_powers_and_ratios_of_known_profiles() -> None:
    cases = cases_of(last=-0.5, first=0.25)
    assert power(of("pre", "last"))(cases) == [pytest.approx(-0.5)]
    assert power(over(of("post", "last"), of("post", "first")))(cases) == [pytest.approx(-0.75)]
    logs = {**cases, ("pre", "xavier"): Case(list(DEPTHS), [math.log(d) ** 0.5 for d in DEPTHS], [], [])}
    assert power(of("pre", "stream"), math.log)(logs) == [pytest.approx(0.5)]


@pytest.mark.parametrize(
    ("claimed", "where"),
    [
        ((1.0,), ""),
        ((0.87,), ""),
        ((0.86,), "differs at L = 6, 12, 24, 48"),
        ((1.2,), "differs at L = 6, 12, 24, 48"),
        (((0.3, 0.9),), ""),
        (((0.3, 0.8),), "differs at L = 6, 12, 24, 48"),
        ((1.0, 2.0, 1.1, 0.5), "differs at L = 12, 48"),
        ((None, 2.0, None, None), "differs at L = 12"),
    ],
)
def test_a_claim_reports_the_depths_outside_its_tolerance(
    claimed: tuple[float | tuple[float, float] | None, ...], where: str
) -> None:
    assert claim(*claimed).verdict(cases_of())[2] == where


def test_the_tolerance_of_a_power_is_absolute() -> None:
    one = Claim("a power", (-0.63,), power(of("pre", "last")), 0.1, absolute=True)
    assert one.verdict(cases_of(last=-0.54))[2] == ""
    assert one.verdict(cases_of(last=-0.52))[2] == "differs"


def test_nan_agrees_with_no_claim() -> None:
    cases = cases_of()
    pre = cases["pre", "xavier"]
    cases["pre", "xavier"] = dataclasses.replace(pre, last=[1.0, 1.0, 1.0, math.nan])
    assert claim(1.0).verdict(cases)[2] == "differs at L = 48"


def test_depths_without_measurement_are_not_compared() -> None:
    pre = Case([6, 9], [1.0, 1.0], [1.0, 1.0], [1.0, 5.0])
    assert claim(2.0, 1.0, 1.0, 1.0).verdict({("pre", "xavier"): pre}) == ("2", "1", "differs at L = 6")


def test_tolerances_are_at_most_a_tenth_of_a_power_or_15_percent() -> None:
    for law in LAWS:
        if not law.name.startswith("Xiong's comparison"):
            assert law.high - law.low <= 0.3 + 1e-9, law.name
            assert law.high - law.low <= 0.2 + 1e-9 or "%" in law.expected, law.name


def test_the_stored_tables_match_the_stored_measurements(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = RESULTS / "init_laws.json"
    monkeypatch.setattr("sys.argv", ["init_laws.py", "--again", str(stored)])
    assert init_laws.main() == 0
    printed = capsys.readouterr().out
    assert (RESULTS / "init_laws.md").read_text().endswith(printed)
    cases = {
        (one["placement"], one["init"]): Case(one["depths"], one["stream"], one["first"], one["last"])
        for one in json.loads(stored.read_text())["cases"]
    }
    differing = "\n".join(compared(cases)).partition("## Where they differ")[2]
    for one in CLAIMS:
        differs = one.verdict(cases)[2]
        assert (f"- {one.name}: " in differing) == bool(differs)
