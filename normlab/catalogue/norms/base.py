"""The base class and the registry of norms. Imports no torch: reading a config stays fast.

A norm is one file with an options dataclass, decorated with `@register_norm`, and the module that it builds. The
contract of the module, which tests check for the whole registry:

- `forward(x)` maps `(*batch, D)` to the same shape and dtype;
- it computes in float32 (float64 for float64 input) unless an option changes that, and documents where it rounds;
- no `.item()`, no branch on data, no writes in place: it runs under `torch.func.vmap` and
  `torch.compile(fullgraph=True)`;
- running statistics are buffers that `forward` *reassigns* (`self.running_mean = ...`);
- a function that changes with the number of updates reads it in a buffer (`plugins.COUNTER`);
- `reference` computes the expected output in float64, and `normlab verify` compares the module with it;
- its parameters are constants at construction, or drawn with torch's global generator, which the model seeds per norm;
- a parameter has a role (`catalogue.parameters`), from which its group of the optimiser follows (`optim.groups`);
- its forward pass draws no random numbers; a plugin's may in training, from the generator that each step seeds.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from normlab.base.errors import ConfigError, unknown
from normlab.base.options import check, option, override_text
from normlab.base.plugins import check_formula, check_initial_values, claim_name, hint_of_empty_plugins
from normlab.catalogue.sites import LAYERS, SITES, selected_layers, split_key

if TYPE_CHECKING:
    from torch import Tensor, nn

REFERENCE_KINDS = ("external", "identity", "self")
WITHOUT_AFFINE: Mapping[str, Any] = {"gain": False, "unit_offset": False, "bias": False}
"""The options of a norm without a gain and a bias per channel (`AffineNormConfig`)."""


@dataclass(kw_only=True, slots=True)
class NormConfig:
    """Base class of norm options. A subclass adds its options and builds the module."""

    module: ClassVar[type[Any]]
    """The module that `build` makes, from the width and these options."""
    version: ClassVar[int] = 1
    """Part of a run's identity. Raise it when the norm computes something else for the same options."""
    title: ClassVar[str] = ""
    """The name in papers, which tables and figures print; empty if it is `name`. A subclass does not inherit it."""
    formula: ClassVar[str] = ""
    """The formula on one line, for display; `verify` uses `reference`."""
    formulas: ClassVar[Mapping[str, str]] = {}
    """The formula under each override that changes it, such as `eps_mode=outside`, or under several: `a=1, b=2`."""
    source: ClassVar[str] = ""
    """Author, year, arXiv id and equation."""
    verified_by: ClassVar[str] = ""
    """The code or identity that `reference` uses, for display."""
    reference_kind: ClassVar[str] = "self"
    """external: `reference` calls external code; identity: `reference` follows from such code by algebra; self:
    `reference` is a second implementation in normlab."""
    parameters: ClassVar[str] = ""
    """Number of parameters with default options: an expression in D."""
    initial_values: ClassVar[Mapping[str, str]] = {}
    """Initial value of each parameter and buffer, by name; those of the base class are added. A value is an expression
    in the norm's options and D that gives a number or a list; `normal(...)` draws N(0, 1) numbers in that shape."""
    invariant_to: ClassVar[tuple[str, ...]] = ()
    """Changes of x that leave the output unchanged, apart from eps: `scale` (times a positive number), `shift` (plus a
    constant)."""
    equals: ClassVar[str] = ""
    """Norms that compute the same function, with the condition."""
    pitfalls: ClassVar[tuple[str, ...]] = ()
    """Known errors and confusions, one sentence each."""
    incompatible_inits: ClassVar[Mapping[str, str]] = {}
    """Init rules that do not fit the norm in a block x = x + F(x) (`Placement.is_plain_sum`), with the reason."""
    is_identity: ClassVar[bool] = False
    """Whether it is no norm, y = x."""
    causal: ClassVar[bool] = True
    """Whether in training no output depends on a later token."""
    batch_statistics: ClassVar[bool] = False
    """Whether evaluation uses running statistics and training those of the batch."""
    synchronised: ClassVar[bool] = False
    """Whether the statistics of the batch are those of the batch on all devices (`ranks.moments_over_ranks`)."""
    example_options: ClassVar[Mapping[str, Any]] = {}
    """Options with which `normlab explain` computes the norm of six channels, if the defaults do not fit six."""
    example_sequences: ClassVar[int] = 1
    """Number of sequences that the tokens of `normlab explain` form."""

    name: str
    """The registered name, fixed by the norm."""
    preset: str = option("", "The preset that these options came from; a label only.", identity=False)
    at: dict[str, Any] = option(
        {}, "Another norm at a site (`normlab list sites`); norm.at.SITE.OPTION=VALUE sets one of its options there.",
        is_later=True,
    )  # fmt: skip

    @property
    def label(self) -> str:
        """The name of the preset, or of the norm without one."""
        return self.preset or self.name

    @property
    def is_nowhere(self) -> bool:
        """Whether no site has a norm, so that options of placements that change only norms have no effect."""
        return self.is_identity and not self.at

    @property
    def has_gain(self) -> bool:
        """Whether the module has a gain per channel, in `affine` (`affine.Affine`)."""
        return False

    @property
    def keeps_normalised(self) -> bool:
        """Whether the backward pass needs what the gain multiplies, a tensor as large as the input, beside it."""
        return self.has_gain

    @property
    def invariances(self) -> tuple[str, ...]:
        """`invariant_to`, with these options and after any number of updates."""
        return self.invariant_to

    @property
    def measures_batches(self) -> bool:
        """Whether an output depends on how a batch is divided into micro-batches."""
        return self.batch_statistics or self.changing[1] > 0

    @property
    def changing(self) -> tuple[int, int]:
        """The numbers of updates between which the function changes by itself, or 0 and 0."""
        return 0, 0

    @classmethod
    def all_initial_values(cls) -> dict[str, str]:
        """Return `initial_values` of the class and of its base classes."""
        merged: dict[str, str] = {}
        # From the base classes on, so that a class may give a parameter of its base another start.
        for base in reversed(cls.__mro__):
            merged |= vars(base).get("initial_values", {})
        return merged

    def validate(self) -> None:
        """Raise ConfigError if options contradict each other or have no effect."""

    def check_width(self, width: int) -> None:
        """Raise ConfigError if the norm does not work with this width."""

    def at_site(self, site: str, layer: int | None, depth: int, *, plain: bool = False) -> NormConfig:
        """Return the norm of a site, as `at` changes it there.

        A setting of a narrower site wins over one of a wider site. A norm that `at` names has its own defaults, or is
        the run's norm if it has its name.

        Args:
            site: The name of a site without parts, a key of `sites.SITES`.
            layer: The block, from 0; None outside the blocks.
            plain: Whether the norm has no gain and bias unless `at` says so.

        Raises:
            ConfigError: `at` names an unknown norm or option, or a value that the option does not take.
        """
        norm, options = self, dict[str, Any]()
        for part in (SITES[site].within, site):
            settings = self._settings_at(part, layer, depth)
            if "" in settings:
                norm, options = self._named(part, settings.pop("")), {}
            for name, value in settings.items():
                options[f"norm.at.{part}.{name}"] = value
        changes: dict[str, Any] = {"at": {}}
        for field in dataclasses.fields(norm):
            if field.name in SITES[site].resets:
                changes[field.name] = field.default
            elif plain and field.name in WITHOUT_AFFINE:
                changes[field.name] = WITHOUT_AFFINE[field.name]
        # Most runs have one norm, and a deep model asks for it hundreds of times.
        if options or any(getattr(norm, name) != value for name, value in changes.items()):
            norm = dataclasses.replace(norm, **changes)
        for option_of_site, value in options.items():
            norm = _with_option(norm, option_of_site, value)
        return norm

    def _settings_at(self, site: str, layer: int | None, depth: int) -> dict[str, Any]:
        """Return what `at` sets for a site in a block, by the name of the option; a norm's name has an empty one."""
        settings: dict[str, Any] = {}
        for key, value in self.at.items():
            owner, name = split_key(key)
            if owner == site:
                settings[name] = value
        layers = settings.pop(LAYERS, None)
        if layers is not None and layer not in selected_layers(site, layers, depth):
            return {}
        return settings

    def _named(self, site: str, name: Any) -> NormConfig:
        """Return the norm that `at` names for a site."""
        if name == self.name:
            return self
        if not isinstance(name, str) or name not in NORMS:
            raise _no_norm(site, override_text(name))
        return NORMS[name]()  # pyright: ignore[reportCallIssue]

    def build(self, width: int) -> nn.Module:
        """Return the module for vectors of this width."""
        self.check_width(width)
        return self.module(width, self)

    def matmul_flops(self, shape: Sequence[int]) -> int:
        """Return the FLOPs of the norm's matrix products, forward and backward, for an input of this shape.

        Args:
            shape: `(B, T, D)`, or with one axis more, `(B, T, H, D)`, for the vectors of heads or several streams.
        """
        return 0

    def reference(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the expected output in training, by an implementation independent of the module.

        `verify` calls it in float64 and takes its gradients by autograd.

        Args:
            x_D: The input, (*batch, D), with at least two axes.
            weights: The state dict of the module.

        Raises:
            NotImplementedError: The norm has no reference; `verify` reports that.
        """
        raise NotImplementedError

    def reference_in_eval(self, x_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the expected output in evaluation; only norms with batch statistics override this."""
        return self.reference(x_D, weights)


@dataclass(kw_only=True, slots=True)
class AffineNormConfig(NormConfig):
    """Options of a norm that ends in a gain and a bias per channel (`affine.Affine`)."""

    initial_values: ClassVar[Mapping[str, str]] = {"affine.gain": "[1 - unit_offset] * D", "affine.bias": "[0] * D"}

    gain: bool = option(True, "Learn a gain per channel.")
    unit_offset: bool = option(
        False, "Multiply by 1 + gain, with gain initially 0 (Gemma): weight decay then pulls towards the identity."
    )
    bias: bool = option(False, "Learn a bias per channel, initially 0.")

    @property
    def has_gain(self) -> bool:
        return self.gain

    def validate(self) -> None:
        if self.unit_offset and not self.gain:
            raise ConfigError("norm.unit_offset=true: has no effect with norm.gain=false; leave one of them out")

    def reference_affine(self, y_D: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return y * gain + bias, or y * (1 + gain) + bias with a unit offset."""
        if self.gain:
            y_D = y_D * (weights["affine.gain"] + float(self.unit_offset))
        return y_D + weights["affine.bias"] if self.bias else y_D


def _no_norm(site: str, name: str) -> ConfigError:
    """Return the error for a name that is not a norm; for a preset, with its norm and options at the site."""
    from normlab.catalogue import entries

    for entry in entries.norms():
        if entry["name"] == name:
            of_site = f"norm.at.{site}"
            options = [f"{of_site}={entry['preset_of']}"]
            for option_name, value in entry["sets"].items():
                options.append(f"{of_site}.{option_name}={override_text(value)}")
            return ConfigError(f"{of_site}={name}: is a preset, and a site has a norm; write {' '.join(options)}")
    return ConfigError(f"norm.at.{site}={name}: {hint_of_empty_plugins()}" + unknown("norm", name, NORMS))


def _with_option(norm: NormConfig, option_of_site: str, value: Any) -> NormConfig:
    """Return a norm with another value of an option, `norm.at.SITE.NAME`."""
    name = option_of_site.rpartition(".")[2]
    names = [field.name for field in dataclasses.fields(norm) if field.name not in ("name", "preset", "at")]
    if name not in names:
        known = unknown("option", name, names) if names else "it has no options"
        raise ConfigError(f"{option_of_site}={override_text(value)}: of norm={norm.name} there: {known}")
    tree = {field.name: getattr(norm, field.name) for field in dataclasses.fields(norm)}
    try:
        changed = msgspec.convert(tree | {name: value}, type(norm))
    except ValueError as error:  # `Expected float, got str - at $.eps`
        reason = str(error).partition(" - at")[0].replace("`", "")
        raise ConfigError(f"{option_of_site}={override_text(value)}: {reason}; set another value") from error
    check(changed, option_of_site.removesuffix(name))
    return changed


NORMS: dict[str, type[NormConfig]] = {}

T = TypeVar("T", bound=type[NormConfig])


def register_norm(cls: T) -> T:
    """Register a norm under the default of its field `name`.

    Raises:
        ConfigError: The name is missing or taken, the class has neither `build` nor `module`, or its `formula`,
            `reference_kind` or `initial_values` is invalid.
    """
    name = next(field.default for field in dataclasses.fields(cls) if field.name == "name")
    if not isinstance(name, str):
        raise ConfigError(f"{cls.__name__}: give the field `name` a default, the value of norm=")
    if cls.build is NormConfig.build and not hasattr(cls, "module"):
        raise ConfigError(
            f"norm {name!r}: {cls.__name__} has no method `build`; write `def build(self, width)`, which returns the "
            "torch.nn.Module"
        )
    check_formula("norm", name, cls.__name__, cls.formula)
    if cls.reference_kind not in REFERENCE_KINDS:
        raise ConfigError(f"norm {name!r}: " + unknown("reference_kind", cls.reference_kind, REFERENCE_KINDS))
    for base in cls.__mro__:
        check_initial_values("norm", name, vars(base).get("initial_values", {}))
    # A class of the same qualified name may replace itself: a notebook's cell that runs again.
    known = NORMS.get(name, cls)
    claim_name("norm", name, known=name in NORMS, same=known.__qualname__ == cls.__qualname__)
    NORMS[name] = cls
    return cls


def load_all() -> dict[str, type[NormConfig]]:
    """Import every norm of the package (this loads torch) and return the registry."""
    package = importlib.import_module("normlab.catalogue.norms")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"normlab.catalogue.norms.{module.name}")
    return NORMS
