"""What a parameter is: its role, given where it is made. Its group of the optimiser follows from it.

    self.gain = parameter(torch.ones(width), role="gain")

A copy of a tensor has no attributes, so a model reads the roles once, when it is built (`roles_of`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from normlab.base.errors import ConfigError, unknown

ROLES = {
    "gain": "a factor on the output of a norm, for each channel or for all",
    "bias": "a vector that is added",
    "scalar": "any other number, or one for each channel, head or stream",
    "matrix": "a matrix that multiplies vectors",
}
"""The roles of a parameter of a norm or a placement."""
EMBEDDING, HEAD = "embedding", "head"
"""The roles of the parameters at the ends of a model."""

_OF_TORCH: tuple[tuple[type[nn.Module], dict[str, str]], ...] = (
    (nn.Linear, {"weight": "matrix", "bias": "bias"}),
    (nn.Embedding, {"weight": EMBEDDING}),
    (nn.LayerNorm, {"weight": "gain", "bias": "bias"}),
    (nn.RMSNorm, {"weight": "gain"}),
    (nn.GroupNorm, {"weight": "gain", "bias": "bias"}),
)
"""The roles of the parameters that torch makes, by the class of their module."""


def parameter(values: Tensor, role: str) -> nn.Parameter:
    """Return a learned parameter with a role, one of `ROLES`.

    Raises:
        ConfigError: There is no such role.
    """
    if role not in (*ROLES, EMBEDDING, HEAD):
        raise ConfigError("parameter: " + unknown("role", role, ROLES))
    made: Any = nn.Parameter(values)  # by its type a tensor has no such attribute
    made.role = role
    return made


def zero_matrix(rows: int, columns: int) -> nn.Parameter:
    """Return a learned matrix that starts at 0 by every init rule.

    It is marked with `starts_at_zero`, because a model on the meta device has no values that would tell.
    """
    made: Any = parameter(torch.zeros(rows, columns), role="matrix")
    made.starts_at_zero = True
    return made


def roles_of(model: nn.Module) -> dict[str, str]:
    """Return the role of each parameter of a module that has not been copied, by the parameter's name.

    Raises:
        ConfigError: A parameter has no role.
    """
    roles: dict[str, str] = {}
    # Objects and not names: a tied matrix has its first name only.
    known_ids: set[int] = set()
    for module_name, module in model.named_modules():
        for name, values in module.named_parameters(module_name, recurse=False):
            if id(values) in known_ids:
                continue
            known_ids.add(id(values))
            role = getattr(values, "role", None) or _role_in(module, name.rpartition(".")[2])
            if role is None:
                raise ConfigError(
                    f"{name}: is a parameter without a role; make it with normlab.plugin.parameter(values, role=...), "
                    f"where a role is {', '.join(ROLES)}"
                )
            roles[name] = role
    return roles


def _role_in(module: nn.Module, leaf: str) -> str | None:
    """Return the role of a parameter that torch made, from the class of its module; None if it is unknown."""
    for kind, roles in _OF_TORCH:
        if isinstance(module, kind):
            return roles.get(leaf)
    return None
