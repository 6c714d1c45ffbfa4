"""`normlab verify` of plugins: a right one passes every check, and a wrong one fails the matching one."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]

NORM = '''"""A norm of a user's."""

from dataclasses import dataclass

import torch
from torch import nn

from normlab.plugin import NormConfig, parameter, register_norm


@register_norm
@dataclass(kw_only=True, slots=True)
class HalvedConfig(NormConfig):
    """x / 2."""

    formula = "x * factor"
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
    "gives the same output in a pack of runs, and leaves its input unchanged": (
        FORWARD, f"{FORWARD} if x_D.abs().max().item() < 1e30 else x_D",
    ),
    "gives the same output in a pack of runs, and leaves its input unchanged, the input": (
        FORWARD, FORWARD.replace("return", "y_D =") + "\n        x_D.detach().add_(1)\n        return y_D",
    ),
    "has a reference that does not call its module": (
        "return x_D * self.factor\n\n\n", "return self.build(x_D.shape[-1])(x_D)\n\n\n",
    ),
    "declares its initial values": (
        "self.factor = factor", "self.factor, self.w = factor, parameter(torch.ones(3), 'scalar')",
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
        "from normlab.catalogue.placements.algebra import Row, SubLayer, register_row\n"
        "half = SubLayer(norms=('input',), scale=lambda layer, depth: 0.5)\n"
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
        "y = 0.5 * F(N(x)); x = x + y",
        "x = x - (-0.5 * F(N(x)))",
        "x = 0.5 * F(N(x)) + 0.5 * x + 0.5 * x",
    ],
)
def test_a_formula_may_have_other_names_and_sums(formula: str, tmp_path: Path, run_command: Command) -> None:
    """Also with `placement.branch_warmup`, which puts a factor into it."""
    (tmp_path / "row.py").write_text(
        "from normlab.catalogue.placements.algebra import Row, SubLayer, register_row\n"
        "half = SubLayer(norms=('input',), branch=lambda layer, depth: 0.5)\n"
        f"register_row(Row(name='half', formula='{formula}', source='the test', init='gpt2', attn=half, mlp=half,"
        " final_norm=True))\n"
    )
    code, out, _ = run_command("verify", f"plugins=[{tmp_path}/row.py]", "placement=half", "--json")
    assert code == 0, [check for check in json.loads(out) if not check["passed"]]


LATE = """from normlab.catalogue.placements.init_rules import init_rule
from normlab.catalogue.placements.algebra import Row, SubLayer, register_row

@init_rule
def {name}_init(weight):
    return 0.02

half = SubLayer(norms=("input",), branch=lambda layer, depth: {branch})
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
    # With an option that changes the formula the blocks are wrong too.
    assert all(claim.startswith("computes x = ") for claim in claims), claims


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


BUILD, WIRE = "def build(self, width):", "def wire(self, layer, depth, width, make_norm):"
FORWARD_OF_WIRING = "def forward(self, x, attn, mlp):"
PLACEMENT = """
from dataclasses import dataclass
from torch import nn
from normlab.plugin import Placement, register_placement

class Wiring(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x, attn, mlp):
        y = self.norm(x)
        return x + attn(y) + mlp(y)

@dataclass(kw_only=True, slots=True)
class Plain(Placement):
    formula = "y = N(x); x = x + A(y) + M(y)"
    source = "the test"
    init = "gpt2"
    block_sites = ("input",)
    name: str = "plain"

    def wire(self, layer, depth, width, make_norm):
        return Wiring(make_norm(width, "input"))

register_placement(Plain())
"""
ERRORS = {
    "build raises": (
        NORM, BUILD, f"{BUILD}\n        raise ValueError('boom')",
        r"plugins: mine\.py line \d+: ValueError: boom; fix the file",
    ),
    "build is missing": (
        NORM, "def build(", "def biuld(",
        r"mine\.py line \d+: .*norm 'halved': HalvedConfig has no method `build`; write `def build\(self, width\)`",
    ),
    "build returns no module": (
        NORM, "return Halved(self.factor)", "return 3",
        r"plugins: mine\.py: norm 'halved': `build` returns 3, but must return a torch\.nn\.Module; fix the file",
    ),
    "build takes no width": (
        NORM, BUILD, "def build(self):",
        r"plugins: TypeError: HalvedConfig\.build\(\) takes 1 .*; mine\.py may cause it: fix the file",
    ),
    "forward takes no input": (
        NORM, "def forward(self, x_D):", "def forward(self):",
        r"plugins: mine\.py: norm 'halved': Halved\.forward takes \(\), but is called as forward\(x\); fix the file",
    ),
    "norm without a formula": (
        NORM, '    formula = "x * factor"\n', "",
        r"mine\.py line \d+: .*norm 'halved': formula of HalvedConfig is '', but must be a text; write formula = ",
    ),
    "formula that is a number": (
        NORM, 'formula = "x * factor"', "formula = 3",
        r"mine\.py line \d+: .*norm 'halved': formula of HalvedConfig is 3, but must be a text; write formula = ",
    ),
    "wire is missing": (
        PLACEMENT, "def wire(", "def wier(",
        r"mine\.py line \d+: .*placement 'plain': Plain has no method `wire`; write `def wire\(self, layer, ",
    ),
    "wire returns no module": (
        PLACEMENT, "return Wiring(", "return None and (",
        r"plugins: mine\.py: placement 'plain': `wire` returns None, but must return a torch\.nn\.Module; fix the file",
    ),
    "wire takes no layer": (
        PLACEMENT, WIRE, "def wire(self):",
        r"plugins: TypeError: Plain\.wire\(\) takes 1 .*; mine\.py may cause it: fix the file",
    ),
    "wiring takes no sub-layers": (
        PLACEMENT, FORWARD_OF_WIRING, "def forward(self, x):",
        r"mine\.py: placement 'plain': Wiring\.forward takes \(x\), but is called as forward\(stream, attn, mlp\); fix",
    ),
    "placement without a formula": (
        PLACEMENT, '    formula = "y = N(x); x = x + A(y) + M(y)"\n', "",
        r"mine\.py line \d+: .*placement 'plain': formula of Plain is None, but must be a text; write formula = ",
    ),
}  # fmt: skip
"""By mistake: a plugin, a text of it with its replacement, and the message of every command."""


@pytest.mark.parametrize("mistake", ERRORS)
def test_a_mistake_in_a_plugin_is_one_line(mistake: str, tmp_path: Path, run_command: Command) -> None:
    source, before, after, message = ERRORS[mistake]
    assert before in source
    (tmp_path / "mine.py").write_text(source.replace(before, after))
    choice = "norm=halved" if source is NORM else "placement=plain"
    overrides = [f"plugins=[{tmp_path}/mine.py]", choice, "model.depth=1", "model.width=16"]
    of_train = [f"results_dir={tmp_path / 'results'}", "tracking.wandb=off", "compile=off"]
    for command in (["verify"], ["train", *of_train]):
        code, _, err = run_command(*command, *overrides)
        errors = [line for line in err.splitlines() if line.startswith("error")]
        assert (code, len(errors)) == (2, 1), err
        assert re.search(message, errors[0])
        assert "Traceback" not in err


WRONG_OUTPUTS = {
    "raises": ("raise ValueError('boom')\n", r"mine\.py line \d+: ValueError: boom", "FAIL"),
    "exits": ("raise SystemExit(0)\n", r"mine\.py line \d+: SystemExit: 0", "FAIL"),
    "another shape": ("return (x_D * self.factor)[..., 1:]\n", r"RuntimeError: mat1 and mat2 shapes", "FAIL"),
    "another dtype": (
        "return (x_D * self.factor).double()\n",
        r"expected an output in torch\.float32, found torch\.float64",
        "ok",
    ),
}
"""By mistake: the end of the norm's forward pass, the message of a check, and the result of the formula in float64."""


