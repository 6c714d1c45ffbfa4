"""The laws: the expected value of a statistic and its tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laws.profiles import (
    KEEL_SAME,
    Cases,
    Statistic,
    by_depth,
    format_numbers,
    last_over_first,
    less,
    of,
    over,
    plus,
    post_over_pre,
    power,
    root_of_2l,
)


@dataclass(frozen=True)
class Law:
    """A statistic and the interval that must contain it."""

    name: str
    expected: str
    statistic: Statistic
    low: float
    high: float

    def line(self, cases: Cases) -> tuple[bool, str]:
        """Return whether the law holds, and its row of the table."""
        values = self.statistic(cases)
        holds = all(self.low <= value <= self.high for value in values)
        verdict = "holds" if holds else "**does not hold**"
        return holds, f"| {self.name} | {self.expected} | {format_numbers(values)} | {verdict} |"


def _slope(name: str, expected: str, statistic: Statistic, exponent: float) -> Law:
    return Law(name, f"{expected} +- 0.1", statistic, exponent - 0.1, exponent + 0.1)


def _one(name: str, statistic: Statistic, percent: int) -> Law:
    return Law(name, f"1 +- {percent} %", statistic, 1 - percent / 100, 1 + percent / 100)


LAWS = (
    _slope("post: last gradient's power of L", "0", power(of("post", "last")), 0),
    _slope("pre: last gradient's power of L", "-1/2", power(of("pre", "last")), -0.5),
    _slope("pre: stream's power of L", "1/2", power(of("pre", "stream")), 0.5),
    _slope("post/pre: power of L of the last gradients' ratio", "1/2", power(post_over_pre("xavier")), 0.5),
    _one("peri: stream's RMS over sqrt(2L)", over(of("peri", "stream"), by_depth(root_of_2l)), 5),
    _one("res_post: stream's RMS over sqrt(2L)", over(of("res_post", "stream"), by_depth(root_of_2l)), 5),
    _one("deepnorm: last over first gradient", last_over_first("deepnorm", "deepnorm"), 15),
    _slope("deepnorm: last gradient's power of L", "-0.6", power(of("deepnorm", "last", "deepnorm")), -0.6),
    _one(f"{KEEL_SAME}: last over first gradient", last_over_first(KEEL_SAME), 5),
    _slope(f"{KEEL_SAME}: last gradient's power of L", "-1", power(of(KEEL_SAME, "last")), -1),
    _slope("keel: last gradient's power of L", "-1", power(of("keel", "last", "gpt2")), -1),
    _slope("keel: first gradient's power of L", "0", power(of("keel", "first", "gpt2")), 0),
    _slope("lns: stream's power of ln L", "1/2", power(of("lns", "stream"), math.log), 0.5),
    _slope("hybridnorm: last gradient's power of L", "0", power(of("hybridnorm", "last")), 0),
    _one(
        "resi_dual: last gradient over the sum of post's and pre's, since it has both paths",
        over(of("resi_dual", "last"), plus(of("post", "last"), of("pre", "last"))),
        15,
    ),
    _slope(
        "siamese: last gradient's power of L, less pre's",
        "0",
        less(power(of("siamese", "last")), power(of("pre", "last"))),
        0,
    ),
    Law(
        "Xiong's comparison reversed, init=gpt2: post/pre, ratio of last gradients",
        "below 0.3; only the sign is a law",
        post_over_pre("gpt2"),
        0.0,
        0.3,
    ),
)
