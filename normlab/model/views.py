"""Observed tensors in float32 or better, with cached values that statistics share.

Shapes: `*lead` any leading axes, first that of stacked tensors; N tokens, D the last axis, d one of its channels;
B batch, H heads, S selected queries, T time, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

QUERIES = 128
"""Most queries of a sequence in the attention statistics: evenly spaced, the last one included."""
MOST_TOKENS = 2048
"""Most tokens of a covariance, evenly spaced."""
TINY = 1e-37
"""Replaces a mean square of 0, so that the ratios of an all-zero token are 0."""


def cached(compute: Callable[[Any], Tensor]) -> Any:
    """Return a property that is computed once, for all rows of a view at once.

    `functools.cached_property` does not compile in Python 3.11.
    """
    name = compute.__name__

    def get(view: Any) -> Tensor:
        if name not in view._cache:
            if view._whole is None:
                view._cache[name] = compute(view)
            else:
                view._cache[name] = take(get(view._whole), view._rows)
        return view._cache[name]

    return property(get, doc=compute.__doc__)


def take(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of a tensor, in ascending order a view if they are adjacent."""
    start, stop = rows[0], rows[-1] + 1
    if list(rows) == list(range(start, stop)):
        return x[start:stop]
    return torch.stack([x[row] for row in rows])  # an index tensor would be copied to a GPU


