"""The check of a block as a GPU trains it: right blocks pass, in bf16 and compiled, and wrong ones fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from normlab.config.compose import compose_run, register
from normlab.config.schema import RunConfig
from normlab.model.small import SmallModel, build_small, shrink, small_config
from normlab.norms.base import NORMS, load_all
from normlab.placements.base import PLACEMENTS
from normlab.placements.base import load_all as load_placements
from normlab.placements.wiring import Residual
from normlab.training.machine import RuntimeSettings, resolve
from normlab.verify import compiled, selection
from normlab.verify.check import Check
from normlab.verify.compiled import bf16_check, compiled_check
from normlab.verify.variants import LARGE_EPS

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def config_of(norm: str = "rmsnorm", placement: str = "pre", depth: int = 3, **options: Any) -> RunConfig:
    kind: Any = NORMS[norm]
    return dataclasses.replace(small_config(kind(**options), PLACEMENTS[placement], depth=depth), device="cpu")


def model_of(config: RunConfig) -> SmallModel:
    return build_small(shrink(config, width=compiled.WIDTH, context=compiled.TIME))


def settings_of(config: RunConfig, *, compiles: bool = False) -> RuntimeSettings:
    settings = resolve(dataclasses.replace(config, precision="bf16", compile="off"))
    return dataclasses.replace(settings, compile="on" if compiles else "off")


def check_without_compiler(config: RunConfig) -> Check:
    return bf16_check(model_of(config), "block", settings_of(config))


# The bound


@pytest.mark.parametrize(
    ("norm", "placement"), [("layernorm", "pre"), ("batchnorm", "pre"), ("rmsnorm", "res_post"), ("rmsnorm", "ngpt")]
)
def test_bf16_is_within_the_bound(norm: str, placement: str) -> None:
    check = check_without_compiler(config_of(norm, placement))
    assert check.passed, check
    assert not check.skipped


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [4, 24])
@pytest.mark.parametrize(
    ("norm", "placement"),
    [*((norm, "pre") for norm in load_all()), *(("", placement) for placement in load_placements())],
)
def test_every_norm_and_placement_in_bf16_is_within_the_bound(norm: str, placement: str, depth: int) -> None:
    norm = norm or ("rmsnorm" if PLACEMENTS[placement].has_norms(depth) else "none")
    check = check_without_compiler(config_of(norm, placement, depth))
    assert check.passed, check
    # In pre-norm without a norm the stream of 24 blocks explodes, and so do the gradients of seednorm's slopes.
    assert check.skipped == (placement == "pre" and depth == 24 and norm in {"none", "seednorm"}), check


# Wrong blocks


def test_a_wrong_sign_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Residual.forward
    monkeypatch.setattr(Residual, "forward", lambda self, x, branch: 2 * x - forward(self, x, branch))
    check = check_without_compiler(config_of())
    assert not check.passed
    assert "tolerance 4e+00" in check.result


@pytest.mark.parametrize("eps_mode", ["outside_rms", "clamp"])
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_a_wrong_place_of_eps_fails(eps_mode: str, placement: str) -> None:
    config = config_of(placement=placement, eps=LARGE_EPS)
    other: Any = dataclasses.replace(config.norm, eps_mode=eps_mode)  # pyright: ignore[reportCallIssue]
    small = model_of(config)
    wrong = dataclasses.replace(small, config=dataclasses.replace(small.config, norm=other))
    assert not bf16_check(wrong, "block", settings_of(config)).passed


def test_a_block_with_other_norms_than_its_formula_fails() -> None:
    small = model_of(config_of())
    wrong = dataclasses.replace(small, config=dataclasses.replace(small.config, placement=PLACEMENTS["peri"]))
    check = bf16_check(wrong, "block", settings_of(small.config))
    assert (check.passed, "more norms than the model" in check.result) == (False, True)


# The compiler


def replace_compiler(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """Replace torch.compile by a change of the output of a segment."""

    def compile_segment(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            output, *others = function(*args)
            return change(output), *others

        return changed

    monkeypatch.setattr(torch, "compile", compile_segment)


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.2, False)])
def test_a_wrong_result_of_the_compiler_fails(factor: float, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_compiler(monkeypatch, lambda output: output * factor)
    config = config_of()
    check = bf16_check(model_of(config), "block", settings_of(config, compiles=True))
    assert check.passed == passed, check
    assert check.claim == "compiled, bf16, on cpu: equals x = x + F(N(x))"


def test_a_block_that_does_not_compile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import Unsupported  # slow to import

    def fail(_: Any) -> None:
        raise Unsupported("a branch on data")

    replace_compiler(monkeypatch, fail)
    config = config_of()
    check = bf16_check(model_of(config), "block", settings_of(config, compiles=True))
    assert not check.passed
    assert check.result.startswith("compile=on: torch's compiler failed (a branch on data)")


def test_a_compiled_block_passes() -> None:
    check = compiled_check(config_of(depth=2), "block")
    assert check.passed, check
    assert not check.skipped


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("norm", "placement"),
    [*((norm, "pre") for norm in load_all()), *(("", placement) for placement in load_placements())],
)
def test_every_compiled_block_passes(norm: str, placement: str) -> None:
    norm = norm or ("rmsnorm" if PLACEMENTS[placement].has_norms(4) else "none")
    check = compiled_check(config_of(norm, placement, depth=4), "block")
    assert check.passed, check


@pytest.mark.exhaustive
def test_a_wrong_sign_fails_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Residual.forward
    monkeypatch.setattr(Residual, "forward", lambda self, x, branch: 2 * x - forward(self, x, branch))
    assert not compiled_check(config_of(depth=2), "block").passed


# Skipped checks


def test_without_a_compiler_the_check_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no_such_compiler")
    check = compiled_check(config_of(), "block rmsnorm, pre")
    line = (
        "skip  block rmsnorm, pre: compiled, bf16: equals its formula  compile=on: the C++ compiler 'no_such_compiler'"
    )
    assert str(check).startswith(line)
    assert (check.passed, check.row()["skipped"]) == (True, True)
    assert selection.verdict([check]).startswith("1 checks: all hold, 1 skipped; references:")


def test_a_bound_that_would_accept_any_block_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BATCH", 2)  # two numbers, normalised over the batch, are always -1 and 1
    check = check_without_compiler(config_of("batchnorm_position", depth=5))
    assert (check.passed, check.skipped) == (True, True)
    assert check.result.startswith("too ill-conditioned")


# Selection


def test_a_run_is_compiled_and_a_study_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    only = Check("block", "compiled", passed=True, result="")
    monkeypatch.setattr(selection, "compiled_check", lambda config, subject: only)
    config = compose_run(["norm=none", "placement=pre", "device=cpu"])
    assert only not in list(selection.checks_of_run(config))
    monkeypatch.setattr(selection, "checks_of_run", lambda config: iter(()))
    assert list(selection.select_checks(config, ["norm=none"])) == [only]


def test_the_catalogue_is_compiled_only_on_request(monkeypatch: pytest.MonkeyPatch, run_command: Command) -> None:
    monkeypatch.setattr(
        selection, "compiled_check", lambda config, subject: Check(subject, "compiled", passed=True, result="")
    )
    code, out, err = run_command("verify", "--compiled")
    assert (code, err) == (0, "")
    subjects = [line.partition(":")[0] for line in out.splitlines()[:-1]]
    assert "ok    block layernorm, pre" in subjects
    assert "ok    block rmsnorm eps=0.3, deepnorm" in subjects
    assert len(subjects) == len(NORMS) + len(PLACEMENTS)
    code, out, err = run_command("verify", "norm=rmsnorm", "--compiled")
    assert (code, out) == (2, "")
    assert err.startswith("error: --compiled: has no effect with a run")
