"""`optim.lr=search(LOW,HIGH)`: the trials of each cell, and the sweep that judges what they found."""

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import combinations_with_replacement
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import optuna
import pytest
from optuna.storages.journal import JournalFileBackend
from scipy import stats
from synthetic_runs import Record

from normlab.analysis.factor_tests.optimum import best_rate
from normlab.base.errors import ConfigError
from normlab.config.searches import read_searches
from normlab.store.plans import read_plan, run_of
from normlab.store.record import RunRecord
from normlab.store.run_json import RecordedCorpus
from normlab.store.runs import RunFolder
from normlab.store.status import Status
from normlab.sweeps.files import write_plan
from normlab.sweeps.plan import PlannedSweep
from normlab.sweeps.search import Search
from normlab.sweeps.trials import SEED
from support.made_runs import merged

OPTIMUM = {"rmsnorm": 2e-3, "dyt": 1e-2}
UNIFORM = 5.5
GRID = ["norm=rmsnorm,dyt", "seed=0,1,2", "sweep.name=found", "optim.lr=search(1e-4,1e-1)"]


def loss_at(norm: str, lr: float) -> float:
    """A parabola in ln(rate); far above its minimum, the run diverges."""
    distance = math.log(lr / OPTIMUM[norm])
    return math.inf if distance > 2 else 2 + 0.05 * distance**2


def write_run(folder: RunFolder, config: dict[str, Any], loss: float) -> None:
    """Write the record of a run that has ended with a loss, as the trainer does."""
    record = merged(Record(stats_every=None).run(), {"config": config, "run_id": folder.run_id})
    record["corpus"]["baselines"] = {"uniform": UNIFORM, "unigram": 3.2, "bigram": 2.5}
    record["identity"]["config"] = {name: record["config"][name] for name in record["identity"]["config"]}
    RunFolder.create(folder.path, record)
    numbers = {"step": 3, "steps": 3, "train_loss": 2.0, "tokens": 1000, "val_loss": loss, "best_val_loss": 2.0}
    if loss == math.inf:
        numbers |= {"diverged": {"step": 3, "loss": math.nan, "grad_norm": math.nan}, "val_loss": 2.5}
    status = msgspec.convert({"state": "diverged" if loss == math.inf else "finished", **numbers}, Status, strict=False)
    references = msgspec.convert(record["corpus"], RecordedCorpus).references(status.initial_val_loss)
    folder.write_status(asdict(status.completed(references, None)))


def parabola(config: dict[str, Any]) -> float:
    return loss_at(config["norm"]["name"], config["optim"]["lr"])


def train(planned: PlannedSweep, most: int | None = None, loss: Callable[[dict[str, Any]], float] = parabola) -> int:
    """Write the plan and the records of the packs that have none, at most some of them; return their number."""
    planned.folder.mkdir(parents=True, exist_ok=True)
    write_plan(planned.folder, planned.plan)
    packs = [planned.plan.runs_of(pack) for pack in planned.plan.packs]
    left = [pack for pack in packs if not run_of(planned.folder, pack[0]).exists()][:most]
    for run in (run for pack in left for run in pack):
        write_run(run_of(planned.folder, run), run.config, loss(run.config))
    return len(left)


def plans(command: Sequence[str], *, extend: bool = False) -> Iterator[PlannedSweep]:
    """Yield each plan of a command; the caller trains it before it asks for the next one."""
    search = Search(command, extend=extend)
    while planned := search.next_plan():
        yield planned


def train_all(command: Sequence[str], loss: Callable[[dict[str, Any]], float] = parabola) -> list[PlannedSweep]:
    """Train every plan of a command, and return the plans."""
    made: list[PlannedSweep] = []
    for planned in plans(command):
        train(planned, loss=loss)
        made.append(planned)
    return made


def with_norms(norms: str) -> list[str]:
    """Return the grid with other norms."""
    return [text.replace("rmsnorm,dyt", norms) for text in GRID]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def rates(plan: Any) -> list[tuple[str, float, int]]:
    return [(run.config["norm"]["name"], run.config["optim"]["lr"], run.config["seed"]) for run in plan.runs]


@pytest.fixture
def searched(overrides: list[str]) -> Callable[..., list[PlannedSweep]]:
    """Return a function that makes all the sweeps of a search, and returns their plans."""

    def call(*more: str) -> list[PlannedSweep]:
        return train_all([*overrides, *GRID, *more])

    return call


