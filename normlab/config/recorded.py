"""The config of a run as a record or a plan has it, parsed back to a `RunConfig`.

A reader of results calls `parse_config`, which needs no plugin. To build the run's model again, `config_from_record`
needs the registered norm and placement, and `load_config` registers them first.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from normlab.base.errors import ConfigError, unknown
from normlab.base.options import check
from normlab.base.parsing import from_json, key_of
from normlab.base.plugins import load_plugins
from normlab.catalogue import entries as catalogue
from normlab.catalogue.corpora import DATA, HubData
from normlab.catalogue.norms.base import NORMS, NormConfig
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.optimizers.options import OPTIMIZERS
from normlab.catalogue.placements.base import PLACEMENTS, Placement
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.config.model import ModelConfig
from normlab.config.schema import RunConfig
from normlab.config.stats import StatsConfig
from normlab.config.train import EvalConfig, RunOptions, TrackingConfig, TrainConfig

T = TypeVar("T")
_KINDS = {
    "model": ModelConfig, "train": TrainConfig, "eval": EvalConfig, "stats": StatsConfig, "tracking": TrackingConfig,
    "run": RunOptions,
}  # fmt: skip
"""The class of each group that has one class."""


def parse_config(tree: Mapping[str, Any]) -> RunConfig:
    """Return the config in a run's record, for readers.

    The norm and the placement are of their base classes, because their own may be a plugin's; the options of their own
    are attributes that nothing has checked. An option that a later version added has its default. Configs share their
    equal groups: copy a config before you change it.

    Raises:
        ConfigError: An option is unknown (another version wrote the record), has a value of another type, or one
            outside its limits.
    """
    config = _convert(tree, RunConfig)
    config.norm = _recorded_part(tree["norm"], _RecordedNorm)
    config.placement = _recorded_part(tree["placement"], _RecordedPlacement)
    if config.optim.name not in OPTIMIZERS:
        raise ConfigError(unknown("optim", config.optim.name, OPTIMIZERS))
    kinds: dict[str, type[Any]] = {
        "optim": OPTIMIZERS[config.optim.name],
        # Any name that is not a corpus of normlab is a dataset of the hub.
        "data": DATA.get(config.data.name, HubData),
        **_KINDS,
    }
    for group, kind in kinds.items():
        setattr(config, group, _parse_group(group, kind, key_of(tree.get(group, {}))))
    check(config, checked=kinds)
    return config


class _RecordedNorm(NormConfig):
    """A norm in a record. Other than its base class it has a `__dict__`, which holds the options of its own."""


class _RecordedPlacement(Placement):
    """A placement in a record, likewise."""


def _recorded_part(tree: Mapping[str, Any], kind: type[T]) -> T:
    """Return a norm or a placement in a record, with the options of its own as attributes."""
    part = msgspec.convert(tree, kind)
    for name, value in tree.items():
        # The record may be a stranger's: it must not replace a method, nor have a property computed.
        if not hasattr(kind, name):
            setattr(part, name, value)
    return part


def config_from_record(tree: Mapping[str, Any]) -> RunConfig:
    """Return the config in a run's record; its norm and its placement must be registered.

    Raises:
        ConfigError: As `parse_config`, or a norm or a placement is unknown because a plugin is missing.
    """
    # Parsed configs share their groups, and this one gets others.
    config = deepcopy(parse_config(tree))
    registries: dict[str, Mapping[str, Any]] = {"norm": NORMS, "placement": PLACEMENTS}
    for group, registry in registries.items():
        name = getattr(config, group).name
        if name not in registry:
            raise ConfigError(unknown(group, name, registry, titles=catalogue.titles(group)))
        kind = registry[name]
        if not isinstance(kind, type):  # a placement is registered with its default options
            kind = type(kind)
        setattr(config, group, _convert(tree[group], kind, group))
    check(config)
    return config


def load_config(tree: Mapping[str, Any]) -> RunConfig:
    """Load the norms, placements and plugins, and return the config that another process of normlab has validated.

    Raises:
        ConfigError: A plugin cannot be loaded, or as `config_from_record`.
    """
    load_norms()
    load_placements()
    load_plugins(tree["plugins"])
    return config_from_record(tree)


@lru_cache(maxsize=4096)  # the configs of a sweep's runs have few different groups
def _parse_group(group: str, kind: type[T], content: bytes) -> T:
    """Return the options of a group, which `content` has as JSON, checked; equal contents give the same object."""
    options = _convert(from_json(content), kind, group)
    check(options, f"{group}.")
    return options


def _convert(tree: Mapping[str, Any], kind: type[T], group: str = "config") -> T:
    """Return the options of a group as an object of its class.

    Raises:
        ConfigError: An option is unknown, or has a value of another type.
    """
    try:
        options = msgspec.convert(tree, kind)
    except ValueError as error:
        raise ConfigError(f"{group}: {error}") from error
    # msgspec ignores the options that the class does not have.
    extra = tree.keys() - {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    if extra:
        raise ConfigError(f"{group} has no option {', '.join(sorted(extra))}")
    return options
