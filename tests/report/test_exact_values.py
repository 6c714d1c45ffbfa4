"""Two different values are never equal and never have one label, however close they are."""

from __future__ import annotations

import math

import numpy as np

from normlab.analysis.factors import Factor, label, short_label
from normlab.analysis.settings import Condition, format_setting, sort_key
from normlab.report.figure_data import factor_axis
from normlab.store.parts import Setting

DRAW = np.random.default_rng(0)
FLOATS = [1e-3, 1.0, 1e6, 2.0**53, *(10 ** DRAW.uniform(-9, 9, 200)).tolist()]
INTEGERS = [0, 2**53, 2**63 - 2, *DRAW.integers(0, 2**62, 200).tolist()]
PAIRS: list[tuple[Setting, Setting]] = [
    *((value, math.nextafter(value, math.inf)) for value in FLOATS),
    *((value, value + 1) for value in INTEGERS),
]


def test_a_condition_selects_one_of_two_adjacent_values() -> None:
    for pair in PAIRS:
        for value in pair:
            for text in (format_setting(value), repr(value)):
                assert [Condition("x", "=", text).accepts(other) for other in pair] == [
                    value is other for other in pair
                ]
        assert Condition("x", ">", format_setting(pair[0])).accepts(pair[1])


def test_adjacent_values_have_different_labels_and_an_order() -> None:
    for pair in PAIRS:
        assert sort_key(pair[0]) < sort_key(pair[1])
        for function in (label, short_label):
            assert len({function(["optim.lr"], [value]) for value in pair}) == 2
        assert len(set(factor_axis(Factor("x", pair)).positions.values())) == 2
