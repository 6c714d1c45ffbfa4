"""A closer look now and then: a pass over a fixed batch, for what would be too dear in every measured step.

Forward the batch goes through the model whole, as it trains; backward one example at a time, which costs no more and
gives each example's own gradient. Nothing of it stays: no gradient, no running statistic.

Shapes: B examples, T time, P parameters, K numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normlab.config import AdamW
from normlab.stats.options import OF_ADAM, OF_EXAMPLES
from normlab.stats.profiles import Column
from normlab.stats.show import Wanted, wanted
from normlab.train.bound import Alone
from normlab.train.columns import column_of, columns_of, refuse_missing, refuse_unmeasured
from normlab.train.measure import Measured
from normlab.train.optim import Optimizer

MOST_EXAMPLES = 8
"""Examples of the fixed batch, at most."""
OF_GRADIENTS = ("radial_cos", *OF_EXAMPLES)


def noise_and_signal(mean_square: Tensor, square_of_mean: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return unbiased estimates of tr(S) and |G|^2, S the covariance and G the mean of an example's gradient.

    McCandlish et al. 2018, arXiv:1812.06162, appendix A.1, with batches of 1 and of `count` examples.

    Args:
        mean_square: mean_b |g_b|^2.
        square_of_mean: |mean_b g_b|^2.
        count: B >= 2, the number of examples.
    """
    trace = (mean_square - square_of_mean) * count / (count - 1)
    return trace, (count * square_of_mean - mean_square) / (count - 1)


@dataclass(slots=True)
class CloserLook:
    """Takes the extended statistics of a lone run."""

    bound: Alone
    names: frozenset[str]
    """Less what such a batch does not give."""
    tokens_BT: Tensor
    targets_BT: Tensor
    optimizer: Optimizer
    apart: bool = True
    """Whether an example's loss depends on that example alone; not with statistics of the batch."""
    autocast: Callable[[], AbstractContextManager] = nullcontext
    wanted: Wanted = field(init=False)
    _eager: Alone = field(init=False)

    def __post_init__(self) -> None:
        """Bind the model once more, uncompiled: a pass in two hundred repays no graph of its own."""
        if not self.apart or len(self.tokens_BT) < 2:
            self.names -= set(OF_EXAMPLES)
        self.wanted = wanted(self.names)
        self._eager = Alone(self.bound.model, compiled=False)

    def __call__(self) -> Measured:
        """What is seen of the model as it stands.

        Raises:
            StatisticsError: A statistic was not measured.
        """
        buffers = self.bound.buffers
        self.bound.train(True)
        try:
            return self._look()
        finally:
            self.bound.set_buffers(buffers)

    def _look(self) -> Measured:
        with torch.no_grad(), self.autocast():
            reports = self._eager.loss(self.tokens_BT, self.targets_BT, self.wanted).reports
        columns, values = columns_of(tuple(report.names for report in reports)), [one.values for one in reports]
        refuse_missing(self.bound.model, self.wanted, columns)
        found = dict[Column, Tensor]()
        if self.names & set(OF_GRADIENTS):
            found |= self._of_gradients()
        # Before the first update Adam has done nothing.
        if isinstance(self.optimizer.options, AdamW) and bool(self.optimizer.count):
            absent = set[str]()
            if self.names & set(OF_ADAM):
                found |= self._of_adam(self.optimizer.options)
        else:
            absent = set(OF_ADAM)
        refuse_unmeasured(self.names - absent, (*columns, *found))
        whole = torch.cat([*values, torch.stack(list(found.values()))] if found else values)
        return Measured((*columns, *found), whole)

    def _of_gradients(self) -> dict[Column, Tensor]:
        """How each matrix's gradient lies to it, and how far the examples' gradients agree."""
        names, params = list(self.bound.params), list(self.bound.params.values())
        count = len(self.tokens_BT) if self.apart else 1
        sums: list[Tensor] = []
        squares: Tensor | None = None
        for tokens, targets in zip(self.tokens_BT.chunk(count), self.targets_BT.chunk(count), strict=True):
            with self.autocast():
                loss = self._eager.loss(tokens, targets).loss
            grads = list(torch.autograd.grad(loss / count, params, materialize_grads=True))
            own = torch.stack(torch._foreach_norm(grads)).square()
            squares = own if squares is None else squares + own
            if sums:
                torch._foreach_add_(sums, grads)
            else:
                sums = grads
        assert squares is not None
        whole = torch.stack(torch._foreach_norm(sums)).square()
        found: dict[Column, Tensor] = {}
        depth = len(self.bound.model.blocks)
        for index, (name, p, g) in enumerate(zip(names, params, sums, strict=True)):
            column = column_of(name, depth)
            if "radial_cos" in self.names and p.dim() >= 2:
                size = torch.linalg.vector_norm(p.detach()) * torch.linalg.vector_norm(g)
                found[column._replace(statistic="radial_cos")] = (p.detach() * g).sum() / size
            if self.names & set(OF_EXAMPLES):
                # These gradients are 1 / B of the examples': mean_b |g_b|^2 = B sum |g_b / B|^2.
                trace, square = noise_and_signal(count * squares[index], whole[index], count)
                for statistic, value in (("gns_trace", trace), ("gns_square", square)):
                    if statistic in self.names:
                        found[column._replace(statistic=statistic)] = value
        return found

    @torch.no_grad()
    def _of_adam(self, options: AdamW) -> dict[Column, Tensor]:
        """How long Adam's steps are; before the first update there are none."""
        found: dict[Column, Tensor] = {}
        count, depth = self.optimizer.count, len(self.bound.model.blocks)
        for name, p in self.bound.params.items():
            if p.dim() < 2:
                continue
            mean, square = (self.optimizer.moments[kind][name] for kind in ("mean", "square"))
            root = (square / (1 - options.beta2**count)).sqrt()
            update = mean / (1 - options.beta1**count) / (root + options.eps)
            for statistic, value in (
                ("adam_rms", update.square().mean().sqrt()),
                ("adam_eps_frac", (root < 10 * options.eps).to(root.dtype).mean()),
            ):
                if statistic in self.names:
                    found[column_of(name, depth)._replace(statistic=statistic)] = value
        return found
