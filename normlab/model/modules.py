"""Build the modules of norms and wirings, and check those that a plugin builds."""

import inspect

from torch import nn

from normlab.base.errors import ConfigError
from normlab.base.plugins import plugin_file
from normlab.catalogue.norms.base import NormConfig
from normlab.catalogue.placements.base import MakeNorm, Placement


def build_norm(norm: NormConfig, width: int) -> nn.Module:
    """Return the module of a norm for vectors of this width.

    Raises:
        ConfigError: A plugin's norm builds no module, or one that does not take one input.
    """
    module = norm.build(width)
    _check_module("norm", norm.name, "build", module, ("x",))
    return module


def build_wiring(placement: Placement, layer: int, depth: int, width: int, make_norm: MakeNorm) -> nn.Module:
    """Return the module of `Placement.wire`.

    Raises:
        ConfigError: A plugin's placement builds no module, or one that does not take the stream and two sub-layers.
    """
    module = placement.wire(layer, depth, width, make_norm)
    _check_module("placement", placement.name, "wire", module, ("stream", "attn", "mlp"))
    return module


def _check_module(kind: str, name: str, method: str, module: object, inputs: tuple[str, ...]) -> None:
    """Raise ConfigError unless a plugin's module can be called with these inputs."""
    file = plugin_file(kind, name)
    if file is None:
        return
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"plugins: {file}: {kind} {name!r}: `{method}` returns {module!r:.60}, but must return a torch.nn.Module; "
            "fix the file"
        )
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*inputs)
    except TypeError as error:
        # Only the call shows a wrong number of arguments, so that no line of the file would be in the traceback.
        raise ConfigError(
            f"plugins: {file}: {kind} {name!r}: {type(module).__name__}.forward takes {signature}, but is called as "
            f"forward({', '.join(inputs)}); fix the file"
        ) from error
