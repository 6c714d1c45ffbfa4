"""The group of each parameter, by which it has its learning rate, weight decay and update (`config.optim.GROUPS`)."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError
from normlab.catalogue.optimizers.options import GROUPS, GroupOptions, ParameterGroups
from normlab.catalogue.parameters import EMBEDDING, HEAD
from normlab.catalogue.placements.base import projects
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import standard_deviation
from normlab.model.instrument import InstrumentedNorm, instrument

OF_NORMS = {"bias": "biases", "scalar": "scalars", "matrix": "norm_matrices"}
"""The group of a norm's parameter by its role; a gain's is `gains`, with the place of the norm."""
OUTSIDE_NORMS = {
    "gain": "scalars", "bias": "biases", "scalar": "scalars", "matrix": "matrices", EMBEDDING: "embed", HEAD: "head",
}  # fmt: skip
DEFAULTS = {"lr": "1", "decay": "null"}
"""The options of a group that change nothing, as overrides."""


def groups_of(model: GPT) -> dict[str, str]:
    """Return the group of each parameter of a GPT by the parameter's name, in the order of the model.

    It follows from the parameter's role, and for a norm's from where the norm stands.
    """
    places: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, InstrumentedNorm):
            for leaf, _ in module.named_parameters():
                places[f"{name}.{leaf}"] = _place_of(name, model)
    groups: dict[str, str] = {}
    for name, role in model.roles.items():
        if name in places:
            groups[name] = f"gains.{places[name]}" if role == "gain" else OF_NORMS[role]
        else:
            groups[name] = OUTSIDE_NORMS[role]
    return groups


def _place_of(norm: str, model: nn.Module) -> str:
    """Return where the norm of a module name is: input, output, qk or final."""
    owner, _, leaf = norm.rpartition(".")
    if norm.startswith("head."):
        return "final"
    if leaf in ("q", "k", "v"):
        return "qk"
    is_output = leaf in ("out", "res", *getattr(model.get_submodule(owner), "output_norms", ()))
    return "output" if is_output else "input"


_groups: dict[str, dict[str, tuple[str, torch.Size]]] = {}
"""The group and the shape of each parameter of a model, by the model's options."""


def check_parameters(config: RunConfig) -> None:
    """Check that the optimiser's options fit the parameters of the model of a validated config.

    Raises:
        ConfigError: A group with options of its own has no parameter, an optimiser that keeps the norms of matrices
            has one that starts at 0, or a rule of transfer has a norm with matrices.
    """
    has_options = config.optim.groups != ParameterGroups()
    if not has_options and not config.optim.keeps_matrix_norms and config.model.scaling == "none":
        return
    structure = repr((config.norm, config.placement, config.model))
    if structure not in _groups:  # a grid has the same structures again and again

        def make_norm(width: int, **site: bool) -> nn.Module:
            return instrument(config.norm.at(**site).build(width))

        with torch.device("meta"):
            model = GPT(config.model, config.placement, make_norm, 1)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        _groups[structure] = {name: (group, shapes[name]) for name, group in groups_of(model).items()}
    parameters = _groups[structure]
    present = {group for group, _ in parameters.values()}
    if config.model.scaling != "none" and "norm_matrices" in present:
        raise ConfigError(
            f"model.scaling={config.model.scaling}: has no rule for the matrices of norm={config.norm.label}; choose "
            "another norm"
        )
    for name, (group, shape) in parameters.items() if config.optim.keeps_matrix_norms else ():
        std = standard_deviation(config.init_rule, name, shape, config.model.depth, config.model.width)
        if group == "matrices" and (std == 0 or name.endswith(("value_gate.weight", ".fn"))):
            raise ConfigError(
                f"optim={config.optim.name}: keeps the norm of each matrix, and {name} starts at 0 "
                f"(init={config.init_rule}); choose another init rule or optimiser"
            )
    for group in () if config.optim.groups.vacant else GROUPS.keys() - present:
        own, default = config.optim.groups.of(group), GroupOptions()
        if own != default:
            changed = [(name, text) for name, text in DEFAULTS.items() if getattr(own, name) != getattr(default, name)]
            resets = " ".join(f"optim.groups.{group}.{name}={text}" for name, text in changed)
            raise ConfigError(f"optim.groups.{group}: the model has no {GROUPS[group]}; set {resets}")


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """How a parameter is updated, or equal ones of several blocks."""

    parameter: str
    """Its name; `blocks.0-5.` for those of several blocks."""
    group: str
    shape: tuple[int, ...]
    lr: float
    """Peak learning rate."""
    decay: float
    """Strength of the weight decay."""
    eps: float | None
    """That of Adam; None for another update."""
    update: str
    init: str
    """The standard deviation or the value of its initial numbers."""

    @property
    def cells(self) -> dict[str, str]:
        """The row of a table; an unknown number of tokens is V."""
        shape = " x ".join(str(size or "V") for size in self.shape) or "number"
        eps = "" if self.eps is None else f"{self.eps:.3g}"
        numbers = {"lr": f"{self.lr:g}", "decay": f"{self.decay:g}", "eps": eps}
        return {"parameter": self.parameter, "group": self.group, "shape": shape} | numbers | {
            "update": self.update, "init": self.init,
        }  # fmt: skip


def parameter_rows(config: RunConfig, model: GPT) -> list[ParameterRow]:
    """Return one row for each parameter of a run's initial model; equal ones of several blocks share one."""
    return [_merged(list(rows)) for _, rows in groupby(_sorted_rows(config, model), key=_without_block)]


def _sorted_rows(config: RunConfig, model: GPT) -> Iterator[ParameterRow]:
    """Yield a row for each parameter, those of one name in successive blocks one after the other."""
    groups = groups_of(model)
    parameters = dict(model.named_parameters())
    places = {name: index for index, name in enumerate(dict.fromkeys(_block(name)[1] for name in parameters))}
    for name in sorted(parameters, key=lambda name: (places[_block(name)[1]], _block(name)[0])):
        own = config.optim.of_group(groups[name], config.model.factors_of(groups[name]))
        shape = tuple(parameters[name].shape)
        sizes = config.model.depth, config.model.width, config.model.width_ratio
        std = standard_deviation(config.init_rule, name, shape, *sizes)
        eps = None if own.adam_constants is None else getattr(own, "eps", None)
        init = _init(std, parameters[name], projected=projects(config.placement))
        yield ParameterRow(name, groups[name], shape, own.lr, own.weight_decay, eps, own.name, init)


def _block(name: str) -> tuple[int, str]:
    """Return the number of a parameter's block, -1 outside the blocks, and its name without that number."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
    return (int(match[1]), f"blocks.{match[2]}") if match else (-1, name)


def _without_block(row: ParameterRow) -> ParameterRow:
    return replace(row, parameter=_block(row.parameter)[1])


def _merged(rows: list[ParameterRow]) -> ParameterRow:
    first, last = (_block(row.parameter)[0] for row in (rows[0], rows[-1]))
    if first == last:
        return rows[0]
    return replace(rows[0], parameter=_without_block(rows[0]).parameter.replace("blocks.", f"blocks.{first}-{last}."))


def _init(std: float | None, values: Tensor, *, projected: bool) -> str:
    if std is not None and not projected:
        return f"normal, sd {std:.4g}"
    if not values.numel():  # the vocabulary is not known
        return ""
    lowest, highest = values.min().item(), values.max().item()
    if lowest == highest:
        return f"{lowest:g}"
    if std is None:
        return f"{lowest:g} to {highest:g}"
    return f"drawn, rms about {math.sqrt(values.square().mean().item()):.1g}"
