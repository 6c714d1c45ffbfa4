"""The project's first measurements of these laws, compared with the current measurements.

They used two seeds up to L = 12 and one beyond; gradients of single seeds differ by a factor of three.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from laws.profiles import (
    KEEL_SAME,
    Cases,
    Statistic,
    by_depth,
    format_numbers,
    harmonic,
    last_over_first,
    of,
    over,
    post_over_pre,
    power,
    root_of_2l,
)

DEPTHS = (6, 12, 24, 48)
Range = tuple[float, float]
Number = float | Range | None


@dataclass(frozen=True)
class Claim:
    """An earlier measurement, and the tolerance for the current one."""

    name: str
    claimed: Sequence[Number]
    """One number (or None) for each of DEPTHS, or one number for all depths or for a power. A pair is a range."""
    statistic: Statistic
    tolerance: float
    """Relative to the claimed number, or absolute."""
    absolute: bool = False

    def compared(self, cases: Cases) -> Iterator[tuple[int | None, Number, float]]:
        """Yield (depth or None, claimed, measured) for each depth with a claim."""
        measured = self.statistic(cases)
        if len(measured) == 1 and len(self.claimed) == 1:
            yield None, self.claimed[0], measured[0]
            return
        depths = next(iter(cases.values())).depths
        claimed = dict(zip(DEPTHS, self.claimed if len(self.claimed) > 1 else self.claimed * 4, strict=True))
        for depth, value in zip(depths, measured, strict=True):
            if claimed.get(depth) is not None:
                yield depth, claimed[depth], value

    def agrees(self, claimed: Number, measured: float) -> bool:
        """Return whether a measurement is within the tolerance of the claim."""
        assert claimed is not None
        low, high = claimed if isinstance(claimed, tuple) else (claimed, claimed)
        below, above = (1, 1) if self.absolute else (low, high)
        return low - self.tolerance * below <= measured <= high + self.tolerance * above

    def verdict(self, cases: Cases) -> tuple[str, str, str]:
        """Return the claimed and the measured numbers as text, and the depths at which they differ."""
        compared = list(self.compared(cases))
        depths = [depth for depth, claimed, measured in compared if not self.agrees(claimed, measured)]
        claimed = self.claimed if len(self.claimed) == 1 else [claimed for _, claimed, _ in compared]
        differs = ""
        if depths:
            differs = "differs" if depths == [None] else f"differs at L = {', '.join(map(str, depths))}"
        return ", ".join(map(_text, claimed)), format_numbers([measured for _, _, measured in compared]), differs


def _text(number: Number) -> str:
    return f"{number[0]:.3g} to {number[1]:.3g}" if isinstance(number, tuple) else f"{number:.3g}"


def _gradient(placement: str, what: str, *claimed: Number, init: str = "xavier") -> Claim:
    return Claim(f"{placement}, init={init}: {what} gradient", claimed, of(placement, what, init), 0.15)


def _stream(placement: str, *claimed: Number, init: str = "xavier") -> Claim:
    return Claim(f"{placement}, init={init}: stream's RMS", claimed, of(placement, "stream", init), 0.05)


def _ratio(name: str, statistic: Statistic, *claimed: Number) -> Claim:
    return Claim(name, claimed, statistic, 0.15)


def _power(name: str, statistic: Statistic, claimed: Number) -> Claim:
    return Claim(name, (claimed,), statistic, 0.1, absolute=True)


CLAIMS = (
    _gradient("post", "last", 0.247, 0.269, 0.252, 0.298),
    _gradient("post", "first", 0.222, 0.181, 0.295, 0.138),
    _stream("post", 1),
    _power("post: last gradient's power of L", power(of("post", "last")), 0),
    _gradient("pre", "last", 0.126, 0.084, 0.045, 0.034),
    _gradient("pre", "first", 0.40, 0.39, 0.34, 0.36),
    _stream("pre", 2.21, 3.38, 4.83, 6.94),
    _power("pre: last gradient's power of L, fitted", power(of("pre", "last")), -0.63),
    _power("pre: last gradient's power of L, as a law", power(of("pre", "last")), (-2 / 3, -0.5)),
    _power("pre: stream's power of L", power(of("pre", "stream")), 0.5),
    _gradient("peri", "last", 0.155, 0.106, 0.072, 0.049),
    _gradient("peri", "first", (0.36, 0.39)),
    _stream("peri", 3.46, 5.06, 6.98, 9.99),
    Claim("peri: stream's RMS over sqrt(2L)", (1,), over(of("peri", "stream"), by_depth(root_of_2l)), 0.05),
    _gradient("res_post", "last", 0.171, 0.115, 0.080, 0.055),
    _gradient("res_post", "first", 0.34),
    _stream("res_post", 3.44, 5.04, 6.85, 10.1),
    Claim("res_post: stream's RMS over sqrt(2L)", (1,), over(of("res_post", "stream"), by_depth(root_of_2l)), 0.05),
    _gradient("lns", "last", 0.077, 0.046, 0.025, 0.015),
    _gradient("lns", "first", (0.35, 0.42)),
    _stream("lns", 1.22, 1.46, 1.63, 1.82),
    _power("lns: stream's power of ln L", power(of("lns", "stream"), math.log), 0.5),
    Claim(
        "lns: stream's RMS over sqrt(ln L)",
        (1,),
        over(of("lns", "stream"), by_depth(lambda depth: math.sqrt(math.log(depth)))),
        0.05,
    ),
    _power("lns: stream's power of the sum of 1 / l", power(of("lns", "stream"), harmonic), 0.5),
    _ratio("lns: last over first gradient", last_over_first("lns"), None, None, None, 0.043),
    _ratio("pre: last over first gradient", last_over_first("pre"), None, None, None, 0.094),
    _gradient("deepnorm", "last", 0.0208, 0.0139, 0.0087, 0.0060, init="deepnorm"),
    _ratio("deepnorm: last over first gradient", last_over_first("deepnorm", "deepnorm"), (0.98, 1.00)),
    _stream("deepnorm", 1, init="deepnorm"),
    _power("deepnorm: last gradient's power of L", power(of("deepnorm", "last", "deepnorm")), -0.6),
    _gradient(KEEL_SAME, "last", 0.0149, 0.0070, 0.0030, 0.0015),
    _ratio(f"{KEEL_SAME}: last over first gradient", last_over_first(KEEL_SAME), (0.99, 1.01)),
    _stream(KEEL_SAME, 1),
    _power(f"{KEEL_SAME}: last gradient's power of L", power(of(KEEL_SAME, "last")), -1),
    _gradient("hybridnorm", "last", 0.237, 0.236, 0.216, 0.222),
    _gradient("hybridnorm", "first", (0.21, 0.25)),
    _stream("hybridnorm", 1.1),
    _power("hybridnorm: last gradient's power of L", power(of("hybridnorm", "last")), 0),
    _gradient("siamese", "last", 0.108, 0.075, 0.041, 0.029),
    _gradient("siamese", "first", 0.29),
    _stream("siamese", 1),
    _gradient("resi_dual", "last", 0.39, 0.36, 0.31, 0.34),
    _gradient("resi_dual", "first", (0.28, 0.47)),
    _stream("resi_dual", 1),
    _power("resi_dual: last gradient's power of L", power(of("resi_dual", "last")), 0),
    _gradient("sub_ln", "last", 0.081, 0.051, 0.027, 0.018, init="sub_ln"),
    _gradient("sub_ln", "first", (0.19, 0.24), init="sub_ln"),
    _stream("sub_ln", 6.1, 9.9, 15.3, 24.1, init="sub_ln"),
    _stream("none", None, 5.8, 1.9e3, 2.5e8),
    _ratio("post/pre, init=xavier: ratio of last gradients", post_over_pre("xavier"), 2.0, 3.2, 5.6, 8.9),
    _power("post/pre, init=xavier: power of L of that ratio", power(post_over_pre("xavier")), 0.5),
    _ratio("post/pre, init=gpt2: ratio of last gradients", post_over_pre("gpt2"), (0.086, 0.25)),
    _gradient("post", "last", 0.036, init="gpt2"),
    _gradient("post", "first", 0.036, init="gpt2"),
    _gradient("pre", "last", None, 0.31, None, None, init="gpt2"),
    _gradient("pre", "first", None, 1.1, None, None, init="gpt2"),
    _stream("pre", None, 0.22, None, None, init="gpt2"),
    _gradient("peri", "first", (8, 17), init="gpt2_scaled"),
    _gradient("res_post", "first", (8, 17), init="gpt2_scaled"),
    _stream("none", (0.029, 0.031), init="gpt2"),
)

NOT_MEASURED = (
    "Not compared: public code's DeepNorm, with 2.828 for (2L)^(1/4) and a gain of (8L)^(1/4), which is no placement "
    "here; ranges over the blocks of a model, except their ends; and that the loss is not finite without a norm at "
    "L = 48."
)


def compared(cases: Cases) -> list[str]:
    """Return a table of the claims, and a list of those that differ, as lines of Markdown."""
    verdicts = [(claim, *claim.verdict(cases)) for claim in CLAIMS]
    verdicts = [verdict for verdict in verdicts if verdict[2]]
    differing = [verdict for verdict in verdicts if verdict[3]]
    return [
        "## The first measurements",
        "",
        "They used two seeds up to L = 12 and one beyond. A power agrees within 0.1, a gradient or a ratio of "
        f"gradients within 15 %, the stream's RMS within 5 %; for a range, from its ends. {NOT_MEASURED}",
        "",
        "| number | claimed | measured | |",
        "|---|---|---|---|",
        *(
            f"| {claim.name} | {claimed} | {measured} | {where or 'agrees'} |"
            for claim, claimed, measured, where in verdicts
        ),
        "",
        "## Where they differ",
        "",
        f"{len(differing)} of {len(verdicts)} rows differ from the current measurements:",
        "",
        *(
            f"- {claim.name}: claimed {claimed}, measured {measured}; {where}."
            for claim, claimed, measured, where in differing
        ),
    ]
