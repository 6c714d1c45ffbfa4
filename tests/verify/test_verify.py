"""`normlab verify`: the catalogue passes every check, and a wrong entry fails one."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from normlab.catalogue.norms.base import NORMS, load_all
from normlab.catalogue.placements.algebra import ROWS_BY_NAME, AlgebraPlacement, Row, SubLayer
from normlab.catalogue.placements.base import PLACEMENTS
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.catalogue.placements.wiring import Residual
from normlab.config.compose import compose_run, norm_presets, register
from normlab.model.small import SmallModel, build_small, small_config
from normlab.verify import init_laws, placements, selection
from normlab.verify.check import Check, LargestError
from normlab.verify.norm_contract import invariance_check
from normlab.verify.norms import oracle_checks, reference_checks

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def failed(checks: Iterator[Check]) -> list[str]:
    return [f"{check.claim}: {check.result}" for check in checks if not check.passed]


def small_model(norm: str, placement: str) -> SmallModel:
    return build_small(small_config(NORMS[norm](), PLACEMENTS[placement], depth=2))  # pyright: ignore[reportCallIssue]


# The catalogue


@pytest.mark.few(3)
@pytest.mark.parametrize("name", load_all())
def test_a_norm_passes_its_checks(name: str) -> None:
    assert failed(selection.checks_of_norm(NORMS[name](), 16)) == []  # pyright: ignore[reportCallIssue]


@pytest.mark.few(3)
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", load_placements())
def test_a_placement_passes_its_checks(name: str, thorough: bool) -> None:
    assert failed(selection.checks_of_placement(PLACEMENTS[name], thorough=thorough)) == []


@pytest.mark.exhaustive
def test_presets_pass_their_checks() -> None:
    for norm in norm_presets():
        assert failed(oracle_checks(norm, norm.label, [norm], 16)) == []


# Wrong entries fail


def test_a_placement_that_differs_in_evaluation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_model("layernorm", "pre")
    assert [check.passed for check in placements.logits_checks(small, "subject")] == [True, True]
    forward = Residual.forward
    monkeypatch.setattr(Residual, "forward", lambda self, *args: forward(self, *args) * (1 if self.training else 2))
    assert [check.passed for check in placements.logits_checks(small, "subject")] == [True, False]


@pytest.mark.parametrize(
    "overrides",
    [["optim.lr=1"], ["norm=dyt", "seed=3"], ["placement=post", "train.steps=5"], ["optim=adamw"], ["data=stdlib"]],
)
def test_an_override_without_effect_on_the_checks_is_refused(overrides: list[str], run_command: Command) -> None:
    code, out, err = run_command("verify", *overrides)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {overrides[-1]}: has no effect, since verify checks only")


@pytest.mark.exhaustive
def test_a_run_of_one_token_is_verified(run_command: Command) -> None:
    code, out, err = run_command("verify", "norm=batchnorm_past", "placement=mix_ln", "model.context=1")
    assert (code, err) == (0, ""), out


@pytest.mark.exhaustive
def test_an_incompatible_init_is_a_warning_of_verify(run_command: Command) -> None:
    code, _, err = run_command("verify", "placement=post", "init=gpt2")
    assert code == 0
    assert "init=gpt2" in err
    assert "arXiv:2002.04745" in err


def row(**parts: object) -> Row:
    return Row(name="tried", source="the test", init="xavier", **parts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("formula", "norms_at", "result"),
    [
        ("x = x + F(N(x))", ("input",), ""),
        (
            "x = x + F(N(x))",
            ("output",),
            "makes a norm for site 'output_attn', and in the formula it is at 'input_attn'",
        ),
        ("x = N(x + F(x))", ("input",), "makes a norm for site 'input_attn', and in the formula it is at 'residual_a"),
        ("x = x + F(x)", ("input",), "has 2 norms, its formula 0"),
        ("x = N(x + F(N(x)))", ("input",), "more norms than the model"),
        ("x = x + 2 * F(N(x))", ("input",), "expected "),
        ("x = x + G(N(x))", ("input",), "unknown name 'G': choose one of A, "),
        ("x = x + sum(F(N(x)))", ("input",), "'sum' is a function of Python, which formulas lack on purpose"),
        ("x = x + F(N(x)).sum()", ("input",), ".sum is a method of torch, which formulas lack on purpose"),
        ("x = x + F(N(x)).mT.mT", ("input",), ""),
        ("x = x + round(F(N(x)))", ("input",), "'round' is a function of Python"),
        ("x = x + simoid(F(N(x)))", ("input",), "unknown name 'simoid' (did you mean 'sigmoid'?): choose one of A, "),
        ("x = x + F(N(y)); y = x", ("input",), "name 'y' is not defined"),
        ("L = F(N(x)); x = x + L", ("input",), "the name 'L' is a size of the model and a variable of the formula"),
        ("x = x + (F(N(x))", ("input",), "cannot be evaluated ("),
    ],
)
def test_a_formula_that_differs_from_the_model_fails(
    formula: str, norms_at: tuple[str, ...], result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normlab.catalogue.placements import algebra, base

    wrong = row(formula=formula, attn=SubLayer(norms=norms_at), mlp=SubLayer(norms=norms_at))
    monkeypatch.setitem(algebra.ROWS_BY_NAME, "tried", wrong)
    monkeypatch.setitem(base.PLACEMENTS, "tried", AlgebraPlacement(name="tried"))
    check = placements.formula_check(small_model("layernorm", "tried"), "subject")
    assert check.passed == (not result)
    assert result in check.result


@pytest.mark.parametrize("name", ["G", "sum"])
def test_the_names_in_a_message_are_those_that_the_documentation_explains(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normlab.catalogue.placements import algebra, base, formula

    wrong = row(formula=f"x = x + F({name}(N(x)))", attn=SubLayer(norms=("input",)), mlp=SubLayer(norms=("input",)))
    monkeypatch.setitem(algebra.ROWS_BY_NAME, "tried", wrong)
    monkeypatch.setitem(base.PLACEMENTS, "tried", AlgebraPlacement(name="tried"))
    result = placements.formula_check(small_model("layernorm", "tried"), "subject").result
    listed = result.rpartition(" one of ")[2].split(", ")
    assert {"A", "F", "L", "M", "N", "abs", "l", "max", "norm2", "x"} <= {*listed}
    # As `normlab list formulas` prints them: the names and the calls, without the arguments of a call.
    documented = [entry["name"].partition("(")[0] for entry in formula.rows()]
    assert {*listed} - {*documented, *algebra.AlgebraPlacement.__dataclass_fields__} == set()
    assert {*listed} & {"name", "copies", "mix", "embedding_norm", "final_norm"} == set()
    assert [each for each in listed if each.startswith("norm_")] == []


def test_the_law_of_another_placement_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of pre grows more slowly than sqrt(2L), which is the law of peri."""
    for name, laws in (("peri", ()), ("pre", ROWS_BY_NAME["peri"].laws)):
        monkeypatch.setitem(ROWS_BY_NAME, name, dataclasses.replace(ROWS_BY_NAME[name], laws=laws))
    assert list(init_laws.law_checks(PLACEMENTS["peri"])) == []
    (check,) = init_laws.law_checks(PLACEMENTS["pre"])
    assert not check.passed


