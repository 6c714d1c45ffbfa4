"""What a placement is, and the list of those that are known. Imports no torch.

A placement is handed to the model and answers four questions: how a block's two sub-layers are wired to the
residual stream (`wire`), which norms stand inside the sub-layers (`inner_sites`), what happens to the stream
at its two ends (`open`, `close`), and which init rule it belongs to. Almost all of the field is covered by
the residual algebra (`algebra.py`), where a placement is one row; a scheme with other wiring subclasses
`Placement` and returns its own module from `wire`; it may also say what queries, keys, hidden activations and
logits pass through.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from normlab.errors import ConfigError
from normlab.options import option
from normlab.source import check_starts, claim

if TYPE_CHECKING:
    from torch import Tensor, nn

    from normlab.norms.base import NormConfig

MakeNorm = Callable[[int], "nn.Module"]
"""Builds the run's norm for a width; a placement receives it and never imports a norm."""

INNER_SITES = ("q", "k", "v", "attn_inner", "mlp_inner")
"""Sites inside the sub-layers. `q`, `k`, `v`: each head's vectors, before RoPE; `attn_inner`: the heads'
joined output, before the output projection; `mlp_inner`: the hidden activations, before the down projection."""

NORMED = "x = N(x)"
"""What a norm at an end of the stream does there."""
SWITCHES = {"embedding_norm": "opens", "final_norm": "closes"}
"""Options that ask for a norm at an end of the stream, or for none, by what a placement has there of itself."""
WITHOUT_NORMS = "has no effect with norm=none; leave it out or choose a norm"


