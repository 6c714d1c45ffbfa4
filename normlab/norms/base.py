"""What a norm is, and the list of those that are known. Imports no torch, so that a config can name a norm.

A norm is one file: an options dataclass, decorated with `@register_norm`, and beside it the module that it
builds. The contract of that module (held by tests over the whole registry):

- `forward(x)` maps `(*batch, D)` to the same shape and dtype;
- it computes in float32 (float64 for float64 input) unless an option says otherwise, and says where it rounds;
- no `.item()`, no branch on data, nothing written in place: it runs under `torch.func.vmap` and
  `torch.compile(fullgraph=True)`;
- running statistics are buffers that `forward` *reassigns* (`self.running_mean = ...`);
- a `reference` says in float64 what it should give (`normlab verify` holds the module to it);
- its parameters are the same at every construction (ones, zeros, constants), or drawn with torch's global
  generator, which the model seeds per norm.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from normlab.errors import ConfigError, unknown
from normlab.options import option
from normlab.source import check_starts, claim

if TYPE_CHECKING:
    from torch import Tensor, nn

ORACLE_KINDS = ("external", "identity", "self")
"""What a reference may be made of (`NormConfig.oracle_kind`)."""


@dataclass(kw_only=True, slots=True)
class NormConfig:
    """Options that every norm has. A subclass adds its own, and builds the module."""

    version: ClassVar[int] = 1
    """Part of a run's identity. Raise it when the norm computes something else for the same options."""
    formula: ClassVar[str] = ""
    """What it computes, on one line, for people: `verify` reads `reference` instead."""
    formulas: ClassVar[Mapping[str, str]] = {}
    """What it computes with another word than the default, by that word: `eps_mode=outside`."""
    source: ClassVar[str] = ""
    """Author, year, arXiv id and equation."""
    oracle: ClassVar[str] = ""
    """What `reference` is made of: what the norm is held against."""
    oracle_kind: ClassVar[str] = "self"
    """external: `reference` calls code that others wrote, and it alone computes the whole; identity: the norm equals
    such code by algebra; self: it is our own formula, written a second time."""
    parameters: ClassVar[str] = ""
    """How many numbers it learns, with its default options, for vectors of D: an expression in D."""
    starts: ClassVar[Mapping[str, str]] = {}
    """Where each parameter and buffer starts, by its name in the module, beside what the base class says: an expression
    in the norm's options and D, of one number or a list of them; `normal(...)` is drawn from N(0, 1), in that shape."""
    blind_to: ClassVar[tuple[str, ...]] = ()
    """What changes nothing, but for eps: `scale`, x times a positive number; `shift`, x plus one for all channels."""
    equals: ClassVar[str] = ""
    """What it is equal to, and when."""
    pitfalls: ClassVar[tuple[str, ...]] = ()
    """What others got wrong in it or take it for, a sentence each."""
    incompatible_inits: ClassVar[Mapping[str, str]] = {}
    """Why an init rule is known to be wrong with it, by its name, where a block is x = x + F(x) but for its norms."""
    causal: ClassVar[bool] = True
    """Whether, in training, no output depends on a later token."""
    batch_statistics: ClassVar[bool] = False
    """Whether training and evaluation compute different things (running statistics)."""

    name: str
    """The registered name. Fixed by the norm; not to be set."""
    preset: str = option("", identity=False)
    """The preset that these options came from; a label only."""

    @property
    def label(self) -> str:
        """What people call it: the preset's name where there is one."""
        return self.preset or self.name

    @property
    def has_gain(self) -> bool:
        """Whether it ends in a gain for each channel, which the module has in `affine` (`affine.Affine`)."""
        return False

    @classmethod
    def all_starts(cls) -> dict[str, str]:
        """`starts` of the class and of those that it is derived from."""
        told: dict[str, str] = {}
        for each in reversed(cls.__mro__):
            told |= vars(each).get("starts", {})
        return told

    def validate(self) -> None:
        """Raise ConfigError where options contradict each other or have no effect."""

    def check_width(self, width: int) -> None:
        """Raise ConfigError where the norm cannot be had for vectors of `width` numbers."""

    def build(self, width: int) -> nn.Module:
        """The module, for vectors of `width` numbers."""
        raise NotImplementedError

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """What the module should give in training, written without it and without haste.

        `verify` calls it in float64, and takes its gradients by autograd. It is no part of a run's identity.

        Args:
            x_D: The input, (*batch, D), with at least two axes.
            weights: The module's state dict, by the names that it has there.

        Raises:
            NotImplementedError: There is none; `verify` says that the norm is held against nothing.
        """
        raise NotImplementedError

    def reference_evaluated(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The same in evaluation; another function where there are batch statistics only."""
        return self.reference(x_D, weights)


@dataclass(kw_only=True, slots=True)
class AffineNormConfig(NormConfig):
    """Options of a norm that ends in a gain and a bias for each channel (`affine.Affine`)."""

    starts: ClassVar[Mapping[str, str]] = {"affine.gain": "[1 - unit_offset] * D", "affine.bias": "[0] * D"}

    gain: bool = True
    """Learn a gain per channel."""
    unit_offset: bool = False
    """Multiply by 1 + gain, gain starting at 0 (Gemma): weight decay then pulls towards the identity."""
    bias: bool = False
    """Learn a bias per channel, started at 0."""

    @property
    def has_gain(self) -> bool:
        """Whether the gain is learned."""
        return self.gain

    def validate(self) -> None:
        """Refuse options without effect.

        Raises:
            ConfigError: unit_offset without gain.
        """
        if self.unit_offset and not self.gain:
            raise ConfigError("norm.unit_offset=true: has no effect with norm.gain=false; leave one of them out")

    def reference_affine(self, y_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The gain and the bias of a `reference`: y * gain + bias, or y * (1 + gain) + bias with a unit offset."""
        if self.gain:
            y_D = y_D * (weights["affine.gain"] + float(self.unit_offset))
        return y_D + weights["affine.bias"] if self.bias else y_D


NORMS: dict[str, type[NormConfig]] = {}

T = TypeVar("T", bound=type[NormConfig])


def register_norm(cls: T) -> T:
    """Make a norm known by its `name` field's default. A name that is taken is an error."""
    name = next(field.default for field in dataclasses.fields(cls) if field.name == "name")
    if not isinstance(name, str):
        raise ConfigError(f"{cls.__name__}: give the field `name` a default; it is the word after norm=")
    if cls.oracle_kind not in ORACLE_KINDS:
        raise ConfigError(f"norm {name!r}: " + unknown("oracle_kind", cls.oracle_kind, ORACLE_KINDS))
    for each in cls.__mro__:
        check_starts("norm", name, vars(each).get("starts", {}))
    known = NORMS.get(name)
    claim("norm", name, known=known is not None, same=known is not None and known.__qualname__ == cls.__qualname__)
    NORMS[name] = cls
    return cls


def load_all() -> dict[str, type[NormConfig]]:
    """Import every norm of the package (this loads torch) and return the registry."""
    package = importlib.import_module("normlab.norms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"normlab.norms.{module.name}")
    return NORMS
