"""A user's files: what they define is part of a run, and takes no name that is taken."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import normlab
from normlab.base.errors import ConfigError
from normlab.catalogue.norms.base import NORMS
from normlab.config.compose import compose_run, compose_sweep
from normlab.data.corpus import open_corpus
from normlab.sweeps.files import write_plan
from normlab.sweeps.plan import make_plan
from normlab.training.identity import identity, run_id_of
from normlab.training.machine import resolve
from normlab.training.start import train
from normlab.verify.runs import verify_runs
from normlab.verify.selection import groups_of_norm
from support.plugins import NORM

ROW = """
from normlab.catalogue.placements.algebra import Row, SubLayer, register_row

ALPHA = 0.5

def factor(value):
    return lambda layer, depth: value

def skip(layer, depth):
    return ALPHA

sub = SubLayer(norms=("input",), skip=skip, branch=factor(2.0))
register_row(Row(name="scaled", formula="f", source="s", init="gpt2", attn=sub, mlp=sub))
"""
RULE = """
from normlab.catalogue.placements.init_rules import init_rule

STD = 0.01
OUTSIDE = 0.02

@init_rule
def tiny(weight):
    return STD if weight.layer else OUTSIDE
"""


@pytest.fixture
def run_id(overrides: list[str]) -> Callable[..., str]:
    """The id of the run that `overrides` and more make."""

    def of(*more: str) -> str:
        config = compose_run([*overrides, *more])
        return run_id_of(config, identity(config, resolve(config), open_corpus(config.data)))

    return of


EDITS = {
    "norm": (NORM, "norm=mine", "nn.Tanh", "nn.Softsign"),
    "row": (ROW, "placement=scaled", "ALPHA = 0.5", "ALPHA = 0.9"),
    "init rule": (RULE, "init=tiny", "STD = 0.01", "STD = 0.2"),
}
"""By kind: a plugin, the override that selects it, and a text of the plugin with its replacement."""


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", EDITS)
def test_edited_plugin_starts_another_run(kind: str, run_id: Callable[..., str]) -> None:
    text, override, before, after = EDITS[kind]
    Path("mine.py").write_text(text)
    first, without = run_id("plugins=[mine.py]", override), run_id("plugins=[mine.py]")
    Path("mine.py").write_text(text.replace(before, after))
    assert run_id("plugins=[mine.py]", override) != first
    assert run_id("plugins=[mine.py]") == without == run_id()
    Path("mine.py").write_text(text)
    assert run_id("plugins=[mine.py]", override) == first


@pytest.mark.parametrize("override", ["norm=mine", "placement=mine", "init=mine", "norm.at.final=mine"])
def test_a_plugin_that_registers_nothing_is_named(override: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("class Mine: pass\n")
    with pytest.raises(ConfigError) as caught:
        compose_run([override, f"plugins=[{tmp_path / 'x.py'}]"])
    hint = "nothing is registered in x.py (add @register_norm, register_placement or @init_rule); unknown "
    assert str(caught.value).startswith(f"{override}: {hint}")
    with pytest.raises(ConfigError, match=f"^{override}: unknown "):
        compose_run([override])


@pytest.mark.parametrize("kind", EDITS)
def test_edited_comment_starts_no_other_run(kind: str, run_id: Callable[..., str]) -> None:
    text, override, _, _ = EDITS[kind]
    Path("mine.py").write_text(text)
    first = run_id("plugins=[mine.py]", override)
    Path("mine.py").write_text(f"# A comment.\n\n{text}")
    assert run_id("plugins=[mine.py]", override) == first


def test_edited_plugin_is_named_wherever_its_runs_are_used(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By train, by the sweep that planned them, by another sweep, by start_from, and by readers of an edited copy."""
    mine = [*overrides, "plugins=[mine.py]", "norm=mine", "train.steps=2"]
    Path("mine.py").write_text(NORM)
    folder = train(compose_run(mine), trackers=[]).folder
    planned = make_plan(*compose_sweep([*mine, "sweep.name=first"]))
    planned.folder.mkdir(parents=True)
    write_plan(planned.folder, planned.plan)
    Path("mine.py").write_text(f"{NORM}\n# A comment.\n")
    make_plan(*compose_sweep([*mine, "sweep.name=first"]))
    assert "changed" not in capsys.readouterr().err

    Path("mine.py").write_text(NORM.replace("nn.Tanh", "nn.Softsign"))
    changed = f"mine.py: its code is not that with which run {folder.run_id} started with the same options, so this is"
    with pytest.raises(ConfigError, match=f"run {folder.run_id} of the existing sweep would be .* now: mine.py has ch"):
        make_plan(*compose_sweep([*mine, "sweep.name=first"]))
    (warning,) = make_plan(*compose_sweep([*mine, "sweep.name=other"])).warnings
    assert changed in warning
    with pytest.raises(
        ConfigError, match=r"start_from=.*: mine.py has changed since that run started; undo the change$"
    ):
        train(compose_run([*mine, "train.steps=3", f"train.start_from={folder.run_id}"]), trackers=[])
    train(compose_run(mine), trackers=[])
    assert changed in capsys.readouterr().err

    (copy,) = (folder.path / "plugins").iterdir()
    copy.write_text(NORM.replace("nn.Tanh", "nn.Sigmoid"))
    assert normlab.load(folder.path, trust=True).model
    assert f"run {folder.run_id}: 00_mine.py in its folder has changed since it was trained" in capsys.readouterr().err
    check = next(verify_runs([normlab.load(folder.path, trust=True)]))
    assert not check.passed
    assert check.result.endswith("(00_mine.py in its folder has changed since)")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NORM.replace('"mine"', '"rmsnorm"').replace("class Mine", "class RMSNormConfig"), "norm 'rmsnorm'"),
        (ROW.replace('"scaled"', '"pre"'), "placement 'pre'"),
        (RULE.replace("def tiny", "def gpt2_scaled"), "init rule 'gpt2_scaled'"),
    ],
)
def test_names_of_the_package_are_rejected(text: str, said: str, run_id: Callable[..., str]) -> None:
    Path("mine.py").write_text(text)
    plain = run_id()
    with pytest.raises(ConfigError, match=f"{said} is defined by normlab itself: rename yours"):
        run_id("plugins=[mine.py]")
    assert run_id() == plain


