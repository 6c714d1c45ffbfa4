"""What papers, tables and other libraries call the values of options: `pre-norm` for `pre`, `float32` for `fp32`."""

import difflib
import re
from collections.abc import Iterable, Mapping

TITLES: Mapping[str, Mapping[str, str]] = {
    "norm": {
        "layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "batchnorm": "BatchNorm", "groupnorm": "GroupNorm",
        "crmsnorm": "CRMSNorm", "prmsnorm": "pRMSNorm", "scalenorm": "ScaleNorm", "seednorm": "SeeDNorm",
        "gatednorm": "GatedNorm", "dyt": "DyT", "derf": "Derf", "bhyt": "BHyT", "none": "no norm",
    },
    "placement": {
        "pre": "pre-norm", "post": "post-norm", "peri": "peri-LN", "mix_ln": "Mix-LN", "deepnorm": "DeepNorm",
        "keel": "Keel", "lns": "LayerNorm scaling", "skipinit": "SkipInit", "rezero": "ReZero",
        "layerscale": "LayerScale", "sub_ln": "Sub-LN", "hybridnorm": "HybridNorm", "hybridnorm_star": "HybridNorm*",
        "normformer": "NormFormer", "b2t": "B2T", "gpas": "GPAS", "ngpt": "nGPT", "resi_dual": "ResiDual",
        "siamese": "SiameseNorm", "sandwich": "Sandwich-LN", "res_post": "res-post-norm",
    },
    "model.qk_norm": {"head": "per head", "full": "over all heads"},
}  # fmt: skip
"""The titles of values in tables and figures, which are the names in papers; another value is its own title."""

_SAME = (
    ("pre", "prenorm", "preln", "prelayernorm"),
    ("post", "postnorm", "postln", "postlayernorm"),
    ("peri", "perinorm", "periln"),
    ("layernorm", "ln"),
    ("rmsnorm", "rms"),
    ("batchnorm", "bn"),
    ("groupnorm", "gn"),
    ("off", "none", "null", "no", "false", "0", "disabled", "nonorm", "identity"),
    ("on", "online", "yes", "true", "1", "enabled"),
    ("fp32", "float32", "float", "single", "f32", "32", "32true", "torchfloat32", "torchfloat"),
    ("fp16", "float16", "half", "f16", "16", "16mixed", "fp16mixed", "torchfloat16", "torchhalf"),
    ("bf16", "bfloat16", "bf16mixed", "torchbfloat16"),
    ("fp64", "float64", "double", "torchfloat64"),
    ("fp8", "float8"),
    ("cuda", "gpu", "cuda0"),
    ("rope", "rotary", "rotaryembeddings"),
    ("learned", "absolute", "wpe"),
    ("swiglu", "silu", "swish"),
    ("adamw", "adam"),
)
"""Names of the same value, as `_plain` returns them; no option has two names of one line among its values."""


def _plain(name: str) -> str:
    """Return a name in lower case, with letters and digits only."""
    return re.sub(r"[\W_]", "", name).lower()


_BY_TITLE = {title.lower(): value for titles in TITLES.values() for value, title in titles.items()}
_BY_PLAIN_TITLE = {_plain(title): value for title, value in reversed(_BY_TITLE.items())}


def nearest_value(name: str, values: Iterable[str]) -> str | None:
    """Return the value with this name apart from case and marks, this title or this synonym, or else the closest one.

    Return None if no value is close, or if `name` is a known synonym of no value: `fp64` is not a typing error of fp16.
    """
    values = list(values)
    plain = _plain(name)
    same = next((names for names in _SAME if plain in names), ())
    by_plain_name = {_plain(value): value for value in values}
    # A title comes first: HybridNorm* is another placement than HybridNorm.
    for candidate in (_BY_TITLE.get(name.lower(), plain), plain, _BY_PLAIN_TITLE.get(plain, plain), *same):
        if _plain(candidate) in by_plain_name:
            return by_plain_name[_plain(candidate)]
    if same:
        return None
    by_lower_case = {value.lower(): value for value in values}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.5)
    return by_lower_case[close[0]] if close else None
