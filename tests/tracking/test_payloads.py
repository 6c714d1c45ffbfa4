"""What W&B receives of a run: each step's numbers, once and complete, and names that it accepts."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import LAYERS
from normlab.config.compose import compose_run
from normlab.config.stats import StatsConfig
from normlab.report.inspect import spike_rows
from normlab.store.plans import Plan, PlannedRun
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.tracking import payloads
from normlab.tracking.payloads import StepReader, config_of, labels_of, summary_of
from normlab.training.start import train
from support.small_run import small_run

NAMES = StatsConfig().names("core") | {"attn_ratio", "mlp_ratio", "resid_crest"}


def folder_of(results: Path, *overrides: str) -> RunFolder:
    return train(compose_run([*small_run(results), *overrides]), trackers=[]).folder


def sent(folder: RunFolder, first: int = 0, state: str = "finished") -> dict[int, dict[str, float]]:
    return dict(StepReader(folder, first).read(state))


def test_each_step_has_the_numbers_of_the_record(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train.steps=12", "train.log_every=5", "eval.every=6", "stats.every=3")
    steps = sent(folder)
    assert list(steps) == list(range(13))
    for row in folder.rows("train").rows:
        names = {"loss": "train/loss", "grad_norm": "train/grad_norm", "clip": "train/clip_factor", "lr": "train/lr"}
        assert {name: steps[row["step"]][key] for name, key in names.items()} == {name: row[name] for name in names}
        assert steps[row["step"]]["train/tokens"] == row["step"] * 4 * folder.run()["config"]["model"]["context"]
    assert {step: each["eval/loss"] for step, each in steps.items() if "eval/loss" in each} == {
        row["step"]: row["loss"] for row in folder.rows("eval").rows
    }
    paces = {step: each["perf/tflops_per_s"] * 1e12 for step, each in steps.items() if "perf/tflops_per_s" in each}
    flops = folder.run()["flops_per_token"]
    assert paces == pytest.approx({row["step"]: flops * row["tokens_per_s"] for row in folder.rows("pace").rows})
    assert [step for step, each in steps.items() if "resid/resid_rms/L01" in each] == [0, 3, 6, 9]


def test_damaged_rows_are_left_out(tmp_path: Path) -> None:
    """As after an error of the disk, which changes bits."""
    folder = folder_of(tmp_path, "train.steps=4", "train.log_every=2", "eval.every=2")
    whole = sent(folder)
    content = folder.metrics_path.read_bytes()
    folder.metrics_path.write_bytes(
        content.replace(b'"tokens_per_s"', b'"tokens_per_r"', 1).replace(b'"loss":', b'"loss":"x","was":', 1)
    )
    damaged = sent(folder)
    assert {(step, key) for step in whole for key in whole[step] if key not in damaged.get(step, {})} == {
        (0, "eval/loss"), (2, "perf/tokens_per_s"), (2, "perf/seconds"), (2, "perf/tflops_per_s"),
    }  # fmt: skip
    assert all(isinstance(value, int | float) for numbers in damaged.values() for value in numbers.values())


def test_statistics_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, "model.depth=4", "train.steps=1")
    (profiles,), _ = folder.statistics.read("core")
    numbers = sent(folder)[0]
    sizes = profiles.single_site("resid_rms")[0]
    assert [numbers[f"resid/resid_rms/L{layer:02d}"] for layer in range(1, 6)] == sizes[1:].tolist()
    assert {key.split("/")[1] for key in numbers if key.endswith("/L01")} == {
        name for name in NAMES if STATISTICS[name].sent == LAYERS
    }
    assert sum(value for key, value in numbers.items() if key.startswith("parameter/grad_share/")) == pytest.approx(1)
    assert numbers["head/logz"] == profiles.single_site("logz")[0, 5]
    gains = np.concatenate([values.ravel() for values in profiles.get("gain_absmax").values()])
    assert numbers["gain/gain_absmax"] == np.nanmax(gains)
    part = re.compile(r"[_a-zA-Z][_a-zA-Z0-9]*")
    for key in numbers:
        assert all(part.fullmatch(each) for each in key.split("/")), key
    monkeypatch.setattr(payloads, "MOST_LAYERS", 3)
    assert [key[-2:] for key in sent(folder)[0] if key.startswith("resid/resid_rms/L")] == ["01", "03", "05"]


def test_a_running_run_sends_complete_steps_only(tmp_path: Path) -> None:
    """Whatever the moment at which its record is read, a step that is sent has all that it ever gets."""
    options = ["train.steps=12", "train.log_every=3", "eval.every=2", "stats.tiers=[core,extended]", "stats.every=1"]
    options += ["stats.extended_every=2"]
    moments: list[dict[int, dict[str, float]]] = []
    readers: list[StepReader] = []
    taken: list[tuple[int, dict[str, float]]] = []
    results = tmp_path / "results"

    class Reader:
        """Reads the record between any two writes."""

        def read(self) -> None:
            (path,) = (results / "runs").iterdir()
            moments.append(sent(RunFolder(path), state="running"))
            if not readers:
                readers.append(StepReader(RunFolder(path), 0))
            taken.extend(readers[0].read("running"))

        def start(self, run: Any, first_step: int) -> None: ...

        def log(self, rows: Any) -> None:
            self.read()

        def finish(self, status: Any) -> None:
            self.read()

    folder = train(compose_run([*small_run(results), *options]), trackers=[Reader()]).folder
    final = sent(folder)
    assert moments[0] == {}
    assert taken == list(moments[-1].items())  # each step once
    assert len(moments[-1]) > 9
    for moment in moments:
        assert moment == {step: final[step] for step in moment}
        assert list(moment) == list(final)[: len(moment)]
    assert sent(folder, first=7) == {step: final[step] for step in final if step >= 7}
    for state in ("interrupted", "killed", "failed"):  # a resumed run adds to the last step
        assert sent(folder, state=state) == {step: final[step] for step in range(12)}


def test_labels(tmp_path: Path) -> None:
    run = folder_of(tmp_path, "train.steps=1").run()
    configuration = ["norm=rmsnorm", "placement=pre", "model.depth=2"]
    assert labels_of(run, None) == {
        "name": run["run_id"], "group": None, "job_type": " ".join(configuration), "tags": configuration,
    }  # fmt: skip
    plan = Plan("first", "auto", [PlannedRun(run["run_id"], ["seed=3", "optim.lr=0.01"], {})], [])
    assert labels_of(run, plan) == {
        "name": "seed=3 optim.lr=0.01", "group": "first", "job_type": "optim.lr=0.01",
        "tags": ["seed=3", "optim.lr=0.01"],
    }  # fmt: skip
    long = Plan("g", "auto", [PlannedRun(run["run_id"], ["run.x=" + "x" * 98], {})], [])
    labels = labels_of(run | {"name": "n"}, long)
    assert (labels["name"], labels["group"]) == ("n", "g")
    assert labels["job_type"].startswith("run.x=" + "x" * 47 + "...")
    assert labels["tags"] == [labels["job_type"]]


def test_long_labels_of_different_cells_stay_different(tmp_path: Path) -> None:
    """W&B averages the runs of one group and job type, whose lengths it limits."""
    run = folder_of(tmp_path, "train.steps=1").run()
    cell = ["norm=rmsnorm", "placement=peri", "model.depth=8", "train.batch_size=16"]
    labels = []
    for name, lr, seed in (("a", 1e-3, 0), ("a", 1e-3, 1), ("a", 3e-3, 0), ("b", 1e-3, 0)):
        planned = PlannedRun(run["run_id"], [*cell, f"optim.lr={lr:g}", f"seed={seed}"], {})
        labels.append(labels_of(run, Plan("x" * 200 + name, "auto", [planned], [])))
    job_types, groups = ([each[key] for each in labels] for key in ("job_type", "group"))
    assert (job_types[0] == job_types[1] == job_types[3], job_types[0] != job_types[2]) == (True, True)
    assert (groups[0] == groups[1] == groups[2], groups[0] != groups[3]) == (True, True)
    assert (max(map(len, job_types)), max(map(len, groups))) == (64, 128)


def test_config_and_summary_have_the_whole_record(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train.steps=12", "optim.clip=0.5")
    run, config = folder.run(), config_of(folder.run())
    resolved = {option: run["resolved"][option] for option in ("init", "precision", "compile", "deterministic")}
    assert {option: config[option] for option in resolved} == resolved
    assert config["init"] == "gpt2_scaled"
    assert config.pop("record") == {key: value for key, value in run.items() if key != "config"}
    assert config == run["config"] | resolved
    summary = summary_of(RunRecord.load(folder))
    status = folder.status()
    assert (summary["state"], summary["outcome"]) == (status["state"], status["outcome"])
    assert (summary["val_loss"], summary["best_val_loss"]) == (status["val_loss"], status["best_val_loss"])
    assert {key: value for key, value in summary.items() if key.startswith("spike/")} == {
        f"spike/{row['rule']}": row["spikes"] for row in spike_rows(folder)
    }
    assert summary["spike/clipped"] > 0


def test_a_diverged_run_has_no_final_loss(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "train.steps=30", "optim.lr=1e9", "optim.clip=null", "norm=none")
    summary = summary_of(RunRecord.load(folder))
    assert (summary["state"], summary["outcome"]) == ("diverged", "diverged")
    assert "val_loss" not in summary
    assert list(sent(folder))[-1] == folder.status()["diverged"]["step"]