@pytest.mark.parametrize("name", ["my norm", "../mine", "", "2nd", "nörm"])
@pytest.mark.parametrize(("text", "old", "kind"), [(NORM, "mine", "norm"), (ROW, "scaled", "placement")])
def test_name_that_is_no_identifier_is_rejected(
    text: str, old: str, kind: str, name: str, run_id: Callable[..., str]
) -> None:
    Path("mine.py").write_text(text.replace(f'"{old}"', f'"{name}"'))
    with pytest.raises(ConfigError, match=re.escape(f"{kind} {name!r}: is not an identifier")):
        run_id("plugins=[mine.py]")


@pytest.mark.parametrize(
    ("text", "again"),
    [(NORM, NORM.replace("Mine", "Other")), (ROW, ROW.replace("0.5", "0.6")), (RULE, RULE.replace("0.01", "0.02"))],
    ids=["norm", "row", "rule"],
)
def test_two_definitions_of_one_name_are_rejected(text: str, again: str, run_id: Callable[..., str]) -> None:
    Path("one.py").write_text(text)
    Path("other.py").write_text(again)
    for plugins in ("[one.py,other.py]", "[other.py,one.py]", "[one.py]", "[one.py,other.py]"):
        if "," in plugins:
            with pytest.raises(ConfigError, match="is defined by two plugins: rename one of them"):
                run_id(f"plugins={plugins}")
        else:
            run_id(f"plugins={plugins}")
    Path("both.py").write_text(text + again.replace("from __future__", ""))
    with pytest.raises(ConfigError, match="is defined twice: rename one of them"):
        run_id("plugins=[both.py]")


@pytest.mark.parametrize(("text", "override", "before", "after"), [EDITS["norm"], EDITS["row"]], ids=["norm", "row"])
def test_two_versions_of_a_plugin_load_in_one_process(
    text: str, override: str, before: str, after: str, overrides: list[str]
) -> None:
    runs = []
    for version in (text, text.replace(before, after)):
        Path("mine.py").write_text(version)
        config = compose_run([*overrides, "plugins=[mine.py]", override, "train.steps=2"])
        runs.append(train(config, trackers=[]).folder)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    logits = [normlab.load(run.path).model(tokens) for run in (*runs, *runs)]
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[3])
    assert not torch.equal(logits[0], logits[1])


