"""The W&B keys of a measured step: their number does not depend on depth, and their names are valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normlab.config.compose import compose_run
from normlab.report.inspect import spike_rows
from normlab.stats.config import StatsConfig
from normlab.stats.profiles import Profiles
from normlab.tracking.wandb_payloads import PROFILED, step_metrics
from normlab.training.run import train

NAMES = StatsConfig().names("core") | {"attn_ratio", "mlp_ratio", "resid_crest"}
COMMON = [
    "data=files", f"data.path=[{Path(__file__).parents[1] / 'corpus.txt'}]", "device=cpu", "tracking.wandb=off",
    "model=gpt2_nano", "train.batch_size=2", "eval.sequences=2",
]  # fmt: skip


def measured(results: Path, *overrides: str) -> Profiles:
    overrides = (*COMMON, "train.steps=1", f"results_dir={results}", *overrides)
    (profiles,), _ = train(compose_run(overrides), trackers=[]).folder.statistics.read("core")
    return profiles


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", ["pre", "peri", "siamese"])
def test_number_of_keys_does_not_depend_on_depth(placement: str, tmp_path: Path) -> None:
    shallow, deep = (
        step_metrics(measured(tmp_path, f"placement={placement}", f"model.depth={depth}")) for depth in (2, 12)
    )
    assert shallow.numbers.keys() == deep.numbers.keys()
    assert shallow.profiles.keys() == deep.profiles.keys()
    assert 60 < len(deep.numbers) + len(deep.profiles) < 90  # with those of losses and speed some ninety
    part = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*")
    for key in [*deep.numbers, *deep.profiles]:
        assert all(part.fullmatch(each) for each in key.split("/")), key


def test_metrics_of_a_profile(tmp_path: Path) -> None:
    profiles = measured(tmp_path, "model.depth=4")
    metrics = step_metrics(profiles)
    sizes = profiles.single_site("resid_rms")[0, 1:]
    numbers = [metrics.numbers[f"stats/resid_rms/{which}"] for which in ("first", "mid", "last", "max", "slope")]
    slope = np.polyfit(np.arange(5), sizes, 1)[0]
    assert numbers == pytest.approx([sizes[0], sizes[2], sizes[4], sizes.max(), slope], rel=1e-5)
    assert metrics.profiles["profiles/resid_rms"].tolist() == sizes.tolist()
    assert sum(value for key, value in metrics.numbers.items() if key.startswith("grad_share/")) == pytest.approx(1)
    assert metrics.numbers["out/logz"] == profiles.single_site("logz")[0, 5]
    assert all(np.isfinite(value) for value in metrics.numbers.values())


def test_metrics_of_each_layer_on_request(tmp_path: Path) -> None:
    profiles = measured(tmp_path, "model.depth=3")
    extra = step_metrics(profiles, layers=True).numbers.keys() - step_metrics(profiles).numbers.keys()
    assert {key for key in extra if key.startswith("layers/adj_cos/")} == {f"layers/adj_cos/L0{n}" for n in (1, 2, 3)}
    assert {key.split("/")[1] for key in extra} == {name for name in PROFILED if name in NAMES}


def test_statistics_not_measured_are_left_out(tmp_path: Path) -> None:
    metrics = step_metrics(measured(tmp_path, "stats=off", "stats.also=[resid_rms,adj_cos]"))
    assert {key.split("/")[1] for key in metrics.numbers} == {"resid_rms", "adj_cos", "resid_growth"}


def test_no_histogram_of_a_profile_with_non_finite_or_negative_values(tmp_path: Path) -> None:
    profiles = measured(tmp_path)
    broken = Profiles(profiles.layout, profiles.steps, profiles.values.copy())
    for name, value in (("resid_rms", np.inf), ("adj_cos", -1.0)):
        start = 0
        for group in broken.layout.groups:
            if group.statistic == name:
                broken.values[0, start] = value
            start += len(group.layers)
    lost = step_metrics(profiles).profiles.keys() - step_metrics(broken).profiles.keys()
    assert lost == {"profiles/resid_rms", "profiles/adj_cos"}
    assert step_metrics(broken).numbers["stats/adj_cos/first"] == -1


def test_finish_passes_the_spikes_of_the_record(tmp_path: Path) -> None:
    class SpikeTracker:
        def __init__(self) -> None:
            self.spikes: dict[str, Any] = {}

        def start(self, run: Any, first_step: int) -> None: ...
        def log(self, rows: Any) -> None: ...
        def log_statistics(self, profiles: Profiles) -> None: ...
        def finish(self, status: Any) -> None:
            self.spikes = status.spikes

    tracker = SpikeTracker()
    overrides = [*COMMON, "train.steps=12", "optim.clip=0.5", f"results_dir={tmp_path}"]
    folder = train(compose_run(overrides), trackers=[tracker]).folder
    rows = spike_rows(folder)
    assert tracker.spikes == {row["rule"]: {"spikes": row["spikes"], "of_steps": row["of steps"]} for row in rows}
    clipped = [row for row in folder.rows("train").rows if row["clip"] < 1]
    assert tracker.spikes["clipped"]["spikes"] == len(clipped) > 0
    assert folder.status()["spikes"] == tracker.spikes