@pytest.mark.few(1)
@pytest.mark.parametrize("mistake", WRONG_OUTPUTS)
def test_an_exception_in_a_check_is_its_failure(mistake: str, tmp_path: Path, run_command: Command) -> None:
    after, message, formula = WRONG_OUTPUTS[mistake]
    head, _, tail = NORM.rpartition("return x_D * self.factor\n")
    (tmp_path / "mine.py").write_text(head + after + tail)
    overrides = [f"plugins=[{tmp_path}/mine.py]", "norm=halved", "model.depth=1", "model.width=16"]
    code, out, err = run_command("verify", *overrides)
    lines = out.splitlines()
    assert (code, err) == (1, "")
    assert any(re.search(f"^FAIL  .*{message}", line) for line in lines)
    # The checks after the failed ones still run.
    (of_formula,) = (line for line in lines if "block halved, pre: computes x" in line)
    assert of_formula.startswith(formula)
    assert any(line.startswith("ok    placement pre: ") for line in lines)


@pytest.mark.parametrize("mistake", ["raises", "exits", "another shape"])
def test_train_names_the_plugin_of_a_wrong_forward_pass(mistake: str, tmp_path: Path, run_command: Command) -> None:
    after, message, _ = WRONG_OUTPUTS[mistake]
    head, _, tail = NORM.rpartition("return x_D * self.factor\n")
    (tmp_path / "mine.py").write_text(head + after + tail)
    overrides = [f"plugins=[{tmp_path}/mine.py]", "norm=halved", "model.depth=1", "model.width=16", "compile=off"]
    code, _, err = run_command("train", *overrides, f"results_dir={tmp_path / 'results'}", "tracking.wandb=off")
    (line,) = (line for line in err.splitlines() if line.startswith("error"))
    assert (code, "Traceback" in err) == (2, False)
    assert re.search(f"{message}.*fix the file", line)
    assert "mine.py" in line


def test_an_error_of_normlab_without_a_plugin_is_raised(monkeypatch: pytest.MonkeyPatch, run_command: Command) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("normlab.verify.norms.module_of", broken)
    with pytest.raises(ZeroDivisionError):
        run_command("verify", "norm=rmsnorm", "model.depth=1", "model.width=16")


WRONG_FORMULA = """
from normlab.catalogue.placements.algebra import Row, SubLayer, register_row

register_row(
    Row(
        name="wrong_formula", formula="x = x + sum(F(N(x)))", source="the test", init="gpt2", final_norm=True,
        attn=SubLayer(norms=("input",)), mlp=SubLayer(norms=("input",)),
    )
)
"""


@pytest.mark.exhaustive
def test_an_error_of_many_checks_is_printed_once(tmp_path: Path, run_command: Command) -> None:
    (tmp_path / "wrong.py").write_text(WRONG_FORMULA)
    command = ["verify", f"plugins=[{tmp_path / 'wrong.py'}]"]
    code, out, _ = run_command(*command)
    formula = "computes x = x + sum(F(N(x)))  "
    first, more = [line for line in out.splitlines() if formula in line]
    assert (code, first.startswith("FAIL  placement wrong_formula: "), "on purpose" in first) == (1, True, True)
    assert (out.count(first.partition(formula)[2]), "on purpose" in more) == (1, False)
    failed = [each["claim"] for each in json.loads(run_command(*command, "--json")[1]) if not each["passed"]]
    count = failed.count(formula.strip())
    assert more.startswith(f"FAIL  {count - 1} more checks with the error of placement wrong_formula: ")
    assert f"checks: {len(failed)} FAILED" in out
