"""scripts/init_laws.py: laws are judged correctly on known profiles."""

from __future__ import annotations

import math
from pathlib import Path

import init_laws
import pytest
from laws.profiles import CASES, Case, Cases, of, over, power

RESULTS = Path(__file__).parent.parent / "results"
DEPTHS = (6, 12, 24, 48)


def cases_of(**exponents: float) -> Cases:
    """Return every case with numbers that are powers of L."""
    curves = {"stream": 0.0, "first": 0.0, "last": 0.0} | exponents
    return {
        case: Case(list(DEPTHS), *([depth ** curves[name] for depth in DEPTHS] for name in ("stream", "first", "last")))
        for case in CASES
    }


def test_powers_and_ratios_of_known_profiles() -> None:
    cases = cases_of(last=-0.5, first=0.25)
    assert power(of("pre", "last"))(cases) == [pytest.approx(-0.5)]
    assert power(over(of("post", "last"), of("post", "first")))(cases) == [pytest.approx(-0.75)]
    logs = {**cases, ("pre", "xavier"): Case(list(DEPTHS), [math.log(d) ** 0.5 for d in DEPTHS], [], [])}
    assert power(of("pre", "stream"), math.log)(logs) == [pytest.approx(0.5)]


def test_the_stored_tables_match_the_stored_measurements(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = RESULTS / "init_laws.json"
    monkeypatch.setattr("sys.argv", ["init_laws.py", "--again", str(stored)])
    assert init_laws.main() == 0
    printed = capsys.readouterr().out
    assert (RESULTS / "init_laws.md").read_text().endswith(printed)
