"""`normlab verify`: the catalogue passes every check, and a wrong entry fails one."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from normlab.config.compose import compose_run, norm_presets, register
from normlab.model.small import SmallModel, build_small, small_config
from normlab.norms.base import NORMS, load_all
from normlab.placements.algebra import AlgebraPlacement, Row, SubLayer
from normlab.placements.base import PLACEMENTS
from normlab.placements.base import load_all as load_placements
from normlab.placements.init_rules import INIT_RULES
from normlab.placements.table import ROWS
from normlab.placements.wiring import Residual
from normlab.verify import init_laws, placements, selection
from normlab.verify.check import Check, LargestError
from normlab.verify.defaults import DEFAULTS, default_check
from normlab.verify.init_rules import CLOSED_FORMS, INIT_OF_PLACEMENT, placement_init_check, rule_checks
from normlab.verify.norm_contract import invariance_check
from normlab.verify.norms import oracle_checks, reference_checks
from normlab.verify.variants import option_fields, other_values

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


@pytest.mark.parametrize("rule", INIT_RULES)
def test_an_init_rule_passes_its_checks(rule: str) -> None:
    assert failed(rule_checks(rule)) == []


@pytest.mark.exhaustive
def test_presets_pass_their_checks() -> None:
    for norm in norm_presets():
        assert failed(oracle_checks(norm, norm.label, [norm], 16)) == []


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_wrong_default_fails_the_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = NORMS[name]
    assert failed(default_check(name)) == []
    for field in option_fields(kind()):
        other = next(other_values(kind(), field, 16), None)
        if other is None:
            continue
        with monkeypatch.context() as patch:
            patch.setitem(kind.__init__.__kwdefaults__, field.name, getattr(other, field.name))
            (check,) = default_check(name)
            assert not check.passed, field.name
            assert f", found {field.name}={getattr(other, field.name)}" in check.result


def test_the_table_of_defaults_has_every_norm_of_the_package() -> None:
    assert set(DEFAULTS) == {name for name, kind in NORMS.items() if kind.__module__.startswith("normlab.")}


# Wrong entries fail

NORM = '''"""A norm of a user's."""

from dataclasses import dataclass

import torch
from torch import nn

from normlab.norms.base import NormConfig, register_norm


@register_norm
@dataclass(kw_only=True, slots=True)
class HalvedConfig(NormConfig):
    """x / 2."""

    name: str = "halved"
    factor: float = 0.5
    """What x is multiplied by."""

    parameters = "0"

    def build(self, width):
        return Halved(self.factor)

    def reference(self, x_D, weights):
        return x_D * self.factor