def test_each_cell_is_judged_at_its_best_trial(searched: Callable[..., list[PlannedSweep]]) -> None:
    """The trials have another seed than the runs that judge; a diverged one counts as the worst."""
    *rounds, judged = searched("sweep.trials=10")
    assert [len(each.plan.runs) for each in rounds] == [8, 16, 20]
    assert {each.folder.name for each in rounds} == {"found-search"}
    trials = rates(rounds[-1].plan)
    assert {seed for _, _, seed in trials} == {SEED}
    assert all(1e-4 <= lr <= 1e-1 for _, lr, _ in trials)
    for norm in OPTIMUM:
        tried = [lr for name, lr, _ in trials if name == norm]
        assert len(tried) == 10
        # The first four are the centres of four equal parts of the range.
        assert sorted(tried[:4]) == pytest.approx([1e-4 * 10 ** (3 * (part + 0.5) / 4) for part in range(4)], rel=1e-3)
        best = min(tried, key=lambda lr: loss_at(norm, lr))
        assert loss_at(norm, best) < 2.02
        assert [lr for name, lr, _ in rates(judged.plan) if name == norm] == [best] * 3
    assert [seed for _, _, seed in rates(judged.plan)] == [0, 1, 2, 0, 1, 2]
    assert "norm=dyt optim.lr=0.0" in judged.plan.notes[1]
    assert "the best of 10 trials (loss 2.0" in judged.plan.notes[1]


@pytest.mark.parametrize(
    ("seeds", "named"),
    [
        (f"seed=0,{SEED}", f"seed={SEED}"),
        (f"data.seed={SEED}", f"data.seed={SEED}"),
        ("arm=[a: norm=rmsnorm seed=3, b: norm=dyt]", "seed=3"),
        ("arm=[a: norm=rmsnorm data.seed=3, b: norm=dyt]", "data.seed=3"),
    ],
)
def test_a_seed_of_the_trials_judges_nothing(seeds: str, named: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(named)}: is a seed of the trials"):
        next(plans([*overrides, seeds, "sweep.name=found", "optim.lr=search(1e-4,1e-1)"]))


def test_a_seed_that_an_earlier_command_has_judged_tries_nothing(overrides: list[str]) -> None:
    planned = next(plans([*overrides, f"seed=0,{SEED}", "sweep.name=found"]))
    train(planned, most=0)
    with pytest.raises(ConfigError, match=f"^seed={SEED}: is a seed of the trials"):
        next(plans([*overrides, *GRID]))


@pytest.mark.exhaustive
def test_a_search_that_is_stopped_ten_times_makes_the_same_trials(
    overrides: list[str], searched: Callable[..., list[PlannedSweep]], tmp_path: Path
) -> None:
    *_, search, judged = searched("sweep.trials=10", f"results_dir={tmp_path / 'calm'}")
    command = [*overrides, *GRID, "sweep.trials=10", f"results_dir={tmp_path / 'wild'}"]
    for _ in range(10):
        for planned in plans(command):
            if train(planned, most=1):  # then it is killed
                break
    ends = [planned for planned in plans(command) if train(planned) >= 0]
    wild = {each.folder.name: read_plan(each.folder) for each in ends}
    wild["found-search"] = read_plan(tmp_path / "wild" / "sweeps" / "found-search")
    for calm in (search, judged):
        assert rates(wild[calm.folder.name]) == rates(calm.plan)


def test_a_renamed_search_has_nothing_left_to_train(
    overrides: list[str], searched: Callable[..., list[PlannedSweep]], run_command: Any
) -> None:
    folder = searched("sweep.trials=5")[-1].folder
    assert run_command("rename", str(folder), "other")[0] == 0
    command = [*overrides, *(text for text in GRID if not text.startswith("sweep.name")), "sweep.name=other"]
    assert [train(planned) for planned in plans([*command, "sweep.trials=5"])] == [0]
    assert not folder.exists()


def test_more_trials_keep_the_first_ones(overrides: list[str], searched: Callable[..., list[PlannedSweep]]) -> None:
    *_, few, _ = searched("sweep.trials=4")
    command = [text for text in GRID if not text.startswith("sweep.name")]
    more = [
        planned for planned in plans([*overrides, *command, "sweep.name=more", "sweep.trials=8"]) if train(planned) >= 0
    ]
    assert {run.run_id for run in few.plan.runs} <= {run.run_id for run in more[-2].plan.runs}
    with pytest.raises(ConfigError, match=r"sweep\.trials=8: sweep found has been judged after other trials"):
        searched("sweep.trials=8")


