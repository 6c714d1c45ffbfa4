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
GROUPS = (("tokens",), ("positions",), ("head",), ("q", "k"), ("v", "up", "gate"), ("out", "down"))
"""Weights by the last part of their name: tokens; positions; head; queries, keys; values, MLP inputs; outputs."""
SIZES = ((2, 16), (7, 24))
"""Depths and widths."""

OUT_NORM = "our choice: the norm after the branch cancels smaller outputs, which only make the first gradients larger"
INITS = (
    ("gpt2_scaled", "pre", "GPT-2: Radford et al. 2019, section 2.3"),
    ("gpt2_scaled", "parallel parallel_two_norms", "our choice: that of pre; only the sub-layers' inputs differ"),
    ("gpt2_scaled", "siamese", "our choice: that of pre, whose recipes its abstract recommends (arXiv:2602.08064)"),
    ("gpt2_scaled", "hyper_connections", "our choice: that of pre; each stream starts as that of pre"),
    ("gpt2", "attn_res", "our choice: the source names no rule, and the stream begins again in some blocks"),
    ("gpt2", "mhc identity_hc", "DeepSeek-V4 of transformers: N(0, 0.02) for every matrix"),
    ("gpt2_scaled", "x0_lambdas", "our choice: that of pre; in nanochat outputs start at zero"),
    ("xavier", "post", "Xiong et al. 2020, arXiv:2002.04745, section 3"),
    ("xavier", "pre_post", "our choice: that of post, since it has the same norm on the stream"),
    ("xavier", "resi_dual", "our choice: that of post; the authors' code keeps fairseq's (arXiv:2304.14802)"),
    ("xavier", "skipinit rezero", "our choice: branches start at 0, so the rule has no effect at the start"),
    ("gpt2", "peri sandwich peri_raw_attn", OUT_NORM),
    ("gpt2", "depth_scaled_sandwich", f"{OUT_NORM}; the paper's own, tinyinit, is known from a secondary source"),
    ("gpt2", "res_post", "OLMo 2, arXiv:2501.00656: N(0, 0.02) for every matrix"),
    ("gpt2", "mix_ln", "our choice: its first blocks are post, the others pre, and neither rule suits both"),
    ("gpt2", "keel", "a public torchtitan fork of arXiv:2601.19895: N(0, 0.02) for linear layers and embeddings"),
    ("gpt2", "lns", "the authors' README (arXiv:2502.05795): outputs are not scaled, because 1 / sqrt(l) does that"),
    ("gpt2", "layerscale gpas norm_preserving", "our choice: the source names no rule"),
    ("gpt2", "normformer", "our choice: one of its two branches ends in a norm, which cancels smaller outputs"),
    ("gpt2", "ngpt", "our choice: rows are normalised to length 1, so the rule has no effect"),
    ("deepnorm", "deepnorm", "Wang et al. 2022, arXiv:2203.00555"),
    ("sub_ln", "sub_ln", "Wang et al. 2022, arXiv:2210.06423"),
    ("smallinit_scaled", "hybridnorm hybridnorm_star", "the public code of Zhuo et al. 2025, arXiv:2503.04598"),
    ("xavier_scaled", "b2t", "after the public code of Takase et al. 2022, arXiv:2206.00330"),
)
INIT_OF_PLACEMENT = {name: (rule, source) for rule, names, source in INITS for name in names.split()}
"""The init rule of each placement, and its source."""


def placement_init_check(placement: Placement) -> Iterator[Check]:
    """Check a placement's init rule against `INIT_OF_PLACEMENT`."""
    rule, source = INIT_OF_PLACEMENT[placement.name]
    yield check_equal(f"placement {placement.name}", f"has init={rule}", rule, placement.init, source)


def rule_checks(rule: str) -> Iterator[Check]:
    """Check that each weight is its standard normal numbers times the closed form."""
    largest = LargestError(1e-6)
    forms = {part: form for parts, form in zip(GROUPS, CLOSED_FORMS[rule], strict=True) for part in parts}
    norm = NORMS["layernorm"]()  # pyright: ignore[reportCallIssue]
    for depth, width in SIZES:
        small = small_config(norm, PLACEMENTS["pre"], depth=depth, mlp="swiglu", tie_embeddings=False)
        model = dataclasses.replace(small.model, width=width, heads=2, mlp_width=3 * width)
        config = dataclasses.replace(small, model=model, init=rule)
        for name, weight in build_model(config, VOCAB).named_parameters():
            if weight.dim() != 2:
                continue
            outputs, inputs = weight.shape
            layer = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
            sizes = {"L": depth, "l": layer, "D": width, "I": inputs, "O": outputs, "ln": math.log, "min": min}
            form = forms[name.removesuffix(".weight").rpartition(".")[2]]
            std = eval(form, {"__builtins__": {}}, sizes)  # noqa: S307
            generator = np.random.Generator(np.random.Philox(key=derive_seed(config.seed, name)))
            numbers = generator.standard_normal(weight.numel(), dtype=np.float32)
            expected = std * torch.from_numpy(numbers).view_as(weight)
            location = f"{name} of {depth} blocks of width {width}"
            largest.compare(weight, expected, location, float(expected.abs().max()) or 1.0)
    parts = "token embedding, positions, head, queries and keys, values and MLP, outputs"
    yield largest.check(f"init {rule}", f"draws {parts} with {', '.join(CLOSED_FORMS[rule])}", "self")
