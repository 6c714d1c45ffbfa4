"""The residual algebra, and the placements that are rows of it.

With sub-layer F, block l of L (1-based),

    x <- C( a_l x + b_l B( F( A(x) / s_l ) ) )

A is the `in` norm, B the `out` norm, C the residual norm (`res`), each a norm or nothing; a_l, b_l and s_l
are numbers. A placement of this kind is one row of ROWS.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from normlab.errors import ConfigError, unknown
from normlab.options import option
from normlab.placements.base import INNER_SITES, MakeNorm, Placement, register_placement
from normlab.source import code_of

if TYPE_CHECKING:
    from torch import nn

Schedule = Callable[[int, int], float]
"""A number for block l of L, both counted from 1."""


def one(layer: int, depth: int) -> float:
    """The number 1 at every layer: no factor at all."""
    return 1.0


def fourth_root(layer: int, depth: int) -> float:
    """(2L)^(1/4): DeepNorm's alpha."""
    return (2 * depth) ** 0.25


def root_of_layer(layer: int, depth: int) -> float:
    """sqrt(l)."""
    return math.sqrt(layer)


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

    @property
    def factors(self) -> tuple[Schedule, Schedule, Schedule]:
        """The three schedules."""
        return self.skip, self.branch, self.shrink


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
    Row(
        name="peri",
        formula="x <- x + N(F(N(x)))",
        source="Kim et al. 2025, arXiv:2502.02732 (Peri-LN); its norm on the embeddings is embedding_norm=true",
        init="gpt2",
        attn=SubLayer(norms=("in", "out")),
        mlp=SubLayer(norms=("in", "out")),
        final_norm=True,
    ),
    Row(
        name="sandwich",
        formula="x <- x + N(F(N(x)))",
        source="Ding et al. 2021, arXiv:2105.13290 (CogView); peri by its older name, not N(x + F(N(x)))",
        init="gpt2",
        attn=SubLayer(norms=("in", "out")),
        mlp=SubLayer(norms=("in", "out")),
        final_norm=True,
    ),
    Row(
        name="res_post",
        formula="x <- x + N(F(x))",
        source="Liu et al. 2021, arXiv:2111.09883 (Swin v2); OLMo 2, arXiv:2501.00656, with model.qk_norm=full",
        init="gpt2",
        attn=SubLayer(norms=("out",)),
        mlp=SubLayer(norms=("out",)),
        final_norm=True,
    ),
    Row(
        name="deepnorm",
        formula="x <- N(a x + F(x)), a = (2L)^(1/4)",
        source="Wang et al. 2022, arXiv:2203.00555, of decoders alone",
        init="deepnorm",
        attn=SubLayer(norms=("res",), skip=fourth_root),
        mlp=SubLayer(norms=("res",), skip=fourth_root),
    ),
    Row(
        name="lns",
        formula="x <- x + F(N(x) / sqrt(l))",
        source="Sun et al. 2025, arXiv:2502.05795 (LayerNorm Scaling), a fixed factor",
        init="gpt2",
        attn=SubLayer(norms=("in",), shrink=root_of_layer),
        mlp=SubLayer(norms=("in",), shrink=root_of_layer),
        final_norm=True,
    ),
    Row(
        name="sub_ln",
        formula="x <- x + W_out N(heads(N(x))); x <- x + W_down N(act(W_up N(x)))",
        source="Wang et al. 2022, arXiv:2210.06423 (Magneto)",
        init="sub_ln",
        attn=SubLayer(norms=("in", "attn_inner")),
        mlp=SubLayer(norms=("in", "mlp_inner")),
        final_norm=True,
    ),
    Row(
        name="hybridnorm",
        formula="h <- N(x + A_qkv(x)), a norm on each head's q, k and v; x <- h + M(h)",
        source="Zhuo et al. 2025, arXiv:2503.04598 (HybridNorm, without its star)",
        init="smallinit_scaled",
        attn=SubLayer(norms=("q", "k", "v", "res")),
        mlp=SubLayer(),
        final_norm=True,
    ),
)


@dataclass(kw_only=True, slots=True)
class AlgebraPlacement(Placement):
    """A placement that is a row of the algebra."""

    embedding_norm: bool | None = option(None, absent=None)
    """A norm on the embeddings, before the first block; null for what the row has."""
    final_norm: bool | None = option(None, absent=None)
    """A norm on the stream, before the head; null for what the row has."""

    def validate(self) -> None:
        """Refuse switches without effect.

        Raises:
            ConfigError: One is set to what the row has anyway.
        """
        for name in ("embedding_norm", "final_norm"):
            asked, has = getattr(self, name), getattr(self.row, name)
            if asked == has:
                raise ConfigError(
                    f"placement.{name}={str(asked).lower()}: has no effect, {self.name} has "
                    f"{'one' if has else 'none'} already; leave it out"
                )

    @property
    def row(self) -> Row:
        """The row of this name."""
        return _ROWS_BY_NAME[self.name]

    @property
    def init_rule(self) -> str:
        """The init rule that the row belongs to."""
        return self.row.init

    def definition(self, depth: int) -> str:
        """The row, its factors as numbers, and the wiring: other rows of the same table do not count."""
        from normlab.placements import wiring

        sub_layers = [
            (sub.norms, [[factor(layer, depth) for layer in range(1, depth + 1)] for factor in sub.factors])
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
        asked = self.row.embedding_norm if self.embedding_norm is None else self.embedding_norm
        return make_norm(width) if asked else None

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """The final norm, or nothing."""
        asked = self.row.final_norm if self.final_norm is None else self.final_norm
        return make_norm(width) if asked else None


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
    register_placement(AlgebraPlacement(name=row.name), same=_ROWS_BY_NAME.get(row.name) == row)
    _ROWS_BY_NAME[row.name] = row


for _row in ROWS:
    register_row(_row)
