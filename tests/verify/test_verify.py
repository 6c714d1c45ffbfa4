"""`normlab verify`: that the whole catalogue holds, and that what does not hold is found."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from normlab.config import RunConfig, config_of_record
from normlab.launch import compose_run, norm_presets, register
from normlab.norms.base import NORMS, load_all
from normlab.options import plain_tree
from normlab.placements.algebra import ROWS, AlgebraPlacement, Row, SubLayer
from normlab.placements.base import PLACEMENTS
from normlab.placements.base import load_all as load_placements
from normlab.placements.wiring import Residual
from normlab.verify import blocks, init_laws, norms, run
from normlab.verify.check import Check, Worst
from normlab.verify.defaults import DEFAULTS, PRESETS, default_check, preset_check
from normlab.verify.identities import IDENTITIES, identities, invariance_checks
from normlab.verify.init_rules import BELONGS, belongs_check
from normlab.verify.signal import measure, slope
from normlab.verify.small import config_of
from normlab.verify.variants import LABELS, others

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


def failed(checks: Iterator[Check]) -> list[str]:
    return [f"{check.check}: {check.seen}" for check in checks if not check.passed]


# The catalogue


@pytest.mark.slow
@pytest.mark.parametrize("name", load_all())
def test_a_norm_is_what_it_says(name: str) -> None:
    assert failed(run.of_norm(NORMS[name](), 16)) == []  # pyright: ignore[reportCallIssue]


@pytest.mark.slow
@pytest.mark.parametrize("name", load_placements())
def test_a_placement_is_what_it_says(name: str) -> None:
    assert failed(run.of_placement(PLACEMENTS[name])) == []


@pytest.mark.slow
def test_presets_are_what_they_say() -> None:
    for norm in norm_presets():
        assert failed(norms.oracle_checks(norm, norm.label, 16, alone=True)) == []


def test_the_entries_are_to_each_other_what_they_should_be() -> None:
    checks = list(identities())
    assert failed(iter(checks)) == []
    assert len(checks) == len(IDENTITIES)


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_a_default_that_is_another_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = NORMS[name]
    fields = [field for field in dataclasses.fields(kind) if field.name not in LABELS]
    assert failed(default_check(name)) == []
    for field in fields:
        other = next(others(kind(), field, 16), None)
        if other is None:
            continue
        with monkeypatch.context() as patch:
            patch.setitem(kind.__init__.__kwdefaults__, field.name, getattr(other, field.name))
            (check,) = default_check(name)
            assert not check.passed, field.name
            assert f"{field.name}={getattr(other, field.name)}, not " in check.seen


def test_the_defaults_of_every_norm_and_preset_are_told_twice() -> None:
    ours = {name for name, kind in NORMS.items() if kind.__module__.startswith("normlab.")}
    assert set(DEFAULTS) == ours
    presets = norm_presets()
    assert {preset.preset for preset in presets} == set(PRESETS)
    assert [check for check in map(preset_check, presets) if not check.passed] == []
    for preset in presets:
        for field in dataclasses.fields(preset):
            for other in others(preset, field, 16) if field.name not in LABELS else ():
                assert not preset_check(other).passed, (preset, other)
    assert not preset_check(dataclasses.replace(presets[0], preset="nobody_knows")).passed


def test_few_rest_on_themselves() -> None:
    alone = {
        name for name, kind in NORMS.items() if kind.oracle_kind == "self" and kind.__module__.startswith("normlab.")
    }
    assert alone == {"bhyt", "minmax", "seednorm", "gatednorm"}


def test_a_placement_that_is_no_row_rests_on_itself() -> None:
    schemes = {name for name, it in PLACEMENTS.items() if not isinstance(it, AlgebraPlacement)}
    for name in ("pre", *schemes):
        norm = NORMS["rmsnorm" if PLACEMENTS[name].has_norms(2) else "none"]()  # pyright: ignore[reportCallIssue]
        check = blocks.formula_check(config_of(norm, PLACEMENTS[name], depth=2), "it")
        assert check.kind == ("self" if name in schemes else "identity"), name


# What is broken is found

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
    "is x times factor, in float64": ("* self.factor\n\n\n", "* self.factor**2\n\n\n"),
    "is held against something": ("    def reference(", "    def other("),
    "no output moves with a later token": (
        "return x_D * self.factor\n'''", "return x_D * self.factor + x_D.flip(-2)\n'''",
    ),
    "no output moves with a later token, of a norm that is even in it": (
        "return x_D * self.factor\n'''", "return x_D * self.factor + x_D.square().flip(-2)\n'''",
    ),
    "is x times factor, in float64, in evaluation": (
        FORWARD, f"{FORWARD} if self.training else x_D",
    ),
    "is the same at B = 2, T = 40, D = 320": (
        FORWARD, f"{FORWARD} * (x_D.shape[-1] <= 32)",
    ),
    "no output moves with a later token at B = 2, T = 40, D = 320": (
        FORWARD, f"{FORWARD} - (x_D.mean(-2, keepdim=True) if x_D.shape[-2] > 6 else 0)",
    ),
    "is the same at B = 4, T = 128, D = 128": (
        FORWARD, f"{FORWARD} * (x_D.shape[-1] != 128)",
    ),
    "is the same at B = 4, T = 128, D = 128, in evaluation": (
        FORWARD, f"{FORWARD} * (self.training or x_D.shape[-1] != 128)",
    ),
    "is the same at B = 2, T = 40, D = 320, in float32": (
        FORWARD, f"{FORWARD} * (1.5 if x_D.dtype == torch.float32 and x_D.shape[-1] > 128 else 1)",
    ),
    "is the same at B = 1, T = 40, D = 320": (
        FORWARD, f"{FORWARD} * (x_D.shape[0] > 1 or x_D.dim() < 3 or x_D.shape[1] == 1)",
    ),
    "takes any number of axes, and one channel, in evaluation": (
        FORWARD, f"{FORWARD} if self.training or x_D.shape[-2] > 1 else x_D",
    ),
    "is the same at B = 2, T = 40, D = 320, of numbers that are larger": (
        FORWARD, f"{FORWARD} * torch.where((x_D.abs() > 5) & (x_D.abs() < 50), 1.5, 1.0)",
    ),
    "trains in a pack as it does alone": (
        FORWARD, f"{FORWARD} if x_D.abs().max().item() < 1e30 else x_D",
    ),
    "leaves its input as it was": (
        FORWARD, FORWARD.replace("return", "y_D =") + "\n        x_D.detach().add_(1)\n        return y_D",
    ),
    "has a reference that does not call its module": (
        "return x_D * self.factor\n\n\n", "return self.build(x_D.shape[-1])(x_D)\n\n\n",
    ),
    "says where it starts": ("self.factor = factor", "self.factor, self.w = factor, nn.Parameter(torch.ones(3))"),
    "learns 0 numbers": ("        self.factor = factor", "        self.factor, self.w = factor, nn.Linear(1, 3)"),
    "every option has an effect": ("return Halved(self.factor)", "return Halved(0.5)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS)
def test_a_plugin_that_is_broken_is_found(broken: str, tmp_path: Path, run_command: Command) -> None:
    before, after = BREAKS[broken]
    source = NORM.replace('"halved"', f'"halved{list(BREAKS).index(broken)}"')
    source = source.replace('"""x / 2."""', '"""x / 2."""\n\n    oracle = "x times factor"')
    assert before.rstrip("'") in source
    (tmp_path / "mine.py").write_text(source.replace(before.rstrip("'"), after.rstrip("'")) if before else source)
    # Alone where it can be seen so, which is quicker; a run's own size is seen with the run.
    choice = [f"norm=halved{list(BREAKS).index(broken)}"] if not broken or "128" in broken else []
    code, out, err = run_command("verify", f"plugins=[{tmp_path}/mine.py]", *choice, "--json")
    assert err == ""
    failed = [check["check"] for check in json.loads(out) if not check["passed"]]
    assert code == (1 if broken else 0), failed
    if broken:
        assert any(broken.startswith(check) for check in failed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start"), [("late", "0"), ("unread", "half of it"), ("unknown", "K"), ("zeroth", "1 / 0")]
)
def test_a_row_that_does_not_start_where_it_says_is_found(
    name: str, start: str, tmp_path: Path, run_command: Command
) -> None:
    (tmp_path / "late.py").write_text(
        "from normlab.placements.algebra import Row, SubLayer, register_row\n"
        "half = SubLayer(norms=('in',), scale=lambda layer, depth: 0.5)\n"
        f"told = {{'wiring.attn.scale': '{start}', 'wiring.mlp.scale': '0.5'}}\n"
        f"register_row(Row(name='{name}', formula='x = x + scale * F(N(x))', source='the test', init='gpt2', attn=half,"
        " mlp=half, starts=told, final_norm=True))\n"
    )
    code, out, _ = run_command("verify", f"plugins=[{tmp_path}/late.py]", f"placement={name}", "--json")
    (failed,) = (check for check in json.loads(out) if not check["passed"])
    assert (code, failed["check"]) == (1, "starts where it is said to")
    assert "wiring.attn.scale" in failed["seen"]


LATE = """from normlab.init_rules import init_rule
from normlab.placements.algebra import Row, SubLayer, register_row

