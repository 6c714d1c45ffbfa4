"""Check the defaults of norms and presets against tables with their sources.

The tables repeat the defaults on purpose: a norm's reference is called with the norm's own options, so that it cannot
notice a wrong default.
"""

from __future__ import annotations

from collections.abc import Iterator

from normlab.norms.base import NORMS, NormConfig
from normlab.verify.check import Check
from normlab.verify.variants import option_fields

PLAIN = "our choice: no gain and no bias, a plain normalisation; eps small beside channels of size 1"
TORCH = "torch's own layer, which has gain, bias and eps=1e-5"
AFFINE = "gain=True unit_offset=False bias=True"
GAIN = "gain=True unit_offset=False bias=False"
BARE = "gain=False unit_offset=False bias=False"
RUNNING = f"{AFFINE} eps=1e-05 momentum=0.1 running_var=unbiased"

DEFAULTS: dict[str, tuple[str, str]] = {
    "batchnorm": (RUNNING, f"{TORCH}, and momentum=0.1"),
    "batchnorm_past": (RUNNING, "as batchnorm"),
    "batchnorm_position": (RUNNING, "as batchnorm"),
    "bhyt": (
        f"{GAIN} eps=1e-06 lam=2.0 kappa=10.0 learn_lam=True",
        "the authors' code, arXiv:2601.09719: 1 / kappa is 0.1; learnable_lam is True in each of its config files",
    ),
    "crmsnorm": ("eps=1e-05", "as the layer norm that it replaces"),
    "derf": (f"{AFFINE} alpha=0.5 shift=True", "Chen et al. 2025, arXiv:2512.10938"),
    "dyt": (
        f"{AFFINE} alpha=0.5 shift=False",
        "Zhu et al. 2025, arXiv:2503.10622: alpha=0.5 by default",
    ),
    "gatednorm": (
        f"{GAIN} eps=1e-06 rank=16 std=0.02 gate_scale=1.0",
        "arXiv:2601.22966: rank=16; std: our choice, as GPT-2's matrices",
    ),
    "groupnorm": (
        f"{AFFINE} eps=1e-05 groups=4",
        f"{TORCH}; groups: our choice, language models use 4 to 8",
    ),
    "l2norm": ("eps=1e-12 radius=1.0 learn_radius=False", "nGPT, arXiv:2410.01131: length 1; eps of torch's normalize"),
    "layernorm": (f"{AFFINE} eps=1e-05 eps_mode=inside", TORCH),
    "minmax": (f"{BARE} eps=1e-06", PLAIN),
    "none": ("", "it has no options"),
    "pointwise": (f"{AFFINE} alpha=0.5 shift=False function=tanh", "as dyt"),
    "prmsnorm": (
        f"{GAIN} eps=1e-08 fraction=0.0625 count=floor",
        "Zhang & Sennrich's code, arXiv:1910.07467: eps=1e-8 and 6.25 %",
    ),
    "rmsnorm": (
        f"{GAIN} eps=1e-06 eps_mode=inside_ms compute=fp32 rounding=scale_then_cast",
        "Llama's eps and mean; rounded once, as in torch",
    ),
    "scalenorm": (
        "eps=1e-05 radius=None learn_radius=True",
        "Nguyen & Salazar 2019, arXiv:1910.05895: one learned length, from sqrt(D)",
    ),
    "seednorm": ("eps=1e-06 alpha=1.0 unit_offset=False", "arXiv:2510.22777, as reported by others: alpha=1"),
    "zscore": (f"{BARE} eps=1e-06 sigma=population", PLAIN),
}
"""Every option of each norm, and the source of its default."""

