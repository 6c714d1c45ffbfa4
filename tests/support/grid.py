"""The configs of a grid."""

from collections.abc import Sequence

from normlab.config.compose import compose_sweep
from normlab.config.schema import RunConfig


def compose_grid(arguments: Sequence[str]) -> list[RunConfig]:
    return [config for _, config in compose_sweep(arguments)[1]]