def test_a_diverged_trial_is_never_the_best(overrides: list[str]) -> None:
    """Its loss counts as ln V, as that of a finished one may."""

    def loss(config: dict[str, Any]) -> float:
        return math.inf if config["optim"]["lr"] > 1e-3 else UNIFORM + 0.1

    command = ["sweep.name=bad", "optim.lr=search(1e-4,1e-1)", "sweep.trials=4", "seed=0"]
    *_, judged = train_all([*overrides, *command], loss)
    (run,) = read_plan(judged.folder).runs
    assert run.config["optim"]["lr"] < 1e-3


def test_every_whole_number_is_tried() -> None:
    (depths,), _ = read_searches(["model.depth=search(1,4)"])
    assert [depths.at((part + 0.5) / 8) for part in range(8)] == [1, 1, 1, 2, 2, 3, 3, 4]
    (steps,), _ = read_searches(["optim.warmup_steps=search(0,3)"])
    assert [steps.at((part + 0.5) / 4) for part in range(4)] == [0, 1, 2, 3]


def test_cells_are_added_to_a_search(overrides: list[str], searched: Callable[..., list[PlannedSweep]]) -> None:
    *_, search, judged = searched("sweep.trials=8")
    grid = with_norms("rmsnorm,dyt,layernorm")
    for planned in plans([*overrides, *grid, "sweep.trials=8"], extend=True):
        train(planned, loss=lambda config: 2 + abs(math.log(config["optim"]["lr"] / 3e-3)))
    assert {run.run_id for run in judged.plan.runs} < {run.run_id for run in read_plan(judged.folder).runs}
    assert len(read_plan(search.folder).runs) == 24


def test_seeds_are_added_to_a_search(overrides: list[str], searched: Callable[..., list[PlannedSweep]]) -> None:
    *_, judged = searched("sweep.trials=4")
    command = [*overrides, *GRID, "seed=range(5)", "sweep.trials=4"]
    command.remove("seed=0,1,2")
    trained = [(planned.folder.name, train(planned)) for planned in plans(command, extend=True)]
    assert [name for name, _ in trained] == ["found"]
    runs = read_plan(judged.folder).runs
    assert [seed for _, _, seed in rates(judged.plan)] == [0, 1, 2, 0, 1, 2]
    assert sorted(run.config["seed"] for run in runs) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.exhaustive
def test_trials_are_added_until_the_search_is_judged(overrides: list[str]) -> None:
    """A command with more trials of a search that was stopped makes those that it would have made from the start."""
    few = [*overrides, *GRID, "sweep.trials=6"]
    for planned in plans(few):
        if planned.folder.name == "found":  # not trained
            break
        train(planned)
    *_, later = train_all([*few[:-1], "sweep.trials=12"])
    extended, results = later.folder.with_name("found-search"), later.folder.parent.parent
    *_, once = train_all([*few[:-1], "sweep.trials=12", f"results_dir={results}/once"])
    assert sorted(rates(read_plan(extended))) == sorted(rates(read_plan(once.folder.with_name("found-search"))))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("change", "extend", "message"),
    [
        (["sweep.trials=12"], True, "sweep.trials=12: sweep found has been judged after other trials"),
        (["sweep.trials=12"], False, "sweep.trials=12: sweep found has been judged after other trials"),
        (["sweep.trials=1"], True, "sweep.trials=1: sweep found has been judged after other trials"),
        (["optim.lr=search(1e-3,1e-1)"], True, "sweep found has been judged after other trials"),
        (["optim.weight_decay=search(0,1)"], True, "is not of a search of optim.lr, optim.weight_decay"),
        (["norm=rmsnorm,dyt,layernorm", "sweep.trials=12"], True, "judged after other trials"),
        (["norm=rmsnorm,dyt,layernorm"], False, "has 2 of these 3 cells; add --extend"),
        (["norm=rmsnorm,dyt,layernorm", "seed=1,2,3"], True, "leave out 2 of its 6 runs; give the old values too"),
        (["norm=rmsnorm,layernorm"], True, "leave out 3 of its 6 runs; give the old values too"),
        (["norm=layernorm,none"], True, "has none of these cells"),
        (["norm=rmsnorm,dyt,layernorm", "sweep.pack=2"], True, "sweep.pack=2: sweep found started with sweep.pack="),
        (["sweep.name=other"], True, "--extend: there is no sweep other; give sweep.name=... of the sweep"),
    ],
)
def test_a_judged_search_that_cannot_be_extended_is_an_error_before_training(
    change: list[str], extend: bool, message: str, overrides: list[str], searched: Callable[..., list[PlannedSweep]]
) -> None:
    *_, judged = searched("sweep.trials=8")
    results = judged.folder.parent.parent
    changed = {text.partition("=")[0]: text for text in [*GRID, "sweep.trials=8", *change]}
    before = files_below(results)
    with pytest.raises(ConfigError, match=re.escape(message)):
        next(plans([*overrides, *changed.values()], extend=extend))
    assert files_below(results) == before


