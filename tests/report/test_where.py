from __future__ import annotations

import pytest

from normlab.errors import ConfigError
from normlab.report.where import match_runs, parse_conditions

RUNS = [
    {"config": {"norm": {"name": norm, "eps": 1e-6}, "model": {"depth": depth, "bias": bias}, "seed": 0}}
    for norm, depth, bias in (("rmsnorm", 4, True), ("layernorm", 8, False), ("none", 16, True))
]


@pytest.mark.parametrize(
    ("texts", "which"),
    [
        (["model.depth>=8"], [1, 2]),
        (["model.depth > 8"], [2]),
        (["model.depth<8"], [0]),
        (["model.depth<=8"], [0, 1]),
        (["model.depth==8"], [1]),
        (["model.depth!=8"], [0, 2]),
        (["norm=rmsnorm"], [0]),
        (["norm!=none,model.depth>4"], [1]),
        (["norm!=none", "model.depth>4"], [1]),
        (["model.bias=true"], [0, 2]),
        (["norm.eps=1e-6", "norm.eps<0.1"], [0, 1, 2]),
        (["corpus!=stdlib"], [0, 1, 2]),
        ([], [0, 1, 2]),
    ],
)
def test_conditions(texts, which):
    kept = match_runs(RUNS, parse_conditions(texts, "--where"))
    assert [index for index, keep in enumerate(kept) if keep] == which


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model.dpth>=8", "--where model.dpth: no run has such an option .did you mean 'model.depth'"),
        ("nrom=rmsnorm", "did you mean 'norm'"),
        ("norm=rmsnrm", "unknown norm 'rmsnrm': choose one of layernorm, none, rmsnorm .did you mean 'rmsnorm'"),
        ("norm>rmsnorm", "compares numbers"),
        ("model.depth>16", "no run is so; model.depth is 16, 4, 8"),
        ("norm=none,model.depth=4", "no run is all of it"),
        ("model.depth", "write word"),
        ("", "write word"),
        ("model.depth=>8", "write word"),
        ("__import__('os')=1", "write word"),
    ],
)
def test_what_is_no_condition_is_one_line(text, told):
    with pytest.raises(ConfigError, match=told) as seen:
        match_runs(RUNS, parse_conditions([text], "--where"))
    assert "\n" not in str(seen.value)
