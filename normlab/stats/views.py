"""Observed tensors in float32 or better, with cached values that statistics share.

Shapes: `*batch` any leading axes, D the last axis, d one of its channels, N `*batch` flattened; B batch, H heads,
S selected queries, T time, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

QUERIES = 128
"""Most queries of a sequence in the attention statistics: evenly spaced, the last one included."""
MOST_TOKENS = 2048
"""Most tokens of a covariance, evenly spaced."""
TINY = 1e-37
"""Replaces a mean square of 0, so that the ratios of an all-zero token are 0."""


def cached(compute: Callable[[View], Tensor]) -> Any:
    """Return a property that is computed once.

    `functools.cached_property` does not compile in Python 3.11.
    """
    name = compute.__name__

    def get(view: View) -> Tensor:
        if name not in view._cache:
            view._cache[name] = compute(view)
        return view._cache[name]

    return property(get, doc=compute.__doc__)


class View:
    """An observed tensor, (*batch, D), in float32 or float64, without gradient."""

    def __init__(self, x: Tensor):
        self.original = x
        x = x.detach()
        self.x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        self.width = x.shape[-1]
        self._cache: dict[str, Tensor] = {}

    @cached
    def sum_square(self) -> Tensor:
        """The sum of x^2 over D, (*batch)."""
        return torch.linalg.vector_norm(self.x, dim=-1).square()

    @cached
    def mean_square(self) -> Tensor:
        """E_d[x^2], (*batch)."""
        return self.sum_square / self.width

    @cached
    def sum(self) -> Tensor:
        """The sum of x over D, (*batch)."""
        return self.x.sum(-1)

    @property
    def mean(self) -> Tensor:
        """E_d[x], (*batch)."""
        return self.sum / self.width

    @property
    def kurtosis(self) -> Tensor:
        """E_d[x^4] / E_d[x^2]^2, (*batch)."""
        # The squares are scaled first: fourth powers overflow float32 easily.
        scaled = self.x.square().div_(self.mean_square.clamp(min=TINY).unsqueeze(-1))
        return torch.linalg.vector_norm(scaled, dim=-1).square() / self.width

    @property
    def nonfinite(self) -> Tensor:
        """1 where a token's sum of squares is not finite, else 0; (*batch)."""
        return (self.sum_square < math.inf).logical_not().to(self.x.dtype)

    @cached
    def uniform(self) -> Tensor:
        """D E_d[x]^2 / E_d[x^2], (*batch)."""
        return self.sum.square() / self.sum_square.clamp(min=TINY)

    @property
    def absmax(self) -> Tensor:
        """The largest |x|, one number."""
        # A norm of order infinity takes ten times as long on a CPU, and |x| would need memory of its own.
        return torch.maximum(self.x.amax(), -self.x.amin())

    @cached
    def logz(self) -> Tensor:
        """Log sum_d exp(x), (*batch)."""
        return self.x.logsumexp(-1)

    @property
    def coefficient_of_variation(self) -> Tensor:
        """The standard deviation of x over D, divided by |E_d[x]|; (*batch)."""
        return self.x.std(-1, correction=0) / self.mean.abs().clamp(min=TINY)

    def cosine(self, other: View) -> Tensor:
        """Return the cosine between the vectors of two views, (*batch); 0 where a vector is all zeros."""
        return torch.linalg.vecdot(self.x, other.x) / (self.length * other.length)

    @cached
    def length(self) -> Tensor:
        """|x|, at least sqrt(TINY), (*batch)."""
        return self.sum_square.clamp(min=TINY).sqrt()

    # The following properties compare tokens with each other, for the fixed batch of the extended statistics only.

    @property
    def tokens(self) -> Tensor:
        """All tokens divided by their common RMS, (N, D): fourth powers overflow float32 easily."""
        tokens_ND = self.x.flatten(0, -2)
        return tokens_ND / self.mean_square.mean().sqrt().clamp(min=TINY)

    @property
    def neuron_kurt(self) -> Tensor:
        """E_d[s^4] / E_d[s^2]^2, s_d the RMS of a channel over the tokens."""
        square_D = self.tokens.square().mean(0)
        return square_D.square().mean() / square_D.mean().square().clamp(min=TINY)

    @property
    def token_cos(self) -> Tensor:
        """The mean cosine over pairs of tokens; 1 for a single token."""
        tokens_ND = torch.nn.functional.normalize(self.tokens, dim=-1, eps=TINY)
        count = len(tokens_ND)
        all_pairs = tokens_ND.sum(0).square().sum()
        same_token = tokens_ND.square().sum()  # 1 for each token that is not all zeros
        return (all_pairs - same_token) / (count * (count - 1)) if count > 1 else torch.ones_like(all_pairs)

    @property
    def part_ratio(self) -> Tensor:
        """tr(C)^2 / |C|_F^2, C the covariance of at most `MOST_TOKENS` tokens; 0 for identical tokens."""
        tokens_ND = self.tokens[:: -(-len(self.tokens) // MOST_TOKENS)]
        centred_ND = tokens_ND - tokens_ND.mean(0)
        # X^T X and X X^T have the same Frobenius norm: take the smaller product.
        gram = centred_ND.T @ centred_ND if self.width <= len(tokens_ND) else centred_ND @ centred_ND.T
        return centred_ND.square().sum().square() / gram.square().sum().clamp(min=TINY)

    @property
    def dead(self) -> Tensor:
        """The share of channels whose mean |x| is below a thousandth of the mean over all channels."""
        mean_D = self.tokens.abs().mean(0)
        return (mean_D < 1e-3 * mean_D.mean()).to(mean_D.dtype).mean()


class AttentionView:
    """The causal attention of evenly spaced queries; queries and keys are (B, H, T, K)."""

    def __init__(self, q_BHTK: Tensor, k_BHTK: Tensor, scale: float):
        q_BHTK, k_BHTK = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (q_BHTK, k_BHTK))
        length = q_BHTK.shape[-2]
        spacing = -(-length // QUERIES)
        self.first_query = (length - 1) % spacing
        self.queries = torch.arange(self.first_query, length, spacing, device=q_BHTK.device)
        future_ST = torch.arange(length, device=q_BHTK.device) > self.queries[:, None]
        logits_BHST = (q_BHTK[..., self.queries, :] @ k_BHTK.transpose(-1, -2)) * scale
        self.logits = logits_BHST.masked_fill(future_ST, float("-inf"))
        self.p = self.logits.softmax(-1)

    @property
    def entropy_H(self) -> Tensor:
        """The mean entropy of each head, in nats."""
        return torch.special.entr(self.p).sum(-1).mean((0, 2))

    @property
    def sink(self) -> Tensor:
        """The mean attention to the first token from the queries after it; 1 for a single token."""
        first_BHS = self.p[..., 0]
        # A mask of the queries would make the host wait for a GPU.
        after_first = 1 if self.first_query == 0 and len(self.queries) > 1 else 0
        return first_BHS[..., after_first:].mean()