def test_a_search_does_not_take_the_name_of_a_plain_sweep(overrides: list[str]) -> None:
    planned = next(plans([*overrides, "norm=rmsnorm,dyt", "seed=0,1,2", "sweep.name=found"]))
    train(planned)
    with pytest.raises(
        ConfigError, match=r"sweep\.name=found: .* is not of a search of optim\.lr; choose another sweep.name"
    ):
        next(plans([*overrides, *GRID]))


def test_a_search_without_runs_is_an_error(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match="the sweep has no runs"):
        next(plans([*overrides, "seed=range(0)", "sweep.name=found", "optim.lr=search(1e-4,1e-1)"]))


def test_a_search_without_optuna_trains_nothing(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"^search\(...\): needs Optuna, which is not installed; pip install optuna"):
        next(plans([*overrides, *GRID]))


def test_several_options_and_whole_numbers(searched: Callable[..., list[PlannedSweep]]) -> None:
    *_, search, judged = searched(
        "optim.weight_decay=search(0,0.2)", "optim.warmup_steps=search(0,2)", "sweep.trials=6"
    )
    configs = [run.config["optim"] for run in search.plan.runs]
    assert {each["warmup_steps"] for each in configs} <= {0, 1, 2}
    assert len({each["weight_decay"] for each in configs}) > 3
    assert len(judged.plan.runs) == 6


def test_optuna_reads_the_journal(searched: Callable[..., list[PlannedSweep]]) -> None:
    *_, search, _ = searched("sweep.trials=5")
    backend = JournalFileBackend(str(search.folder / "search.journal"))
    storage = optuna.storages.JournalStorage(backend)
    for norm in OPTIMUM:
        study = optuna.load_study(study_name=f"norm={norm}", storage=storage)
        assert [trial.value for trial in study.trials] == pytest.approx(
            [min(loss_at(norm, trial.params["optim.lr"]), UNIFORM) for trial in study.trials]
        )
        assert len(study.trials) == 5


def test_the_name_of_a_search_is_refused(overrides: list[str]) -> None:
    texts = [*overrides, "optim.lr=search(1e-4,1e-1)", "sweep.name=x-search"]
    with pytest.raises(ConfigError, match=r"sweep\.name=x-search: is the name of a search; leave -search out"):
        next(plans(texts))


