"""What papers, tables and other libraries call the values of options: `pre-norm` for `pre`, `float32` for `fp32`."""

import difflib
import re
from collections.abc import Iterable, Mapping

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
    ("head", "perhead"),
    ("full", "overallheads"),
)
"""Names of the same value, as `_plain` returns them; no option has two names of one line among its values."""


def _plain(name: str) -> str:
    """Return a name in lower case, with letters and digits only."""
    return re.sub(r"[\W_]", "", name).lower()


def nearest_values(
    name: str, values: Iterable[str], titles: Mapping[str, str] | None = None, most: int = 1
) -> list[str]:
    """Return the value with this name apart from case and marks, this title or this synonym, or else the closest ones.

    Return none if no value is close, or if `name` is a known synonym of no value: `fp64` is not a typing error of fp16.
    """
    values = list(values)
    by_title = {title.lower(): value for value, title in (titles or {}).items()}
    # Reversed, so that of two titles with one plain form the first one counts.
    by_plain_title = {_plain(title): value for title, value in reversed(by_title.items())}
    plain = _plain(name)
    synonyms = next((names for names in _SAME if plain in names), ())
    by_plain_name = {_plain(value): value for value in values}
    # A title comes first: HybridNorm* is another placement than HybridNorm.
    for candidate in (by_title.get(name.lower(), plain), plain, by_plain_title.get(plain, plain), *synonyms):
        if _plain(candidate) in by_plain_name:
            return [by_plain_name[_plain(candidate)]]
    if synonyms:
        return []
    by_lower_case = {value.lower(): value for value in values}
    # Several are named only if each is close; a single guess may be vague.
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=most, cutoff=0.75)
    close = close or difflib.get_close_matches(name.lower(), by_lower_case, n=1, cutoff=0.5)
    return [by_lower_case[value] for value in close]
