"""Whether rounding in a norm has a direction.

Largest errors do not show it: with every output within one unit in the last place, a stream that each of 72 norms
rounds towards 0 becomes 9 % smaller (ROCm/aiter, issue 5151).

Shapes: B batch, T time, D width.
"""

import math

import torch
from torch import Tensor, nn

from normlab.catalogue.norms.base import NormConfig
from normlab.verify.check import Check, check_no_problems, fails_on_error
from normlab.verify.norms import module_of
from normlab.verify.variants import is_valid

BATCH, TIME, WIDTH = 8, 256, 2048
"""Size of the input; a norm that does not allow the width gets the next multiple of its own."""
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Unit roundoff of each dtype."""
SIGMAS = 6


@torch.no_grad()
def signed_error(module: nn.Module, x: Tensor, dtype: torch.dtype, *, compiled: bool) -> float:
    """Return by which part the outputs in a dtype are larger than in float64: sum(y - r) r / sum r^2, r in float64.

    The parameters and the input are first rounded to the dtype.
    """
    low = module.to(dtype)
    forward = torch.compile(low) if compiled else low
    y = forward(x.to(dtype)).double()
    r = low.double()(x.to(dtype).double())
    return float(((y - r) * r).sum() / r.square().sum())


@fails_on_error("rounds up as often as down")
def signed_error_check(
    norm: NormConfig, subject: str, width: int, *, compiled: bool = False, device: str = "cpu"
) -> Check:
    """Check that the signed error of a norm in float32 and bfloat16 is one of rounding to nearest.

    A rounding to nearest changes a number by at most u times its size, in no direction: its standard deviation is at
    most u / sqrt(3). Errors of numbers that a token or a channel shares are averaged over the other axis only, so that
    the mean has at most u / sqrt(3 n), n the smaller axis. The bound is 6 of these, and 2^-24 for a number in float32
    that all tokens and channels share.
    """
    generator = torch.Generator().manual_seed(0)
    # The default width, the next multiple of the norm's own, or that one.
    candidates = (WIDTH, width * -(-WIDTH // width), width)
    wide = next(candidate for candidate in candidates if is_valid(norm, candidate))
    sizes_BT1 = 0.5 + torch.rand(BATCH, TIME, 1, generator=generator, dtype=torch.float64)
    x_BTD = sizes_BT1 * torch.randn(BATCH, TIME, wide, generator=generator, dtype=torch.float64)
    fewest = min(BATCH * TIME, wide)
    results: list[str] = []
    problems: list[str] = []
    for dtype, roundoff in ROUNDOFF.items():
        name = str(dtype).removeprefix("torch.")
        bound = SIGMAS * roundoff / math.sqrt(3 * fewest) + 2.0**-24
        error = signed_error(module_of(norm, wide).train().to(device), x_BTD.to(device), dtype, compiled=compiled)
        results.append(f"{error:+.1e} in {name}, bound {bound:.0e}")
        if not abs(error) <= bound:
            problems.append(f"expected at most {bound:.0e}, found {error:+.1e} in {name}")
    return check_no_problems(subject, "rounds up as often as down", problems, "; ".join(results))