@dataclass(kw_only=True, slots=True)
class Placement:
    """A placement and its options. Registered under `name`, the word after `placement=`."""

    version: ClassVar[int] = 1
    """Part of a run's identity. Raise it when the placement computes something else for the same options."""
    formula: ClassVar[str]
    """One block's update of the stream x: Python statements `name = expression` separated by "; ". `normlab verify`
    evaluates it in float64 and holds the model to it.

    `A(.)` is attention, `M(.)` the MLP; a formula with `F(.)` is run twice a block, F being A and then M.
    `A(x) = W_out(heads(x))`, `M(x) = W_down(hidden(x))`; `heads_qkv` has a norm on each head's q, k and v,
    `A_qkv(x) = W_out(heads_qkv(x))`, and `heads_scaled` has a learned factor on each head's output. `N(.)` is the
    next norm of the block, in the order in which the block calls them, each used once. `L` is the number of blocks,
    `l` this one counted from 1, `D` the width; there are `sqrt`, `ln`, `silu`, `stop` (no gradient) and `norm2` (the
    L2 norm over the channels). Another name is a stream, a temporary, or a learned parameter of the wiring: of the
    sub-layer's own module where there is an F, otherwise by its dotted name with `_` for `.`."""
    source: ClassVar[str]
    init: ClassVar[str]
    """The init rule that the placement belongs to; `init=auto` takes it."""
    opens: ClassVar[str] = ""
    """Statements that make the streams from x, the embeddings; nothing where x is the stream."""
    closes: ClassVar[str] = ""
    """Statements that make x, the head's input, from the streams."""
    inside: ClassVar[str] = ""
    """Statements of what is done inside the sub-layers and to the logits: `q = ...` to each query and key after RoPE,
    `a = ...` to the products q.k, which are otherwise divided by sqrt(K), `h = ...` to `W_up x` and `W_gate x`,
    `z = ...` to the logits. `scale` is a learned parameter, `K` a head's width."""
    incompatible_inits: ClassVar[Mapping[str, str]] = {}
    """Why an init rule is known to be wrong here, by its name; under `other` why any but the placement's own is."""
    starts: ClassVar[Mapping[str, str]] = {}
    """Where each number starts that is learned beside linear layers and norms, by its name in a block (`wiring.gate`)
    or in the model (`head.logits.scale`): an expression of one number or a list of them, in L, l, D, `M`, the MLP's
    width, `H`, heads, `V`, the vocabulary, and the placement's options. A norm's own too, where the placement starts it
    elsewhere; then the norm's options are known."""
    unit_length: ClassVar[Mapping[str, str]] = {}
    """The matrices whose `rows`, and `columns`, `project` brings back to length 1: their last names, in words."""
    note: ClassVar[str] = ""
    """What the name means elsewhere."""
    parameters: ClassVar[str] = "0"
    """How many numbers it learns beside linear layers and the run's norms: an expression in L, D, H, M and V, as in
    `starts`, of a model with SwiGLU."""
    equals: ClassVar[str] = ""
    """What it is equal to, and when: the same logits from the same weights."""
    pitfalls: ClassVar[tuple[str, ...]] = ()
    """What others got wrong in it or take it for, a sentence each."""

    name: str
    """The registered name. Fixed by the placement; not to be set."""
    embedding_norm: bool | None = option(None, absent=None)
    """A norm on the embeddings, before the first block; null for what the placement has."""
    final_norm: bool | None = option(None, absent=None)
    """A norm on the stream, before the head; null for what the placement has."""

    @property
    def init_rule(self) -> str:
        """The init rule that `init=auto` takes."""
        return self.init

    @property
    def is_plain_sum(self) -> bool:
        """Whether a block is x = x + F(x) but for its norms."""
        return False

    @property
    def has_switches(self) -> bool:
        """Whether a norm is all that there is at either end of the stream, so that it can be had or not."""
        return {self.opens, self.closes} <= {"", NORMED}

    @property
    def ends(self) -> tuple[str, str]:
        """`opens` and `closes`, or what the switches ask for instead."""
        opens, closes = (
            getattr(self, own) if (asked := getattr(self, switch)) is None else NORMED if asked else ""
            for switch, own in SWITCHES.items()
        )
        return opens, closes

    def reduced(self, depth: int) -> Self:
        """The same placement of `depth` blocks, an option not set where it says what is so without it."""
        said = {switch: getattr(self, switch) for switch in SWITCHES}
        idle = {switch: None for switch, asked in said.items() if asked == (getattr(self, SWITCHES[switch]) == NORMED)}
        return replace(self, **idle)

    def validate(self) -> None:
        """Refuse options that contradict each other, or that the placement has not.

        Raises:
            ConfigError: A switch of a norm at an end of the stream, which is otherwise made there than by a norm.
        """
        for switch in SWITCHES:
            if (asked := getattr(self, switch)) is not None and not self.has_switches:
                ends = "; ".join(filter(None, (self.opens, self.closes)))
                raise ConfigError(
                    f"placement.{switch}={str(asked).lower()}: {self.name} has no such switch, what it does at the "
                    f"ends of the stream is a part of it ({ends}); leave it out"
                )

    def fits(self, norm: NormConfig) -> None:
        """Raise ConfigError where the placement cannot be had with this norm."""

    def refuse_idle(self, norm: NormConfig, depth: int) -> None:
        """Raise ConfigError where an option changes nothing with this norm, or in a model of `depth` blocks.

        One that says what the placement has anyway is no error: in a grid it is so for some of the runs.
        """
        for switch in SWITCHES:
            if norm.name == "none" and (asked := getattr(self, switch)) is not None:
                raise ConfigError(f"placement.{switch}={str(asked).lower()}: {WITHOUT_NORMS}")

    def holds_norm(self, depth: int) -> bool:
        """Whether a model of `depth` blocks has any norm of the run's, `model.qk_norm` aside."""
        return True

    def wire(self, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
        """The wiring of block `layer` (0-based) of `depth`: a module `forward(stream, attn, mlp) -> stream`.

        `attn` and `mlp` are the sub-layers (`wiring.Branch`), callables from `(B, T, D)` to `(B, T, D)`; where it
        is not their output itself that is added to the stream, `attn.added(...)` marks what is. A number that differs
        between layers is a buffer of the module, never a Python float: one compiled graph then serves every layer.
        """
        raise NotImplementedError

    def inner_sites(self, layer: int, depth: int) -> frozenset[str]:
        """Which of `INNER_SITES` carry a norm in block `layer`."""
        return frozenset()

    def head_scale(self) -> bool:
        """Whether each head's output has a learned factor, started at 1, before `attn_inner` and the projection."""
        return False

    def open(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """What makes the stream from the embeddings: a module `forward(x) -> stream`, or nothing."""
        return None

    def close(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """What makes the head's input from the stream: a module `forward(stream) -> x`, or nothing."""
        return None

    def begin(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """`open`, or what a switch asks for instead."""
        if self.embedding_norm is None:
            return self.open(width, make_norm)
        return make_norm(width) if self.embedding_norm else None

    def end(self, width: int, make_norm: MakeNorm) -> nn.Module | None:
        """`close`, or what a switch asks for instead."""
        if self.final_norm is None:
            return self.close(width, make_norm)
        return make_norm(width) if self.final_norm else None

    def attention_scale(self, head_width: int) -> float:
        """The factor on q.k before the softmax."""
        return head_width**-0.5

    def rotated(self, heads: int, head_width: int) -> nn.Module | None:
        """What queries, and keys, pass through after RoPE: a module from (B, H, T, K) to the same, or nothing."""
        return None

    def hidden(self, site: str, width: int, mlp_width: int) -> nn.Module | None:
        """What `W_up x` (site `up`) and `W_gate x` (`gate`) pass through before the activation, or nothing."""
        return None

    def logits(self, vocab_size: int, width: int) -> nn.Module | None:
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
FORMER_NAMES = {"residual": "resi_dual"}
"""Names of placements in older records, and the names they have now."""


def register_placement(placement: Placement, *, same: bool | None = None) -> Placement:
    """Make a placement known by its name. A name that is taken is an error.

    Args:
        placement: With its default options.
        same: Whether what is known by that name is this very placement; if its class is, unless given.
    """
    starts = vars(type(placement)).get("starts", {})
    if not isinstance(starts, property):  # a row has its own, which `register_row` checks
        check_starts("placement", placement.name, starts)
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