def test_each_law_is_declared_by_a_placement_and_an_unknown_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for placement in PLACEMENTS.values() for name in placement.laws} == init_laws.LAWS.keys()
    monkeypatch.setitem(ROWS_BY_NAME, "pre", dataclasses.replace(ROWS_BY_NAME["pre"], laws=("stream_is_root",)))
    (check,) = init_laws.law_checks(PLACEMENTS["pre"])
    assert not check.passed
    assert "did you mean 'stream_is_root_of_2l'" in check.result


def test_no_comparison_is_a_failure() -> None:
    check = LargestError(1e-9).check("subject", "claim")
    assert (check.passed, check.result) == (False, "expected a comparison, found none")


@pytest.mark.parametrize(
    ("found", "result"),
    [
        ([1.0, 2.0], "largest error 0.0e+00 of 1 comparison, tolerance 1e-02"),
        ([1.5, 2.25], "expected 1, found 1.5 for here (error 5.0e-01, tolerance 1e-02)"),
        ([1.0, math.nan], "expected 2, found nan for here (error inf, tolerance 1e-02)"),
        ([1.0], "expected shape [2], found [1], for here"),
    ],
)
def test_a_failed_comparison_says_what_was_expected_and_found(found: list[float], result: str) -> None:
    largest = LargestError(1e-2)
    largest.compare(torch.tensor(found), torch.tensor([1.0, 2.0]), "here")
    check = largest.check("subject", "claim")
    assert (check.passed, check.result) == (result.startswith("largest"), result)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "width"),
    [
        (["norm=groupnorm", "norm.groups=7"], 126),
        (["norm=groupnorm", "norm.groups=7"], 14),
        (["norm=groupnorm", "norm.groups=8", "norm.eps=0"], 16),
        (["norm=dyt", "norm.alpha=1e6"], 16),
        (["norm=dyt", "norm.alpha=1e-9"], 16),
        (["norm=pointwise", "norm.function=cubsign", "norm.alpha=0.001"], 16),
    ],
)
def test_a_norm_passes_with_options_at_the_ends_of_their_ranges(overrides: list[str], width: int) -> None:
    assert (
        failed(selection.checks_of_norm(compose_run([*overrides, f"model.width={width}", "model.heads=2"]).norm, width))
        == []
    )


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "l2norm", "batchnorm_past"])
def test_an_undeclared_invariance_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = NORMS[name]
    blind = kind.invariant_to
    monkeypatch.setattr(kind, "invariant_to", ())
    check = invariance_check(kind(), "subject", 16)  # pyright: ignore[reportCallIssue]
    assert (check.passed, check.result) == (False, "; ".join(f"{name} is not in `invariant_to`" for name in blind))


def test_a_norm_without_reference_fails_and_counts_for_no_kind_of_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(NORMS["rmsnorm"], "reference", none)
    (check,) = reference_checks(NORMS["rmsnorm"](), "norm mine", 16, [])  # pyright: ignore[reportCallIssue]
    assert (check.passed, check.result, check.reference_kind) == (False, "no reference", "")
    assert selection.verdict([check]).endswith(
        "references: 0 by external code, 0 by identities, 0 by a second implementation"
    )


# The command


@pytest.mark.exhaustive
def test_a_run_is_verified_by_its_overrides(run_command: Command) -> None:
    code, out, err = run_command(
        "verify", "norm=rmsnorm_gemma", "placement=mix_ln", "placement.early_blocks=2", "model.depth=6"
    )
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    assert all(line.startswith("ok    ") for line in lines)
    assert any("computes x = N(x + F(x)) if l <= 2 else x + F(N(x))" in line for line in lines)
    assert last.startswith(f"{len(lines)} checks: all hold; references: 1 by external code, 2 by identities")


@pytest.mark.parametrize("overrides", [["norm=rmsnrm"], ["placement=rezero"], ["--jsn"], ["model.depth=0"]])
def test_a_mistake_is_one_line(overrides: list[str], run_command: Command) -> None:
    code, out, err = run_command("verify", *overrides)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
