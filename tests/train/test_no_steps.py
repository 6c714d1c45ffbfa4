"""`train.steps=0`: the record of the initial model, without an update."""

from pathlib import Path

import pytest
import torch

from normlab.config.compose import compose_run
from normlab.loaded.run import load
from normlab.model.init import build_model
from normlab.store.format import FINISHED, RUNNING
from normlab.store.outcome import References
from normlab.store.runs import RunFolder
from normlab.store.status import Status
from normlab.training.start import train_pack
from support.run_folders import OVERRIDES, Command, differences

TWO_TIERS = ("stats.tiers=[core,extended]", "train.accumulation=2")
PROBED = ("norm=rmsnorm", "stats.also=[spec_norm]")


def trained(results: Path, *overrides: str, runs: int = 1) -> list[RunFolder]:
    options = [*OVERRIDES, f"results_dir={results}", *overrides]
    configs = [compose_run([*options, f"seed={seed}"]) for seed in range(runs)]
    outcomes = train_pack(configs, trackers=[[] for _ in configs])
    assert {outcome.state for outcome in outcomes} == {FINISHED}
    return [outcome.folder for outcome in outcomes]


def statistics_of_step_0(folder: RunFolder, tier: str) -> dict[tuple[str, str], bytes]:
    (part,), damaged = folder.statistics.read(tier)
    assert (part.steps[0], damaged) == (0, 0)
    return {(name, site): array[0].tobytes() for name in part.names() for site, array in part.get(name).items()}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("overrides", "steps", "runs", "tiers"),
    [(TWO_TIERS, 1, 1, ("core", "extended")), (TWO_TIERS, 1, 2, ("core", "extended")), (PROBED, 120, 1, ("probe",))],
)
def test_statistics_equal_those_of_step_0_of_a_run_with_steps(
    overrides: tuple[str, ...], steps: int, runs: int, tiers: tuple[str, ...], tmp_path: Path
) -> None:
    initial = trained(tmp_path / "initial", *overrides, "train.steps=0", runs=runs)
    longer = trained(tmp_path / "longer", *overrides, f"train.steps={steps}", runs=runs)
    for one, other in zip(initial, longer, strict=True):
        for tier in tiers:
            found, expected = statistics_of_step_0(one, tier), statistics_of_step_0(other, tier)
            assert {name for name, _ in expected.keys() - found.keys()} == (
                {"update_norm"} if tier == "core" else set()
            )
            assert found == {key: expected[key] for key in found}


def test_nothing_is_updated(tmp_path: Path) -> None:
    (folder,) = trained(tmp_path, *TWO_TIERS, "train.steps=0")
    run = load(folder.path)
    expected = build_model(run.config, len(run.model.head.weight)).state_dict()
    found = run.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    status = folder.status()
    assert [status[name] for name in ("step", "tokens", "train_loss", "tokens_per_s")] == [0, 0, None, None]


@pytest.mark.few(1)
@pytest.mark.parametrize("runs", [1, 2])
def test_run_that_was_killed_before_its_last_status_is_not_measured_again(runs: int, tmp_path: Path) -> None:
    complete = trained(tmp_path / "complete", *TWO_TIERS, "train.steps=0", runs=runs)
    killed = trained(tmp_path / "killed", *TWO_TIERS, "train.steps=0", runs=runs)
    for folder in killed:
        keys = ("initial_val_loss", "outcome", "metrics", "version", "updated", "sha256")
        status = {key: value for key, value in folder.status().items() if key not in keys}
        folder.write_status(status | {"state": RUNNING})
    again = trained(tmp_path / "killed", *TWO_TIERS, "train.steps=0", runs=runs)
    for one, other in zip(complete, again, strict=True):
        assert differences(one.path, other.path) == []


@pytest.mark.exhaustive
def test_every_command_reads_a_sweep_without_steps(overrides: list[str], run_command: Command) -> None:
    sweep = [*overrides, "placement=pre,post", "seed=0,1", "train.steps=0", "sweep.pack=2", "sweep.name=initial"]
    sweep += ["sweep.jobs=1", "eval.every=0"]
    folder = str(Path("results", "sweeps", "initial").absolute())
    code, out, _ = run_command("sweep", *sweep)
    assert (code, out.splitlines()[-2]) == (0, "initial: 4 runs, 4 finished")
    assert "4 completed already" in run_command("sweep", *sweep)[1]
    again = run_command("train", *overrides, "placement=pre", "seed=0", "train.steps=0", "eval.every=0")
    assert "nothing to do" in again[1]
    for arguments in (
        ("summarize", folder), ("summarize", folder, "--runs"), ("compare", folder),
        ("summarize", folder, "--columns", "tok/s,tflop/s,mfu"),
        ("inspect", folder, "placement=post,seed=1", "grad_norm"), ("sample", folder, "placement=pre,seed=0"),
        ("figure", "layers", folder, "--statistic", "dresid_rms", "-o", "layers.svg"), ("figure", "loss", folder),
    ):  # fmt: skip
        code, out, err = run_command(*arguments)
        assert code == 0, (arguments, err)
        assert "nan" not in out


def test_run_without_steps_is_never_stuck() -> None:
    references = References(uniform=2.0, unigram=1.95, bigram=1.0, initial=2.0)
    status = Status(state=FINISHED, step=0, steps=0, val_loss=2.0, best_val_loss=2.0)
    assert status.completed(references, None).outcome == "finished"
