"""What the cells of several sweeps differ in although no factor says so is named, and such cells are not compared."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import normlab
from normlab.analysis.comparability import differences
from normlab.analysis.factor_tests.run import run_test
from normlab.analysis.table import summarize_by
from normlab.base.errors import ConfigError
from normlab.config.arms import NO_DESIGN, SweepDesign, design_of
from normlab.store.plans import Plan, PlannedRun
from normlab.store.query import select_runs
from normlab.store.record import RunRecord
from normlab.sweeps.files import write_plan

LOSSES = {"a": 2.0, "b": 2.1, "c": 1.5, "d": 1.6}
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def write(tmp_path: Path, make_run: Callable[..., object]) -> Callable[..., str]:
    """Return a function that writes a sweep of three seeds, by the options of each arm, and returns its folder."""

    def write_sweep(name: str, arms: Mapping[str, Mapping[str, Any]], design: SweepDesign = NO_DESIGN) -> str:
        runs = []
        for arm, options in arms.items():
            for seed in range(3):
                loss = LOSSES.get(arm, 2.0) + 0.01 * seed + 0.001 * len(arm) * seed**2
                run_id = f"{name}-{arm}-{seed}"
                make_run(run_id, seed=seed, status={"val_loss": loss, "best_val_loss": loss}, **options)
                runs.append(PlannedRun(run_id, [f"arm={arm}"] if design.arms else [], {}))
        folder = tmp_path / "sweeps" / name
        folder.mkdir(parents=True)
        write_plan(folder, Plan(name, "auto", runs, [], design=design))
        return str(folder)

    return write_sweep


def arms_of(*overrides: str) -> SweepDesign:
    return design_of(overrides)


@pytest.fixture
def sweeps(write: Callable[..., str]) -> list[str]:
    """Write two sweeps of pre and peri: the second is narrower, with larger batches and without weight decay."""
    first = arms_of("arm=[b: placement=pre, a: placement=peri]", "model.width=64")
    second = arms_of("arm=[c: placement=pre, d: placement=peri]", "model.width=32", "train.batch_size=16")
    small: dict[str, Any] = {"width": 32, "batch_size": 16}
    return [
        write("F", {"b": {"placement": "pre", "width": 64}, "a": {"placement": "peri", "width": 64}}, first),
        write("G", {"c": {"placement": "pre", **small}, "d": {"placement": "peri", **small}}, second),
    ]


def test_a_table_names_what_arms_of_two_sweeps_hide(sweeps: list[str]) -> None:
    table = summarize_by(sweeps, against="arm=b")
    assert list(table.by) == ["arm"]
    warnings = table.warnings
    assert "the cells differ in more than arm: " in warnings[0]
    assert "model.width 32 and 64" in warnings[0]
    assert "train.batch_size 8 and 16" in warnings[0]
    assert "neither ranked nor tested against each other; --by arm,model.width,train.batch_size" in warnings[1]
    assert any(line.startswith("c; d: not compared with the baseline, because the runs differ in") for line in warnings)
    by_arm = {cell.label: cell for cell in table.cells}
    for arm in ("c", "d"):
        comparison = by_arm[arm].comparison
        assert comparison is not None
        assert (comparison.test, comparison.p_holm) == (None, None)
        assert any(
            "not compared with the baseline, because the runs differ in model.width" in w for w in by_arm[arm].warnings
        )
    known = by_arm["a"].comparison
    assert known is not None
    assert (known.tests, known.p_holm is not None) == (1, True)


@pytest.mark.parametrize("test", ["anytime", "counts"])
def test_tests_compare_only_what_is_comparable(test: str, sweeps: list[str], write: Callable[..., str]) -> None:
    table = summarize_by(sweeps)
    assert [row["contrast"] for row in run_test(test, table.cells, table.factors)] == ["a - b"]
    lone = summarize_by(sweeps, where=["placement=pre"])
    with pytest.raises(ConfigError, match=rf"--test {test}: the runs differ in model.width 32 and 64"):
        run_test(test, lone.cells, lone.factors)


@pytest.mark.parametrize(("option", "value"), [("positions", "rope"), ("value_residual", "learned")])
def test_models_with_other_parameters_are_not_compared(option: str, value: str, write: Callable[..., str]) -> None:
    first = write("F", {"b": {"placement": "pre"}}, arms_of("arm=[b: placement=pre]"))
    options = {"run": {"config": {"placement": {"name": "peri"}, "model": {option: value}}}}
    second = write("G", {"c": options}, arms_of("arm=[c: placement=peri]", f"model.{option}={value}"))
    table = summarize_by([first, second], against="arm=b")
    assert any(f"cells that differ in model.{option} are neither ranked" in line for line in table.warnings)
    comparisons = [cell.comparison for cell in table.cells if cell.comparison]
    assert all(comparison.p_holm is None for comparison in comparisons)


def test_every_command_warns_and_none_names_a_best_cell(
    sweeps: list[str], run_command: Command, tmp_path: Path
) -> None:
    page, figure = str(tmp_path / "c.html"), str(tmp_path / "f.svg")
    commands: list[list[str]] = [
        ["summarize", *sweeps],
        ["summarize", *sweeps, "--runs"],
        ["summarize", *sweeps, "--test", "anytime"],
        ["compare", *sweeps, "-o", page],
        ["figure", "factor", *sweeps, "-o", figure],
    ]
    for command in commands:
        code, out, err = run_command(*command)
        assert code == 0, err
        assert "model.width 32 and 64" in err, command
        assert "train.batch_size" in err, command
        assert "Best: " not in out
        if command[0] == "compare":
            assert "No best cell: the runs differ in model.width 32 and 64; train.batch_size" in out
            assert "the best of 4 cells" not in out
    code, out, _ = run_command("compare", *sweeps, "--by", "arm,width,batch_size", "-o", page)
    assert code == 0
    assert "Best at width 32, batch size 16: c: " in out
    assert "Best at width 64, batch size 8: a: " in out


def test_functions_warn(sweeps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    frame = normlab.summarize(sweeps, against="arm=b")
    assert "train.batch_size" in capsys.readouterr().err
    assert [pd.isna(p) for p in frame["p"]] == [True, False, True, True]
    runs = normlab.runs(sweeps)
    assert "train.batch_size" in capsys.readouterr().err
    assert set(runs["train.batch_size"]) == {8, 16}


def test_one_sweep_hides_nothing(sweeps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for sweep in sweeps:
        table = summarize_by(sweep)
        assert not table.table_warnings
        normlab.runs(sweep)
        assert not capsys.readouterr().err


PRE, PERI, WIDE = {"placement": "pre"}, {"placement": "peri"}, {"width": 64}
ARMS = "arm=[a: placement=pre, b: placement=peri]"


@pytest.mark.parametrize(
    ("first", "second", "options", "named"),
    [
        # The sweeps differ.
        ([ARMS], ["arm=[c: placement=pre]", "model.width=64"], PRE | WIDE, {"model.width"}),
        ([ARMS, "model.width=32"], ["arm=[c: placement=pre]"], PRE | WIDE, {"model.width"}),
        ([ARMS], ["arm=[c: placement=pre]", "model=gpt2_nano"], PRE | WIDE, {"model.width"}),
        ([ARMS], ["arm=[c: placement=pre]", "train.steps=200"], PRE | {"steps": 200}, {"train.steps"}),
        ([ARMS], ["placement=pre", "model.width=64"], PRE | WIDE, {"model.width"}),
        # An arm differs by its definition.
        ([ARMS], ["arm=[c: placement=post]"], {"placement": "post"}, set()),
        ([ARMS], ["arm=[c: placement=pre model.width=64]"], PRE | WIDE, set()),
        ([ARMS], ["arm=[c: placement=pre model=gpt2_nano]"], PRE | WIDE, set()),
        ([ARMS], ["arm=[c: recipe=nanochat]"], PRE | WIDE, set()),
        # A preset of an arm decides nothing that a sweep sets for all of its arms.
        ([ARMS, "model.width=32"], ["arm=[c: placement=pre model=gpt2_nano]"], PRE | WIDE, {"model.width"}),
        ([ARMS], ["arm=[c: placement=pre seed=0,1,2]", "model.width=64"], PRE | WIDE, {"model.width"}),
    ],
)
def test_what_follows_from_arms(
    first: list[str],
    second: list[str],
    options: dict[str, Any],
    named: set[str],
    write: Callable[..., str],
    tmp_path: Path,
) -> None:
    """An option that an arm sets is one of its properties; one that a sweep sets for all arms is not."""
    small = {"width": 32}
    folders = [write("F", {"a": small | PRE, "b": small | PERI}, arms_of(*first))]
    folders.append(write("G", {"c": small | options}, arms_of(*second)))
    runs = [run for run in select_runs(folders, tmp_path).records if isinstance(run, RunRecord)]
    found = {each.name for each in differences(runs, ["arm"])}
    assert found - {"optim.warmup_steps"} == named
    for folder in folders:
        runs = [run for run in select_runs([folder], tmp_path).records if isinstance(run, RunRecord)]
        assert not differences(runs, ["arm"])


def test_sweeps_without_arms(write: Callable[..., str], run_command: Command, tmp_path: Path) -> None:
    """The same placement twice: the difference is that of the batches."""
    folders = [write("P", {"a": PRE}), write("Q", {"c": PRE | {"batch_size": 16, "context": 64}})]
    table = summarize_by(folders)
    assert table.by == ["model.context"]
    table = summarize_by(folders, against="model.context=64")
    assert [cell.comparison and cell.comparison.test for cell in table.cells] == [None, None]
    assert "train.batch_size" in table.warnings[0]
    code, out, err = run_command("compare", *folders, "--by", "corpus", "-o", str(tmp_path / "c.html"))
    assert code == 0
    assert "runs in one cell differ in model.context" in err
    code, out, err = run_command("compare", *folders, "--by", "train.batch_size", "-o", str(tmp_path / "c.html"))
    assert "Best: " not in out


def test_arms_beside_a_sweep_without_arms(write: Callable[..., str]) -> None:
    """Equal settings are one cell: the name of an arm, which half of the runs lack, would separate them."""
    placements = {"a": {"placement": "pre"}, "b": {"placement": "peri"}}
    arms = arms_of("arm=[a: placement=pre, b: placement=peri]")
    assert summarize_by([write("F", placements, arms)]).by == ["arm"]
    long = {arm: options | {"steps": 20} for arm, options in placements.items()}
    table = summarize_by([write("F2", placements, arms), write("H", long)], against="placement=pre")
    assert table.by == ["placement", "train.steps"]
    tested = [cell.key[0] for cell in table.cells if cell.comparison and cell.comparison.p_holm is not None]
    assert tested == ["peri", "peri"]


def test_a_mixture_that_all_cells_share_is_compared(write: Callable[..., str]) -> None:
    """A cell is then a mean over both widths; cells with different mixtures are not compared."""
    wide = {name: {**options, **WIDE} for name, options in {"a": PRE, "b": PERI}.items()}
    narrow = {name: {**options, "width": 32} for name, options in {"c": PRE, "d": PERI}.items()}
    both = [write("F", wide), write("G", narrow)]
    table = summarize_by(both, ["placement"], against="placement=pre")
    assert any(cell.comparison and cell.comparison.test for cell in table.cells)
    less = [both[0], write("H", {"e": PRE | {"width": 32}})]
    table = summarize_by(less, ["placement"], against="placement=pre")
    assert not any(cell.comparison and cell.comparison.test for cell in table.cells)
    assert any("cells that differ in model.width are neither ranked nor tested" in line for line in table.warnings)


def test_searched_options_are_meant_to_differ(write: Callable[..., str]) -> None:
    """Each cell has its own best values."""
    arms: dict[str, dict[str, Any]] = {"a": PRE | {"lr": 1e-3}, "b": PERI | {"lr": 3e-3}}
    tuned = write("T", arms, SweepDesign(searched=["optim.lr"]))
    assert not summarize_by(tuned).table_warnings
    plain = write("U", {f"{name}2": options for name, options in arms.items()})
    assert "each cell has one learning rate" in summarize_by(plain).table_warnings[0]
    assert any("learning rate" in line for line in summarize_by([tuned, plain], ["placement"]).warnings)


def test_the_default_baseline_is_that_of_the_sweep(write: Callable[..., str]) -> None:
    """Else it is the first arm that the command has written; `--by` may leave the baseline out."""
    arms = {"b": PRE, "a": PERI, "c": {"placement": "post"}}
    command = "arm=[b: placement=pre, a: placement=peri, c: placement=post]"

    def contrasts(folder: str, by: Sequence[str] | None = None) -> list[str]:
        table = summarize_by(folder, by)
        return [row["contrast"] for row in run_test("anytime", table.cells, table.factors)]

    written = write("F", arms, design_of([command]))
    assert contrasts(written) == ["a - b", "c - b"]
    grown = write("G", arms, SweepDesign(arms=design_of([command]).arms, baseline="arm=a"))
    assert contrasts(grown) == ["b - a", "c - a"]
    assert contrasts(grown, ["placement"]) == ["post-norm - peri-LN", "pre-norm - peri-LN"]
