from __future__ import annotations

import json
import math

import pytest

from normlab.store.schema import decode, encode, number, to_json


def test_non_finite_numbers_come_back_from_strict_json():
    row = {"kind": "train", "step": 3, "loss": math.nan, "deep": {"up": [math.inf, -math.inf, 1e-308, -0.0]}}
    text = to_json(row)

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    back = decode(json.loads(text, parse_constant=refuse))
    assert math.isnan(back["loss"])
    assert back["deep"] == {"up": [math.inf, -math.inf, 1e-308, 0.0]}
    assert math.copysign(1, back["deep"]["up"][3]) == -1
    assert (back["kind"], back["step"]) == ("train", 3)


@pytest.mark.parametrize("value", [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 2**60 + 1])
def test_numbers_come_back_to_the_last_bit(value):
    assert decode(json.loads(to_json({"loss": value})))["loss"] == value


def test_text_fields_are_not_numbers_whatever_they_say():
    assert decode(encode({"kind": "inf", "error": "nan", "state": "-inf"})) == {
        "kind": "inf",
        "error": "nan",
        "state": "-inf",
    }


def test_one_line_whatever_the_text():
    assert to_json({"error": "a\nb\r\u2028c"}).count(b"\n") == 1
    assert to_json({"error": "a\nb\r\u2028c"}).isascii()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (0.5, 0.5),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("3", None),
        (None, None),
        (True, None),
        (10**400, None),
        ({}, None),
    ],
)
def test_number(value, expected):
    assert number(value) == expected
