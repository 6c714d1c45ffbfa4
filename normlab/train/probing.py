"""The probe of a model that is training or trained: curvature, what each block is worth, and where signals go.

It is eager, in the weights' own precision, in evaluation mode and with attention written out, which alone can be
differentiated twice. Nothing of it stays.

Shapes: B examples, T time, D width, L blocks, N tokens, K numbers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.config import AdamW, OptimConfig, RunConfig
from normlab.model.attention import Attention
from normlab.model.gpt import GPT
from normlab.stats.profiles import Column
from normlab.stats.tap import first, tap
from normlab.train.columns import column_of, refuse_unmeasured
from normlab.train.measure import Measured

PRODUCTS = 20
"""Most products of the Hessian with a vector, for each eigenvalue."""
ENOUGH = 1e-3
"""How little, as a share of itself, an eigenvalue must still change for the iteration to end."""
VECTORS = 4
"""Gaussian vectors of `jac_gain`."""
SHARE = 8
"""One of so many examples of a batch is looked at."""

Vector = list[Tensor]


def cost(depth: int, batch_size: int) -> float:
    """About what a probe costs, in training steps: a product with the Hessian is 3.5 passes forward and back.

    Counted and not timed, so that the same run is always probed at the same moments. Decompositions of matrices are not
    counted, nor how much faster compiled steps are.
    """
    forward = 1 / 3
    passes = 2 * PRODUCTS * 3.5 + VECTORS + depth / 2 * forward + 2 * forward
    return passes * examples(batch_size) / batch_size


def examples(batch_size: int) -> int:
    """How many examples are looked at, of a batch of this size."""
    return max(1, batch_size // SHARE)


def probed_steps(config: RunConfig) -> frozenset[int]:
    """After how many updates a run is probed: as many moments as fit into its share of the run's steps.

    At the beginning, after the warm-up, after a quarter, at half and at the end; or the beginning, half and the end; or
    the end alone; or never.
    """
    steps, share = config.train.steps, config.stats.probe_share
    if share is None:
        return frozenset()
    warmup = config.optim.warmup_steps or 0
    for chosen in ((0, warmup, steps // 4, steps // 2, steps), (0, steps // 2, steps), (steps,)):
        found = frozenset(chosen)
        if len(found) * cost(config.model.depth, config.train.batch_size) <= share * steps:
            return found
    return frozenset()


def fits(share: float, steps: int, done: int, seconds: float, probes: Sequence[float]) -> bool:
    """Whether one more probe keeps to its share of a run's time, by what those before it took.

    What is counted (`cost`) leaves out what narrow matrices and many small operations take.

    Args:
        share: Of the run's time.
        steps: Of the run.
        done: How many of them took `seconds`.
        seconds: The probes' own left out.
        probes: Seconds of each.
    """
    return not probes or not done or sum(probes) + max(probes) <= share * seconds / done * steps


def adam_measure(options: OptimConfig, squares: Mapping[str, Tensor], count: Tensor) -> dict[str, Tensor] | None:
    """Adam's sqrt(v) + eps by parameter, v the mean of squared gradients made up for its beginning; before it, none.

    Args:
        options: Of the run's optimiser.
        squares: v by parameter, as the optimiser keeps it.
        count: How many updates there were.
    """
    if not isinstance(options, AdamW) or not count:
        return None
    share = 1 - options.beta2**count
    return {name: (square / share).sqrt() + options.eps for name, square in squares.items()}


@dataclass(slots=True)
class Probe:
    """Takes the probe's statistics of a model."""

    model: GPT
    names: frozenset[str]
    tokens_BT: Tensor
    targets_BT: Tensor
    measure: Mapping[str, Tensor] | None = None
    """Adam's sqrt(v) + eps by parameter, for `sharpness_pre`; without it there is none."""

    def __call__(self) -> Measured:
        """What is seen of the model as it stands.

        Raises:
            StatisticsError: A statistic was not measured.
        """
        found: dict[Column, Tensor] = {}
        training = self.model.training
        self.model.eval()
        try:
            with _written_out(self.model):
                made = {"layer_drop": self._layer_drop, "angular": self._angular, "erank": self._erank}
                streams = self._streams() if self.names & made.keys() else []
                for name in made.keys() & self.names:
                    with torch.no_grad():
                        found |= made[name](streams)
                if "jac_gain" in self.names:
                    found |= self._jac_gain()
                found |= self._of_matrices()
                found |= self._sharpness()
        finally:
            self.model.train(training)
        refuse_unmeasured(self.names - ({"sharpness_pre"} if self.measure is None else set()), found)
        values = [value.to(torch.float32).cpu() for value in found.values()]
        return Measured(tuple(found), torch.stack(values) if values else torch.zeros(0))

    def _loss(self, stream: Any) -> Tensor:
        return F.cross_entropy(self.model.head(stream).flatten(0, 1), self.targets_BT.flatten())

    @torch.no_grad()
    def _streams(self) -> list[Any]:
        """What enters each block and the head."""
        streams = [self.model.embed(self.tokens_BT)]
        for block in self.model.blocks:
            streams.append(block(streams[-1]))
        return streams

    def _layer_drop(self, streams: list[Any]) -> dict[Column, Tensor]:
        whole, found = self._loss(streams[-1]), dict[Column, Tensor]()
        for layer in range(len(self.model.blocks)):
            stream = streams[layer]
            for block in self.model.blocks[layer + 1 :]:
                stream = block(stream)
            found[Column("layer_drop", "", layer + 1)] = self._loss(stream) - whole
        return found

    def _angular(self, streams: list[Any]) -> dict[Column, Tensor]:
        units = [F.normalize(first(stream).double(), dim=-1) for stream in streams]
        found: dict[Column, Tensor] = {}
        for apart in range(1, len(units)):
            for place in range(1, len(units) - apart + 1):
                cosine = (units[place - 1] * units[place - 1 + apart]).sum(-1).clamp(-1, 1)
                found[Column("angular", str(apart), place)] = cosine.arccos().mean() / math.pi
        return found

    def _erank(self, streams: list[Any]) -> dict[Column, Tensor]:
        found: dict[Column, Tensor] = {}
        for place, stream in enumerate(streams, start=1):
            tokens_ND = first(stream).flatten(0, -2).double()
            centred_ND = tokens_ND - tokens_ND.mean(0)
            erank = torch.tensor(math.nan)
            if bool(centred_ND.isfinite().all()):  # or there are no singular values
                shares = torch.linalg.svdvals(centred_ND).square()
                whole = shares.sum().clamp(min=torch.finfo(shares.dtype).tiny)
                erank = torch.special.entr(shares / whole).sum().exp()
            found[Column("erank", "", place)] = erank
        return found

    def _jac_gain(self) -> dict[Column, Tensor]:
        stream, inputs = self.model.embed(self.tokens_BT), list[Tensor]()
        for block in self.model.blocks:
            stream, tapped = tap(stream)
            inputs.append(tapped)
            stream = block(stream)
        last_BTD = first(stream)
        generator = torch.Generator().manual_seed(0)
        gains = torch.zeros(len(inputs), dtype=torch.float64)
        for _ in range(VECTORS):
            v_BTD = torch.randn(last_BTD.shape, generator=generator).to(last_BTD)
            back = torch.autograd.grad(last_BTD, inputs, v_BTD, retain_graph=True)
            size = v_BTD.square().sum()
            gains += torch.stack([(g.square().sum() / size).double().cpu() for g in back]) / VECTORS
        return {Column("jac_gain", "", place): gain for place, gain in enumerate(gains, start=1)}

    @torch.no_grad()
    def _of_matrices(self) -> dict[Column, Tensor]:
        found: dict[Column, Tensor] = {}
        for name, p in self.model.named_parameters():
            if p.dim() == 2 and self.names & {"spec_norm", "stable_rank"}:
                column, size = column_of(name, len(self.model.blocks)), torch.tensor(math.nan)
                if bool(p.isfinite().all()):
                    size = torch.linalg.matrix_norm(p, ord=2)
                for statistic, value in (
                    ("spec_norm", size), ("stable_rank", torch.linalg.matrix_norm(p).square() / size.square())
                ):  # fmt: skip
                    if statistic in self.names:
                        found[column._replace(statistic=statistic)] = value
        return found

    def _sharpness(self) -> dict[Column, Tensor]:
        asked = {"sharpness": None, **({"sharpness_pre": self.measure} if self.measure is not None else {})}
        asked = {name: measure for name, measure in asked.items() if name in self.names}
        if not asked:
            return {}
        named = dict(self.model.named_parameters())
        params: Vector = list(named.values())
        loss = self._loss(self._through())
        grads = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)

        def product(v: Vector) -> Vector:
            return list(torch.autograd.grad(grads, params, v, retain_graph=True, materialize_grads=True))

        found: dict[Column, Tensor] = {}
        for name, measure in asked.items():
            roots = [torch.ones(()) if measure is None else measure[each].rsqrt() for each in named]

            def times(v: Vector, roots: Vector = roots) -> Vector:
                return _by(product(_by(v, roots)), roots)

            place = len(self.model.blocks) + 1
            found[Column(name, "", place)] = torch.tensor(largest_eigenvalue(times, params))
        return found

    def _through(self) -> Any:
        stream = self.model.embed(self.tokens_BT)
        for block in self.model.blocks:
            stream = block(stream)
        return stream


