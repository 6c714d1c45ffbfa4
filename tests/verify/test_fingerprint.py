"""The fingerprint of a block: equal on every machine, different for a different computation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from normlab.config.compose import compose_run
from normlab.model.fingerprint import fingerprint
from normlab.training.start import train

KNOWN = {
    "norm=rmsnorm placement=pre": "2c95640d13302d1a",
    "norm=layernorm placement=post model.depth=2": "f2822e525939a479",
    "norm=dyt placement=peri model.depth=3": "24fb83a63fbe5f78",
    "norm=batchnorm placement=res_post model=llama_nano": "d2c0a54be8156788",
    "norm=rmsnorm_eps_outside placement=deepnorm model.depth=12": "6b50d21297161577",
    "norm=gatednorm placement=sub_ln model.qk_norm=full": "57af0320a3eb6a93",
    "norm=none placement=ngpt model=llama_nano": "8a027c4ca805024d",
    "norm=layernorm placement=resi_dual": "276f6e9e925922c4",
}
"""Fingerprints from another machine. A changed one is a changed computation; its commit must say so."""


@pytest.mark.few(3)
@pytest.mark.parametrize("overrides", KNOWN)
def test_is_equal_on_every_machine(overrides: str) -> None:
    assert fingerprint(compose_run(overrides.split())) == KNOWN[overrides]


@pytest.mark.process
def test_is_equal_in_another_process_with_more_threads() -> None:
    overrides = ["norm=layernorm", "placement=peri"]
    code = (
        "import sys; from normlab.config.compose import compose_run; "
        "from normlab.model.fingerprint import fingerprint; "
        "print(fingerprint(compose_run(sys.argv[1:])))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code, *overrides], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == fingerprint(compose_run(overrides)), done.stderr


SAME = [
    (["placement=peri"], ["placement=sandwich"]),
    (["norm=rmsnorm"], ["norm=rmsnorm_gemma"]),
    (["norm=dyt"], ["norm=pointwise"]),
    (["norm=scalenorm"], ["norm=l2norm", "norm.learn_radius=true", "norm.radius=null", "norm.eps=1e-5"]),
    (["norm.eps_mode=clamp", "norm.eps=0"], ["norm.eps_mode=none", "norm.eps=0"]),
    ([], ["model.width=512", "model.heads=8"]),
    ([], ["norm.unit_offset=true"]),
    ([], ["seed=3", "init=xavier"]),
]
DIFFERENT = [
    ["norm=layernorm"],
    ["norm.eps=1e-5"],
    ["norm.eps_mode=outside_rms"],
    ["norm.rounding=cast_then_scale"],
    ["norm.compute=input"],
    ["norm.gain=false"],
    ["placement=post"],
    ["placement.final_norm=false"],
    ["placement.embedding_norm=true"],
    ["model.qk_norm=head"],
    ["model.qk_norm=full"],
    ["model.mlp=swiglu"],
    ["model.positions=rope"],
    ["model.bias=false"],
    ["model.depth=5"],
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "second"), SAME)
def test_does_not_depend_on_names_and_sizes(first: list[str], second: list[str]) -> None:
    assert fingerprint(compose_run(first)) == fingerprint(compose_run(second))


def test_differs_for_every_different_computation() -> None:
    found = [fingerprint(compose_run(overrides)) for overrides in [[], *DIFFERENT]]
    assert len(set(found)) == len(found)
    assert all(len(digits) == 16 for digits in found)


@pytest.mark.parametrize(
    "choices",
    [
        ["norm.eps_mode=clamp norm.eps=1e-6", "norm.eps_mode=clamp norm.eps=5e-4", "norm.eps_mode=none norm.eps=0"],
        ["norm=scalenorm norm.eps=1e-12", "norm=scalenorm", "norm=scalenorm norm.eps=1e-3"],
        ["norm=l2norm", "norm=l2norm norm.eps=1e-3"],
    ],
)
def test_depends_on_an_eps_that_acts_only_near_zero(choices: list[str]) -> None:
    found = [fingerprint(compose_run([*overrides.split(), "model.depth=2"])) for overrides in choices]
    assert len(set(found)) == len(found)


def test_depends_on_the_depth_if_the_blocks_do() -> None:
    found = [fingerprint(compose_run(["placement=deepnorm", f"model.depth={depth}"])) for depth in (3, 4)]
    assert found[0] != found[1]


def test_is_in_the_record_and_in_wandb(overrides: list[str], tmp_path: Path) -> None:
    from normlab.tracking.payloads import config_of

    config = compose_run([*overrides, "train.steps=1"])
    run = train(config, trackers=[]).folder.run()
    assert run["fingerprint"] == config_of(run)["record"]["fingerprint"] == fingerprint(config)
    assert run["norm"]["causal"] is True
    assert json.loads(json.dumps(run))["warnings"] == []
