"""Frozen outputs: a refactor must reproduce the numbers, texts and page data of reports, lists, figures and verdicts.

A change of an output must refresh its golden (`scripts/prove/refresh_goldens.py outputs`) and explain it. The losses of
training are in test_goldens.py, the reports of the studies in studies/test_reports.py.
"""

import difflib
import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from support.frozen_outputs import ENVIRONMENT, FOLDER, NAMES, Outputs, as_text, read

SHOWN = 12
"""Most differences that a failure shows."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outputs]:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in ENVIRONMENT.items():
            patch.setenv(variable, value)
        time.tzset()
        yield Outputs(tmp_path_factory.mktemp("frozen"))
    time.tzset()


@pytest.mark.parametrize("name", NAMES)
def test_an_output_equals_its_golden(name: str, outputs: Outputs) -> None:
    found = list(islice(differences(read(name), outputs.of(name)), SHOWN))
    assert not found, "\n".join([f"{name}: golden, then now:", *found])


def test_every_golden_is_compared() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(NAMES)


def differences(golden: Any, now: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each difference of two contents; numbers are equal to nine significant digits."""
    if isinstance(golden, dict) and isinstance(now, dict):
        for key in [*golden, *(key for key in now if key not in golden)]:
            if key in golden and key in now:
                yield from differences(golden[key], now[key], f"{place}.{key}")
            else:
                yield f"{place}.{key}: {'is missing' if key in golden else 'is new'}"
        if list(golden) != list(now) and golden.keys() == now.keys():
            yield f"{place}: the order of keys is {list(now)}"
    elif isinstance(golden, list) and isinstance(now, list) and len(golden) == len(now):
        for index, pair in enumerate(zip(golden, now, strict=True)):
            yield from differences(*pair, f"{place}[{index}]")
    elif isinstance(golden, str) and isinstance(now, str) and "\n" in golden:
        before, after = golden.splitlines(), now.splitlines()
        if len(before) == len(after):
            yield from differences(before, after, place)
        else:
            yield from islice(difflib.unified_diff(before, after, n=0, lineterm=""), 2, None)
    elif isinstance(golden, float) and isinstance(now, int | float):
        if not math.isclose(golden, now, rel_tol=1e-9, abs_tol=1e-14):
            yield f"{place}: {golden} -> {now}"
    elif (type(golden), golden) != (type(now), now):
        yield f"{place}:\n  - {_short(golden)}\n  + {_short(now)}"


def _short(value: Any) -> str:
    text = as_text(value).strip() if isinstance(value, str | dict | list) else repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."
