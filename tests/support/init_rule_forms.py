"""The closed forms of init rules, in models of two depths and widths, and the init rule of each placement.

The tables repeat what the init rules and the placements declare, so that a mistake in one of them fails a check.

Shapes: L blocks, l the number of a block from 1, D width, I a matrix's inputs, O its outputs.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch

from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.placements.base import PLACEMENTS, Placement
from normlab.model.init import build_model, derive_seed
from normlab.model.small import VOCAB, small_config
from normlab.verify.check import Check, LargestError, check_equal

XAVIER = "(2 / (I + O)) ** 0.5"
CLOSED_FORMS = {
    "gpt2": ("0.02",) * 6,
    "gpt2_scaled": (*["0.02"] * 5, "0.02 * (2 * L) ** -0.5"),
    "xavier": ("0.02", "0.02", "0.02", XAVIER, XAVIER, XAVIER),
    "xavier_scaled": ("0.02", "0.02", "0.02", *[f"{XAVIER} * L ** -0.5"] * 3),
    "deepnorm": ("0.02", "0.02", "0.02", XAVIER, *[f"{XAVIER} * (8 * L) ** -0.25"] * 2),
    "deepnorm_inverse": ("0.02", "0.02", "0.02", XAVIER, *[f"{XAVIER} * (8 * L) ** 0.25"] * 2),
    "sub_ln": ("0.02", "0.02", "0.02", XAVIER, *[f"{XAVIER} * ln(2 * L) ** 0.5"] * 2),
    "smallinit": ("(0.4 / D) ** 0.5",) * 6,
    "smallinit_scaled": (*["(0.4 / D) ** 0.5"] * 5, "(0.2 / (D * L)) ** 0.5"),
    "depth_scaled": (*["0.02"] * 5, "0.02 * (2 * l) ** -0.5"),
    "tinyinit": ("0.5", "0.02", "0.02", *["(2 * D * L) ** -0.5"] * 3),
    "nanochat": ("1", "1", "0", *["min(1, (O / I) ** 0.5) * I ** -0.5"] * 2, "0"),
    "modded": ("1", "1", "0", *["(0.33 / I) ** 0.5"] * 2, "0"),
}
"""Standard deviations of each rule, one for each group of `GROUPS`."""
GROUPS = (
    ("embed.tokens",), ("embed.positions",), ("head",), ("attn.q", "attn.k", "attn.gate"),
    ("attn.v", "mlp.up", "mlp.gate"), ("attn.out", "mlp.down"),
)  # fmt: skip
"""Weights by the last parts of their name: tokens; positions; head; queries, keys, gates of attention; values, inputs
of the MLP; outputs."""
SIZES = ((2, 16), (7, 24))
"""Depths and widths."""

INITS = {
    "gpt2_scaled": "pre parallel parallel_two_norms siamese hyper_connections x0_lambdas",
    "gpt2": "attn_res mhc identity_hc gated_residual peri sandwich peri_raw_attn depth_scaled_sandwich res_post mix_ln "
    "keel lns layerscale gpas norm_preserving normformer ngpt",
    "xavier": "post pre_post resi_dual skipinit rezero",
    "deepnorm": "deepnorm",
    "sub_ln": "sub_ln",
    "smallinit_scaled": "hybridnorm hybridnorm_star",
    "xavier_scaled": "b2t",
}
"""The placements that have each init rule."""
INIT_OF_PLACEMENT = {name: rule for rule, names in INITS.items() for name in names.split()}
"""The init rule of each placement."""


def placement_init_check(placement: Placement) -> Iterator[Check]:
    """Check a placement's init rule against `INIT_OF_PLACEMENT`."""
    rule, source = INIT_OF_PLACEMENT[placement.name], placement.init_source
    yield check_equal(f"placement {placement.name}", f"has init={rule}", rule, placement.init, source)


def rule_checks(rule: str) -> Iterator[Check]:
    """Check that each weight is its standard normal numbers times the closed form."""
    largest = LargestError(1e-6)
    forms = {part: form for parts, form in zip(GROUPS, CLOSED_FORMS[rule], strict=True) for part in parts}
    norm = NORMS["layernorm"]()  # pyright: ignore[reportCallIssue]
    for depth, width in SIZES:
        small = small_config(norm, PLACEMENTS["pre"], depth=depth, mlp="swiglu", tie_embeddings=False)
        # A gate for each head is the only matrix with fewer outputs than inputs that no rule sets to 0.
        model = dataclasses.replace(small.model, width=width, heads=2, mlp_width=3 * width, attn_gate="head")
        config = dataclasses.replace(small, model=model, init=rule)
        for name, weight in build_model(config, VOCAB).named_parameters():
            if weight.dim() != 2:
                continue
            outputs, inputs = weight.shape
            layer = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
            sizes = {"L": depth, "l": layer, "D": width, "I": inputs, "O": outputs, "ln": math.log, "min": min}
            form = forms[".".join(name.removesuffix(".weight").split(".")[-2:])]
            std = eval(form, {"__builtins__": {}}, sizes)  # noqa: S307
            generator = np.random.Generator(np.random.Philox(key=derive_seed(config.seed, name)))
            numbers = generator.standard_normal(weight.numel(), dtype=np.float32)
            expected = std * torch.from_numpy(numbers).view_as(weight)
            location = f"{name} of {depth} blocks of width {width}"
            largest.compare(weight, expected, location, float(expected.abs().max()) or 1.0)
    parts = "token embedding, positions, head, queries, keys and gates, values and MLP, outputs"
    yield largest.check(f"init {rule}", f"draws {parts} with {', '.join(CLOSED_FORMS[rule])}", "self")
