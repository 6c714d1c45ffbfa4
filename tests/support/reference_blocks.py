"""Small configs with a placement, and rows for tests."""

import dataclasses
from functools import cache

from normlab.catalogue.placements.algebra import Row
from normlab.catalogue.placements.base import Placement
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig

VOCAB, DEPTH, WIDTH, CONTEXT = 11, 5, 12, 5


@cache
def composed() -> RunConfig:
    overrides = ["model=llama_nano", "norm=layernorm", "model.heads=2", f"model.depth={DEPTH}"]
    return compose_run([*overrides, f"model.width={WIDTH}", f"model.context={CONTEXT}"])


def config_of(placement: Placement) -> RunConfig:
    return dataclasses.replace(composed(), placement=placement)


def row_of(name: str = "test_row", **parts: object) -> Row:
    """Return a row of a test; the fixture `registries` forgets it after the test."""
    return Row(name=name, formula="in the test", source="the test", init="xavier", **parts)  # pyright: ignore[reportArgumentType]