def largest_eigenvalue(product: Callable[[Vector], Vector], like: Vector, most: int = PRODUCTS) -> float:
    """The largest eigenvalue of a symmetric operator by Lanczos' iteration, three vectors at a time.

    Args:
        product: The operator on a vector, which is a list of tensors.
        like: A vector, for its shapes.
        most: Most products.
    """
    generator = torch.Generator().manual_seed(0)
    v = [torch.randn(p.shape, generator=generator).to(p.detach()) for p in like]
    v = _scaled(v, 1 / _length(v))
    before, beta = [torch.zeros_like(p) for p in v], 0.0
    diagonal: list[float] = []
    beside: list[float] = []
    largest = math.nan
    for _ in range(min(most, sum(p.numel() for p in like))):
        w = [tensor.detach() for tensor in product(v)]
        alpha = sum(float((a.double() * b.double()).sum()) for a, b in zip(w, v, strict=True))
        w = [a - alpha * b - beta * c for a, b, c in zip(w, v, before, strict=True)]
        diagonal.append(alpha)
        last, largest = largest, _top(diagonal, beside)
        beta = _length(w)
        if not math.isfinite(largest) or beta == 0 or abs(largest - last) <= ENOUGH * abs(largest):
            break
        beside.append(beta)
        before, v = v, _scaled(w, 1 / beta)
    return largest


def _top(diagonal: list[float], beside: list[float]) -> float:
    """The largest eigenvalue of a symmetric tridiagonal matrix."""
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    if beside:
        off = torch.tensor(beside, dtype=torch.float64)
        matrix += torch.diag(off, 1) + torch.diag(off, -1)
    return float(torch.linalg.eigvalsh(matrix)[-1]) if bool(matrix.isfinite().all()) else math.nan


def _length(v: Vector) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in v))


def _by(v: Vector, w: Vector) -> Vector:
    """The product, number by number."""
    return [a * b.to(a) for a, b in zip(v, w, strict=True)]


def _scaled(v: Vector, factor: float) -> Vector:
    return [tensor * factor for tensor in v]


@contextlib.contextmanager
def _written_out(model: GPT) -> Iterator[None]:
    """Attention by its formula: torch's fused kernels have no second derivative."""
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    fused = [module.fused for module in modules]
    for module in modules:
        module.fused = False
    try:
        yield
    finally:
        for module, was in zip(modules, fused, strict=True):
            module.fused = was
