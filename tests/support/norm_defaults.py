"""The defaults of norms, with their sources.

The table repeats the defaults on purpose: a norm's reference gets the norm's own options and cannot notice a wrong
default.
"""

from collections.abc import Iterator

from normlab.catalogue.norms.base import NORMS
from normlab.verify.check import Check, check_no_problems
from normlab.verify.variants import option_fields

PLAIN = "our choice: no gain and no bias, a plain normalisation; eps small beside channels of size 1"
TORCH = "torch's own layer, which has gain, bias and eps=1e-5"
AFFINE = "gain=True unit_offset=False bias=True"
GAIN = "gain=True unit_offset=False bias=False"
BARE = "gain=False unit_offset=False bias=False"
NO_TAPER = "taper_steps=None taper_warmup=100"
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
    "layernorm": (f"{AFFINE} {NO_TAPER} eps=1e-05 eps_mode=inside", TORCH),
    "minmax": (f"{BARE} eps=1e-06", PLAIN),
    "none": ("", "it has no options"),
    "pointwise": (f"{AFFINE} alpha=0.5 shift=False function=tanh", "as dyt"),
    "prmsnorm": (
        f"{GAIN} eps=1e-08 fraction=0.0625 count=floor",
        "Zhang & Sennrich's code, arXiv:1910.07467: eps=1e-8 and 6.25 %",
    ),
    "rmsnorm": (
        f"{GAIN} {NO_TAPER} eps=1e-06 eps_mode=inside_ms compute=fp32 rounding=scale_then_cast",
        "Llama's eps and mean; rounded once, as in torch",
    ),
    "scalenorm": (
        "eps=1e-05 radius=None learn_radius=True",
        "Nguyen & Salazar 2019, arXiv:1910.05895: one learned length, from sqrt(D)",
    ),
    "seednorm": ("eps=1e-06 alpha=1.0 unit_offset=False", "arXiv:2510.22777, as reported by others: alpha=1"),
    "ssnorm": ("eps=1e-06", "as rmsnorm"),
    "zscore": (f"{BARE} eps=1e-06 sigma=population", PLAIN),
}
"""Every option of each norm, and the source of its default."""


def default_check(name: str) -> Iterator[Check]:
    """Check a norm's defaults against `DEFAULTS`."""
    text, source = DEFAULTS[name]
    norm = NORMS[name]()  # pyright: ignore[reportCallIssue]
    expected = dict(option.split("=", 1) for option in text.split())
    values = {field.name: str(getattr(norm, field.name)) for field in option_fields(norm)}
    differing = [option for option in expected | values if values.get(option) != expected.get(option)]
    problems = [f"expected {name}={expected.get(name)}, found {name}={values.get(name)}" for name in differing]
    problems = [f"{'; '.join(problems)} ({source})"] if problems else []
    yield check_no_problems(f"norm {name}", "has the defaults of its source", problems, source)
