"""What public code computes under one name, and how far it is from the first of that name.

Shapes: B batch, T time, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from normlab.catalogue.other_names import NAMES
from normlab.config.compose import compose_run
from normlab.model.fingerprint import fingerprint
from normlab.model.small import build_small, shrink, tokens

SMALL_WIDTH = 32
"""The width of these models, which have two heads."""

LEGEND = (
    "here: the overrides of what the name means there, initial values aside; distance: the largest difference of the "
    "logits from those of the first code of this name, divided by the largest logit of the first, in two small float64 "
    "models whose weights have the same numbers; no commit: a paper, an issue, a release, or code of many commits"
)


def name_entries(only: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield an entry for each use of a name, or of one name only; `LEGEND` explains it."""
    first_logits: dict[str, Tensor] = {}
    for name, code, commit, overrides in NAMES:
        if only not in (None, name):
            continue
        config = compose_run(["norm=rmsnorm", *overrides.split()])
        logits_BTV = build_small(shrink(config, width=SMALL_WIDTH)).gpt(tokens()).detach()
        expected_BTV = first_logits.setdefault(name, logits_BTV)
        distance = float((logits_BTV - expected_BTV).abs().max() / expected_BTV.abs().max())
        yield {
            "name": name, "code": code, "commit": commit, "here": overrides, "distance": float(f"{distance:.2g}"),
            "fingerprint": fingerprint(config),
        }  # fmt: skip