@init_rule
def {name}_init(weight):
    return 0.02

half = SubLayer(norms=("in",), branch=lambda layer, depth: {branch})
register_row(Row(name="{name}", formula="x = x + 0.5 * F(N(x))", source="the test", init="{name}_init", attn=half,
                 mlp=half, final_norm=True))
"""


@pytest.mark.slow
def test_a_row_that_is_right_in_few_blocks_only_is_found(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "late.py").write_text(LATE.format(name="right_at_four", branch="0.5 if layer <= 4 else 0.7"))
    code, out, _ = run_command("verify", f"plugins=[{tmp_path}/late.py]", "placement=right_at_four", "--json")
    failed = [check for check in json.loads(out) if not check["passed"]]
    assert code == 1
    assert all(check["of"].startswith("placement right_at_four") for check in failed)
    assert {check["check"] for check in failed} == {"computes x = x + 0.5 * F(N(x))"}


def test_a_placement_that_differs_in_evaluation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(NORMS["layernorm"](), PLACEMENTS["pre"], depth=2)  # pyright: ignore[reportCallIssue]
    assert [check.passed for check in blocks.evaluation_check(config, "it")] == [True]
    forward = Residual.forward
    monkeypatch.setattr(Residual, "forward", lambda self, *args: forward(self, *args) * (1 if self.training else 2))
    assert [check.passed for check in blocks.evaluation_check(config, "it")] == [False]


@pytest.mark.slow
def test_plugins_alone_are_verified_whatever_they_register(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "norm.py").write_text(NORM.replace('"halved"', '"halved_alone"').replace("= 0.5", "= 0.25"))
    (tmp_path / "row.py").write_text(LATE.format(name="row_alone", branch="0.5"))
    word = f"plugins=[{tmp_path}/norm.py,{tmp_path}/row.py]"
    code, out, err = run_command("verify", word, "--json")
    checks = json.loads(out)
    assert (code, err) == (0, ""), [check for check in checks if not check["passed"]]
    assert {check["of"] for check in checks} == {"norm halved_alone", "placement row_alone", "init row_alone_init"}
    (tmp_path / "row.py").write_text(LATE.format(name="row_alone", branch="0.4"))
    code, out, err = run_command("verify", word, "--json")
    assert (code, err) == (1, "")


@pytest.mark.parametrize(
    ("std", "expected"), [("0.01", 0), ("-0.02", 1), ("float('nan')", 1), ("0.02 / (weight.layer - 1)", 2)]
)
def test_an_init_rule_alone_is_verified(std: str, expected: int, tmp_path: Path, run_command: Command) -> None:
    name = f"rule_{len(std)}"
    rule = LATE.partition("half =")[0].replace("return 0.02", f"return {std}").format(name=name)
    (tmp_path / "rule.py").write_text(rule)
    code, out, err = run_command("verify", f"plugins=[{tmp_path}/rule.py]")
    assert code == expected
    assert (f"init {name}_init: gives each matrix a standard deviation" in out) == (expected < 2)
    assert err.count("\n") == (expected == 2)


def test_plugins_that_register_nothing_are_said(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "empty.py").write_text("")
    code, out, err = run_command("verify", f"plugins=[{tmp_path}/empty.py]")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no norm, placement or init rule is registered there" in err


@pytest.mark.parametrize(
    "words",
    [["optim.lr=1"], ["norm=dyt", "seed=3"], ["placement=post", "train.steps=5"], ["optim=adamw"], ["data=stdlib"]],
)
def test_a_word_that_changes_nothing_of_what_is_verified_is_refused(words: list[str], run_command: Command) -> None:
    code, out, err = run_command("verify", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {words[-1]}: has no effect on what is verified")


@pytest.mark.slow
def test_a_run_of_one_token_is_verified(run_command: Command) -> None:
    code, out, err = run_command("verify", "norm=batchnorm_past", "placement=mix_ln", "model.context=1")
    assert (code, err) == (0, ""), out


@pytest.mark.parametrize("where", ["build", "forward"])
@pytest.mark.parametrize("command", ["verify", "probe", "train"])
def test_an_error_in_a_plugin_is_one_line(command: str, where: str, tmp_path: Path, run_command: Command) -> None:
    source = NORM.replace('"halved"', f'"raises_in_{where}"')
    head = {"build": "def build(self, width):\n", "forward": "def forward(self, x_D):\n"}[where]
    source = source.replace(head, head + "        raise ValueError('boom')\n")
    (tmp_path / "mine.py").write_text(source)
    words = [f"plugins=[{tmp_path}/mine.py]", f"norm=raises_in_{where}", "model.depth=1", "model.width=16"]
    if command == "train":
        words += [f"results_dir={tmp_path / 'results'}", "tracking.wandb=off", "compile=off"]
    code, _, err = run_command(command, *words)
    (line,) = (line for line in err.splitlines() if line.startswith("error"))
    assert code == 2
    assert re.search(r"plugins: mine\.py line \d+: ValueError: boom; fix the file", line)
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_run_with_a_doubtful_init_is_verified_with_the_doubt(run_command: Command) -> None:
    code, _, err = run_command("verify", "placement=post", "init=gpt2")
    assert code == 0
    assert "init=gpt2" in err
    assert "arXiv:2002.04745" in err


def row(**parts: object) -> Row:
    return Row(name="tried", source="the test", init="xavier", **parts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("formula", "norms_at", "seen"),
    [
        ("x = x + F(N(x))", ("in",), ""),
        ("x = x + F(N(x))", ("out",), "largest error"),
        ("x = N(x + F(x))", ("in",), "largest error"),
        ("x = x + F(x)", ("in",), "has 2 norms, its formula 0"),
        ("x = N(x + F(N(x)))", ("in",), "more norms than the model"),
        ("x = x + 2 * F(N(x))", ("in",), "largest error"),
        ("x = x + G(N(x))", ("in",), "'G' is not defined"),
    ],
)
def test_a_formula_that_is_not_the_models_is_found(
    formula: str, norms_at: tuple[str, ...], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normlab.placements import algebra, base

    wrong = row(formula=formula, attn=SubLayer(norms=norms_at), mlp=SubLayer(norms=norms_at))
    monkeypatch.setitem(algebra._ROWS_BY_NAME, "tried", wrong)
    monkeypatch.setitem(base.PLACEMENTS, "tried", AlgebraPlacement(name="tried"))
    check = blocks.formula_check(config_of(NORMS["layernorm"](), base.PLACEMENTS["tried"], depth=2), "it")  # pyright: ignore[reportCallIssue]
    assert check.passed == (not seen)
    assert seen in check.seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [("post", "gpt2"), ("sub_ln", "gpt2"), ("deepnorm", "xavier"), ("hybridnorm", "gpt2"), ("pre", "gpt2")],
)
def test_a_row_with_the_init_of_another_is_found(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from normlab.placements import algebra

    (right,) = belongs_check(PLACEMENTS[name])
    monkeypatch.setitem(algebra._ROWS_BY_NAME, name, dataclasses.replace(algebra._ROWS_BY_NAME[name], init=wrong))
    checks = [check for check in run.of_placement(PLACEMENTS[name], thorough=False) if "init=" in check.check]
    assert [(check.passed, check.kind) for check in (right, *checks)] == [(True, ""), (False, "")]
    assert checks[0].seen.startswith(f"{wrong}, not {right.check.partition('=')[2]} (")


def test_every_placement_of_the_catalogue_has_an_init_to_be_held_against_and_a_plugins_has_none() -> None:
    schemes = {name for name, it in load_placements().items() if not isinstance(it, AlgebraPlacement)}
    ours = {name for name in schemes if type(PLACEMENTS[name]).__module__.startswith("normlab.")}
    assert {row.name for row in ROWS} | ours == BELONGS.keys()
    assert list(belongs_check(AlgebraPlacement(name="a_plugins"))) == []


def test_a_law_of_another_placement_is_found_not_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pre's stream grows more slowly than the root of 2L, which is peri's."""
    (law,) = (law for law in init_laws.LAWS if law.placement == "peri")
    monkeypatch.setattr(init_laws, "LAWS", (dataclasses.replace(law, placement="pre"),))
    assert list(init_laws.law_checks("peri")) == []
    (check,) = init_laws.law_checks("pre")
    assert not check.passed


