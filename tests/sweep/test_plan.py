"""Plans: jobs, packs, names, existing runs and errors."""

import json
from collections.abc import Callable
from pathlib import Path

import hydra
import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from synthetic_runs import Record

from normlab.base.errors import ConfigError, StoreError
from normlab.base.options import flatten_options, plain_tree
from normlab.base.paths import config_dir
from normlab.config.compose import compose_grid, compose_run, compose_sweep, to_config
from normlab.config.recorded import config_from_record
from normlab.store.format import PLAN_FILE
from normlab.store.plans import Pack, Plan, PlannedRun, read_plan, run_of, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweeps.files import write_plan
from normlab.sweeps.packs import make_packs, pack_key
from normlab.sweeps.plan import PlannedSweep, make_plan
from normlab.training.start import train
from support.fake_workers import FINISHED_STATUS

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def plan(overrides: list[str]) -> Callable[..., PlannedSweep]:
    """Return the plan of the overrides of a small sweep."""
    return lambda *more: make_plan(*compose_sweep([*overrides, *more]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "grid",
    [
        ["norm=layernorm,rmsnorm_llama", "model=gpt2_nano,llama_nano", "optim=adamw,sgd", "model.depth=1,3"],
        ["stats=core,full", "stats.every=3", "optim.schedule=wsd", "optim.decay_fraction=0.1,0.5", "seed=range(2)"],
        ["data=files", 'data.path=[a.txt,"it\'s"]', "run.name=x y,'1,2'"],
        ["norm=rmsnorm", "++norm.eps=1e-3,1e-4", "model.width=64", "model.mlp_width=${model.width}"],
    ],
)
def test_grid_composed_once_equals_one_composition_per_job(grid: list[str]) -> None:
    """Compare every job of a grid with a composition of its own."""
    parsed = OverridesParser.create().parse_overrides(grid)
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    assert len(jobs) > 1
    configs = [plain_tree(config) for config in compose_grid(grid)]
    with hydra.initialize_config_dir(str(config_dir()), version_base="1.3"):
        assert configs == [plain_tree(to_config(hydra.compose("train", overrides=job))) for job in jobs]


def test_value_with_quotes_spaces_and_commas_is_one_value(overrides: list[str], tmp_path: Path) -> None:
    """As with `train --multirun`, a list or a quoted text is one value."""
    for name in ("a b.txt", "it's, one.txt"):
        (tmp_path / name).write_text("a line of text for a small model to learn\n" * 60)
    path = f'data.path=["{tmp_path}/a b.txt","{tmp_path}/it\'s, one.txt"]'
    _, jobs = compose_sweep([*overrides, path, "run.name='x, y',z"])
    assert [config.run.name for _, config in jobs] == ["x, y", "z"]
    assert all(
        flatten_options(config)["data.path"] == [f"{tmp_path}/a b.txt", f"{tmp_path}/it's, one.txt"]
        for _, config in jobs
    )
    assert [varied for varied, _ in jobs] == [["run.name='x, y'"], ["run.name=z"]]


def test_jobs_and_packs_of_a_plan(plan: Callable[..., PlannedSweep]) -> None:
    made = plan("norm=layernorm,rmsnorm", "seed=range(3)", "sweep.pack=off").plan
    assert [job.overrides for job in made.runs] == [
        [f"norm={norm}", f"seed={seed}"] for norm in ("layernorm", "rmsnorm") for seed in range(3)
    ]
    assert [config_from_record(job.config).seed for job in made.runs] == [0, 1, 2] * 2
    assert [pack.runs for pack in made.packs] == [[index] for index in range(6)]
    assert len({job.run_id for job in made.runs}) == 6


def test_default_name_depends_on_runs_and_packing(plan: Callable[..., PlannedSweep]) -> None:
    name = plan("norm=layernorm,rmsnorm", "optim.lr=1e-3,3e-3").plan.name
    assert name.startswith("norm.lr-")
    assert plan("optim.lr=3e-3,1e-3", "norm=rmsnorm,layernorm", "sweep.jobs=2").plan.name.endswith(name[-8:])
    assert not plan("norm=layernorm,rmsnorm", "optim.lr=1e-3,4e-3").plan.name.endswith(name[-8:])
    assert not plan("norm=layernorm,rmsnorm", "optim.lr=1e-3,3e-3", "sweep.pack=2").plan.name.endswith(name[-8:])


def test_two_jobs_of_one_run_are_trained_once(plan: Callable[..., PlannedSweep]) -> None:
    made = plan("optim.lr=1e-3,0.001,2e-3", "run.name=x")
    assert len(made.plan.runs) == 2
    assert made.warnings == ["optim.lr=0.001: is the same run as optim.lr=1e-3, and is trained once"]
    made = plan("optim.lr=choice(1e-3,0.001,2e-3)", "run.name=x")
    assert made.warnings == ["optim.lr=0.001: is the same run as optim.lr=1e-3, and is trained once"]
    assert len(plan("optim.lr=shuffle(1e-3,0.001,2e-3)", "run.name=x").plan.runs) == 2
    twice = plan("optim.lr=1e-3,1e-3", "run.name=x")
    assert (len(twice.plan.runs), twice.warnings) == (1, ["optim.lr=1e-3: is given twice, and is trained once"])


def test_placements_with_other_init_rules_are_named(plan: Callable[..., PlannedSweep]) -> None:
    line = "the placements also differ in their init rules: gpt2_scaled (pre); gpt2 (peri); init=NAME gives all"
    assert [each for each in plan("placement=pre,peri").warnings if each.startswith(line)]
    assert not any("init rules" in each for each in plan("placement=pre,peri", "init=gpt2").warnings)


def test_blocks_that_are_one_function_are_named(plan: Callable[..., PlannedSweep]) -> None:
    """mix_ln has post-norm in the first quarter of the blocks, which no block of two is in."""
    made = plan("placement=pre,mix_ln,peri", "model.depth=2,4", "seed=0,1", "init=gpt2")
    assert [each for each in made.warnings if "is the function" in each] == [
        "placement=mix_ln: is the function of placement=pre at depth 2; the runs differ at most in the init"
    ]


def test_arms_that_differ_in_a_redundant_norm_are_named(plan: Callable[..., PlannedSweep]) -> None:
    arms = "placement=peri,peri_raw_attn", "norm=rmsnorm", "model=llama_nano", "model.qk_norm=head"
    made = plan(*arms, "model.v_norm=true")
    assert [each for each in made.warnings if "is the function" in each] == [
        "placement=peri_raw_attn: is the function of placement=peri at depth 2 without redundant norms; attn.in: later "
        "norms cancel its scale, except for eps, and the next weights can hold its gain"
    ]
    others = (
        (*arms, "model.v_norm=false"),
        (
            *arms[1:],
            "model.v_norm=true",
            "arm=[a: placement=peri norm.eps=1e-6, b: placement=peri_raw_attn norm.eps=1.0]",
        ),
        (*arms[1:], "arm=[a: placement=mhc, b: placement=mhc placement.iterations=40]"),
    )
    for other in others:
        assert not any("is the function" in each for each in plan(*other).warnings)


def test_of_many_blocks_no_equal_functions_are_searched_for(plan: Callable[..., PlannedSweep]) -> None:
    line = "equal functions were not searched for: the models have 120 blocks, more than 100"
    assert line in plan("placement=peri,sandwich", "model.depth=60").warnings


def test_completed_runs_get_no_pack_and_interrupted_ones_their_own(
    plan: Callable[..., PlannedSweep], overrides: list[str]
) -> None:
    completed = train(compose_run([*overrides, "seed=1"]), trackers=[]).folder
    interrupted = train(compose_run([*overrides, "seed=2"]), trackers=[]).folder
    interrupted.write_status({**interrupted.status(), "state": "interrupted", "step": 3})
    made = plan("seed=range(4)", "sweep.pack=8").plan
    assert completed.run_id == made.runs[1].run_id
    assert [pack.runs for pack in made.packs] == [[0, 3], [2]]
    (completed.path / "status.json").write_text("{}")
    with pytest.raises(StoreError, match=r"status.json: is damaged"):
        plan("seed=range(4)")


def test_name_of_another_sweep_is_an_error(plan: Callable[..., PlannedSweep]) -> None:
    first = plan("sweep.name=mine", "seed=0,1")
    first.folder.mkdir(parents=True)
    write_plan(first.folder, first.plan)
    assert plan("sweep.name=mine", "seed=1,0").plan == first.plan
    message = (
        r"this name has 2 runs; these overrides make 3, of which 2 are the same; .*completed are not trained again"
    )
    with pytest.raises(ConfigError, match=message):
        plan("sweep.name=mine", "seed=0,1,2")
    with pytest.raises(
        ConfigError, match="the same; to add runs, give the old values beside the new ones and add --ex"
    ):
        plan("sweep.name=mine", "seed=1,2")
    with pytest.raises(ConfigError, match="the same; give the values of its other runs too, or choose another"):
        plan("sweep.name=mine", "seed=1")
    with pytest.raises(ConfigError, match=r"sweep.pack=2: sweep mine started with sweep.pack=auto"):
        plan("sweep.name=mine", "seed=0,1", "sweep.pack=2")


@pytest.mark.parametrize(
    ("override", "texts"),
    [
        ("sweep.nam=x", ["sweep.nam=x", "jobs, name, on, pack, slurm, timeout_minutes", "did you mean 'sweep.name'?"]),
        ("sweep.pack=of", ["sweep.pack=of", "auto, off"]),
        ("sweep.pack=0", ["sweep.pack=0", "auto, off"]),
        ("sweep.pack=2,3", ["sweep.pack=2,3: choose auto, off, or a number"]),
        ("sweep.jobs=0", ["sweep.jobs=0", "at least 1"]),
        ("sweep.jobs=many", ["sweep.jobs=many: must be a whole number"]),
        ("sweep.name=../x", ["sweep.name=../x", "folder"]),
        ("run.fresh=true", ["run.fresh=true", "leave it out"]),
        ("results_dir=a,b", ["results_dir=a,b", "one results folder"]),
        ("seed=range(0)", ["no value", "no runs"]),
        ("seed=range(10001)", ["seed=range", "more than 10000 runs"]),
        ("model.heads=2,5", ["model.heads=5", "model.width=32"]),
        ("model.width=64,131072", ["model.width=131072", "memory"]),
        ("data.path=no_such.txt", ["no_such.txt"]),
        ("optim.lr=1e-3,,3e-3", ["optim.lr=1e-3,,3e-3: has no value beside a comma; leave out the comma"]),
    ],
)
def test_error_is_one_line_and_leaves_nothing(
    override: str, texts: list[str], overrides: list[str], run_command: Command, tmp_path: Path
) -> None:
    option = override.partition("=")[0]
    others = [each for each in overrides if each.partition("=")[0] != option]
    code, out, err = run_command("sweep", *others, override)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert all(text in err for text in texts), err
    assert list(tmp_path.iterdir()) == []


def test_dry_run_shows_the_plan_and_leaves_nothing(overrides: list[str], run_command: Command, tmp_path: Path) -> None:
    code, out, err = run_command(
        "sweep", *overrides, "norm=layernorm,rmsnorm", "seed=range(3)", "--dry-run", "sweep.pack=2"
    )
    assert (code, err) == (0, "")
    assert "runs    6" in out
    assert "packs   4, each trains up to 2 runs together (sweep.pack=2)" in out
    assert f"tokens  {6 * 12 * 4 * 32:,} to train on" in out
    assert "norm=layernorm seed=0 and 1 more" in out
    assert "norm=rmsnorm seed=2" in out
    assert list(tmp_path.iterdir()) == []


# Packs.


def test_every_option_is_in_the_key_or_may_differ() -> None:
    """A new option keeps runs apart until it is added to the options that may differ."""
    config = compose_run([])
    clipped, unclipped = compose_run(["optim.clip=0.5"]), compose_run(["optim.clip=null"])
    assert pack_key(clipped) == pack_key(config) != pack_key(unclipped)
    key = json.loads(pack_key(config))
    may_differ: set[str] = set()
    for override in flatten_options(config):
        group, _, name = override.rpartition(".")
        if name not in (key.get(group, {}) if group else key):
            may_differ.add(override)
    assert {each for each in may_differ if not each.startswith(("tracking.", "optim.groups."))} == {
        "seed", "init", "data.seed", "run.name", "optim.lr", "optim.weight_decay", "optim.decay_mode",
        "optim.beta1", "optim.beta2", "optim.warmup_steps", "optim.schedule", "optim.final_lr_fraction",
        "optim.decay_fraction", "train.tokens_per_parameter",
    }  # fmt: skip


def test_runs_of_equal_keys_may_train_together() -> None:
    configs = compose_grid(["norm=layernorm,rmsnorm", "seed=range(5)"])
    assert make_packs(configs, range(10), (), 5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert make_packs(configs, range(10), {1}, 5) == [[0, 2, 3, 4], [1], [5, 6, 7, 8, 9]]
    assert make_packs(configs, [0, 2, 9], (), 5) == [[0, 2], [9]]
    probed = compose_grid(["stats=full,core", "seed=0,1"])
    assert make_packs(probed, range(4), (), 5) == [[0], [1], [2, 3]]
    extended = compose_grid(["stats.tiers=[core,extended]", "seed=0,1"])
    assert make_packs(extended, range(2), (), 5) == [[0, 1]]


# Stored plans.


def test_plan_reads_back_and_a_changed_one_is_damaged(tmp_path: Path) -> None:
    _, runs = compose_sweep(["seed=range(5)", "run.name=inf"])
    planned = [PlannedRun(f"run{i}", overrides, plain_tree(config)) for i, (overrides, config) in enumerate(runs)]
    made = Plan("x", "4", planned, [Pack(1, [0, 1, 2]), Pack(2, [3, 4])])
    folder = sweep_folder(tmp_path, made.name)
    folder.mkdir(parents=True)
    write_plan(folder, made)
    assert read_plan(folder) == made
    assert run_of(folder, made.runs[0]).path == tmp_path / "runs" / "run0"
    path = folder / PLAN_FILE
    path.write_text(path.read_text().replace('"number": 2', '"number": 3'))
    with pytest.raises(StoreError, match=r"plan.json: is damaged .*; delete this one file"):
        read_plan(folder)
    path.unlink()
    with pytest.raises(StoreError, match=r"plan.json: is missing"):
        read_plan(folder)


def test_run_in_a_pack_of_another_sweep_is_an_error(plan: Callable[..., PlannedSweep]) -> None:
    first = plan("seed=0,1", "sweep.pack=2", "sweep.name=first")
    run = run_of(first.folder, first.plan.runs[0])
    pack = {"sweep": "first", "number": 1, "runs": ["a", "b"]}
    RunFolder.create(run.path, Record().run() | {"run_id": run.run_id, "pack": pack})
    with pytest.raises(ConfigError, match=r"is not completed, and trains in a pack of 2 runs of sweep first"):
        plan("seed=0", "sweep.name=second")
    run.write_status(FINISHED_STATUS)
    assert plan("seed=0", "sweep.name=second").plan.packs == []


def test_last_row_of_a_long_record(tmp_path: Path) -> None:
    from normlab.store.reading import read_last_row

    folder = RunFolder(tmp_path)
    assert read_last_row(folder.metrics_path) is None
    with folder.lock():
        folder.append({"kind": "eval", "step": step, "loss": float("nan")} for step in range(2000))
    assert (read_last_row(folder.metrics_path) or {})["step"] == 1999
    with folder.metrics_path.open("ab") as file:
        file.write(b'{"kind":"tr')
    assert (read_last_row(folder.metrics_path) or {})["step"] == 1999
