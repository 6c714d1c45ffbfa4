"""Check that init rules give standard deviations. `tests/` compares those of the package with closed forms."""

import math
from collections.abc import Iterator

from normlab.catalogue.placements.init_rules import standard_deviations
from normlab.model.small import VOCAB
from normlab.verify.check import Check, check_no_problems

SIZES = ((2, 16), (7, 24))
"""Depths and widths."""


def rule_checks(rule: str) -> Iterator[Check]:
    """Check that a rule gives a finite number, 0 or more, for each matrix of models of two sizes."""
    stds: list[float] = []
    for depth, width in SIZES:
        stds += standard_deviations(rule, depth=depth, width=width, mlp_width=3 * width, vocab_size=VOCAB)
    wrong = [std for std in stds if not (isinstance(std, (int, float)) and math.isfinite(std) and std >= 0)]
    problems = [f"expected a finite number, 0 or more, found {std!r}" for std in wrong[:1]]
    yield check_no_problems(f"init {rule}", "gives each matrix a standard deviation", problems, f"{len(stds)} numbers")