NIKIEMA = 'Nikiema 2025, "Normalization in Transformers"'
TUTORIAL = 'the tutorial "Normalization"'
PRESETS: dict[str, tuple[str, str]] = {
    "batchnorm_biased_var": ("batchnorm running_var=biased", f"the code of {TUTORIAL}"),
    "derf_gpt2": ("derf alpha=1.0", "the authors' code"),
    "dyt_llama": ("dyt alpha=1.0 bias=False", "the authors' code"),
    "layernorm_bert": ("layernorm eps=1e-12", "BERT's code"),
    "layernorm_eps_1e-6": ("layernorm eps=1e-06", f"the code of {NIKIEMA}"),
    "layernorm_eps_outside": ("layernorm eps=1e-06 eps_mode=outside", f"the formula of {NIKIEMA}"),
    "layernorm_gpt2": ("layernorm", "GPT-2's code"),
    "layernorm_nobias": ("layernorm bias=False", "Cohere's Command R, in transformers"),
    "layernorm_olmo1": ("layernorm gain=False bias=False", "Groeneveld et al. 2024, arXiv:2402.00838"),
    "rmsnorm_eps_outside": ("rmsnorm eps_mode=outside_rms", f"the code of {TUTORIAL}"),
    "rmsnorm_gemma": ("rmsnorm unit_offset=True", "Gemma, in transformers"),
    "rmsnorm_llama": ("rmsnorm rounding=cast_then_scale", "Llama, in transformers"),
    "rmsnorm_nanochat": (
        "rmsnorm gain=False eps=1.1920928955078125e-07",
        "nanochat: torch's rms_norm, whose eps is float32's",
    ),
    "rmsnorm_olmo2": ("rmsnorm eps=1e-05", "OLMo 2, in transformers"),
    "rmsnorm_paper": ("rmsnorm eps=1e-08 eps_mode=outside_rms", "Zhang & Sennrich's code, arXiv:1910.07467"),
    "rmsnorm_qwen3": ("rmsnorm rounding=cast_then_scale", "Qwen3, in transformers"),
    "rmsnorm_qwen3_next": ("rmsnorm unit_offset=True", "Qwen3-Next, in transformers"),
    "rmsnorm_simple": ("rmsnorm gain=False", "TransNormerLLM, arXiv:2307.14995"),
    "rmsnorm_sum_of_squares": ("rmsnorm gain=False eps_mode=inside_sum", f"the formula of {NIKIEMA}"),
    "rmsnorm_torch": ("rmsnorm eps=1.1920928955078125e-07", "torch.nn.RMSNorm, whose eps is float32's"),
    "zscore_annotated": ("zscore gain=True bias=True sigma=sample", "The Annotated Transformer's code"),
}
"""The norm of each preset with the options that differ from its defaults, and the source."""


def default_check(name: str) -> Iterator[Check]:
    """Check a norm's defaults against `DEFAULTS`; a plugin's norm has no entry there."""
    if name not in DEFAULTS:
        return
    defaults, source = DEFAULTS[name]
    options = NORMS[name]()  # pyright: ignore[reportCallIssue]
    expected = _parse(defaults)
    yield _check(f"norm {name}", "has the defaults of its source", _options(options), expected, source)


def preset_check(preset: NormConfig) -> Check:
    """Check that a preset has the options of `PRESETS`, and the defaults of its norm in every other option."""
    subject = f"norm {preset.preset}"
    if preset.preset not in PRESETS:
        return Check(subject=subject, claim="is in the table of presets", passed=False, result="it is not")
    text, source = PRESETS[preset.preset]
    name, _, options = text.partition(" ")
    expected = {"norm": name} | _parse(DEFAULTS[name][0]) | _parse(options)
    return _check(subject, f"is {text}", {"norm": preset.name} | _options(preset), expected, source)


def _check(subject: str, claim: str, found: dict[str, str], expected: dict[str, str], source: str) -> Check:
    differing = [option for option in expected | found if found.get(option) != expected.get(option)]
    text = ", ".join(f"{option}={found.get(option)}, not {expected.get(option)}" for option in differing)
    result = f"{text} ({source})" if differing else source
    return Check(subject=subject, claim=claim, passed=not differing, result=result)


def _options(norm: NormConfig) -> dict[str, str]:
    return {field.name: str(getattr(norm, field.name)) for field in option_fields(norm)}


def _parse(text: str) -> dict[str, str]:
    return dict(option.split("=", 1) for option in text.split())
