import json
import math

import pytest

from normlab.store.format import decode, to_json


def test_strict_json_keeps_non_finite_numbers():
    row = {"kind": "train", "step": 3, "loss": math.nan, "deep": {"up": [math.inf, -math.inf, 1e-308, -0.0]}}
    text = to_json(row)

    def fail(constant):
        raise AssertionError(f"{constant} is not JSON")

    back = decode(json.loads(text, parse_constant=fail))
    assert math.isnan(back["loss"])
    assert back["deep"] == {"up": [math.inf, -math.inf, 1e-308, 0.0]}
    assert math.copysign(1, back["deep"]["up"][3]) == -1
    assert (back["kind"], back["step"]) == ("train", 3)


@pytest.mark.parametrize("value", [0.1 + 0.2, 5e-324, 1.7976931348623157e308, 2**60 + 1])
def test_numbers_keep_every_bit(value):
    assert decode(json.loads(to_json({"loss": value})))["loss"] == value


def test_every_row_is_one_ascii_line():
    assert to_json({"error": "a\nb\r\u2028c"}).count(b"\n") == 1
    assert to_json({"error": "a\nb\r\u2028c"}).isascii()
