"""The residual algebra, and the placements that are rows of it.

With sub-layer F, block l of L (1-based),

    x <- C( a_l x + b_l B( F( A(x) / s_l ) ) )

A is the `in` norm, B the `out` norm, C the residual norm (`res`), each a norm or nothing; a_l, b_l and s_l
are numbers. A placement of this kind is one row of ROWS.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from normlab.errors import ConfigError, unknown
from normlab.placements.base import INNER_SITES, MakeNorm, Placement, register_placement
from normlab.source import code_of

if TYPE_CHECKING:
    from torch import nn

Schedule = Callable[[int, int], float]
"""A number for block l of L, both counted from 1."""


def one(layer: int, depth: int) -> float:
    """The number 1 at every layer: no factor at all."""
    return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SubLayer:
    """How one sub-layer joins the stream."""

    norms: tuple[str, ...] = ()
    """Sites that carry a norm: `in`, `out`, `res`, and those inside the sub-layer (`base.INNER_SITES`)."""
    skip: Schedule = one
    """a_l, the factor on the stream."""
    branch: Schedule = one
    """b_l, the factor on the sub-layer's (normed) output."""
    shrink: Schedule = one
    """s_l, the divisor of the sub-layer's (normed) input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A placement in the algebra: data, not code."""

    name: str
    formula: str
    source: str
    init: str
    attn: SubLayer = field(default_factory=SubLayer)
    mlp: SubLayer = field(default_factory=SubLayer)
    embedding_norm: bool = False
    """A norm on the embeddings, before the first block."""
    final_norm: bool = False
    """A norm on the stream, before the head."""


ROWS: tuple[Row, ...] = (
    Row(
        name="pre",
        formula="x <- x + F(N(x))",
        source="Xiong et al. 2020, arXiv:2002.04745, section 3; GPT-2",
        init="gpt2_scaled",
        attn=SubLayer(norms=("in",)),
        mlp=SubLayer(norms=("in",)),
        final_norm=True,
    ),
    Row(
        name="post",
        formula="x <- N(x + F(x))",
        source="Vaswani et al. 2017, arXiv:1706.03762, section 3.1",
        init="xavier",
        attn=SubLayer(norms=("res",)),
        mlp=SubLayer(norms=("res",)),
    ),
)


@dataclass(kw_only=True, slots=True)
class AlgebraPlacement(Placement):
    """A placement that is a row of the algebra."""

    @property
    def row(self) -> Row:
        """The row of this name."""
        return _ROWS_BY_NAME[self.name]

    @property
    def init_rule(self) -> str:
        """The init rule that the row belongs to."""
        return self.row.init

    def definition(self) -> str:
        """The row and the wiring: other rows of the same table do not count."""
        from normlab.placements import wiring

        sub_layers = [
            (sub.norms, *(inspect.getsource(schedule) for schedule in (sub.skip, sub.branch, sub.shrink)))
            for sub in (self.row.attn, self.row.mlp)
        ]
        return repr((sub_layers, self.row.embedding_norm, self.row.final_norm)) + code_of(wiring)

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """The two sub-layers, one after the other, each by the algebra."""
        from normlab.placements.wiring import Residual, Sequential

        return Sequential(*(Residual(sub, layer + 1, depth, width, make_norm) for sub in (self.row.attn, self.row.mlp)))

    def inner_sites(self, layer: int, depth: int) -> frozenset[str]:
        """The row's sites that lie inside the sub-layers."""
        return frozenset(self.row.attn.norms + self.row.mlp.norms) & set(INNER_SITES)

    def open(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """The embedding norm, or nothing."""
        return make_norm(width) if self.row.embedding_norm else None

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """The final norm, or nothing."""
        return make_norm(width) if self.row.final_norm else None


_ROWS_BY_NAME: dict[str, Row] = {}

SITES = ("in", "out", "res", *INNER_SITES)


def register_row(row: Row) -> None:
    """Make a row known as a placement.

    Raises:
        ConfigError: A site that there is not, or another row under the same name.
    """
    for site in (*row.attn.norms, *row.mlp.norms):
        if site not in SITES:
            raise ConfigError(f"placement {row.name!r}: " + unknown("site", site, SITES))
    placement, known = AlgebraPlacement(name=row.name), _ROWS_BY_NAME.get(row.name)
    if known is not None:
        # The same file, run again, says the same thing.
        before = placement.definition()
        _ROWS_BY_NAME[row.name] = row
        if placement.definition() != before:
            _ROWS_BY_NAME[row.name] = known
            raise ConfigError(f"placement {row.name!r} is defined twice: give the new one another name")
    _ROWS_BY_NAME[row.name] = row
    register_placement(placement)


for _row in ROWS:
    register_row(_row)
