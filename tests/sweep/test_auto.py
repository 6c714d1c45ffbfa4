"""`sweep.pack=auto`: what is tried, when it stops, what it decides, and that the plan keeps it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from normlab.config import RunConfig
from normlab.launch import compose_run
from normlab.store.plans import read_plan
from normlab.sweep import auto
from normlab.sweep.trial import Trial, try_pack
from normlab.train.start import train
from tests.conftest import small_run
from tests.sweep.watching import children_of, wait_for

Command = Callable[..., tuple[int, str, str]]
FIRST_S = 10.0


def machine(step_s: Callable[[int], float], fits: int = 1000) -> Callable[..., Trial]:
    """A machine whose packs take as long a step as is said, and no more than fit."""

    def attempt(configs: Sequence[RunConfig], threads: int | None) -> Trial:
        runs = len(configs)
        if runs > fits:
            return Trial(runs, error="the memory ran out")
        return Trial(runs, first_s=FIRST_S, step_s=step_s(runs))

    return attempt


def group(runs: int, steps: int = 100_000) -> list[RunConfig]:
    return [compose_run([f"train.steps={steps}", "device=cpu"])] * runs


def decided(runs: int, attempt: Callable[..., Trial], steps: int = 100_000, jobs: int = 1) -> auto.Decision:
    return auto.decide(group(runs, steps), jobs, attempt)


def test_packs_grow_while_they_are_faster() -> None:
    # A step of a pack: 10 ms, and 1 ms for each run beyond the fourth, from where nothing is gained any more.
    found = decided(16, machine(lambda runs: 0.010 * max(1, runs / 4)))
    assert [trial.runs for trial in found.trials] == [1, 2, 4, 8]
    assert (found.most, found.why) == (4, "8 are no faster")


def test_what_is_faster_up_to_all_of_them_is_one_pack() -> None:
    found = decided(12, machine(lambda runs: 0.010))
    assert [trial.runs for trial in found.trials] == [1, 2, 4, 8, 12]
    assert (found.most, found.why) == (12, "all of them")
    assert decided(200, machine(lambda runs: 0.010)).most == auto.MOST


def test_what_does_not_pay_is_not_packed() -> None:
    found = decided(16, machine(lambda runs: 0.010 * runs))
    assert (found.most, found.why) == (1, "2 are no faster")


def test_what_does_not_fit_is_not_tried_further() -> None:
    found = decided(16, machine(lambda runs: 0.010, fits=5))
    assert [trial.runs for trial in found.trials] == [1, 2, 4, 8]
    assert (found.most, found.why) == (4, "8: the memory ran out")
    assert decided(16, machine(lambda runs: 0.010, fits=0)).most == 1


def test_a_short_sweep_tries_nothing() -> None:
    found = decided(4, machine(lambda runs: 0.010), steps=20)
    assert (found.most, found.trials, found.why) == (1, [], "too short to try more in")


@pytest.mark.parametrize("slower", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("runs", [2, 3, 16, 50])
@pytest.mark.parametrize("steps", [3_000, 30_000, 300_000])
def test_where_packs_do_not_pay_little_is_lost(runs: int, steps: int, slower: float) -> None:
    """The first trial is made on a guess of the shortest; all others within the share that may be lost."""
    step_s = 0.2
    found = decided(runs, machine(lambda n: step_s * n * (1 if n == 1 else slower)), steps)
    spent = sum(trial.seconds for trial in found.trials)
    assert found.most == 1
    assert spent <= max(auto.SHARE * runs * (FIRST_S + steps * step_s), found.trials[0].seconds if found.trials else 0)


def test_with_several_at_once_the_longest_counts() -> None:
    # Four at once already: one pack of sixteen would leave three places empty.
    assert decided(16, machine(lambda runs: 0.010 * max(1, runs / 4)), jobs=4).most == 4
    assert decided(4, machine(lambda runs: 0.010), jobs=4).most == 1


def test_a_trial_measures_a_real_pack_and_leaves_nothing(tmp_path: Path) -> None:
    configs = [compose_run([*small_run(tmp_path / "results"), f"seed={seed}"]) for seed in range(3)]
    found = try_pack(configs, threads=1)
    assert (found.runs, found.error) == (3, "")
    assert 0 < found.step_s < found.first_s
    assert found.peak_bytes is not None
    assert not (tmp_path / "results").exists()
    assert train(configs[0], sinks=[]).state == "finished"


def test_a_trial_that_fails_says_why(tmp_path: Path) -> None:
    config = compose_run([*small_run(tmp_path / "results"), "model.context=4096"])
    found = try_pack([config, config], threads=1)
    assert "context" in found.error
    assert "\n" not in found.error


SLEEPY = """
import dataclasses, pathlib, time, torch
from normlab.norms import base
class Sleepy(torch.nn.Module):
    def forward(self, x):
        pathlib.Path("asleep").touch()
        time.sleep(1e6)