def test_a_failed_trial_stops_the_search_with_the_command_that_retries_it(
    overrides: list[str], run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supervise(planned: PlannedSweep, *_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(plan=planned.plan, failed={}, code=1)

    for planned in plans([*overrides, *GRID, "sweep.trials=4"]):
        train(planned)
    monkeypatch.setattr("normlab.sweeps.supervisor.supervise", supervise)
    command = [*overrides, *with_norms("rmsnorm,dyt,layernorm"), "sweep.trials=4", "--extend"]
    code, out, _ = run_command("sweep", *command)
    (line,) = [line for line in out.splitlines() if "needs the losses of all trials" in line]
    reason, _, retry = line.partition(": normlab ")
    assert (code, reason.split()[:2]) == (1, ["sweep", "found"])
    assert shlex.split(retry) == ["sweep", *command, "--retry-failed"]
    code, out, _ = run_command("sweep", *overrides, "seed=0", "sweep.name=plain")
    assert (code, "--retry-failed" in out) == (1, False)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["optim.lr=search(1e-4)"], "optim.lr=search(1e-4): is not a search"),
        (["optim.lr=search(1e-1,1e-4)"], "the limits must be two numbers, the lower one first"),
        (["optim.lr=search(a,b)"], "the limits must be two numbers"),
        (["optim.lr=search(1e-4,inf)"], "the limits must be two numbers"),
        (["optim.lr=search(1e-4,1e-1)", "optim.lr=1e-3"], "optim.lr: is given twice"),
        (["optim.lr=search(1e-4,1e-1)", "optim.lr=search(1e-4,1)"], "optim.lr: is given twice"),
        (["seed=search(1,9)"], "only options of the model, the data and the training"),
        (["arm=[a: optim.lr=search(1e-4,1e-1)]"], "inside of arm=[...]"),
    ],
)
def test_errors(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_searches(texts)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("search", "problem"),
    [
        ("optim.lr=search(0,0.1)", "optim.lr=0.0: must be greater than 0"),
        ("optim.beta2=search(0.9,1)", "optim.beta2=1.0: must be less than 1"),
        ("model.depth=search(0,4)", "model.depth=0: must be at least 1"),
        ("optim.warmup_steps=search(1,99)", "optim.warmup_steps=99: "),
        (
            "optim.lrr=search(1e-4,1e-1)",
            "optim.lrr=0.0001: the chosen optim has no option 'lrr' (did you mean 'optim.lr'",
        ),
    ],
)
def test_a_limit_that_the_option_does_not_take_is_refused(search: str, problem: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        next(plans([*overrides, search]))
    assert str(error.value).startswith(search.replace("1e-4", "0.0001").replace("1e-1", "0.1"))
    assert f": {problem}" in str(error.value)
    assert ("; choose another limit" in str(error.value)) is ("has no option" not in problem)


@pytest.mark.parametrize("search", ["norm=search(0,1)", "norm.alpha=search(0,1)", "model.attn_gate=search(0,1)"])
def test_only_an_option_that_takes_numbers_gets_advice_about_limits(search: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        next(plans([*overrides, search]))
    assert "choose another limit" not in str(error.value)


def test_a_linear_search_is_named(overrides: list[str]) -> None:
    planned = next(plans([*overrides, "optim.weight_decay=search(0,0.2)", "sweep.trials=2"]))
    assert (
        "optim.weight_decay is searched on a linear scale, because its lower limit 0 has no logarithm"
        in planned.plan.notes
    )
    planned = next(plans([*overrides, "optim.weight_decay=search(0.01,0.2)", "sweep.trials=2"]))
    assert not [note for note in planned.plan.notes if "linearly" in note]


def test_trials_without_a_search_are_refused(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.trials=5: nothing is searched"):
        next(plans([*overrides, "sweep.trials=5"]))


def runs_at(points: list[tuple[float, float]], tmp_path: Path) -> list[RunRecord]:
    base = Record(stats_every=None).run()["config"]
    runs = []
    for index, (lr, loss) in enumerate(points):
        folder = RunFolder(tmp_path / f"run-{index}")
        write_run(folder, merged(base, {"optim": {"lr": float(lr)}}), float(loss))
        runs.append(RunRecord.load(folder))
    return runs


def test_the_optimum_of_a_parabola_with_fiellers_interval(tmp_path: Path) -> None:
    """The limits are where an F test of two nested fits, by numpy, just rejects."""
    random = np.random.default_rng(0)
    rates_N = np.geomspace(3e-3, 3e-2, 9)
    losses_N = 2 + 0.05 * np.log(rates_N / 1e-2) ** 2 + 0.003 * random.standard_normal(9)
    found = best_rate(runs_at([*zip(rates_N, losses_N, strict=True), (0.3, 5.0), (0.5, math.inf)], tmp_path))
    assert found is not None
    assert found.n == 9
    _, b, c = np.polynomial.Polynomial.fit(np.log(rates_N), losses_N, 2).convert().coef
    assert math.log(found.estimate) == pytest.approx(-b / (2 * c), abs=1e-9)

    def p_value(rate: float) -> float:
        """Compare the parabola with the one whose minimum is at this rate."""
        free = np.vander(np.log(rates_N), 3)
        fixed = np.stack([np.ones(9), (np.log(rates_N) - math.log(rate)) ** 2], 1)
        rss = [float(np.linalg.lstsq(design, losses_N)[1][0]) for design in (free, fixed)]
        return float(stats.f.sf((rss[1] - rss[0]) / (rss[0] / 6), 1, 6))

    assert found.low is not None
    assert found.high is not None
    assert found.low < found.estimate < found.high
    assert [p_value(found.low), p_value(found.high)] == pytest.approx([0.05, 0.05], rel=1e-6)


@pytest.mark.parametrize(
    "points",
    [
        [(1e-3, 2.0), (2e-3, 2.01), (4e-3, 2.02)],  # too few
        [(1e-3, 2.0), (2e-3, 2.01), (4e-3, 2.02), (8e-3, 2.04)],  # the lowest is at the end
        [(1e-3, 2.0), (2e-3, 2.05), (4e-3, 2.05), (8e-3, 2.0)],  # a maximum
    ],
)
def test_no_optimum(points: list[tuple[float, float]], tmp_path: Path) -> None:
    assert best_rate(runs_at(points, tmp_path)) is None


def test_an_interval_without_ends(tmp_path: Path) -> None:
    """Noise of the size of the curvature."""
    points = [(1e-3, 2.03), (2e-3, 2.0), (4e-3, 2.02), (8e-3, 2.0), (16e-3, 2.05), (32e-3, 2.02)]
    found = best_rate(runs_at(points, tmp_path))
    assert found is not None
    assert (found.low, found.high) == (None, None)


def test_summarize_prints_the_optimum_and_its_cost(
    searched: Callable[..., list[PlannedSweep]], run_command: Any, tmp_path: Path
) -> None:
    search = searched("sweep.trials=12")[-2]
    code, out, _ = run_command("summarize", str(search.folder), "--test", "optimum", "--format", "json")
    assert code == 0
    by_cell = {row["contrast"]: row for row in json.loads(out)}
    for norm, title in (("rmsnorm", "RMSNorm"), ("dyt", "DyT")):
        row = by_cell[f"optimum: {title}"]
        assert (row["runs"], row["tokens"]) == (12, 12_000)
        if row["estimate"] is not None:
            assert row["estimate"] == pytest.approx(OPTIMUM[norm], rel=1e-3)
    assert any(row["estimate"] for row in by_cell.values())
    code, out, _ = run_command("summarize", str(search.folder), "--test", "optimum", "--notes")
    assert code == 0
    assert "tokens: total of all runs of the cell" in out


# seed=until(...)

UNTIL = ["norm=rmsnorm,dyt,layernorm", "sweep.name=grown", "seed=until(norm=rmsnorm,max=18)"]
DIFFERENCES = {"rmsnorm": 0.0, "dyt": 0.05, "layernorm": -0.02}


def noisy(config: dict[str, Any]) -> float:
    noise = np.random.default_rng([config["seed"], *config["norm"]["name"].encode()]).standard_normal()
    return 2 + DIFFERENCES[config["norm"]["name"]] + 0.006 * float(noise)


def grow(command: Sequence[str], most: int | None = None) -> list[PlannedSweep]:
    """Train the sweeps of a command, or only some packs of the first one, as if it was killed then.

    Return the sweeps that had something left to train.
    """
    made: list[PlannedSweep] = []
    for planned in plans(command):
        if train(planned, most, noisy):
            made.append(planned)
            if most:
                break
    return made


def evidence(differences: Sequence[float]) -> float:
    """Return the capital of bets on the signs of differences, by the rank of each one among those so far."""
    total = 0.0
    for bet in (-6.0, -1.5, 1.5, 6.0):
        capital = 1.0
        for n in range(1, len(differences) + 1):
            rank = (stats.rankdata(np.abs(differences[:n]))[-1] - 0.5) / n
            capital *= 1 + math.tanh(bet * rank) * math.copysign(1.0, differences[n - 1])
        total += capital / 4
    return total


def test_seeds_are_added_until_every_difference_is_decided(overrides: list[str], run_command: Any) -> None:
    made = grow([*overrides, *UNTIL])
    seeds = [sorted({seed for _, _, seed in rates(each.plan)}) for each in made]
    assert seeds[:-1] == [list(range(n)) for n in range(4, len(seeds[-1]), 4)]
    assert 4 < len(seeds[-1]) < 18
    assert not grow([*overrides, *UNTIL])
    (ended,) = plans([*overrides, *UNTIL])  # nothing is left to train, which the command prints
    assert ended.plan == read_plan(made[-1].folder)
    assert ended.plan.design.baseline == "norm=rmsnorm"
    command = ["summarize", str(made[-1].folder), "--test", "anytime", "--against", "norm=rmsnorm", "--format", "json"]
    code, out, _ = run_command(*command)
    assert code == 0
    rows = {row["contrast"]: row for row in json.loads(out)}
    for norm, title in (("dyt", "DyT - RMSNorm"), ("layernorm", "LayerNorm - RMSNorm")):
        row, n = rows[title], len(seeds[-1])
        pairs = [[noisy({"seed": seed, "norm": {"name": each}}) for each in (norm, "rmsnorm")] for seed in range(n)]
        differences = [loss - other for loss, other in pairs]
        means_of_pairs = [(first + second) / 2 for first, second in combinations_with_replacement(differences, 2)]
        assert row["estimate"] == pytest.approx(np.median(means_of_pairs), abs=1e-9)
        assert row["low"] < DIFFERENCES[norm] < row["high"]
        assert row["p_holm"] < 0.05
        assert row["p"] == pytest.approx(1 / evidence(differences), rel=1e-6)


@pytest.mark.exhaustive
def test_a_growing_sweep_that_is_killed_has_the_same_seeds(overrides: list[str], tmp_path: Path) -> None:
    calm = grow([*overrides, *UNTIL, f"results_dir={tmp_path / 'calm'}"])
    command = [*overrides, *UNTIL, f"results_dir={tmp_path / 'wild'}"]
    wild: list[PlannedSweep] = []
    while grown := grow(command, most=1):
        wild += grown
    assert rates(wild[-1].plan) == rates(calm[-1].plan)


def test_it_ends_with_the_largest_number_of_seeds(overrides: list[str]) -> None:
    made = grow([*overrides, "norm=rmsnorm,dyt", "sweep.name=most", "seed=until(norm=dyt,max=6)", "norm.eps=1e-5"][:-1])
    assert len(made[-1].plan.runs) in (8, 12)
    command = [*overrides, "sweep.name=same", "norm.eps=1e-5,1e-6", "seed=until(norm.eps=1e-5,max=6)"]
    equal = grow(command)
    assert [len(each.plan.runs) for each in equal] == [8, 12]


def test_a_search_may_be_judged_until_it_is_decided(overrides: list[str]) -> None:
    command = ["norm=rmsnorm,dyt", "sweep.name=both", "optim.lr=search(1e-3,1e-2)", "sweep.trials=4"]
    made = grow([*overrides, *command, "seed=until(norm=rmsnorm,max=12)"])
    assert [each.folder.name for each in made[:2]] == ["both-search", "both"]
    assert {seed for _, _, seed in rates(made[0].plan)} == {SEED}
    assert {seed for _, _, seed in rates(made[1].plan)} == {0, 1, 2, 3}


@pytest.mark.parametrize("text", ["seed=until(24)", "seed=until(norm=rmsnorm)", "seed=until(norm=rmsnorm,max=2)"])
def test_errors_of_until(text: str, overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"must have a baseline and a largest number of seeds, from 4"):
        next(plans([*overrides, "sweep.name=x", text]))


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ("norm=foo", r"seed=until norm=foo: no run matches; norm is dyt, rmsnorm"),
        ("placement=pre", r"seed=until\(placement=pre,...\): every run has it; name a value"),
        ("nrom=dyt", r"seed=until nrom: no run has this option"),
    ],
)
@pytest.mark.parametrize("more", [[], ["optim.lr=search(1e-3,1e-2)", "sweep.trials=4"]])
def test_a_baseline_that_is_none_is_an_error_before_training(
    baseline: str, message: str, more: list[str], overrides: list[str], tmp_path: Path
) -> None:
    command = ["norm=rmsnorm,dyt", "placement=pre", "sweep.name=x", f"seed=until({baseline},max=6)", *more]
    with pytest.raises(ConfigError, match=message):
        next(plans([*overrides, *command, f"results_dir={tmp_path / 'none'}"]))
    assert not (tmp_path / "none").exists()


def test_a_growing_sweep_needs_a_name(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"add sweep\.name"):
        next(plans([*overrides, "norm=rmsnorm,dyt", "seed=until(norm=rmsnorm,max=8)"]))