def test_nothing_compared_is_nothing_shown() -> None:
    worst = Worst(1e-9)
    assert not worst.passed
    assert str(worst) == "nothing was compared"
    worst.add(float("nan"), "here")
    assert "inf" in str(worst)
    assert not worst.passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "width"),
    [
        (["norm=groupnorm", "norm.groups=7"], 126),
        (["norm=groupnorm", "norm.groups=7"], 14),
        (["norm=groupnorm", "norm.groups=8", "norm.eps=0"], 16),
        (["norm=dyt", "norm.alpha=1e6"], 16),
        (["norm=dyt", "norm.alpha=1e-9"], 16),
        (["norm=pointwise", "norm.function=cubsign", "norm.alpha=0.001"], 16),
    ],
)
def test_a_norm_holds_with_options_at_the_ends_of_what_they_may_be(words: list[str], width: int) -> None:
    assert failed(run.of_norm(compose_run([*words, f"model.width={width}", "model.heads=2"]).norm, width)) == []


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "l2norm", "batchnorm_past"])
def test_a_norm_that_does_not_say_what_it_is_blind_to_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = NORMS[name]
    blind = kind.blind_to
    monkeypatch.setattr(kind, "blind_to", ())
    (check,) = invariance_checks(kind(), "it", 16)  # pyright: ignore[reportCallIssue]
    assert (check.passed, check.seen) == (False, ", ".join(blind))