def test_model_of_another_version_of_its_norm_loads_with_a_warning(
    overrides: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train(compose_run([*overrides, "norm=rmsnorm", "train.steps=2"]), trackers=[]).folder
    assert normlab.load(folder.path).model
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(NORMS["rmsnorm"], "version", 2)
    assert normlab.load(folder.path).model
    assert "was trained with another version of its norm" in capsys.readouterr().err


def test_row_with_an_unknown_init_rule_is_rejected() -> None:
    Path("mine.py").write_text(ROW.replace('init="gpt2"', 'init="gpt3"'))
    with pytest.raises(
        ConfigError, match=r"^placement=scaled, init=gpt3: unknown init rule 'gpt3' \(did you mean 'gpt2'"
    ):
        compose_run(["plugins=[mine.py]", "placement=scaled"])


LEARNED = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from torch import nn
from normlab.plugin import NormConfig, option, parameter, register_norm

@register_norm
@dataclass(kw_only=True, slots=True)
class {name}(NormConfig):
    '''x times a gain.'''

    formula: ClassVar[str] = "x * gain"
    source: ClassVar[str] = "the test"
    parameters: ClassVar[str] = "D + 1"
    {initial_values}

    name: str = "{name}"
    gentle: float = option(0.5, "How gentle it is.", above=0)

    def build(self, width):
        return Gain(width)

class Gain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = parameter(torch.full((width,), 2.0), role="gain")
        self.shift = parameter(torch.tensor(0.0), role="scalar")

    def forward(self, x):
        return x * self.gain + self.shift
"""

Command = Callable[..., tuple[int, str, str]]


def learned(folder: Path, name: str, initial_values: str) -> str:
    """Write a plugin with learned parameters; the override that names it."""
    (folder / f"{name}.py").write_text(LEARNED.format(name=name, initial_values=initial_values))
    return f"plugins=[{folder / name}.py]"


@pytest.mark.exhaustive
def test_verify_names_the_parameters_without_initial_values(run_command: Command, tmp_path: Path) -> None:
    out = run_command("verify", learned(tmp_path, "nowhere", ""))[1]
    (failed,) = (line for line in out.splitlines() if "declares its initial values" in line)
    assert "gain, shift: not in `initial_values` of nowhere; add an expression for each" in failed
    line = 'initial_values: ClassVar[dict[str, str]] = {"gain": "[2] * D", "shift": "0"}'
    out = run_command("verify", learned(tmp_path, "somewhere", line))[1]
    assert "ok    norm somewhere: has its declared initial values" in out


def test_verify_names_the_group_of_each_parameter(tmp_path: Path) -> None:
    norm = compose_run([learned(tmp_path, "grouped", ""), "norm=grouped"]).norm
    line = str(groups_of_norm(norm, "norm grouped", 16))
    assert line == "ok    norm grouped: groups of the optimiser:  gain: gains.input, shift: scalars"


def test_a_parameter_without_a_role_is_an_error(run_command: Command, tmp_path: Path) -> None:
    """Its group of the optimiser, and so its weight decay, would follow from the letters of its name."""
    override = learned(tmp_path, "without_role", "")
    file = tmp_path / "without_role.py"
    file.write_text(
        file.read_text().replace('parameter(torch.full((width,), 2.0), role="gain")', "nn.Parameter(torch.ones(width))")
    )
    for command in ("train", "verify"):
        code, out, err = run_command(command, override, "norm=without_role", "model.depth=1")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "gain: is a parameter without a role; make it with normlab.plugin.parameter(values, role=...)" in err
    file.write_text(
        file.read_text().replace("nn.Parameter(torch.ones(width))", 'parameter(torch.ones(width), role="g")')
    )
    code, out, err = run_command("train", override, "norm=without_role", "model.depth=1", "train.steps=1")
    assert (code, out) == (2, "")
    assert "unknown role 'g': choose one of bias, gain, matrix, scalar" in err


@pytest.mark.parametrize(
    "initial_values",
    [
        'initial_values: ClassVar[str] = "[1] * D"', 'initial_values = {"gain": 1.0}', 'initial_values = ["gain"]',
    ],
)  # fmt: skip
def test_initial_values_of_a_wrong_type_is_rejected_with_the_syntax(
    initial_values: str, run_command: Command, tmp_path: Path
) -> None:
    code, out, err = run_command("verify", learned(tmp_path, "wrong", initial_values))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "norm 'wrong': initial_values is " in err
    assert 'write initial_values: ClassVar[dict[str, str]] = {"gain": "[1] * D"}' in err


def test_list_includes_entries_of_plugins(run_command: Command, tmp_path: Path) -> None:
    override = learned(tmp_path, "listed", 'initial_values: ClassVar = {"gain": "[2] * D", "shift": "0"}')
    assert "listed" not in run_command("list", "norms")[1]
    out = run_command("list", "norms", override)[1]
    assert "x * gain" in next(line for line in out.splitlines() if line.startswith("listed"))
    whole = run_command("list", "norms", "listed", override)[1]
    for part in (
        "parameters            D + 1\n",
        "- gain: [2] * D\n    - shift: 0",
        "gentle=0.5: How gentle",
        "x times a gain.",
    ):
        assert part in whole
    (entry,) = (entry for entry in json.loads(run_command("list", "norms", override, "--json")[1])
                if entry["name"] == "listed")  # fmt: skip
    assert entry["options"] == [{"option": "gentle", "default": 0.5, "about": "How gentle it is.", "above": 0}]
    assert "listed" not in run_command("list", "norms")[1]  # of a command that does not name the plugin

    (tmp_path / "row.py").write_text(ROW.replace('"scaled"', '"listed_row"').replace('"s"', '"Someone 2026"'))
    row = run_command("list", "placements", f"plugins=[{tmp_path}/row.py]", "listed_row")[1]
    assert "Someone 2026" in row
    assert "gpt2" in row
    assert "listed_row" in run_command("list", "placements", f"plugins=[{tmp_path}/row.py]")[1]
