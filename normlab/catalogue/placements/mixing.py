"""Matrices c that mix n streams and are not made by Sinkhorn's iterations.

Both are made from the numbers of a token by softmaxes, so that their rows and columns sum to 1 but for rounding. At
first the identity has the score 0 and every other permutation -8: up to 4 streams nearly keep themselves, and of 6 each
keeps 0.84 of itself.

Shapes: B batch, T time, n streams, P = n! permutations, K = log2(n) factors, M = n^2.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError

MOST_PERMUTED = 6
"""The largest n of a sum of permutations: it needs 720 numbers of a token, and 5040 for n = 7."""
UNLIKELY = -8.0
"""The initial value of what is added to the numbers of a permutation; it is 0 for the identity."""


class Mixing:
    """A way to make c from numbers of a token."""

    def check_streams(self, streams: int) -> None:
        """Raise ConfigError if this number of streams cannot be mixed in this way."""
        raise NotImplementedError

    def count_numbers(self, streams: int) -> int:
        """Return how many numbers of a token c is made from."""
        raise NotImplementedError

    def initial_numbers(self, streams: int) -> list[float]:
        """Return the initial values of what is added to these numbers."""
        raise NotImplementedError

    def initial_values(self, streams: int) -> str:
        """Return `initial_numbers` as in `Placement.initial_values`, with which `verify` compares them."""
        raise NotImplementedError

    def formula(self, numbers: str) -> str:
        """Return the expression of c in the language of formulas."""
        raise NotImplementedError

    def function(self, streams: int) -> Callable[[Tensor], Tensor]:
        """Return the function, or the module, that makes c, (B, T, n, n), from the numbers."""
        raise NotImplementedError

    def matmul_weights(self, streams: int) -> int:
        """Return the products of this function for each token, as in `Placement.matmul_weights`."""
        return 0


class Permutations(Mixing):
    """c = sum_k softmax(numbers)_k P_k, over all permutation matrices P_k in lexicographic order.

    Source: Yang & Gao 2026, arXiv:2601.05732 (mHC-lite), FFTYYY/mhc-lite at ea19775.
    """

    def check_streams(self, streams: int) -> None:
        if streams > MOST_PERMUTED:
            raise ConfigError(
                f"placement.streams={streams}: placement.mixing=permutations needs {streams}! numbers of each token; "
                f"choose at most {MOST_PERMUTED}, or placement.mixing=kronecker"
            )

    def count_numbers(self, streams: int) -> int:
        return math.factorial(streams)

    def initial_numbers(self, streams: int) -> list[float]:
        return [0.0] + [UNLIKELY] * (self.count_numbers(streams) - 1)

    def initial_values(self, streams: int) -> str:
        return f"[0] + [-8] * {self.count_numbers(streams) - 1}"

    def formula(self, numbers: str) -> str:
        return f"permutations({numbers}, streams)"

    def function(self, streams: int) -> Callable[[Tensor], Tensor]:
        return PermutationSum(streams)

    def matmul_weights(self, streams: int) -> int:
        # The matrices have no gradient: a training step has two products with them, forward and for the gradient of the
        # softmax, where a weight has three.
        return self.count_numbers(streams) * streams**2 * 2 // 3


class PermutationSum(nn.Module):
    """sum_k softmax(numbers)_k P_k, from (B, T, P) to (B, T, n, n)."""

    permutations_PM: Tensor

    def __init__(self, streams: int):
        super().__init__()
        self.streams = streams
        columns_Pn = torch.tensor([*itertools.permutations(range(streams))])
        # Row i of a matrix has its 1 in the column to which the permutation maps i.
        self.register_buffer("permutations_PM", torch.eye(streams)[columns_Pn].flatten(1))

    def forward(self, numbers_BTP: Tensor) -> Tensor:
        c_BTM = numbers_BTP.softmax(-1) @ self.permutations_PM
        return c_BTM.unflatten(-1, (self.streams, self.streams))


class Kronecker(Mixing):
    """c = U_1 (x) ... (x) U_K, each U_k = [[p, q], [q, p]] with p and q a softmax of two numbers.

    Source: Zhou et al. 2026, arXiv:2601.21579 (KromHC), wz1119/KromHC at 7b15834.
    """

    def check_streams(self, streams: int) -> None:
        if streams.bit_count() != 1:
            raise ConfigError(
                f"placement.streams={streams}: is no power of 2, and placement.mixing=kronecker multiplies 2 x 2 "
                "matrices; choose 2, 4, 8, 16, 32 or 64"
            )

    def count_numbers(self, streams: int) -> int:
        return 2 * (streams.bit_length() - 1)

    def initial_numbers(self, streams: int) -> list[float]:
        return [0.0, UNLIKELY] * (self.count_numbers(streams) // 2)

    def initial_values(self, streams: int) -> str:
        return f"[0, -8] * {self.count_numbers(streams) // 2}"

    def formula(self, numbers: str) -> str:
        return f"kronecker({numbers})"

    def function(self, streams: int) -> Callable[[Tensor], Tensor]:
        return kronecker_product


def kronecker_product(numbers_BTm: Tensor) -> Tensor:
    """Return the Kronecker product of K matrices [[p, q], [q, p]], from (B, T, 2 K) to (B, T, n, n)."""
    kept_BTK2 = numbers_BTm.unflatten(-1, (-1, 2)).softmax(-1)
    product, *factors = torch.stack([kept_BTK2, kept_BTK2.flip(-1)], -2).unbind(-3)
    for factor in factors:
        # Axes (a, 1, a, 1) and (1, 2, 1, 2): each entry of the product becomes a block of 2 x 2.
        blocks = product[..., None, :, None] * factor[..., None, :, None, :]
        product = blocks.flatten(-4, -3).flatten(-2, -1)
    return product


MIXINGS = {"permutations": Permutations(), "kronecker": Kronecker()}
"""The other values of `placement.mixing`, besides `sinkhorn`."""