def test_what_has_no_reference_is_counted_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(NORMS["rmsnorm"], "reference", none)
    (check,) = norms.oracle_checks(NORMS["rmsnorm"](), "norm mine", 16)  # pyright: ignore[reportCallIssue]
    assert (check.check, check.passed, check.kind) == ("is held against something", False, "")
    assert run.verdict([check]).endswith("code of others 0, an identity 0, our own formula 0")


# The command


@pytest.mark.slow
def test_a_run_is_verified_by_its_words(run_command: Command) -> None:
    code, out, err = run_command(
        "verify", "norm=rmsnorm_gemma", "placement=mix_ln", "placement.early_blocks=2", "model.depth=6"
    )
    assert (code, err) == (0, "")
    *lines, last = out.splitlines()
    assert all(line.startswith("ok    ") for line in lines)
    assert any("computes x = N(x + F(x)) if l <= 2 else x + F(N(x))" in line for line in lines)
    assert last.startswith(f"{len(lines)} checks: all hold; held against code of others 1, an identity 2")


@pytest.mark.parametrize("words", [["norm=rmsnrm"], ["placement=rezero"], ["--jsn"], ["model.depth=0"]])
def test_a_mistake_is_one_line(words: list[str], run_command: Command) -> None:
    code, out, err = run_command("verify", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")


@pytest.mark.parametrize("command", ["verify", "probe"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["norm=layernormm"], ["error: norm=layernormm: unknown norm", "did you mean 'layernorm'"]),
        (["norm=", "model.depth=3"], ["error: norm=: unknown norm ''", "choose one of batchnorm, "]),
        (["norm=dyt", "placement=sandwhich"], ["error: placement=sandwhich: unknown", "did you mean 'sandwich'"]),
    ],
)
def test_a_misspelt_name_is_answered_with_the_choices(
    command: str, words: list[str], told: list[str], run_command: Command
) -> None:
    code, out, err = run_command(command, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert all(text in err for text in told), err


# What a placement says of inits and norms


def test_a_norm_without_effect_is_refused() -> None:
    from normlab.errors import ConfigError

    with pytest.raises(ConfigError, match=r"placement=rezero: has no norm, so norm=rmsnorm, named or by default, has"):
        compose_run(["placement=rezero"])
    for words in (["norm=none"], ["model.qk_norm=head"], ["placement.final_norm=true"]):
        compose_run(["placement=rezero", *words])


@pytest.mark.parametrize("words", [["model.qk_norm=head"], ["model.qk_norm=full", "placement=ngpt"]])
def test_a_norm_on_queries_and_keys_that_is_none_is_refused(words: list[str]) -> None:
    from normlab.errors import ConfigError

    with pytest.raises(ConfigError, match=f"^{words[0]}: has no effect with norm=none; leave it out or choose a norm"):
        compose_run(["norm=none", *words])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "norm=none placement.final_norm=false",
            "placement.final_norm=false: has no effect with norm=none; leave it out",
        ),
        ("norm=none placement.embedding_norm=true", "placement.embedding_norm=true: has no effect with norm=none; "),
        ("norm=none placement=rezero placement.final_norm=true", "placement.final_norm=true: has no effect with norm"),
        (
            "norm=none placement=mix_ln placement.early_blocks=1 model.depth=8",
            "early_blocks=1: has no effect with norm",
        ),
        (
            "norm=none placement=parallel placement.final_norm=true",
            "placement.final_norm=true: has no effect with norm",
        ),
        (
            "placement=resi_dual placement.embedding_norm=true",
            "embedding_norm=true: resi_dual does not have this option, because the ends of the "
            "stream are part of its definition (y = x; x = x + N(y)); leave the option out",
        ),
        ("placement=x0_lambdas placement.final_norm=false", "final_norm=false: x0_lambdas does not have this option"),
        (
            "placement=mix_ln placement.early_blocks=9 model.depth=8",
            "early_blocks=9: is more than model.depth=8; choose at",
        ),
    ],
)
@pytest.mark.parametrize("command", ["verify", "train"])
def test_an_option_of_a_placement_that_changes_nothing_is_refused(
    command: str, words: str, told: str, run_command: Command
) -> None:
    code, out, err = run_command(command, *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


@pytest.mark.parametrize(
    "words",
    [
        "norm=none",
        "norm=none placement=post",
        "norm=none placement=mix_ln model.depth=8",
        "placement=mix_ln placement.early_blocks=0 model.depth=4",
        "placement=mix_ln placement.early_blocks=4 model.depth=4",
        "placement=hybridnorm_star placement.early_blocks=0",
        "placement=mix_ln placement.early_blocks=2 model.depth=8",
        "placement=hybridnorm_star placement.early_blocks=1",
        "placement=pre placement.final_norm=true placement.embedding_norm=false",
    ],
)
def test_what_a_placement_has_by_itself_and_what_differs_from_it_are_no_idle_words(words: str) -> None:
    compose_run(words.split())


def test_a_run_of_before_with_an_idle_switch_can_be_read() -> None:
    config = compose_run(["placement.final_norm=false"])
    tree = plain_tree(config) | {"norm": plain_tree(compose_run(["norm=none"]).norm)}
    before = config_of_record(json.loads(json.dumps(tree)))
    assert (before.norm.name, before.placement) == ("none", config.placement)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "doubt"),
    [
        (["placement=post"], None),
        (["placement=post", "init=gpt2"], r"init=gpt2 is not what placement=post goes with \(xavier\): .*2002.04745"),
        (["placement=deepnorm", "init=xavier"], r"\(deepnorm\): beta = .*2203.00555"),
        (["placement=deepnorm", "init=deepnorm"], None),
        (["placement=peri", "init=gpt2_scaled"], r"the first gradients grow"),
        (["placement=sandwich", "init=smallinit_scaled"], r"\(gpt2\): .*the first gradients grow with depth"),
        (["placement=res_post", "init=smallinit_scaled"], r"\(gpt2\): .*the first gradients grow with depth"),
        (["placement=res_post", "init=depth_scaled"], None),
        (["placement=post", "init=depth_scaled"], r"\(xavier\): .*2002.04745"),
        (["placement=lns", "init=depth_scaled"], r"\(gpt2\): .*1 / sqrt\(l\) does that \(arXiv:2502.05795"),
        (["placement=lns", "init=smallinit_scaled"], r"\(gpt2\): .*1 / sqrt\(l\) does that"),
        (["placement=pre", "init=xavier"], None),
        (["norm=none", "placement=pre", "init=xavier"], r"is wrong with norm=none: .* grows exponentially with depth"),
        (["norm=none", "placement=post"], r"init=xavier is wrong with norm=none"),
        (["norm=none", "placement=mix_ln", "init=xavier"], r"init=xavier is wrong with norm=none"),
        (["norm=none", "placement=pre"], None),
        (["norm=none", "placement=lns", "init=xavier"], None),
        (["norm=none", "placement=layerscale", "init=xavier"], None),
        (["norm=none", "placement=rezero"], None),
    ],
)
def test_an_init_that_is_known_to_be_wrong_is_said(words: list[str], doubt: str | None) -> None:
    import re

    found: RunConfig = compose_run(words)
    if doubt is None:
        assert found.doubts() == []
    else:
        assert re.search(doubt, found.doubts()[0])


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["peri", "res_post"])
@pytest.mark.parametrize(
    ("rule", "grows"), [("gpt2", 0.0), ("gpt2_scaled", 0.5), ("smallinit", 0.0), ("smallinit_scaled", 0.5)]
)
def test_the_first_gradients_under_a_norm_of_the_branch_grow_as_outputs_are_scaled(
    placement: str, rule: str, grows: float
) -> None:
    """The norm divides by a branch that is smaller by sqrt(2L), and its gradient is larger by as much."""
    depths = [4, 16]
    first = [init_laws.profile(placement, rule, depth).first for depth in depths]
    assert slope(depths, first) == pytest.approx(grows, abs=0.3)


@pytest.mark.slow
def test_without_norms_the_stream_explodes_under_xavier_where_that_is_said_and_not_where_it_is_not() -> None:
    for placement in ("pre", "post", "mix_ln", "lns", "layerscale", "rezero"):
        words = ["norm=none", f"placement={placement}", "init=xavier", "model.depth=24", "train.batch_size=2"]
        config = compose_run(words)
        assert (measure(config)[0].stream[-1] > 100) == bool(config.doubts()), placement


def test_depth_scaled_is_as_small_beside_a_normed_stream_as_gpt2() -> None:
    seen = {rule: init_laws.profile("post", rule, 8).last for rule in ("gpt2", "depth_scaled", "xavier")}
    assert seen["depth_scaled"] == pytest.approx(seen["gpt2"], rel=0.15)
    assert seen["xavier"] > 3 * seen["depth_scaled"]


def test_every_wrong_init_is_a_rule() -> None:
    from normlab.init_rules import INIT_RULES

    for placement in PLACEMENTS.values():
        assert set(placement.incompatible_inits) <= {*INIT_RULES, "other"}
        assert placement.init_rule in INIT_RULES
