"""What public code computes under one name, and how far it is from the first of that name.

Shapes: B batch, T time, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from normlab.config.compose import compose_run
from normlab.model.fingerprint import fingerprint
from normlab.model.small import build_small, shrink, tokens

NAMES = (
    ("mHC", "transformers, DeepSeek-V4", "7fa433e", "placement=mhc"),
    ("mHC", "NVIDIA/Megatron-LM, branch dev", "023f5cf", "placement=mhc placement.variant=megatron"),
    ("mHC", "NVIDIA/Megatron-LM, branch main", "d98e8a6", "placement=mhc placement.variant=untransposed"),
    ("mHC", "transformers 5.8.0", "", "placement=mhc placement.variant=transformers_5_8_0"),
    ("post-norm", "arXiv:1706.03762", "", "placement=post"),
    ("post-norm", "transformers, OLMo 2", "008f5c8", "placement=res_post"),
    ("Peri-LN", "arXiv:2502.02732", "", "placement=peri"),
    ("Peri-LN", "ReaLLMASIC/ReaLLM-Forge without its pre-norm", "42dfe7f", "placement=res_post"),
    ("sandwich", "pixeli99/MixLN", "ff45826", "placement=sandwich"),
    ("sandwich", "wandb/senpai, issue 775", "", "placement=pre_post"),
    ("hybrid norm", "BryceZhuo/HybridNorm", "f0dd605", "placement=hybridnorm"),
    ("hybrid norm", "marin-community/levanter", "9263f81", "placement=peri"),
    ("parallel", "GPT-J, PaLM (arXiv:2204.02311)", "", "placement=parallel"),
    ("parallel", "Lightning-AI/litgpt without shared_attention_norm", "2685705", "placement=parallel_two_norms"),
    ("Keel", "forks of OLMo-core and torchtitan", "", "placement=keel"),
    ("Keel", "lucidrains/x-transformers", "9252ed7", "placement=pre_post"),
    ("QK-norm", "transformers, Qwen 3", "", "model=llama_nano model.qk_norm=head"),
    (
        "QK-norm", "transformers, Gemma 4, without a divisor of the scores", "033b1a8",
        "model=llama_nano model.qk_norm=head model.qk_scale=2",
    ),
    ("QK-norm", "transformers, OLMo 2", "008f5c8", "model=llama_nano model.qk_norm=full"),
    (
        "QK-norm", "karpathy/nanochat, but for its lack of gains", "92d63d4",
        "model=llama_nano model.qk_norm=head model.qk_norm_after_rope=true model.qk_scale=1.2",
    ),
    ("RMSNorm", "transformers, Llama", "", "norm=rmsnorm norm.eps=1e-6"),
    ("RMSNorm", "bzhangGo/rmsnorm", "2e726f1", "norm=rmsnorm norm.eps_mode=outside_rms norm.eps=1e-8"),
    ("RMSNorm", "lucidrains/x-transformers", "9252ed7", "norm=rmsnorm norm.eps_mode=clamp norm.eps=1e-12"),
    ("RMSNorm", "ReaLLMASIC/ReaLLM-Forge", "42dfe7f", "norm=rmsnorm norm.eps_mode=none norm.eps=0"),
)  # fmt: skip
"""A name, who uses it, the commit that was read, and the overrides that compute the same here.

Gemma 4 has qk_scale = K^(1/4), K the width of a head, 16 in llama_nano and in the models that are compared."""
SMALL_WIDTH = 32
"""The width of these models, which have two heads."""

LEGEND = (
    "here: the overrides of what the name means there, initial values aside; distance: the largest difference of the "
    "logits from those of the first code of this name, divided by the largest logit of the first, in two small float64 "
    "models whose weights have the same numbers; no commit: a paper, an issue, a release, or code of many commits"
)


def name_entries(only: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield an entry for each use of a name, or of one name only; `LEGEND` explains it."""
    first: dict[str, Tensor] = {}
    for name, code, commit, overrides in NAMES:
        if only not in (None, name):
            continue
        config = compose_run(["norm=rmsnorm", *overrides.split()])
        logits_BTV = build_small(shrink(config, width=SMALL_WIDTH)).gpt(tokens()).detach()
        expected_BTV = first.setdefault(name, logits_BTV)
        distance = float((logits_BTV - expected_BTV).abs().max() / expected_BTV.abs().max())
        yield {
            "name": name, "code": code, "commit": commit, "here": overrides, "distance": float(f"{distance:.2g}"),
            "fingerprint": fingerprint(config),
        }  # fmt: skip
