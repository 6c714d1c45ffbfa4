"""What a placement is, and the list of those that are known. Imports no torch.

A placement is handed to the model and answers four questions: how a block's two sub-layers are wired to the
residual stream (`wire`), which norms stand inside the sub-layers (`inner_sites`), what happens to the stream
at its two ends (`open`, `close`), and which init rule it belongs to. Almost all of the field is covered by
the residual algebra (`algebra.py`), where a placement is one row; a scheme with other wiring subclasses
`Placement` and returns its own module from `wire`.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from normlab.source import claim, code_of

if TYPE_CHECKING:
    from torch import Tensor, nn

MakeNorm = Callable[[int], "nn.Module"]
"""Builds the run's norm for a width; a placement receives it and never imports a norm."""

INNER_SITES = ("q", "k", "v", "attn_inner", "mlp_inner")
"""Sites inside the sub-layers. `q`, `k`, `v`: each head's vectors, before RoPE; `attn_inner`: the heads'
joined output, before the output projection; `mlp_inner`: the hidden activations, before the down projection."""


@dataclass(kw_only=True, slots=True)
class Placement:
    """A placement and its options. Registered under `name`, the word after `placement=`."""

    formula: ClassVar[str]
    """One sub-layer's update of the stream x."""
    source: ClassVar[str]
    init: ClassVar[str]
    """The init rule that the placement belongs to; `init=auto` takes it."""

    name: str
    """The registered name. Fixed by the placement; not to be set."""

    @property
    def init_rule(self) -> str:
        """The init rule that `init=auto` takes."""
        return self.init

    def definition(self, depth: int) -> str:
        """What defines the placement in a model of `depth` blocks; its hash is part of a run's identity."""
        return code_of(sys.modules[type(self).__module__])

    def validate(self) -> None:
        """Raise ConfigError where options contradict each other or have no effect."""

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """The wiring of block `layer` (0-based) of `depth`: a module `forward(stream, attn, mlp) -> stream`.

        `attn` and `mlp` are the sub-layers, callables from `(B, T, D)` to `(B, T, D)`. A number that
        differs between layers is a buffer of the module, never a Python float: one compiled graph then
        serves every layer.
        """
        raise NotImplementedError

    def inner_sites(self, layer: int, depth: int) -> frozenset[str]:
        """Which of `INNER_SITES` carry a norm in block `layer`."""
        return frozenset()

    def open(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """What makes the stream from the embeddings: a module `forward(x) -> stream`, or nothing."""
        return None

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """What makes the head's input from the stream: a module `forward(stream) -> x`, or nothing."""
        return None

    def attention_scale(self, head_width: int) -> float:
        """The factor on q.k before the softmax."""
        return head_width**-0.5

    def logits(self, vocab_size: int) -> nn.Module | None:
        """What the logits pass through before the softmax: a module, or nothing."""
        return None

    def project(self, weights: Mapping[str, Tensor]) -> None:
        """Bring the parameters back to where they must lie, in place; called after init and each update.

        In a pack each tensor has a leading axis of runs: count axes from the end.
        """


def projects(placement: Placement) -> bool:
    """Whether a placement projects the parameters at all."""
    return type(placement).project is not Placement.project


PLACEMENTS: dict[str, Placement] = {}
"""By name: the placement with its default options."""


def register_placement(placement: Placement, *, same: bool | None = None) -> Placement:
    """Make a placement known by its name. A name that is taken is an error.

    Args:
        placement: With its default options.
        same: Whether what is known by that name is this very placement; if its class is, unless given.
    """
    known = PLACEMENTS.get(placement.name)
    if same is None:
        same = known is not None and type(known).__qualname__ == type(placement).__qualname__
    claim("placement", placement.name, known=known is not None, same=same)
    PLACEMENTS[placement.name] = placement
    return placement


def load_all() -> dict[str, Placement]:
    """Import every placement of the package and return the registry."""
    package = importlib.import_module("normlab.placements")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"normlab.placements.{module.name}")
    return PLACEMENTS
