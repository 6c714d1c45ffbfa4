"""Computes the probe statistics (entries of tier `probe` in `catalogue/statistics/registry.py`).

A probe measures curvature, the effect of each block, and signal propagation. It runs eagerly, in the weights' own
precision, in evaluation mode, with unfused attention, which alone can be differentiated twice; afterwards the model is
unchanged.

Shapes: B examples, T time, D width, L blocks, N tokens, K statistics.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normlab.catalogue.optimizers.options import OptimConfig
from normlab.catalogue.statistics.profiles import StatisticColumn
from normlab.model.attention import attend
from normlab.model.gpt import GPT
from normlab.model.instrument import main_stream, tap
from normlab.model.runner import attention_by
from normlab.training.measure.core import Measurement, parameter_column

MOST_PRODUCTS = 20
"""Most products of the Hessian with a vector, for each eigenvalue."""
TOLERANCE = 1e-3
"""The relative change of the eigenvalue at which the iteration stops."""
JACOBIAN_VECTORS = 4
"""Gaussian vectors of `jac_gain`."""

Vector = list[Tensor]


def adam_preconditioner(
    options: OptimConfig, squares: Mapping[str, Tensor], count: Tensor | int
) -> dict[str, Tensor] | None:
    """Return Adam's sqrt(v^) + eps by parameter; None for other optimisers and before the first update.

    Args:
        squares: v by parameter, as the optimiser keeps it.
    """
    if options.adam_constants is None or not count:
        return None
    _, beta2, eps = options.adam_constants
    correction = 1 - beta2 ** float(count)
    return {name: (square / correction).sqrt() + eps for name, square in squares.items()}


@dataclass(slots=True)
class Probe:
    model: GPT
    names: frozenset[str]
    tokens_BT: Tensor
    targets_BT: Tensor
    preconditioner: Mapping[str, Tensor] | None = None
    """Adam's sqrt(v^) + eps by parameter; None leaves `sharpness_pre` out."""

    def __call__(self) -> Measurement:
        values: dict[StatisticColumn, Tensor] = {}
        training = self.model.training
        self.model.eval()
        try:
            with attention_by(self.model, attend):
                of_streams = {"layer_drop": self._layer_drop, "angular": self._angular, "erank": self._erank}
                if self.names & of_streams.keys():
                    with torch.no_grad():
                        streams = self._streams()
                        for name, measure in of_streams.items():  # in this order, which is that of the columns
                            if name in self.names:
                                values |= measure(streams)
                if "jac_gain" in self.names:
                    values |= self._jacobian_gain()
                values |= self._matrix_norms()
                values |= self._sharpness()
        finally:
            self.model.train(training)
        if not values:
            return Measurement((), torch.zeros(0))
        numbers = [value.to(torch.float32).cpu() for value in values.values()]
        return Measurement(tuple(values), torch.stack(numbers))

    def _loss(self, stream: Any) -> Tensor:
        return F.cross_entropy(self.model.head(stream).flatten(0, 1), self.targets_BT.flatten())

    def _streams(self) -> list[Any]:
        """Return the stream that enters each block and the head."""
        streams = [self.model.embed(self.tokens_BT)]
        for block in self.model.blocks:
            streams.append(block(streams[-1]))
        return streams

    def _layer_drop(self, streams: list[Any]) -> dict[StatisticColumn, Tensor]:
        full_loss, values = self._loss(streams[-1]), dict[StatisticColumn, Tensor]()
        for layer, stream in enumerate(streams[:-1], start=1):
            for block in self.model.blocks[layer:]:
                stream = block(stream)
            values[StatisticColumn("layer_drop", "", layer)] = self._loss(stream) - full_loss
        return values

    def _angular(self, streams: list[Any]) -> dict[StatisticColumn, Tensor]:
        units = [F.normalize(main_stream(stream).double(), dim=-1) for stream in streams]
        values: dict[StatisticColumn, Tensor] = {}
        for distance in range(1, len(units)):
            for layer, (a, b) in enumerate(zip(units, units[distance:], strict=False), start=1):
                cosine = (a * b).sum(-1).clamp(-1, 1)
                values[StatisticColumn("angular", str(distance), layer)] = cosine.arccos().mean() / math.pi
        return values

    def _erank(self, streams: list[Any]) -> dict[StatisticColumn, Tensor]:
        values: dict[StatisticColumn, Tensor] = {}
        for layer, stream in enumerate(streams, start=1):
            tokens_ND = main_stream(stream).flatten(0, -2).double()
            centred_ND = tokens_ND - tokens_ND.mean(0)
            erank = torch.tensor(math.nan)
            if bool(centred_ND.isfinite().all()):  # svdvals raises otherwise
                squares = torch.linalg.svdvals(centred_ND).square()
                total = squares.sum().clamp(min=torch.finfo(squares.dtype).tiny)
                erank = torch.special.entr(squares / total).sum().exp()
            values[StatisticColumn("erank", "", layer)] = erank
        return values

    def _jacobian_gain(self) -> dict[StatisticColumn, Tensor]:
        stream, inputs = self.model.embed(self.tokens_BT), list[Tensor]()
        for block in self.model.blocks:
            stream, tapped = tap(stream)
            inputs.append(tapped)
            stream = block(stream)
        last_BTD = main_stream(stream)
        generator = torch.Generator().manual_seed(0)
        gains = torch.zeros(len(inputs), dtype=torch.float64)
        for _ in range(JACOBIAN_VECTORS):
            v_BTD = torch.randn(last_BTD.shape, generator=generator).to(last_BTD)
            grads = torch.autograd.grad(last_BTD, inputs, v_BTD, retain_graph=True)
            square = v_BTD.square().sum()
            # With Gaussian v, the mean of |J^T v|^2 / |v|^2 is that of the squared singular values.
            gains += torch.stack([(g.square().sum() / square).double().cpu() for g in grads]) / JACOBIAN_VECTORS
        return {StatisticColumn("jac_gain", "", layer): gain for layer, gain in enumerate(gains, start=1)}

    @torch.no_grad()
    def _matrix_norms(self) -> dict[StatisticColumn, Tensor]:
        values, depth = dict[StatisticColumn, Tensor](), len(self.model.blocks)
        for name, p in self.model.named_parameters():
            if p.dim() == 2 and self.names & {"spec_norm", "stable_rank"}:
                norm = torch.tensor(math.nan)
                if bool(p.isfinite().all()):  # matrix_norm raises otherwise
                    norm = torch.linalg.matrix_norm(p, ord=2)
                values[parameter_column(name, depth, "spec_norm")] = norm
                stable_rank = torch.linalg.matrix_norm(p).square() / norm.square()
                values[parameter_column(name, depth, "stable_rank")] = stable_rank
        return {column: value for column, value in values.items() if column.statistic in self.names}

    def _sharpness(self) -> dict[StatisticColumn, Tensor]:
        preconditioners: dict[str, Mapping[str, Tensor] | None] = {"sharpness": None}
        if self.preconditioner is not None:
            preconditioners["sharpness_pre"] = self.preconditioner
        names = [name for name in preconditioners if name in self.names]
        if not names:
            return {}
        named = dict(self.model.named_parameters())
        params: Vector = list(named.values())
        loss = self._loss(self._streams()[-1])
        grads = torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True)
        values: dict[StatisticColumn, Tensor] = {}
        for name in names:
            # With P = diag(preconditioner), that of P^-1/2 H P^-1/2: a symmetric operator, with the eigenvalues of
            # P^-1 H.
            scale = None
            preconditioner = preconditioners[name]
            if preconditioner:
                scale = [preconditioner[parameter].rsqrt() for parameter in named]

            def product(v: Vector, scale: Vector | None = scale) -> Vector:
                v = _scaled(v, scale)
                v = list(torch.autograd.grad(grads, params, v, retain_graph=True, materialize_grads=True))
                return _scaled(v, scale)

            values[StatisticColumn(name, "", len(self.model.blocks) + 1)] = torch.tensor(
                largest_eigenvalue(product, params)
            )
        return values


