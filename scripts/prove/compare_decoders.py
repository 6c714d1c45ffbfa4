#!/usr/bin/env python3
"""Compare the recipes of released decoders with their classes in transformers, in float64.

    .venv/bin/python scripts/prove/compare_decoders.py > results/decoders.md

Both models have the same random weights, and depth 2. A difference is the largest one, of the logits relative to the
largest logit, of the gradients relative to the largest entry of the same gradient. What a recipe leaves out is replaced
in the class or in its weights by the rows of `tests/support/architectures/recipes.py`.

Exits with 1 if a difference is above 1e-10.
"""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.architectures.comparison import results_of_both  # noqa: E402
from support.architectures.recipes import RECIPES, recipe_of  # noqa: E402
from support.tolerance import float32_as_float64  # noqa: E402

LARGEST = 1e-10
TITLE = """# Released decoders

Each command trains the blocks of a released decoder: its residual stream or streams, its norms at each site and its
MLP. The differences are the largest relative ones from its class in transformers {version}, with the same weights in
float64, by `scripts/prove/compare_decoders.py` (torch {torch}, on a CPU). What a recipe leaves out stands in its
description (`normlab list recipes NAME`), with its source; for the comparison it is replaced in the class.

| decoder | class | command | logits | gradients |
| --- | --- | --- | --- | --- |"""
CANNOT = """
Without a command:

- DeepSeek V4 and GLM-5.3-Flash have the streams of `placement=mhc`, beside attention that normlab does not have.
- Kimi K3's attention residuals are `placement=attn_res`. transformers has no class of it.
- Inkling has convolutions in attention and behind each sub-layer.
- Gemma 3n predicts and corrects its streams around the whole block (AltUp), and adds a learned low-rank branch
  (LAuReL). In normlab streams are written behind each sub-layer, and a formula has no matrices of its own."""


def relative_difference(result: Tensor, expected: Tensor) -> float:
    return ((result - expected).abs().max() / expected.abs().max()).item()


def main() -> int:
    print(TITLE.format(version=transformers.__version__, torch=torch.__version__))
    too_large = False
    for row in RECIPES:
        recipe = recipe_of(row)
        if not hasattr(transformers, str(row.transformers_class)):
            print(f"transformers {transformers.__version__} has no {row.transformers_class}", file=sys.stderr)
            return 1
        with pytest.MonkeyPatch.context() as monkeypatch, float32_as_float64():
            ours, theirs = results_of_both(row, monkeypatch)
        logits = relative_difference(ours.logits, theirs.logits)
        gradients = max(relative_difference(ours.gradients[name], theirs.gradients[name]) for name in ours.gradients)
        too_large |= max(logits, gradients) > LARGEST
        command = f"normlab train recipe={recipe}"
        print(f"| {row.name} | {row.transformers_class} | `{command}` | {logits:.1e} | {gradients:.1e} |")
    print(CANNOT)
    return int(too_large)


if __name__ == "__main__":
    sys.exit(main())
