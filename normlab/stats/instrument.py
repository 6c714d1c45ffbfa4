"""Instrumentation: an open `Collector` computes statistics of tensors passed to `observe`.

    with Collector(selection) as collector:
        y = segment(x)                      # calls observe("attn", "", branch) and the like
    names, values = collector.results(y.device)

Without an open collector `observe` does nothing, so the plain training step runs the same code. This works eager,
compiled (the compiled function opens the collector and returns its results) and under vmap, where each run has its own
values. `tap` gives the gradient of the stream in the same places, without a hook.

Shapes: K values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from normlab.stats.registry import STATISTICS
from normlab.stats.views import AttentionView, View

Selection = Mapping[str, tuple[tuple[str, Any], ...]]
"""For each kind of tensor (a key of `statistic.OF`) the names and functions of the statistics computed from it."""


def select(names: frozenset[str]) -> Selection:
    """Return the statistics of these names that are computed from observed tensors."""
    selection: dict[str, tuple[tuple[str, Any], ...]] = {}
    for name, statistic in STATISTICS.items():
        if name in names and statistic.value is not None:
            selection[statistic.of] = (*selection.get(statistic.of, ()), (name, statistic.value))
    return selection


class Collector:
    """Computes the selected statistics of observed tensors while open. Collectors do not nest."""

    def __init__(self, selection: Selection):
        self.selection = selection
        self._names: list[tuple[str, str]] = []
        self._values: list[Tensor] = []
        self._views: list[View] = []
        self._calls: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Collector:
        """Start to collect."""
        global _collector
        _collector = self
        return self

    def __exit__(self, *error: object) -> None:
        """Stop collecting, also after an error."""
        global _collector
        _collector = None

    def add(self, kind: str, site: str, *tensors: Any) -> None:
        """Compute the selected statistics of observed tensors."""
        statistics = self.selection.get(kind, ())
        if not statistics:
            return
        views = [AttentionView(*tensors)] if kind == "attention" else [self._view(x) for x in tensors]
        for name, value in statistics:
            # A norm that runs a second time in one segment gets a numbered site.
            calls = self._calls[name, site] = self._calls.get((name, site), 0) + 1
            self._names.append((name, f"{site}#{calls}" if calls > 1 else site))
            self._values.append(value(*views))

    def results(self, device: torch.device) -> tuple[tuple[tuple[str, str], ...], Tensor]:
        """Return (statistic, site) pairs and their values, (K,); average per-token values.

        Values of one shape are averaged together and stay adjacent: one operation for each would cost more.

        Args:
            device: The device of the model, where the result lies even if there are no values.
        """
        by_shape: dict[torch.Size, list[int]] = {}
        for index, value in enumerate(self._values):
            by_shape.setdefault(value.shape, []).append(index)
        names: list[tuple[str, str]] = []
        parts: list[Tensor] = []
        for shape, indices in by_shape.items():
            names += [self._names[index] for index in indices]
            stacked = torch.stack([self._values[index] for index in indices])
            parts.append(stacked.flatten(1).mean(-1) if shape else stacked)
        return tuple(names), torch.cat(parts) if parts else torch.zeros(0, device=device)

    def _view(self, x: Tensor) -> View:
        # The input of a norm is often the stream that was just observed: its view is reused.
        for view in self._views:
            if view.original is x:
                return view
        self._views.append(View(x))
        return self._views[-1]


_collector: Collector | None = None


def observe(kind: str, site: str, *tensors: Any) -> None:
    """Offer tensors to the open collector, if there is one.

    Args:
        kind: The kind of the tensors, a key of `statistic.OF`.
        site: Distinguishes several tensors of this kind in a segment; empty if there is one.
        tensors: The arguments of that kind's statistics; for attention queries, keys and the scale of their product.
    """
    if _collector is not None:
        _collector.add(kind, site, *tensors)


class InstrumentedNorm(nn.Module):
    """Mixin of every norm of a model: observes the norm's input and output."""

    site: str = ""
    """The norm's site in its segment."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm's own output."""
        y = super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        observe("norm", self.site, x, y)
        return y


def instrument(norm: nn.Module) -> nn.Module:
    """Make a norm observe its input and output; its parameters keep their names."""
    if not isinstance(norm, nn.Identity | InstrumentedNorm):  # norm=none builds an identity
        norm.__class__ = _instrumented_class(type(norm))
    return norm


@cache
def _instrumented_class(norm: type[nn.Module]) -> type[nn.Module]:
    return type(norm.__name__, (InstrumentedNorm, norm), {"__module__": norm.__module__, "__doc__": norm.__doc__})


def assign_sites(segment: nn.Module) -> None:
    """Set the site of every norm of a block, of the embeddings or of the head."""
    for name, module in segment.named_modules():
        if isinstance(module, InstrumentedNorm):
            module.site = norm_site(name)


def norm_site(name: str) -> str:
    """Return a norm's site from its module name: `attn.in`, `mlp.in`, `attn.q`, `close`."""
    return ".".join(part for part in name.split(".") if part not in ("wiring", "norms", "qk_norms"))


def tap(stream: Any) -> tuple[Any, Tensor]:
    """Return the stream, and the tensor in it that gets the stream's gradient at this layer.

        stream, tapped = tap(stream)                    # before each block
        torch.autograd.grad(loss, [*params, tapped])

    The tapped tensor is a view. Without the view, the gradient would include that of another layer if a placement uses
    the same tensor in both.
    """
    tapped = main_stream(stream).view_as(main_stream(stream))
    return (tapped if isinstance(stream, Tensor) else (tapped, *stream[1:])), tapped


def main_stream(stream: Any) -> Tensor:
    """Return the stream that the papers call x: the first, if there are several."""
    return stream if isinstance(stream, Tensor) else stream[0]
