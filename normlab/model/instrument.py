"""Instrumentation: an open `Collector` keeps the tensors passed to `observe`, of which `compute` makes statistics.

    with Collector(selection) as collector:
        y = segment(x)                      # calls observe("attn", "", branch) and the like
    statistics = compute(selection, collector.observations)

Without an open collector `observe` does nothing, so the plain training step runs the same code. This works eager,
compiled and under vmap: the function that opens the collector returns the observed tensors. `tap` gives the gradient of
the stream in the same places, without a hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.catalogue.statistics.registry import STATISTICS

StatisticsSelection = Mapping[str, tuple[tuple[str, Any], ...]]
"""For each kind of tensor (a key of `statistic.OF`) the names and functions of the statistics computed from it."""


def select(names: frozenset[str]) -> StatisticsSelection:
    """Return the statistics of these names that are computed from observed tensors."""
    selection: dict[str, tuple[tuple[str, Any], ...]] = {}
    for name, statistic in STATISTICS.items():
        if name in names and statistic.value is not None:
            selection[statistic.of] = (*selection.get(statistic.of, ()), (name, statistic.value))
    return selection


class Observation(NamedTuple):
    kind: str
    site: str
    tensors: tuple[Any, ...]
    """Without gradient; numbers stay numbers."""
    layer: int = 0


class Collector:
    """Keeps the observed tensors that the selected statistics need while it is open. Collectors do not nest."""

    def __init__(self, selection: StatisticsSelection):
        self.selection = selection
        self.observations: list[Observation] = []
        self._calls: dict[tuple[str, str], int] = {}

    def __enter__(self) -> Collector:
        global _collector
        _collector = self
        return self

    def __exit__(self, *error: object) -> None:
        global _collector
        _collector = None

    def add(self, kind: str, site: str, *tensors: Any) -> None:
        if kind not in self.selection:
            return
        # A norm that runs a second time in one segment gets a numbered site.
        calls = self._calls[kind, site] = self._calls.get((kind, site), 0) + 1
        if calls > 1:
            site = f"{site}#{calls}"
        # Without gradient, so that a kept tensor keeps no graph of the operations before it.
        kept: list[Any] = []
        for x in tensors:
            if isinstance(x, Tensor):
                x = x.detach()
            kept.append(x)
        self.observations.append(Observation(kind, site, tuple(kept)))


_collector: Collector | None = None


def observe(kind: str, site: str, *tensors: Any) -> None:
    """Offer tensors to the open collector, if there is one.

    Args:
        kind: The kind of the tensors, a key of `statistic.OF`.
        site: Distinguishes several tensors of this kind in a segment; empty if there is one.
        tensors: The arguments of that kind's statistics; for attention queries, keys, and the scale and the softcap of
            their product.
    """
    if _collector is not None:
        _collector.add(kind, site, *tensors)


def observe_streams(stream: Any) -> None:
    """Offer each of several streams, if they have one shape, and their sum; its site is its number, from 0."""
    if _collector is None or "streams" not in _collector.selection:
        return
    # Several streams are one tensor (B, T, n, D), or a tuple of tensors (B, T, D).
    streams = stream
    if isinstance(stream, Tensor) and stream.dim() == 4:
        streams = stream.unbind(-2)
    if not isinstance(streams, tuple) or len({x.shape for x in streams}) > 1:
        return
    total = torch.stack(streams).sum(0)
    for number, x in enumerate(streams):
        observe("streams", str(number), x, total)


class InstrumentedNorm(nn.Module):
    """Mixin of every norm of a model: observes the norm's input and output."""

    site: str = ""
    """The norm's name in its segment, such as `attn.in`, under which its statistics are recorded."""
    placed_at: str = ""
    """The site where it stands, a key of `sites.SITES`."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        observe("norm", self.site, x, y)
        return y


def instrument(norm: nn.Module, site: str) -> nn.Module:
    """Make a norm at a site (`sites.SITES`) observe its input and output; its parameters keep their names."""
    # A norm inside another module would give its parameters a longer name, so the class is replaced.
    if not isinstance(norm, nn.Identity | InstrumentedNorm):  # norm=none builds an identity
        norm.__class__ = _instrumented_class(type(norm))
    if isinstance(norm, InstrumentedNorm):
        norm.placed_at = site
    return norm


@cache
def _instrumented_class(norm: type[nn.Module]) -> type[nn.Module]:
    return type(norm.__name__, (InstrumentedNorm, norm), {"__module__": norm.__module__, "__doc__": norm.__doc__})


def assign_sites(segment: nn.Module) -> None:
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
    if isinstance(stream, Tensor):
        tapped = stream.view_as(stream)
        return tapped, tapped
    # The main stream is the first of several, and comes before the tensors that blocks share.
    main, tapped = tap(stream[0])
    return (main, *stream[1:]), tapped


def main_stream(stream: Any) -> Tensor:
    """Return the stream that the papers call x: the first, if there are several."""
    if isinstance(stream, Tensor):
        return stream
    return main_stream(stream[0])
