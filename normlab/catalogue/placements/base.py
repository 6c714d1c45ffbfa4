"""The base class and the registry of placements. Imports no torch.

A placement defines how a block's two sub-layers are wired to the residual stream (`wire`), which norms are inside the
sub-layers (`inner_sites`), how the stream is made from the embeddings (`embed_stream`) and read by the head
(`read_stream`), and its init rule. Most placements are rows of the residual algebra (`algebra.py`). A placement with
another wiring subclasses `Placement` and returns its own module from `wire`; it may also transform queries and keys,
hidden activations and logits.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, Self

from normlab.base.errors import ConfigError
from normlab.base.options import option, override_text
from normlab.base.plugins import check_formula, check_initial_values, claim_name
from normlab.catalogue.sites import OUTSIDE_BLOCKS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normlab.catalogue.norms.base import NormConfig


class MakeNorm(Protocol):
    """Builds the norm of a site. A placement receives this function and never imports a norm."""

    def __call__(self, width: int, site: str) -> nn.Module:
        """Return the module for vectors of a width at a site, a key of `sites.SITES`."""
        ...


INNER_SITES = ("q", "k", "v", "inner_attn", "inner_mlp")
"""The sites of norms inside the sub-layers, which the sub-layers themselves make."""

NORM_UPDATE = "x = N(x)"
"""The formula of a norm at an end of the stream."""
SWITCHES = {"embedding_norm": "embedding_formula", "final_norm": "head_formula"}
"""Options that switch a norm at an end of the stream on or off, and the formula that each one replaces."""


def no_effect_without_norm(setting: str, norm: NormConfig) -> ConfigError:
    """Return the error for an option of a placement that changes only norms, with a norm that is none."""
    return ConfigError(f"{setting}: has no effect with norm={norm.name}; leave it out or choose a norm")


@dataclass(kw_only=True, slots=True)
class Placement:
    """A placement and its options. Registered under `name`, the value of `placement=`."""

    version: ClassVar[int] = 1
    """Part of a run's identity. Raise it when the placement computes something else for the same options."""
    title: ClassVar[str] = ""
    """The name in papers, which tables and figures print; empty if it is `name`. A subclass does not inherit it."""
    formula: ClassVar[str]
    """One block's update of the stream x: Python statements `name = expression` separated by "; ". `normlab verify`
    evaluates it in float64 and compares the model with it.

    `formula.py` defines the functions and the names, and `normlab list formulas` prints them. Any other name is a
    stream, a temporary variable, or a learned parameter of the wiring; `verify` rejects unknown names, and names with
    two meanings. Python's functions and torch's methods are unknown on purpose: `sum(x)` and `x.sum()` would add over
    the batch, not over the channels."""
    source: ClassVar[str]
    init: ClassVar[str]
    """The init rule of the placement, which `init=auto` selects."""
    init_source: ClassVar[str] = ""
    """Who uses the placement with this init rule, or why we chose it."""
    embedding_formula: ClassVar[str] = ""
    """Statements that make the streams from x, the embeddings; empty if x is the stream."""
    weights_formula: ClassVar[str] = ""
    """Statements before `formula`, whenever it is evaluated: numbers by which streams are read, written and mixed. The
    n streams are x (B, T, n, D)."""
    head_weights_formula: ClassVar[str] = ""
    """Statements before `head_formula`, as `weights_formula`."""
    head_formula: ClassVar[str] = ""
    """Statements that make x, the input of the head, from the streams."""
    inside: ClassVar[str] = ""
    """Statements inside the sub-layers, `q = ...`, `a = ...` and `h = ...`, and on the logits, `z = ...`
    (`formula.INSIDE`)."""
    incompatible_inits: ClassVar[Mapping[str, str]] = {}
    """Init rules that do not fit the placement, with the reason; `other` stands for all except `init`."""
    initial_values: ClassVar[Mapping[str, str]] = {}
    """Initial values of the parameters outside linear layers and norms, by name in a block (`wiring.gate`) or in the
    model (`head.logits.scale`): expressions for a number or a list, in L, l, D, `M` (width of the MLP), `H` (heads),
    `V` (vocabulary) and the placement's options. It also has the parameters of norms that the placement initialises
    itself; those expressions may use the norm's options."""
    unit_length: ClassVar[Mapping[str, str]] = {}
    """Names, separated by spaces, of the matrices that `project` normalises to length 1 by `rows` or `columns`."""
    note: ClassVar[str] = ""
    """Other meanings of the name in the literature."""
    parameters: ClassVar[str] = "0"
    """Number of parameters outside linear layers and the run's norms, for a model with SwiGLU: an expression in L, D,
    H, M and V, as in `initial_values`."""
    equals: ClassVar[str] = ""
    """Placements that give the same logits from the same weights, with the condition."""
    block_sites: ClassVar[tuple[str, ...]] = ("input_attn", "input_mlp")
    """The sites of the norms that `wire` makes in each block, keys of `sites.SITES`."""
    laws: ClassVar[tuple[str, ...]] = ()
    """Names of the laws of signal propagation at initialisation that hold, keys of `verify.init_laws.LAWS`."""
    pitfalls: ClassVar[tuple[str, ...]] = ()
    """Known errors and confusions, one sentence each."""

    name: str
    """The registered name, fixed by the placement."""
    embedding_norm: bool | None = option(
        None, "A norm on the embeddings, before the first block; null for the placement's default."
    )
    final_norm: bool | None = option(
        None, "A norm on the stream, before the LM head; null for the placement's default."
    )

    @property
    def full_formula(self) -> str:
        """`weights_formula` and `formula`."""
        return "; ".join(filter(None, (self.weights_formula, self.formula)))

    @property
    def is_plain_sum(self) -> bool:
        """Whether a block without its norms is x = x + F(x)."""
        return False

    @property
    def has_standard_matrices(self) -> bool:
        """Whether only the linear layers of the sub-layers, embeddings and head are matrices, with the usual scores."""
        return False

    @property
    def has_free_branches(self) -> bool:
        """Whether a block is x = x + F(N(x)), or without norms, so that no norm undoes a factor on F."""
        return False

    @property
    def streams_in_tensors(self) -> tuple[int, ...]:
        """How many streams each tensor between blocks holds: n for (B, T, n, D), 1 for (B, T, D)."""
        return (1,)

    @property
    def is_parallel(self) -> bool:
        """Whether attention and the MLP read the same stream."""
        return False

    @property
    def has_switches(self) -> bool:
        """Whether each end of the stream has nothing but a norm, so that `SWITCHES` apply."""
        return {self.embedding_formula, self.head_formula} <= {"", NORM_UPDATE}

    @property
    def end_formulas(self) -> tuple[str, str]:
        """`embedding_formula` and `head_formula`, as changed by the switches."""
        embedding_formula = _switched(self.embedding_formula, self.embedding_norm)
        head_formula = _switched(self.head_formula, self.final_norm)
        return embedding_formula, head_formula

    def without_defaults(self, depth: int, width: int) -> Self:
        """Return this placement without the options that repeat its default at this depth and width."""
        unset: dict[str, None] = {}
        for switch, formula in SWITCHES.items():
            has_norm = getattr(self, formula) == NORM_UPDATE
            if getattr(self, switch) == has_norm:
                unset[switch] = None
        return replace(self, **unset)

    def resolved(self) -> Self:
        """Return this placement with the options whose defaults depend on others."""
        return self

    def validate(self) -> None:
        """Reject options that contradict each other or that the placement does not have.

        Raises:
            ConfigError: A switch is set, and the placement does more than a norm at the ends of the stream.
        """
        # An end that does more than a norm, such as reading several streams, can be neither left out nor a norm alone.
        for switch in SWITCHES:
            value = getattr(self, switch)
            if value is not None and not self.has_switches:
                formulas = "; ".join(filter(None, (self.embedding_formula, self.head_formula)))
                raise ConfigError(
                    f"placement.{switch}={override_text(value)}: {self.name} does not have this option, because the "
                    f"ends of the stream are part of its definition ({formulas}); leave it out, or null if a recipe "
                    "sets it"
                )

    def check_norm(self, site: str, norm: NormConfig) -> None:
        """Raise ConfigError if the placement does not work with this norm at one of its sites."""

    def reject_unused_options(self, norm: NormConfig, depth: int) -> None:
        """Raise ConfigError if an option has no effect with this norm or at this depth.

        An option that repeats the default is valid, because a grid may contain it.
        """
        for switch in SWITCHES:
            value = getattr(self, switch)
            if norm.is_nowhere and value is not None:
                raise no_effect_without_norm(f"placement.{switch}={override_text(value)}", norm)

    def has_norms(self, depth: int) -> bool:
        """Return whether a model of `depth` blocks has norms besides those of `model.qk_norm` and `model.v_norm`."""
        if self.end_sites():
            return True
        # A norm of one block, such as the first ones, is enough.
        return any(self.wiring_sites(layer, depth) or self.inner_sites(layer, depth) for layer in range(depth))

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """Return the wiring of block `layer` (from 0) of `depth`: a module `forward(stream, attn, mlp) -> stream`.

        `attn` and `mlp` are the sub-layers (`wiring.Branch`), callables from `(B, T, D)` to `(B, T, D)`. If the wiring
        adds another tensor than their output, it passes that tensor to `attn.mark_update(...)`. A number that differs
        between layers is a buffer of the module, never a Python float: one compiled graph then serves every layer.
        """
        raise NotImplementedError

    def wiring_sites(self, layer: int, depth: int) -> tuple[str, ...]:
        """Return the site of each norm that `wire` makes in block `layer` (from 0), in the order of construction."""
        return self.block_sites

    def end_sites(self) -> tuple[str, ...]:
        """Return the site of each norm before and after the blocks: those of `end_formulas`."""
        sites: list[str] = []
        for site, formula in zip(OUTSIDE_BLOCKS, self.end_formulas, strict=True):
            sites += [site] * len(re.findall(r"\bN\(", formula))
        return tuple(sites)

    def inner_sites(self, layer: int, depth: int) -> frozenset[str]:
        """Return the subset of `INNER_SITES` with a norm in block `layer` (from 0)."""
        return frozenset()

    def head_scale(self) -> bool:
        """Return whether heads' outputs have learned factors (initially 1), before `attn_inner`."""
        return False

    def matmul_weights(self, depth: int, width: int) -> int:
        """Return the products of all wirings for each token, each counted as a weight of a linear layer."""
        return 0

    def kept_numbers(self, depth: int, width: int) -> int:
        """Return the float32 numbers of a token that a block's wiring keeps for the backward pass, at least.

        Not counted: the inputs of sub-layers, and those of norms.
        """
        return 0

    def kept_with_input(self, width: int) -> int:
        """Return the float32 numbers of a token that are kept because a sub-layer's input is a part of their tensor.

        What keeps the input for the backward pass keeps the whole tensor. The input itself is not counted.
        """
        return 0

    def embed_stream(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """Return the module from embeddings to stream, `forward(x) -> stream`, or None.

        The default is a norm if `embedding_formula` is one.
        """
        if self.embedding_formula != NORM_UPDATE:
            return None
        return make_norm(width, "embedding")

    def read_stream(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """Return the module that makes the input of the head, `forward(stream) -> x`, or None.

        The default is a norm if `head_formula` is one.
        """
        if self.head_formula != NORM_UPDATE:
            return None
        return make_norm(width, "final")

    def input_module(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """Return the module of `embed_stream`; the option `embedding_norm` overrides it."""
        if self.embedding_norm is None:
            return self.embed_stream(width, make_norm)
        return make_norm(width, "embedding") if self.embedding_norm else None

    def output_module(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """Return the module of `read_stream`; the option `final_norm` overrides it."""
        if self.final_norm is None:
            return self.read_stream(width, make_norm)
        return make_norm(width, "final") if self.final_norm else None

    def attention_scale(self, head_width: int) -> float:
        """Return the factor on q.k before the softmax."""
        return head_width**-0.5

    def qk_transform(self, heads: int, head_width: int) -> nn.Module | None:
        """Return the module applied to queries and keys, (B, H, T, K), after RoPE, or None."""
        return None

    def hidden_transform(self, site: str, width: int, mlp_width: int) -> nn.Module | None:
        """Return the module applied to `W_up x` (site `up`) or `W_gate x` (`gate`), or None."""
        return None

    def logits_transform(self, vocab_size: int, width: int) -> nn.Module | None:
        """Return the module applied to the logits, or None. It has no buffers and treats each token alone."""
        return None

    def project(self, weights: Mapping[str, Tensor]) -> None:
        """Project the parameters onto a constraint, in place, after init and after each update.

        In a pack each tensor has a leading axis of runs, so count axes from the end.
        """


def _switched(formula: str, switch: bool | None) -> str:
    """Return the formula of an end of the stream, as a switch of its norm changes it."""
    if switch is None:
        return formula
    return NORM_UPDATE if switch else ""


def projects(placement: Placement) -> bool:
    return type(placement).project is not Placement.project


PLACEMENTS: dict[str, Placement] = {}
"""Each placement with its default options, by name."""


def register_placement(placement: Placement, *, same: bool = True) -> Placement:
    """Register a placement, with its default options, under its name; `same`: as for `claim_name`.

    Raises:
        ConfigError: The name is taken, the class has no `wire`, or its `formula` or `initial_values` is invalid.
    """
    kind = type(placement)
    if kind.wire is Placement.wire:
        raise ConfigError(
            f"placement {placement.name!r}: {kind.__name__} has no method `wire`; write "
            "`def wire(self, layer, depth, width, make_norm)`, which returns the torch.nn.Module"
        )
    # The formula of a row is a property of its class, and `register_row` checks it.
    formula = getattr(kind, "formula", None)
    if not isinstance(formula, property):
        check_formula("placement", placement.name, kind.__name__, formula)
    initial_values = vars(type(placement)).get("initial_values", {})
    if not isinstance(initial_values, property):  # `register_row` checks the `initial_values` of a row
        check_initial_values("placement", placement.name, initial_values)
    claim_name("placement", placement.name, known=placement.name in PLACEMENTS, same=same)
    PLACEMENTS[placement.name] = placement
    return placement


def load_all() -> dict[str, Placement]:
    package = importlib.import_module("normlab.catalogue.placements")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"normlab.catalogue.placements.{module.name}")
    return PLACEMENTS