def largest_eigenvalue(product: Callable[[Vector], Vector], like: Vector, most: int = MOST_PRODUCTS) -> float:
    """Return the largest eigenvalue of a symmetric operator, by Lanczos iteration without reorthogonalisation.

    Args:
        product: Applies the operator to a vector, which is a list of tensors.
        like: A vector, for its shapes.
    """
    generator = torch.Generator().manual_seed(0)
    v = [torch.randn(p.shape, generator=generator).to(p.detach()) for p in like]
    norm = _norm(v)
    v = [tensor * (1 / norm) for tensor in v]
    previous, beta = [torch.zeros_like(p) for p in v], 0.0
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    eigenvalue = math.nan
    for _ in range(min(most, sum(p.numel() for p in like))):
        # One step of Lanczos: w is what A v has besides v and the vector before it.
        w = [tensor.detach() for tensor in product(v)]
        alpha = _dot(w, v)
        w = [a - alpha * b - beta * c for a, b, c in zip(w, v, previous, strict=True)]
        diagonal.append(alpha)
        last, eigenvalue = eigenvalue, _largest_tridiagonal(diagonal, off_diagonal)
        beta = _norm(w)
        if not math.isfinite(eigenvalue) or beta == 0 or abs(eigenvalue - last) <= TOLERANCE * abs(eigenvalue):
            break
        off_diagonal.append(beta)
        previous, v = v, [tensor * (1 / beta) for tensor in w]
    return eigenvalue


def _largest_tridiagonal(diagonal: list[float], off_diagonal: list[float]) -> float:
    matrix = np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
    if not np.isfinite(matrix).all():
        return math.nan
    return float(np.linalg.eigvalsh(matrix)[-1])


def _dot(v: Vector, w: Vector) -> float:
    # Summed on the device: the host waits for one number, and not for one of every tensor.
    return float(sum((a.double() * b.double()).sum() for a, b in zip(v, w, strict=True)))


def _norm(v: Vector) -> float:
    return math.sqrt(_dot(v, v))


def _scaled(v: Vector, scale: Vector | None) -> Vector:
    if scale is None:
        return v
    return [a * b.to(a) for a, b in zip(v, scale, strict=True)]