class View:
    """Tensors without gradient, (*lead, N, D), in float32 or float64; gains have no axis of tokens.

    A statistic is one number for each token, (*lead, N), or for each tensor, (*lead).
    """

    def __init__(self, x: Tensor):
        x = x.detach()
        # Sums of squares of many numbers need float32: float16 overflows at 65504, bfloat16 has three digits.
        if x.dtype not in (torch.float32, torch.float64):
            x = x.float()
        self._x: Tensor | None = x
        self.width = x.shape[-1]
        self._cache: dict[str, Tensor] = {}
        self._whole: View | None = None
        """The view whose rows this view selects; None if it has all."""
        self._rows: Sequence[int] = ()

    def rows(self, rows: Sequence[int]) -> View:
        """Return a view of these tensors of the first axis. Cached values are computed for all tensors at once."""
        view = View.__new__(View)
        view._x = None
        view.width = self.width
        view._cache = {}
        view._whole = self
        view._rows = rows
        return view

    @property
    def x(self) -> Tensor:
        if self._x is None:
            assert self._whole is not None
            self._x = take(self._whole.x, self._rows)
        return self._x

    @cached
    def norm(self) -> Tensor:
        """|x|, (*lead, N)."""
        return torch.linalg.vector_norm(self.x, dim=-1)

    @cached
    def length(self) -> Tensor:
        """|x|, at least sqrt(TINY), (*lead, N)."""
        return self.norm.clamp(min=math.sqrt(TINY))

    @cached
    def mean_square(self) -> Tensor:
        """E_d[x^2], (*lead, N)."""
        return self.norm.square() / self.width

    @property
    def mean(self) -> Tensor:
        """E_d[x], (*lead, N)."""
        return self.x.mean(-1)

    @property
    def kurtosis(self) -> Tensor:
        """E_d[x^4] / E_d[x^2]^2, (*lead, N)."""
        # Divided by the length first: fourth powers overflow float32 easily.
        squares = (self.x / self.length.unsqueeze(-1)).square_()
        return torch.linalg.vector_norm(squares, dim=-1).square() * self.width

    @property
    def nonfinite(self) -> Tensor:
        """1 where a token's mean square is not finite, else 0; (*lead, N)."""
        return (self.mean_square < math.inf).logical_not().to(self.x.dtype)

    @cached
    def uniform(self) -> Tensor:
        """D E_d[x]^2 / E_d[x^2], (*lead, N)."""
        return (self.x.sum(-1) / self.length).square()

    @property
    def absmax(self) -> Tensor:
        """The largest |x| of a tensor, (*lead)."""
        # A norm of order infinity takes fifty times as long on a CPU, and |x| would need memory of its own.
        flat = self.x.flatten(-2)
        return torch.maximum(flat.amax(-1), -flat.amin(-1))

    @cached
    def logz(self) -> Tensor:
        """Log sum_d exp(x), (*lead, N)."""
        return self.x.logsumexp(-1)

    @property
    def coefficient_of_variation(self) -> Tensor:
        """The standard deviation of x over D, divided by |E_d[x]|."""
        deviation, mean = torch.std_mean(self.x, -1, correction=0)
        return deviation / mean.abs().clamp(min=TINY)

    def cosine(self, other: View) -> Tensor:
        """Return the cosine between the vectors of two views, (*lead, N); 0 where a vector is all zeros."""
        # Not by vecdot, which autocast would compute in bfloat16.
        return (self.x * other.x).sum(-1) / self.length / other.length

    # The following properties compare tokens with each other, for the fixed batch of the extended statistics only.

    @property
    def tokens(self) -> Tensor:
        """All tokens divided by their common RMS, (*lead, N, D): fourth powers overflow float32 easily."""
        return self.x / self.mean_square.mean(-1).sqrt().clamp(min=TINY)[..., None, None]

    @property
    def neuron_kurt(self) -> Tensor:
        """E_d[s^4] / E_d[s^2]^2, s_d the RMS of a channel over the tokens; (*lead)."""
        square_D = self.tokens.square().mean(-2)
        return square_D.square().mean(-1) / square_D.mean(-1).square().clamp(min=TINY)

    @property
    def token_cos(self) -> Tensor:
        """The mean cosine over pairs of tokens, (*lead); 1 for a single token."""
        tokens_ND = torch.nn.functional.normalize(self.tokens, dim=-1, eps=TINY)
        count = tokens_ND.shape[-2]
        all_pairs = tokens_ND.sum(-2).square().sum(-1)
        same_token = tokens_ND.square().sum((-2, -1))  # 1 for each token that is not all zeros
        if count == 1:  # there is no pair
            return torch.ones_like(all_pairs)
        return (all_pairs - same_token) / (count * (count - 1))

    @property
    def part_ratio(self) -> Tensor:
        """tr(C)^2 / |C|_F^2, C the covariance of at most `MOST_TOKENS` tokens, (*lead); 0 for identical tokens."""
        count = self.x.shape[-2]
        tokens_ND = self.tokens[..., :: -(-count // MOST_TOKENS), :]
        centred_ND = tokens_ND - tokens_ND.mean(-2, keepdim=True)
        # X^T X and X X^T have the same Frobenius norm: take the smaller product.
        gram = centred_ND.mT @ centred_ND if self.width <= centred_ND.shape[-2] else centred_ND @ centred_ND.mT
        return centred_ND.square().sum((-2, -1)).square() / gram.square().sum((-2, -1)).clamp(min=TINY)

    @property
    def dead(self) -> Tensor:
        """The share of channels whose mean |x| is below a thousandth of the mean over all channels, (*lead)."""
        mean_D = self.tokens.abs().mean(-2)
        return (mean_D < 1e-3 * mean_D.mean(-1, keepdim=True)).to(mean_D.dtype).mean(-1)


class AttentionView:
    """The causal attention of evenly spaced queries; queries and keys are (*lead, B, H, T, K)."""

    def __init__(self, q_BHTK: Tensor, k_BHTK: Tensor, scale: float, softcap: float | None = None):
        self.q, self.k = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (q_BHTK, k_BHTK))
        self.scale, self.softcap, self.length = scale, softcap, q_BHTK.shape[-2]
        self.spacing = -(-self.length // QUERIES)
        self.first_query = (self.length - 1) % self.spacing
        self._cache: dict[str, Tensor] = {}
        self._whole = None

    @cached
    def logits(self) -> Tensor:
        """The scaled products of queries and keys, with the softcap, (*lead, B, H, S, T); -inf for later keys."""
        queries_S = torch.arange(self.first_query, self.length, self.spacing, device=self.q.device)
        logits_BHST = (self.q[..., queries_S, :] @ self.k.transpose(-1, -2)) * self.scale
        if self.softcap is not None:
            logits_BHST = self.softcap * torch.tanh(logits_BHST / self.softcap)
        later_ST = torch.arange(self.length, device=self.q.device) > queries_S[:, None]
        return logits_BHST.masked_fill(later_ST, float("-inf"))

    @cached
    def p(self) -> Tensor:
        """The weights of attention, (*lead, B, H, S, T)."""
        return self.logits.softmax(-1)

    @property
    def entropy_H(self) -> Tensor:
        """The mean entropy of each head, in nats, (*lead, H)."""
        return torch.special.entr(self.p).sum(-1).mean((-3, -1))

    @property
    def largest_H(self) -> Tensor:
        """The largest scaled product of each head over all queries, without the softcap, (*lead, H)."""
        later_TT = torch.ones(self.length, self.length, dtype=torch.bool, device=self.q.device).triu(1)
        products_BHTT = (self.q @ self.k.transpose(-1, -2)).masked_fill(later_TT, float("-inf"))
        return products_BHTT.amax((-4, -2, -1)) * self.scale

    @property
    def largest(self) -> Tensor:
        """The largest logit, (*lead)."""
        return self.logits.amax((-4, -3, -2, -1))

    @property
    def sink(self) -> Tensor:
        """The mean attention to the first token from the queries after it, (*lead); 1 for a single token."""
        first_BHS = self.p[..., 0]
        # The first token attends to itself only, so it is left out unless it is alone. A mask of the queries would make
        # the host wait for a GPU.
        if self.first_query == 0 and self.length > self.spacing:
            first_BHS = first_BHS[..., 1:]
        return first_BHS.mean((-3, -2, -1))
