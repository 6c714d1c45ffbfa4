"""The group of each parameter, by which it has its learning rate, weight decay and update (`config.optim.GROUPS`)."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError
from normlab.catalogue.optimizers.options import GROUPS, GroupOptions, ParameterGroups
from normlab.catalogue.parameters import EMBEDDING, HEAD
from normlab.catalogue.placements.base import projects
from normlab.catalogue.placements.init_rules import Weight
from normlab.catalogue.sites import SITES
from normlab.config.schema import RunConfig
from normlab.model.gpt import GPT
from normlab.model.init import drawn_weights, standard_deviation
from normlab.model.instrument import InstrumentedNorm, instrument
from normlab.model.modules import build_norm

OF_NORMS = {"bias": "biases", "scalar": "scalars", "matrix": "norm_matrices"}
"""The group of a norm's parameter by its role; a gain's is `gains`, with the place of the norm."""
OUTSIDE_NORMS = {
    "gain": "scalars", "bias": "biases", "scalar": "scalars", "matrix": "matrices", EMBEDDING: "embed", HEAD: "head",
}  # fmt: skip
DEFAULTS = {"lr": "1", "decay": "null"}
"""The options of a group that change nothing, as overrides."""


def groups_of(model: GPT) -> dict[str, str]:
    """Return the group of each parameter of a GPT by the parameter's name, in the order of the model.

    It follows from the parameter's role, and for a norm's from the norm's site.
    """
    places: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, InstrumentedNorm):
            for leaf, _ in module.named_parameters():
                places[f"{name}.{leaf}"] = SITES[module.placed_at].group
    groups: dict[str, str] = {}
    for name, role in model.roles.items():
        if name not in places:
            groups[name] = OUTSIDE_NORMS[role]
        elif role == "gain":
            groups[name] = f"gains.{places[name]}"
        else:
            groups[name] = OF_NORMS[role]
    return groups


class _Parameter(NamedTuple):
    group: str
    weight: Weight | None
    """None unless an init rule draws it."""
    is_zero_matrix: bool
    """Whether it is a `zero_matrix`."""


_parameters: dict[str, dict[str, _Parameter]] = {}
"""The parameters of a model by name, by the model's options."""


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
    if structure not in _parameters:  # a grid has the same structures again and again

        def make_norm(width: int, site: str, layer: int | None = None) -> nn.Module:
            return instrument(build_norm(config.norm_at(site, layer), width), site)

        with torch.device("meta"):
            model = GPT(config.model, config.placement, make_norm, 1)
        weights, values = drawn_weights(model), dict(model.named_parameters())
        parameters: dict[str, _Parameter] = {}
        for name, group in groups_of(model).items():
            parameters[name] = _Parameter(group, weights.get(name), getattr(values[name], "starts_at_zero", False))
        _parameters[structure] = parameters
    parameters = _parameters[structure]
    present = {parameter.group for parameter in parameters.values()}
    if config.model.scaling != "none" and "norm_matrices" in present:
        raise ConfigError(
            f"model.scaling={config.model.scaling}: has no rule for the matrices of norm={config.norm.label}; choose "
            "another norm"
        )
    if config.optim.keeps_matrix_norms:
        for name, parameter in parameters.items():
            if parameter.group == "matrices" and _starts_at_zero(parameter, config.init_rule):
                raise ConfigError(
                    f"optim={config.optim.name}: keeps the norm of each matrix, and {name} starts at 0 "
                    f"(init={config.init_rule}); choose another init rule or optimiser"
                )
    if config.optim.groups.vacant:
        return
    for group in GROUPS:
        if group in present:
            continue
        options, default = config.optim.groups.of(group), GroupOptions()
        resets: list[str] = []
        for name, text in DEFAULTS.items():
            if getattr(options, name) != getattr(default, name):
                resets.append(f"optim.groups.{group}.{name}={text}")
        if resets:
            raise ConfigError(f"optim.groups.{group}: the model has no {GROUPS[group]}; set {' '.join(resets)}")


def _starts_at_zero(matrix: _Parameter, rule_name: str) -> bool:
    """Return whether a matrix of a model without values is known to start at 0: by its rule, or as a `zero_matrix`."""
    if matrix.weight is not None:
        return standard_deviation(rule_name, matrix.weight) == 0
    return matrix.is_zero_matrix


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
        return {
            "parameter": self.parameter,
            "group": self.group,
            "shape": shape,
            "lr": f"{self.lr:g}",
            "decay": f"{self.decay:g}",
            "eps": eps,
            "update": self.update,
            "init": self.init,
        }


def parameter_rows(config: RunConfig, model: GPT) -> list[ParameterRow]:
    """Return one row for each parameter of a run's initial model; equal ones of several blocks share one."""
    return [_merged(list(rows)) for _, rows in groupby(_sorted_rows(config, model), key=_without_block)]


def _sorted_rows(config: RunConfig, model: GPT) -> Iterator[ParameterRow]:
    """Yield a row for each parameter, those of one name in successive blocks one after the other."""
    groups, weights = groups_of(model), drawn_weights(model)
    parameters = dict(model.named_parameters())
    # Rows of equal parameters become one (`parameter_rows`), so those of all blocks follow one another.
    order: dict[str, int] = {}
    for name in parameters:
        order.setdefault(_block(name)[1], len(order))

    def position(name: str) -> tuple[int, int]:
        block, name_in_block = _block(name)
        return order[name_in_block], block

    for name in sorted(parameters, key=position):
        options = config.optim.of_group(groups[name], config.model.factors_of(groups[name]))
        std = None
        if name in weights:
            std = standard_deviation(config.init_rule, weights[name], config.model.width_ratio)
        # Only Adam divides by a root to which eps is added, though the options of other updates may have one, too.
        eps = None
        if options.adam_constants is not None:
            eps = getattr(options, "eps", None)
        init = _init(std, parameters[name], projected=projects(config.placement))
        shape = tuple(parameters[name].shape)
        yield ParameterRow(name, groups[name], shape, options.lr, options.weight_decay, eps, options.name, init)


def _block(name: str) -> tuple[int, str]:
    """Return the number of a parameter's block, -1 outside the blocks, and its name without that number."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.*)", name)
    if match is None:
        return -1, name
    return int(match[1]), f"blocks.{match[2]}"


def _without_block(row: ParameterRow) -> ParameterRow:
    return replace(row, parameter=_block(row.parameter)[1])


def _merged(rows: list[ParameterRow]) -> ParameterRow:
    first, name = _block(rows[0].parameter)
    last, _ = _block(rows[-1].parameter)
    if first == last:
        return rows[0]
    return replace(rows[0], parameter=name.replace("blocks.", f"blocks.{first}-{last}."))


def _init(std: float | None, values: Tensor, *, projected: bool) -> str:
    # A placement that projects its matrices changes what the rule has drawn: the values themselves are shown then.
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
