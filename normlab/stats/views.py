"""Tensors as statistics see them: in float32 or better, with what several of them need computed once.

Shapes: `*batch` any leading axes, D the last, d one of its channels, N `*batch` flattened; B batch, H heads, S picked
queries, T time, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normlab.stats.extended import MOST_TOKENS, QUERIES

TINY = 1e-37
"""Stands for a mean square of 0, so that a token of zeros has 0 for its ratios."""


def once(make: Callable[[View], Tensor]) -> Any:
    """A property that is computed once; `functools.cached_property` has a lock in Python 3.11 and does not compile."""
    name = make.__name__

    def get(view: View) -> Tensor:
        if name not in view._made:
            view._made[name] = make(view)
        return view._made[name]

    return property(get, doc=make.__doc__)


class View:
    """A tensor that was shown, (*batch, D), and what several statistics need of it, each computed once.

    In float32, or float64 if it is; no gradient flows back from here.
    """

    def __init__(self, x: Tensor):
        self.shown = x
        x = x.detach()
        self.x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        self.width = x.shape[-1]
        self._made: dict[str, Tensor] = {}

    @once
    def sum_square(self) -> Tensor:
        """The sum of x^2 over D, (*batch)."""
        return torch.linalg.vector_norm(self.x, dim=-1).square()

    @once
    def mean_square(self) -> Tensor:
        """E_d[x^2], (*batch)."""
        return self.sum_square / self.width

    @once
    def sum(self) -> Tensor:
        """The sum of x over D, (*batch)."""
        return self.x.sum(-1)

    @property
    def mean(self) -> Tensor:
        """E_d[x], (*batch)."""
        return self.sum / self.width

    @property
    def fourth(self) -> Tensor:
        """E_d[x^4] / E_d[x^2]^2, (*batch). The squares are scaled first: a fourth power soon leaves float32."""
        scaled = self.x.square().div_(self.mean_square.clamp(min=TINY).unsqueeze(-1))
        return torch.linalg.vector_norm(scaled, dim=-1).square() / self.width

    @property
    def broken(self) -> Tensor:
        """1 where a token has a number that is not finite, or whose square is not; (*batch)."""
        return (self.sum_square < math.inf).logical_not().to(self.x.dtype)

    @once
    def uniform(self) -> Tensor:
        """D E_d[x]^2 / E_d[x^2], (*batch)."""
        return self.sum.square() / self.sum_square.clamp(min=TINY)

    @property
    def absmax(self) -> Tensor:
        """The largest |x|, one number."""
        # A norm of order infinity takes ten times as long on a CPU, and |x| would be written down first.
        return torch.maximum(self.x.amax(), -self.x.amin())

    @once
    def logz(self) -> Tensor:
        """The logarithm of sum_d exp(x), (*batch)."""
        return self.x.logsumexp(-1)

    @property
    def spread(self) -> Tensor:
        """The standard deviation over D of x, over |E_d[x]|; (*batch)."""
        return self.x.std(-1, correction=0) / self.mean.abs().clamp(min=TINY)

    def cosine(self, other: View) -> Tensor:
        """The cosine of the angle between two views' vectors, (*batch); 0 where one is all zeros."""
        return torch.linalg.vecdot(self.x, other.x) / (self.length * other.length)

    @once
    def length(self) -> Tensor:
        """|x|, and a little where it is 0, (*batch)."""
        return self.sum_square.clamp(min=TINY).sqrt()

    # Of a fixed batch only: these look at tokens together.

    @property
    def tokens(self) -> Tensor:
        """All tokens, (N, D), over the RMS of them all: fourth powers of what is far from 1 soon leave float32."""
        tokens_ND = self.x.flatten(0, -2)
        return tokens_ND / self.mean_square.mean().sqrt().clamp(min=TINY)

    @property
    def neuron_kurt(self) -> Tensor:
        """E_d[s^4] / E_d[s^2]^2, s_d the RMS of a channel over the tokens."""
        square_D = self.tokens.square().mean(0)
        return square_D.square().mean() / square_D.mean().square().clamp(min=TINY)

    @property
    def token_cos(self) -> Tensor:
        """The mean cosine over pairs of tokens; of a single token 1."""
        tokens_ND = torch.nn.functional.normalize(self.tokens, dim=-1, eps=TINY)
        count = len(tokens_ND)
        whole = tokens_ND.sum(0).square().sum()
        own = tokens_ND.square().sum()  # one each, but for a token of zeros
        return (whole - own) / (count * (count - 1)) if count > 1 else torch.ones_like(whole)

    @property
    def part_ratio(self) -> Tensor:
        """tr(C)^2 / |C|_F^2, C the covariance of at most `MOST_TOKENS` tokens; where they are all one, 0."""
        tokens_ND = self.tokens[:: -(-len(self.tokens) // MOST_TOKENS)]
        centred_ND = tokens_ND - tokens_ND.mean(0)
        # Of the two products the smaller one: their squares have one sum.
        gram = centred_ND.T @ centred_ND if self.width <= len(tokens_ND) else centred_ND @ centred_ND.T
        return centred_ND.square().sum().square() / gram.square().sum().clamp(min=TINY)

    @property
    def dead(self) -> Tensor:
        """The share of channels whose mean |x| is below a thousandth of the mean over all."""
        mean_D = self.tokens.abs().mean(0)
        return (mean_D < 1e-3 * mean_D.mean()).to(mean_D.dtype).mean()


class AttentionView:
    """Queries and keys that were shown, (B, H, T, K): the attention of some of the queries."""

    def __init__(self, q_BHTK: Tensor, k_BHTK: Tensor, scale: float):
        q_BHTK, k_BHTK = (x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in (q_BHTK, k_BHTK))
        length = q_BHTK.shape[-2]
        picked_S = torch.arange(length - 1, -1, -length // QUERIES, device=q_BHTK.device).flip(0)
        keys_T = torch.arange(length, device=q_BHTK.device)
        unseen_ST = keys_T > picked_S[:, None]
        logits_BHST = (q_BHTK[..., picked_S, :] @ k_BHTK.transpose(-1, -2)) * scale
        self.logits = logits_BHST.masked_fill(unseen_ST, float("-inf"))
        self.p = self.logits.softmax(-1)
        self.picked = picked_S

    @property
    def entropy_H(self) -> Tensor:
        """The mean entropy of each head, in nats."""
        return torch.special.entr(self.p).sum(-1).mean((0, 2))

    @property
    def sink(self) -> Tensor:
        """What the first token gets of the queries after it; of a single token 1."""
        later = self.picked > 0
        first_BHS = self.p[..., 0]
        return first_BHS[..., later].mean() if len(self.picked) > 1 else first_BHS.mean()


VIEWS: dict[str, Any] = {"attention": AttentionView}
"""What is made of what is shown all at once; elsewhere each tensor has a `View`."""
