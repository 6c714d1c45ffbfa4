"""What other code and papers call norms and placements, and what computes the same here.

A name often means a norm, a placement and options of the model together, so it is not part of one entry.
"""

_GEMMA = f"model=llama_nano placement=peri model.tie_embeddings=true model.embed_scale={32**0.5}"
_NOT_GEMMA = (
    "with SiLU in place of GELU, and full attention in each layer; embed_scale is the square root of the width, which "
    "is 32 in model=llama_nano"
)
_TRINITY = (
    "model=llama_nano norm=rmsnorm placement=depth_scaled_sandwich placement.c_attn=1 placement.c_mlp=1 "
    "model.qk_norm=head model.attn_gate=channel"
)
OTHER_NAMES = {
    "prores": "placement=pre model.depth=4 placement.branch_warmup=4000 (1000 times model.depth), or post, "
    "deepnorm, peri or lns in place of pre",
    "gemma2": f"norm=rmsnorm_gemma {_GEMMA} model.attn_softcap=50 model.logit_softcap=30 ({_NOT_GEMMA})",
    "gemma3": f"norm=rmsnorm_gemma {_GEMMA} model.qk_norm=head ({_NOT_GEMMA})",
    "gemma4": f"norm=rmsnorm_llama {_GEMMA} model.qk_norm=head model.v_norm=true model.qk_scale=2 ({_NOT_GEMMA}; "
    "qk_scale is K^(1/4), where a head has K channels, 16 in model=llama_nano)",
    "granite": "model=llama_nano norm=rmsnorm_llama placement=pre placement.branch_factor=0.22 (0.22 stands for the "
    "model's residual_multiplier)",
    "zaya": "model=llama_nano norm=rmsnorm_llama placement=pre placement.residual_affine=true (without its "
    "convolutions, its experts, and the scale and shift of its embeddings)",
    "gatedresidual": "placement=gated_residual norm=rmsnorm_gemma",
    "hyv4": "placement=identity_hc placement.variant=hy4", "ihc": "placement=identity_hc",
    "mhclite": "placement=mhc placement.mixing=permutations placement.start=0.01",
    "kromhc": "placement=mhc placement.mixing=kronecker placement.start=0.01",
    "afmoe": _TRINITY, "trinity": _TRINITY,
    "qknorm": "model.qk_norm=head, or full for all heads together",
    "tapernorm": "norm=rmsnorm norm.taper_steps=1000, or layernorm in place of rmsnorm",
}  # fmt: skip
"""What others call a placement or a norm, by its name without case and marks, and the overrides that give it here."""

NAMES = (
    ("mHC", "transformers, DeepSeek-V4", "7fa433e", "placement=mhc"),
    ("mHC", "NVIDIA/Megatron-LM, branch dev", "023f5cf", "placement=mhc placement.variant=megatron"),
    ("mHC", "NVIDIA/Megatron-LM, branch main", "d98e8a6", "placement=mhc placement.variant=untransposed"),
    ("mHC", "transformers 5.8.0", "", "placement=mhc placement.variant=transformers_5_8_0"),
    ("iHC", "marin-community/marin, issue 7409: identity", "", "placement=identity_hc"),
    (
        "iHC", "transformers 5.23.0, Hy4-Preview: independent; identity in its README", "",
        "placement=identity_hc placement.variant=hy4",
    ),
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
    (
        "residual scaling", "transformers, ZAYA: ResidualScaling", "060988b",
        "placement=pre placement.residual_affine=true",
    ),
    (
        "residual scaling", "transformers, Granite: residual_multiplier, in its docs scaled residual", "1415f8c",
        "placement=pre placement.branch_factor=0.22",
    ),
    ("RMSNorm", "transformers, Llama", "", "norm=rmsnorm norm.eps=1e-6"),
    ("RMSNorm", "bzhangGo/rmsnorm", "2e726f1", "norm=rmsnorm norm.eps_mode=outside_rms norm.eps=1e-8"),
    ("RMSNorm", "lucidrains/x-transformers", "9252ed7", "norm=rmsnorm norm.eps_mode=clamp norm.eps=1e-12"),
    ("RMSNorm", "ReaLLMASIC/ReaLLM-Forge", "42dfe7f", "norm=rmsnorm norm.eps_mode=none norm.eps=0"),
)  # fmt: skip
"""A name, who uses it, the commit that was read, and the overrides that compute the same here.

Gemma 4 has qk_scale = K^(1/4), K the width of a head, 16 in llama_nano and in the models that are compared."""
