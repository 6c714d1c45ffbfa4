"""The check of a block as a GPU trains it: right blocks pass, in bf16 and compiled, and wrong ones fail."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.catalogue.norms.base import NORMS, load_all
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.catalogue.placements.wiring import Residual
from normlab.config.compose import compose_run, register
from normlab.config.schema import RunConfig
from normlab.model.small import SmallModel, build_small, shrink, small_config
from normlab.training.machine import RuntimeSettings, resolve
from normlab.training.start import train
from normlab.verify import compiled, selection
from normlab.verify.check import Check
from normlab.verify.compiled import bf16_check, compiled_check, graphs_check
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
    # In pre-norm without a norm the stream of 24 blocks explodes, and so do the gradients of seednorm's slopes. Weights
    # that depend on the streams and are not bounded amplify the rounding of the streams at these large random numbers.
    explodes = placement == "pre" and depth == 24 and norm in {"none", "seednorm"}
    assert check.skipped == (explodes or placement == "hyper_connections"), check


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


def test_a_compiled_block_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of all blocks compile the embeddings and the head, too."""
    real = torch.compile
    compiled_names = []

    def compile_block(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if function.__name__ != "_block":
            return function
        compiled_names.append(function.__name__)
        return real(function, **options)

    monkeypatch.setattr(torch, "compile", compile_block)
    check = compiled_check(config_of(depth=2), "block")
    assert check.passed, check
    assert not check.skipped
    assert compiled_names == ["_block"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("norm", "placement"),
    [*((norm, "pre") for norm in load_all()), *(("", placement) for placement in load_placements())],
)
def test_every_compiled_block_passes(norm: str, placement: str) -> None:
    norm = norm or ("rmsnorm" if PLACEMENTS[placement].has_norms(4) else "none")
    check = compiled_check(config_of(norm, placement, depth=4), "block")
    assert check.passed, check


# Blocks that do not share their compiled code


def trace_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile only trace, which takes a moment; its limit of graphs stays."""
    real = torch.compile

    def trace(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        options["backend"] = "eager"
        return real(function, **options)

    monkeypatch.setattr(torch, "compile", trace)


NUMBER_PER_LAYER = """
from dataclasses import dataclass
from torch import nn
from normlab.catalogue.norms.base import NormConfig, register_norm
from normlab.catalogue.placements.base import Placement, register_placement

class Wiring(nn.Module):
    def __init__(self, layer, norm):
        super().__init__()
        self.factor, self.norm = 1.0 / (layer + 1), norm

    def forward(self, x, attn, mlp):
        return x + self.factor * (attn(self.norm(x)) + mlp(self.norm(x)))

@dataclass(kw_only=True, slots=True)
class Inverse(Placement):
    formula = "n = N(x); x = x + (A(n) + M(n)) / l"
    block_sites = ("input",)
    source = "this file"
    init = "gpt2"
    name: str = "inverse"

    def wire(self, layer, depth, width, make_norm):
        return Wiring(layer, make_norm(width, "input"))

register_placement(Inverse())
numbers = iter(range(1000))

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 1.0 + next(numbers)

    def forward(self, x):
        return self.factor * x

@register_norm
@dataclass(kw_only=True, slots=True)
class ScaledConfig(NormConfig):
    formula = "factor * x"
    name: str = "scaled"

    def build(self, width):
        return Scaled()
"""


@pytest.fixture
def number_per_layer(tmp_path: Path) -> str:
    (tmp_path / "numbers.py").write_text(NUMBER_PER_LAYER)
    return f"plugins=[{tmp_path}/numbers.py]"


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", ["placement=inverse", "norm=scaled"])
def test_a_python_number_that_differs_between_blocks_fails_at_any_depth(choice: str, number_per_layer: str) -> None:
    check = graphs_check(compose_run([number_per_layer, choice, "model.depth=1", "device=cpu"]), "block")
    assert not check.passed
    assert check.result.startswith("expected at most 6 graphs, found 10 graphs at depth 8: the blocks do not share")


@pytest.mark.exhaustive
def test_a_run_with_a_python_number_in_each_block_ends_in_one_line(
    number_per_layer: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch, run_command: Command
) -> None:
    trace_only(monkeypatch)
    options = ("placement=inverse", "model.depth=13", "compile=on")
    code, out, err = run_command("train", number_per_layer, *overrides, *options)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: compile=on: the blocks do not share their compiled code")
    assert not re.search("Traceback|torch._dynamo", err)


@pytest.mark.exhaustive  # 13 graphs
def test_two_kinds_of_blocks_compile_for_every_pass(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    trace_only(monkeypatch)
    # The last of 6 windows in batches of 4 is smaller, and batch statistics are evaluated in training mode too.
    options = ("norm=batchnorm", "placement=mix_ln", "model.depth=4", "eval.sequences=6", "compile=on")
    assert train(compose_run([*overrides, *options]), trackers=[]).state == "finished"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("norm", "placement"),
    [
        ("batchnorm", "pre"), ("gatednorm", "pre"), ("rmsnorm", "mix_ln"), ("rmsnorm", "hybridnorm_star"),
        *(
            pytest.param(norm or ("rmsnorm" if PLACEMENTS[name].has_norms(4) else "none"), name or "pre",
                         marks=pytest.mark.exhaustive)
            for norm, name in [*((norm, "") for norm in load_all()), *(("", name) for name in load_placements())]
        ),
    ],
)  # fmt: skip
def test_blocks_of_the_catalogue_share_their_compiled_code(norm: str, placement: str) -> None:
    check = graphs_check(config_of(norm, placement), "block")
    assert check.passed, check


def test_a_block_that_does_not_share_its_compiled_code_is_not_compiled(
    number_per_layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Check("block", "shares", passed=False, result="")
    monkeypatch.setattr(selection, "graphs_check", lambda config, subject: dataclasses.replace(wrong, subject=subject))
    for name in ("checks_of_run", "checks_of_default_norm", "checks_of_placement"):
        monkeypatch.setattr(selection, name, lambda _: iter(()))
    config = compose_run([number_per_layer])
    of_run = selection.select_checks(config, ["norm=scaled", "placement=inverse"])
    assert [check.subject for check in of_run] == ["block rmsnorm, pre"]
    of_plugins = selection.select_checks(config, [number_per_layer])
    assert [check.subject for check in of_plugins] == ["placement inverse", "norm scaled"]


# Skipped checks


def test_without_a_compiler_the_check_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no_such_compiler")
    check = compiled_check(config_of(), "block rmsnorm, pre")
    line = (
        "skip  block rmsnorm, pre: compiled, bf16: equals its formula  compile=on: the C++ compiler 'no_such_compiler'"
    )
    assert str(check).startswith(line)
    assert (check.passed, check.skipped) == (True, True)
    assert selection.verdict([check]).startswith("1 check: all hold, 1 skipped; references:")


def test_a_bound_that_would_accept_any_block_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BATCH", 2)  # two numbers, normalised over the batch, are always -1 and 1
    check = check_without_compiler(config_of("batchnorm_position", depth=5))
    assert (check.passed, check.skipped) == (True, True)
    assert check.result.startswith("too ill-conditioned")


# Selection


@pytest.mark.exhaustive
def test_a_run_is_compiled_and_a_study_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    only = Check("block", "compiled", passed=True, result="")
    monkeypatch.setattr(selection, "compiled_check", lambda config, subject: only)
    monkeypatch.setattr(selection, "graphs_check", lambda config, subject: only)
    monkeypatch.setattr(selection, "signed_error_check", lambda *_, **__: only)
    config = compose_run(["norm=none", "placement=pre", "device=cpu"])
    assert only not in list(selection.checks_of_run(config))
    monkeypatch.setattr(selection, "checks_of_run", lambda config: iter(()))
    assert list(selection.select_checks(config, ["norm=none"])) == [only, only, only]