class Halved(nn.Module):
    """The module."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x_D):
        return x_D * self.factor
'''

FORWARD = "def forward(self, x_D):\n        return x_D * self.factor"
BREAKS = {
    "": ("", ""),
    "equals x times factor, in float64": ("* self.factor\n\n\n", "* self.factor**2\n\n\n"),
    "has a reference that does not call its module, or no reference": ("    def reference(", "    def other("),
    "no output depends on a later token": (
        "return x_D * self.factor\n'''", "return x_D * self.factor + x_D.flip(-2)\n'''",
    ),
    "equals x times factor, in float64, in evaluation": (
        FORWARD, f"{FORWARD} if self.training else x_D",
    ),
    "equals x times factor, in float64, at B = 2, T = 40, D = 320": (
        FORWARD, f"{FORWARD} * (x_D.shape[-1] <= 32)",
    ),
    "equals x times factor, in float64, at the run's size, D = 128": (
        FORWARD, f"{FORWARD} * (x_D.shape[-1] != 128)",
    ),
    "gives the same output in a pack, and leaves its input unchanged": (
        FORWARD, f"{FORWARD} if x_D.abs().max().item() < 1e30 else x_D",
    ),
    "gives the same output in a pack, and leaves its input unchanged, the input": (
        FORWARD, FORWARD.replace("return", "y_D =") + "\n        x_D.detach().add_(1)\n        return y_D",
    ),
    "has a reference that does not call its module": (
        "return x_D * self.factor\n\n\n", "return self.build(x_D.shape[-1])(x_D)\n\n\n",
    ),
    "declares its initial values": (
        "self.factor = factor", "self.factor, self.w = factor, nn.Parameter(torch.ones(3))",
    ),
    "parameters: 0": ("        self.factor = factor", "        self.factor, self.w = factor, nn.Linear(1, 3)"),
    "every option has an effect": ("return Halved(self.factor)", "return Halved(0.5)"),
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_plugin_fails_the_matching_check(broken: str, tmp_path: Path, run_command: Command) -> None:
    before, after = BREAKS[broken]
    source = NORM.replace('"halved"', f'"halved{list(BREAKS).index(broken)}"')
    source = source.replace('"""x / 2."""', '"""x / 2."""\n\n    verified_by = "x times factor"')
    assert before.rstrip("'") in source
    (tmp_path / "mine.py").write_text(source.replace(before.rstrip("'"), after.rstrip("'")) if before else source)
    # The plugin alone is quicker to verify; the size of a run is checked only with a run.
    choice = [f"norm=halved{list(BREAKS).index(broken)}"] if not broken or "128" in broken else []
    code, out, err = run_command("verify", f"plugins=[{tmp_path}/mine.py]", *choice, "--json")
    assert err == ""
    failed = [check["claim"] for check in json.loads(out) if not check["passed"]]
    assert code == (1 if broken else 0), failed
    if broken:
        assert any(broken.startswith(check) for check in failed)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "start"), [("late", "0"), ("unread", "half of it"), ("unknown", "K"), ("zeroth", "1 / 0")]
)
def test_a_row_with_wrong_starts_fails(name: str, start: str, tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "late.py").write_text(
        "from normlab.placements.algebra import Row, SubLayer, register_row\n"
        "half = SubLayer(norms=('in',), scale=lambda layer, depth: 0.5)\n"
        f"initial_values = {{'wiring.attn.scale': '{start}', 'wiring.mlp.scale': '0.5'}}\n"
        f"register_row(Row(name='{name}', formula='x = x + scale * F(N(x))', source='the test', init='gpt2', attn=half,"
        " mlp=half, initial_values=initial_values, final_norm=True))\n"
    )
    code, out, _ = run_command("verify", f"plugins=[{tmp_path}/late.py]", f"placement={name}", "--json")
    (failed,) = (check for check in json.loads(out) if not check["passed"])
    assert (code, failed["claim"]) == (1, "has its declared initial values")
    assert "wiring.attn.scale" in failed["result"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "formula",
    [
        "y = x + 0.5 * A(N(x)); x = y + 0.5 * M(N(y))",
        "x = 0.5 * F(N(x)) + x",
        "x = x + (l + L) / (2 * (l + L)) * F(N(x))",
        "x = x + F(N(x)) / 2",
    ],
)
def test_a_formula_may_have_other_names_and_sums(formula: str, tmp_path: Path, run_command: Command) -> None:
    """Also with `placement.branch_warmup`, which puts a factor into it."""
    (tmp_path / "row.py").write_text(
        "from normlab.placements.algebra import Row, SubLayer, register_row\n"
        "half = SubLayer(norms=('in',), branch=lambda layer, depth: 0.5)\n"
        f"register_row(Row(name='half', formula='{formula}', source='the test', init='gpt2', attn=half, mlp=half,"
        " final_norm=True))\n"
    )
    code, out, _ = run_command("verify", f"plugins=[{tmp_path}/row.py]", "placement=half", "--json")
    assert code == 0, [check for check in json.loads(out) if not check["passed"]]


LATE = """from normlab.placements.init_rules import init_rule
from normlab.placements.algebra import Row, SubLayer, register_row

