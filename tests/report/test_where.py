import pytest

from normlab.analysis.conditions import select_where
from normlab.base.errors import ConfigError
from normlab.store.format import DAMAGED
from normlab.store.record import RunEntry
from normlab.store.runs import RunFolder
from support.made_runs import record_of

CONFIGS = [
    {
        "norm": {"name": norm, "eps": 1e-6},
        "model": {"depth": depth, "bias": bias, "tie_embeddings": bias},
        "optim": {"clip": None if bias else 1.0},
        "seed": 0,
    }
    for norm, depth, bias in (("rmsnorm", 4, True), ("layernorm", 8, False), ("none", 16, True))
]
RUNS = [record_of({"config": config}) for config in CONFIGS]


@pytest.mark.parametrize(
    ("texts", "which"),
    [
        (["model.depth>=8"], [1, 2]),
        (["model.depth > 8"], [2]),
        (["model.depth<=8"], [0, 1]),
        (["model.depth==8"], [1]),
        (["model.depth!=8"], [0, 2]),
        (["norm=rmsnorm"], [0]),
        (["norm!=none,model.depth>4"], [1]),
        (["norm!=none", "model.depth>4"], [1]),
        (["model.bias=true"], [0, 2]),
        (["norm.eps=1e-6", "norm.eps<0.1"], [0, 1, 2]),
        (["depth>4"], [1, 2]),
        (["n_layer>4,tie_embeddings=true"], [2]),
        (["clip=null"], [0, 2]),
        (["clip!=null"], [1]),
        (["clip>0.5"], [1]),
        ([], [0, 1, 2]),
    ],
)
def test_conditions(texts, which):
    assert select_where(RUNS, texts) == [RUNS[index] for index in which]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.dpth>=8", "--where model.dpth: no run has this option .did you mean 'model.depth'"),
        ("nrom=rmsnorm", "did you mean 'norm'"),
        ("norm=LayerNorm", "no run matches .did you mean 'layernorm'.."),
        ("norm=no norm", "no run matches .did you mean 'none'.."),
        ("norm=rmsnrm", "no run matches .did you mean 'rmsnorm'..; norm is layernorm, none, rmsnorm"),
        ("norm>rmsnorm", "norm>rmsnorm: > compares numbers, and norm is "),
        ("model.depth<=x", "model.depth<=x: <= compares numbers, and 'x' is none; use = or !="),
        ("x.depth>4", "--where x.depth: no run has this option .did you mean 'model.depth'"),
        ("model.depth>16", "no run matches; model.depth is 4, 8, 16"),
        ("norm=none,model.depth=4", "--where model.depth=4: no run with norm=none matches; model.depth is 16"),
        ("model.depth", "not a condition"),
        ("__import__('os')=1", "not a condition"),
    ],
)
def test_invalid_conditions_are_errors(text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        select_where(RUNS, [text])
    assert "\n" not in str(raised.value)


def test_a_damaged_run_is_named_where_no_run_matches():
    damaged = RunEntry(RunFolder("y"), DAMAGED, problem="y/run.json: is damaged")
    with pytest.raises(ConfigError) as raised:
        select_where([*RUNS, damaged], ["model.depth=5"])
    assert str(raised.value) == "--where model.depth=5: no run matches; model.depth is 4, 8, 16; y/run.json: is damaged"
