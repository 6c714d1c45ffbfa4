"""What a plugin imports: a file that adds a norm, a placement, an init rule or a study. These names stay.

    from normlab.plugin import NormConfig, option, register_norm

The other modules of normlab may move. Each name is imported when a plugin asks for it: a row of the residual algebra
needs no torch, and a norm no studies.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normlab.base.errors import ConfigError
    from normlab.base.options import option
    from normlab.base.plugins import COUNTER
    from normlab.catalogue.norms.affine import Affine, NormModule, working_dtype
    from normlab.catalogue.norms.base import AffineNormConfig, NormConfig, register_norm
    from normlab.catalogue.parameters import parameter
    from normlab.catalogue.placements.algebra import Row, SubLayer, register_row
    from normlab.catalogue.placements.base import Placement, register_placement
    from normlab.catalogue.placements.init_rules import Weight, init_rule
    from normlab.studies.base import AtLeast, AtMost, Claim, Grid, Study, Within, register_study
    from normlab.studies.estimate import Estimate, Estimator, over_seeds
    from normlab.studies.estimators import Contrast, Share, Slope, difference, interaction
    from normlab.studies.measures import Measure
    from normlab.system.ranks import moments_over_ranks

_MODULES = {
    "base.errors": ("ConfigError",),
    "base.options": ("option",),
    "base.plugins": ("COUNTER",),
    "catalogue.norms.affine": ("Affine", "NormModule", "working_dtype"),
    "catalogue.norms.base": ("AffineNormConfig", "NormConfig", "register_norm"),
    "catalogue.parameters": ("parameter",),
    "catalogue.placements.algebra": ("Row", "SubLayer", "register_row"),
    "catalogue.placements.base": ("Placement", "register_placement"),
    "catalogue.placements.init_rules": ("Weight", "init_rule"),
    "studies.base": ("AtLeast", "AtMost", "Claim", "Grid", "Study", "Within", "register_study"),
    "studies.estimate": ("Estimate", "Estimator", "over_seeds"),
    "studies.estimators": ("Contrast", "Share", "Slope", "difference", "interaction"),
    "studies.measures": ("Measure",),
    "system.ranks": ("moments_over_ranks",),
}
"""The names of each module of normlab."""

__all__ = [
    "COUNTER",
    "Affine",
    "AffineNormConfig",
    "AtLeast",
    "AtMost",
    "Claim",
    "ConfigError",
    "Contrast",
    "Estimate",
    "Estimator",
    "Grid",
    "Measure",
    "NormConfig",
    "NormModule",
    "Placement",
    "Row",
    "Share",
    "Slope",
    "Study",
    "SubLayer",
    "Weight",
    "Within",
    "difference",
    "init_rule",
    "interaction",
    "moments_over_ranks",
    "option",
    "over_seeds",
    "parameter",
    "register_norm",
    "register_placement",
    "register_row",
    "register_study",
    "working_dtype",
]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"normlab.{module}"), name)
    raise AttributeError(f"module 'normlab.plugin' has no attribute {name!r}; it has {', '.join(__all__)}")