@init_rule
def {name}_init(weight):
    return 0.02

half = SubLayer(norms=("in",), branch=lambda layer, depth: {branch})
register_row(Row(name="{name}", formula="x = x + 0.5 * F(N(x))", source="the test", init="{name}_init", attn=half,
                 mlp=half, final_norm=True))
"""


@pytest.mark.exhaustive
def test_a_row_that_is_wrong_in_late_blocks_fails(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "late.py").write_text(LATE.format(name="right_at_four", branch="0.5 if layer <= 4 else 0.7"))
    code, out, _ = run_command("verify", f"plugins=[{tmp_path}/late.py]", "placement=right_at_four", "--json")
    failed = [check for check in json.loads(out) if not check["passed"]]
    assert code == 1
    assert all(check["subject"].startswith("placement right_at_four") for check in failed)
    claims = {check["claim"] for check in failed}
    assert "computes x = x + 0.5 * F(N(x))" in claims
    assert all(claim.startswith("computes x = x + 0.5 * F(N(x))") for claim in claims)


def test_a_placement_that_differs_in_evaluation_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    small = small_model("layernorm", "pre")
    assert [check.passed for check in placements.logits_checks(small, "subject")] == [True, True]
    forward = Residual.forward
    monkeypatch.setattr(Residual, "forward", lambda self, *args: forward(self, *args) * (1 if self.training else 2))
    assert [check.passed for check in placements.logits_checks(small, "subject")] == [True, False]


@pytest.mark.exhaustive
def test_plugins_without_a_run_are_verified_with_all_that_they_register(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "norm.py").write_text(NORM.replace('"halved"', '"halved_alone"').replace("= 0.5", "= 0.25"))
    (tmp_path / "row.py").write_text(LATE.format(name="row_alone", branch="0.5"))
    override = f"plugins=[{tmp_path}/norm.py,{tmp_path}/row.py]"
    code, out, err = run_command("verify", override, "--json")
    checks = json.loads(out)
    assert (code, err) == (0, ""), [check for check in checks if not check["passed"]]
    assert {check["subject"] for check in checks} == {"norm halved_alone", "placement row_alone", "init row_alone_init"}
    (tmp_path / "row.py").write_text(LATE.format(name="row_alone", branch="0.4"))
    code, out, err = run_command("verify", override, "--json")
    assert (code, err) == (1, "")


@pytest.mark.parametrize(
    ("std", "expected"), [("0.01", 0), ("-0.02", 1), ("float('nan')", 1), ("0.02 / (weight.layer - 1)", 2)]
)
def test_a_plugin_with_only_an_init_rule_is_verified(
    std: str, expected: int, tmp_path: Path, run_command: Command
) -> None:
    name = f"rule_{len(std)}"
    rule = LATE.partition("half =")[0].replace("return 0.02", f"return {std}").format(name=name)
    (tmp_path / "rule.py").write_text(rule)
    code, out, err = run_command("verify", f"plugins=[{tmp_path}/rule.py]")
    assert code == expected
    assert (f"init {name}_init: gives each matrix a standard deviation" in out) == (expected < 2)
    assert err.count("\n") == (expected == 2)


def test_plugins_that_register_nothing_are_refused(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "empty.py").write_text("")
    code, out, err = run_command("verify", f"plugins=[{tmp_path}/empty.py]")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no norm, placement or init rule is registered there" in err


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


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["build", "forward"])
@pytest.mark.parametrize("command", ["verify", "train"])
def test_an_error_in_a_plugin_is_one_line(command: str, where: str, tmp_path: Path, run_command: Command) -> None:
    source = NORM.replace('"halved"', f'"raises_in_{where}"')
    head = {"build": "def build(self, width):\n", "forward": "def forward(self, x_D):\n"}[where]
    source = source.replace(head, head + "        raise ValueError('boom')\n")
    (tmp_path / "mine.py").write_text(source)
    overrides = [f"plugins=[{tmp_path}/mine.py]", f"norm=raises_in_{where}", "model.depth=1", "model.width=16"]
    if command == "train":
        overrides += [f"results_dir={tmp_path / 'results'}", "tracking.wandb=off", "compile=off"]
    code, _, err = run_command(command, *overrides)
    (line,) = (line for line in err.splitlines() if line.startswith("error"))
    assert code == 2
    assert re.search(r"plugins: mine\.py line \d+: ValueError: boom; fix the file", line)
    assert "Traceback" not in err


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
        ("x = x + F(N(x))", ("in",), ""),
        ("x = x + F(N(x))", ("out",), "expected "),
        ("x = N(x + F(x))", ("in",), "expected "),
        ("x = x + F(x)", ("in",), "has 2 norms, its formula 0"),
        ("x = N(x + F(N(x)))", ("in",), "more norms than the model"),
        ("x = x + 2 * F(N(x))", ("in",), "expected "),
        ("x = x + G(N(x))", ("in",), "'G' is not defined"),
    ],
)
def test_a_formula_that_differs_from_the_model_fails(
    formula: str, norms_at: tuple[str, ...], result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normlab.placements import algebra, base

    wrong = row(formula=formula, attn=SubLayer(norms=norms_at), mlp=SubLayer(norms=norms_at))
    monkeypatch.setitem(algebra.ROWS_BY_NAME, "tried", wrong)
    monkeypatch.setitem(base.PLACEMENTS, "tried", AlgebraPlacement(name="tried"))
    check = placements.formula_check(small_model("layernorm", "tried"), "subject")
    assert check.passed == (not result)
    assert result in check.result


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("post", "gpt2"), ("sub_ln", "gpt2"), ("deepnorm", "xavier"), ("hybridnorm", "gpt2"), ("pre", "gpt2")],
)
def test_a_row_with_a_wrong_init_fails(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from normlab.placements import algebra

    (right,) = placement_init_check(PLACEMENTS[name])
    monkeypatch.setitem(algebra.ROWS_BY_NAME, name, dataclasses.replace(algebra.ROWS_BY_NAME[name], init=wrong))
    checks = [
        check
        for check in selection.checks_of_placement(PLACEMENTS[name], thorough=False)
        if check.claim.startswith("has init=")
    ]
    assert [(check.passed, check.reference_kind) for check in (right, *checks)] == [(True, ""), (False, "")]
    assert checks[0].result.startswith(f"expected {right.claim.partition('=')[2]}, found {wrong} (")


def test_the_table_of_inits_has_every_placement_of_the_package() -> None:
    assert set(CLOSED_FORMS) == {name for name in INIT_RULES if INIT_RULES[name].__module__.startswith("normlab.")}
    own_wiring = {name for name, it in load_placements().items() if not isinstance(it, AlgebraPlacement)}
    ours = {name for name in own_wiring if type(PLACEMENTS[name]).__module__.startswith("normlab.")}
    assert {row.name for row in ROWS} | ours == INIT_OF_PLACEMENT.keys()
    assert list(placement_init_check(AlgebraPlacement(name="a_plugins"))) == []


def test_the_law_of_another_placement_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of pre grows more slowly than sqrt(2L), which is the law of peri."""
    (law,) = (law for law in init_laws.LAWS if law.placement == "peri")
    monkeypatch.setattr(init_laws, "LAWS", (law._replace(placement="pre"),))
    assert list(init_laws.law_checks("peri")) == []
    (check,) = init_laws.law_checks("pre")
    assert not check.passed


def test_no_comparison_is_a_failure() -> None:
    check = LargestError(1e-9).check("subject", "claim")
    assert (check.passed, check.result) == (False, "expected a comparison, found none")


@pytest.mark.parametrize(
    ("found", "result"),
    [
        ([1.0, 2.0], "largest error 0.0e+00 of 1 comparisons, tolerance 1e-02"),
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