@base.register_norm
@dataclasses.dataclass(kw_only=True, slots=True)
class SleepyConfig(base.NormConfig):
    name: str = "sleepy"
    def build(self, width):
        return Sleepy()
"""


def test_a_trial_goes_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    words = [*small_run(tmp_path / "results"), f"plugins=[{tmp_path / 'sleepy.py'}]", "norm=sleepy"]
    code = f"from normlab.launch import compose_run; from normlab.sweep.trial import try_pack; c = compose_run({words})"
    with subprocess.Popen([sys.executable, "-c", f"{code}; try_pack([c, c], 1)"], cwd=tmp_path) as parent:
        wait_for((tmp_path / "asleep").exists)
        (child,) = children_of(parent.pid)
        parent.kill()
    wait_for(lambda: not Path(f"/proc/{child}").exists())


def test_two_starts_at_once_try_once(tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes second finds the sweep active before anything is tried."""
    monkeypatch.setattr(auto, "SHARE", 1e9)
    words = [*small_run(tmp_path / "results"), "seed=0,1", "sweep.name=x", "train.steps=2", "stats=off"]
    tried: list[int] = []

    def attempt(configs: Sequence[RunConfig], threads: int | None) -> Trial:
        tried.append(len(configs))
        if len(tried) == 1:
            code, _, err = run_command("sweep", *words)
            assert code == 2
            assert "sweep x is active in process" in err
        return Trial(len(configs), first_s=FIRST_S, step_s=1.0)

    monkeypatch.setattr(auto.decide, "__defaults__", (attempt,))
    assert run_command("sweep", *words)[0] == 0
    assert tried == [1, 2]


def test_what_was_measured_is_in_the_plan(
    tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "SHARE", 1e9)  # as if it were long
    monkeypatch.setattr(auto.decide, "__defaults__", (machine(lambda runs: 0.010),))
    words = [*small_run(tmp_path / "results"), "norm=rmsnorm,dyt", "seed=range(4)", "train.steps=2", "stats=off"]
    code, out, _ = run_command("sweep", *words, "--dry-run")
    assert code == 0
    assert "packs   8, one run each, unless more at once prove faster when it starts (sweep.pack=auto)" in out
    assert not (tmp_path / "results").exists()
    code, out, err = run_command("sweep", *words)
    assert code == 0, err
    assert "packs   8, one run each, unless more at once prove faster when it starts (sweep.pack=auto)" in out
    assert "packs   2, up to 4 runs (sweep.pack=auto)" in out
    assert "tried   norm=rmsnorm (4 runs): 1 at once 10 ms a step of each, 2 at once 5 ms" in out
    (folder,) = (tmp_path / "results" / "sweeps").iterdir()
    plan = read_plan(folder)
    assert [len(pack.jobs) for pack in plan.packs] == [4, 4]
    assert [group["most"] for group in plan.tried] == [4, 4]
    assert sorted(run for group in plan.tried for run in group["runs"]) == sorted(job.run_id for job in plan.jobs)
    assert json.dumps(plan.tried)
    # The plan is frozen: nothing is tried again.
    monkeypatch.setattr(auto.decide, "__defaults__", (None,))
    code, out, err = run_command("sweep", *words)
    assert (code, read_plan(folder)) == (0, plan), err
