"""The residual algebra: placements that are rows of data. `table.py` holds the rows.

With sub-layer F, block l of L (1-based),

    x <- C( a_l x + r g b_l B( F( A(x) / s_l ) ) )

A is the `input` norm, B the `output` norm, C the `residual` norm, each a norm or nothing; a_l, b_l and s_l
are numbers, g a learned number, a learned vector or nothing, and r a number that grows to 1 in training, or nothing. A
placement of this kind is one `Row`. With `residual_affine` each of the two terms t of the sum becomes (t + b) s, with a
learned shift b and scale s per channel.

Shapes: B batch, T time, D width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Self

from normlab.base.errors import ConfigError, did_you_mean
from normlab.base.options import option
from normlab.base.plugins import check_formula, check_initial_values
from normlab.catalogue.placements.base import (
    INNER_SITES,
    NORM_UPDATE,
    SWITCHES,
    MakeNorm,
    Placement,
    no_effect_without_norm,
    register_placement,
)
from normlab.catalogue.placements.formula_rewriting import with_affine, with_factor
from normlab.catalogue.sites import of_sub_layer, parts_of

if TYPE_CHECKING:
    from torch import nn

    from normlab.catalogue.norms.base import NormConfig

Schedule = Callable[[int, int], float]
"""A number for block l of L, counted from 1."""


def unit_factor(layer: int, depth: int) -> float:
    """Return 1: no factor in any block."""
    return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SubLayer:
    """How one sub-layer is added to the stream."""

    norms: tuple[str, ...] = ()
    """Sites with a norm: `input`, `output`, `residual`, and those inside the sub-layer (`base.INNER_SITES`)."""
    skip: Schedule = unit_factor
    """a_l, the factor on the stream."""
    branch: Schedule = unit_factor
    """b_l, the factor on the output of the sub-layer, after the `output` norm."""
    shrink: Schedule = unit_factor
    """s_l, the divisor of the input of the sub-layer, after the `input` norm."""
    scale: Schedule | None = None
    """Initial value of g, the learned factor on the output; None without one."""
    scale_per_channel: bool = False
    """Whether g has one factor per channel."""
    out_gain: Schedule | None = None
    """Initial gain of the `output` norm; None for the norm's own."""

    @property
    def factors(self) -> tuple[Schedule, Schedule, Schedule]:
        """The schedules of a, b and s."""
        return self.skip, self.branch, self.shrink


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyBlocks:
    """The sub-layers of the first blocks, if they differ from those of the other blocks."""

    blocks: Callable[[int], int]
    """Number of these blocks, given L."""
    condition: str
    """The condition in the row's formula that selects these blocks."""
    attn: SubLayer = field(default_factory=SubLayer)
    mlp: SubLayer = field(default_factory=SubLayer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Another form of a row, with its own formula and first blocks."""

    formula: str
    early: EarlyBlocks | None = None
    """None if all blocks are alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A placement of the algebra: data, not code. Fields without a description are those of `Placement`."""

    name: str
    title: str = ""
    formula: str
    """The update of one block, in the notation of `Placement.formula`."""
    source: str
    init: str
    init_source: str = ""
    version: int = 1
    attn: SubLayer = field(default_factory=SubLayer)
    mlp: SubLayer = field(default_factory=SubLayer)
    early: EarlyBlocks | None = None
    """The first blocks, if they differ from the others."""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    """Other forms of the row, by the option value that selects them."""
    kind: type[AlgebraPlacement] | None = None
    """The class with the row's options; by default `EarlyPlacement` for a row with `early`, else `AlgebraPlacement`."""
    head_scale: bool = False
    shared_scale: bool = False
    """Whether both sub-layers of a block share g."""
    embedding_norm: bool = False
    """A norm on the embeddings, before the first block."""
    final_norm: bool = False
    """A norm on the stream, before the LM head."""
    incompatible_inits: Mapping[str, str] = field(default_factory=dict)
    initial_values: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    """As `Placement.note`, and other names of the placement."""
    parameters: str = "0"
    equals: str = ""
    laws: tuple[str, ...] = ()
    pitfalls: tuple[str, ...] = ()

    @property
    def embedding_formula(self) -> str:
        return NORM_UPDATE if self.embedding_norm else ""

    @property
    def head_formula(self) -> str:
        return NORM_UPDATE if self.final_norm else ""

    @property
    def all_sub_layers(self) -> list[SubLayer]:
        """All sub-layers, including those of the first blocks and of the variants."""
        sub_layers: list[SubLayer] = []
        for part in (self, self.early, *(variant.early for variant in self.variants.values())):
            # Few rows, and not all of their variants, have other first blocks.
            if part is not None:
                sub_layers += [part.attn, part.mlp]
        return sub_layers


@dataclass(frozen=True, slots=True)
class _Multiple:
    """A schedule times a number. Two of them are equal if both parts are, unlike two lambdas."""

    schedule: Schedule
    factor: float

    def __call__(self, layer: int, depth: int) -> float:
        return self.factor * self.schedule(layer, depth)


def _of_row(name: str) -> Any:
    """Return a property with the value of the row's field `name`."""
    return property(lambda placement: getattr(placement.row, name))


@dataclass(kw_only=True, slots=True)
class AlgebraPlacement(Placement):
    branch_warmup: int | None = option(
        None, at_least=1, at_most=10**9,
        help="Updates W over which branches grow from 0 to 1: after t updates the branch of block l has a factor "
        "min(t / (W l / L), 1) (ProRes, arXiv:2603.05369).",
    )  # fmt: skip
    branch_factor: float = option(
        1.0, above=0, is_later=True,
        help="m in x = x + m F(N(x)), a constant factor on what each sub-layer adds; Granite calls it "
        "residual_multiplier.",
    )  # fmt: skip
    residual_affine: bool = option(
        False, is_later=True,
        help="A learned shift b and scale s per channel on both terms of each sum, x = (x + b1) s1 + (F(N(x)) + b2) "
        "s2, behind all norms and factors on these terms (ZAYA1, but for those on its embeddings).",
    )  # fmt: skip

    version = _of_row("version")
    title = _of_row("title")

    @property
    def formula(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        formula = self.row.formula
        if self.branch_factor != 1:
            formula = with_factor(formula, f"{self.branch_factor}")
        if self.branch_warmup is not None:
            formula = with_factor(formula, f"min(t / ({self.branch_warmup} * l / L), 1)")
        if self.residual_affine:
            formula = with_affine(formula)
        return formula

    source = _of_row("source")
    init = _of_row("init")
    init_source = _of_row("init_source")
    incompatible_inits = _of_row("incompatible_inits")
    note = _of_row("note")
    equals = _of_row("equals")
    laws = _of_row("laws")
    pitfalls = _of_row("pitfalls")
    embedding_formula = _of_row("embedding_formula")
    head_formula = _of_row("head_formula")

    @property
    def initial_values(self) -> Mapping[str, str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        values = self.row.initial_values
        if not self.residual_affine:
            return values
        of_affine: dict[str, str] = {}
        for sub_layer, term in itertools.product(("attn", "mlp"), ("skip", "branch")):
            of_affine[f"wiring.{sub_layer}.{term}_bias"] = "[0] * D"
            of_affine[f"wiring.{sub_layer}.{term}_scale"] = "[1] * D"
        return {**values, **of_affine}

    @property
    def parameters(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        if not self.residual_affine:
            return self.row.parameters
        # Each of two sub-layers has two terms, and each term a shift and a scale.
        return f"{self.row.parameters} + 8 * L * D".removeprefix("0 + ")

    def check_norm(self, site: str, norm: NormConfig) -> None:
        sets_gains = any(sub.out_gain is not None for sub in self.row.all_sub_layers)
        if site in parts_of("output") and sets_gains and not norm.has_gain:
            raise ConfigError(
                f"norm={norm.name}: has no gain per channel, but placement={self.name} sets the initial gain; "
                f"choose a norm with norm.gain=true, or placement=peri"
            )

    def reject_unused_options(self, norm: NormConfig, depth: int) -> None:
        """As the base class; with norm=none also reject an option that changes only norms."""
        super(AlgebraPlacement, self).reject_unused_options(norm, depth)
        if not norm.is_nowhere:
            return
        for changed in fields(self):
            if changed.name in ("name", *RESIDUAL_OPTIONS, *SWITCHES):
                continue
            default = replace(self, **{changed.name: changed.default})
            if self != default and _without_norms(self, depth) == _without_norms(default, depth):
                raise no_effect_without_norm(f"placement.{changed.name}={getattr(self, changed.name)}", norm)

    @property
    def row(self) -> Row:
        """The row of this name, as changed by the options."""
        return ROWS_BY_NAME[self.name]

    @property
    def has_standard_matrices(self) -> bool:
        return True

    @property
    def is_plain_sum(self) -> bool:
        if self.branch_warmup is not None or self.branch_factor != 1 or self.residual_affine:
            return False
        # By identity: a schedule that is 1 in some blocks, or at some depth, is a factor all the same.
        return all(
            sub.scale is None and sub.skip is sub.branch is sub.shrink is unit_factor for sub in self.row.all_sub_layers
        )

    @property
    def has_free_branches(self) -> bool:
        return self.is_plain_sum and not any({"output", "residual"} & set(sub.norms) for sub in self.row.all_sub_layers)

    def sub_layers(self, layer: int, depth: int) -> tuple[SubLayer, SubLayer]:
        """Return attention and MLP of block `layer`, counted from 1."""
        row = self.row
        attn, mlp = row.attn, row.mlp
        if row.early is not None and layer <= row.early.blocks(depth):
            attn, mlp = row.early.attn, row.early.mlp
        return self._with_branch_factor(attn), self._with_branch_factor(mlp)

    def _with_branch_factor(self, sub: SubLayer) -> SubLayer:
        if self.branch_factor == 1:
            return sub
        return replace(sub, branch=_Multiple(sub.branch, self.branch_factor))

    def kept_numbers(self, depth: int, width: int) -> int:
        # The scale of each of the two terms of a sub-layer's sum keeps what it multiplies.
        return 4 * width if self.residual_affine else 0

    def layers(self, depth: int) -> list[tuple[SubLayer, SubLayer]]:
        return [self.sub_layers(layer, depth) for layer in range(1, depth + 1)]

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        from normlab.catalogue.placements.wiring import Residual, Sequential

        # A model counts blocks from 0, and schedules from 1, as papers do.
        of_attn, of_mlp = self.sub_layers(layer + 1, depth)
        warmup, affine = self.branch_warmup, self.residual_affine
        attn = Residual(of_attn, "attn", layer + 1, depth, width, make_norm, warmup, affine)
        mlp = Residual(of_mlp, "mlp", layer + 1, depth, width, make_norm, warmup, affine)
        # One parameter under two names, so that it gets the gradients of both sub-layers.
        if self.row.shared_scale:
            mlp.scale = attn.scale
        return Sequential(attn, mlp)

    # The row's fields build these norms, not its formulas, so that `verify` compares two independent statements.
    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        return make_norm(width, "embedding") if self.row.embedding_norm else None

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        return make_norm(width, "final") if self.row.final_norm else None

    def wiring_sites(self, layer: int, depth: int) -> tuple[str, ...]:
        sites: list[str] = []
        for sub, sub_layer in zip(self.sub_layers(layer + 1, depth), ("attn", "mlp"), strict=True):
            for site in WIRING_SITES:
                if site in sub.norms:
                    sites.append(of_sub_layer(site, sub_layer))
        return tuple(sites)

    def inner_sites(self, layer: int, depth: int) -> frozenset[str]:
        attn, mlp = self.sub_layers(layer + 1, depth)
        return frozenset(attn.norms + mlp.norms) & set(INNER_SITES)

    def head_scale(self) -> bool:
        return self.row.head_scale


@dataclass(kw_only=True, slots=True)
class EarlyPlacement(AlgebraPlacement):
    """A row whose first blocks differ from the others."""

    early_blocks: int | None = option(
        None, "Number of early blocks, from the first; null for the row's number.", at_least=0
    )

    def without_defaults(self, depth: int, width: int) -> Self:
        """As the base class; also unset `early_blocks` if it is the row's number."""
        reduced = super(EarlyPlacement, self).without_defaults(depth, width)
        if self.early_blocks == self.early.blocks(depth):
            return replace(reduced, early_blocks=None)
        return reduced

    def reject_unused_options(self, norm: NormConfig, depth: int) -> None:
        """As the base class; also reject `early_blocks` above the depth."""
        if self.early_blocks is not None and self.early_blocks > depth:
            raise ConfigError(
                f"placement.early_blocks={self.early_blocks}: is more than model.depth={depth}; "
                f"choose at most {depth}, or raise model.depth"
            )
        super(EarlyPlacement, self).reject_unused_options(norm, depth)

    @property
    def early(self) -> EarlyBlocks:
        """The row's early blocks, before `early_blocks` changes their number."""
        early = ROWS_BY_NAME[self.name].early
        assert early is not None
        return early

    @property
    def row(self) -> Row:
        row, blocks = ROWS_BY_NAME[self.name], self.early_blocks
        if blocks is None:
            return row
        # The formula changes with the blocks, so that `verify` still compares two statements.
        condition = f"l <= {blocks}"
        early = replace(self.early, blocks=lambda depth: blocks, condition=condition)
        return replace(row, formula=row.formula.replace(self.early.condition, condition), early=early)


@dataclass(kw_only=True, slots=True)
class FirstBlockPlacement(AlgebraPlacement):
    """A row whose first block differs between public implementations."""

    first_block: str = option(
        "attention_pre", choices=("attention_pre", "pre", "same"),
        help="The first block. `attention_pre`: pre-norm attention and the MLP N(x + M(N(x))); `pre`: pre-norm for "
        "both; `same`: like all other blocks.",
    )  # fmt: skip

    @property
    def row(self) -> Row:
        row = ROWS_BY_NAME[self.name]
        variant = row.variants.get(self.first_block)
        if variant is None:
            return row
        return replace(row, formula=variant.formula, early=variant.early)


@dataclass(kw_only=True, slots=True)
class DepthScaledPlacement(AlgebraPlacement):
    """A row whose output norms start with c times the row's initial gain."""

    c_attn: float = option(
        0.283, "c of the output norm of attention: 0.283 as reported for Pangu Ultra; 1 in Arcee Trinity.", above=0
    )
    c_mlp: float = option(
        0.432, "c of the output norm of the MLP: 0.432 as reported for Pangu Ultra; 1 in Arcee Trinity.", above=0
    )

    @property
    def row(self) -> Row:
        row = ROWS_BY_NAME[self.name]
        return replace(row, attn=_scaled_start(row.attn, self.c_attn), mlp=_scaled_start(row.mlp, self.c_mlp))


def _scaled_start(sub: SubLayer, c: float) -> SubLayer:
    start = sub.out_gain
    assert start is not None
    return replace(sub, out_gain=lambda layer, depth: c * start(layer, depth))


ROWS_BY_NAME: dict[str, Row] = {}

WIRING_SITES = ("input", "output", "residual")
RESIDUAL_OPTIONS = ("branch_warmup", "branch_factor", "residual_affine")
"""The options of the sums, which each row has, and which have an effect also without norms."""
SITES = {"attn": (*WIRING_SITES, "q", "k", "v", "inner_attn"), "mlp": (*WIRING_SITES, "inner_mlp")}
"""The sites that a sub-layer may have norms at."""


def register_row(row: Row) -> None:
    """Register a row as a placement.

    Raises:
        ConfigError: An unknown site, an `out_gain` without an `output` norm, a `formula` that is not a text,
            `initial_values` that is not a mapping, or another row of the same name.
    """
    # `all_sub_layers` has attention and the MLP in turn.
    for kind, sub in zip(itertools.cycle(SITES), row.all_sub_layers, strict=False):
        for site in sub.norms:
            if site not in SITES[kind]:
                sites = "; ".join(f"{owner} has {', '.join(known)}" for owner, known in SITES.items())
                hint = did_you_mean(site, SITES[kind])
                raise ConfigError(f"placement {row.name!r}: unknown site {site!r} of {kind}{hint}: {sites}")
        if sub.out_gain is not None and "output" not in sub.norms:
            raise ConfigError(f"placement {row.name!r}: out_gain has no effect without a norm at site 'output'; add it")
    check_formula("placement", row.name, "the row", row.formula)
    check_initial_values("placement", row.name, row.initial_values)
    options = row.kind or (AlgebraPlacement if row.early is None else EarlyPlacement)
    register_placement(options(name=row.name), same=ROWS_BY_NAME.get(row.name, row) == row)
    ROWS_BY_NAME[row.name] = row


def _without_norms(placement: AlgebraPlacement, depth: int) -> list[SubLayer]:
    """Return the sub-layers of all blocks without their norms."""
    sub_layers = itertools.chain.from_iterable(placement.layers(depth))
    return [replace(sub, norms=()) for sub in sub_layers]
