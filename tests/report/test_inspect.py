"""`normlab inspect`: statistics of a run, from its record alone."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import Record, write_sweep

import normlab
from normlab.catalogue.statistics.profiles import Layout, Profiles
from normlab.catalogue.statistics.profiles import StatisticColumn as NumberOf
from normlab.catalogue.statistics.registry import STATISTICS
from normlab.catalogue.statistics.statistic import CORE, EXTENDED
from normlab.config.compose import compose_run
from normlab.report.inspect import MAX_LAYERS, inspect, notes, sparkline, table_rows
from normlab.store.runs import RunFolder
from normlab.training.start import train

Command = Callable[..., tuple[int, str, str]]
CORPUS = Path(__file__).parents[1] / "corpus.txt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Peri at depth 3, measured at steps 0, 10 and 20; its name has a space and a quote."""
    overrides = [
        "data=files", f"data.path=[{CORPUS}]", "device=cpu", "tracking.wandb=off", "model=gpt2_nano",
        "placement=peri", "model.depth=3", "train.steps=21", "train.batch_size=4", "eval.sequences=4",
        f"results_dir={tmp_path_factory.mktemp('inspect')}", "run.name=\"it's peri\"",
    ]  # fmt: skip
    return train(compose_run(overrides), trackers=[]).folder


@pytest.fixture
def command(run: RunFolder, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *overrides: run_command("inspect", *overrides, "--results-dir", str(run.path.parents[1]))


def test_statistic_by_layer_and_over_training(run: RunFolder, command: Command) -> None:
    code, out, err = command("it's peri", "resid_rms")
    assert (code, err) == (0, "")
    definition, question, source, _, head, _, *lines = out.strip().splitlines()
    measured_on = "the residual stream that enters each layer and the LM head"
    assert definition == f"resid_rms: sqrt(mean x^2); unit 1; measured on {measured_on}"
    assert question.startswith("question: How large is the residual stream in each layer? ")
    assert source.startswith("source: Xiong et al. 2020, arXiv:2002.04745; ")
    assert head.split("  ")[0] == "layer"
    assert all(f"step {step}" in head for step in (0, 10, 20))
    (profiles,), _ = run.statistics.read("core")
    values = profiles.single_site("resid_rms")
    assert [line[:7].strip() for line in lines] == ["layer 1", "layer 2", "layer 3", "head"]
    for place, line in enumerate(lines, start=1):
        texts = line[7:].split()
        assert texts[:3] == [f"{value:.4g}" for value in values[:, place]]
        assert texts[3] == sparkline(values[:, place].tolist())


def test_overview_is_short(command: Command, run: RunFolder) -> None:
    code, out, err = command(run.run_id)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) < 40
    cells = {tuple(re.split(r"\s{2,}", line)[:2]) for line in lines}
    assert {
        ("resid_rms", "layer 1 / head"),
        ("norm_gain", "attn.out"),
        ("norm_in_rms", "close"),
        ("grad_share", "mlp"),
    } <= cells
    assert lines[0].startswith("to read: a row is a statistic at a site; a / b: its values in the first and the last ")
    assert lines[-1].endswith("normlab list stats lists the statistics")


def test_json_has_all_steps_and_layers(command: Command, run: RunFolder) -> None:
    rows = json.loads(command(run.run_id, "--json")[1])
    core = {name for name, each in STATISTICS.items() if each.tier == CORE and each.of != "streams"}  # it has one
    assert {row["statistic"] for row in rows} == core
    (profiles,), _ = run.statistics.read("core")
    for row in rows:
        assert row["steps"] == [0, 10, 20]
        assert len(row["values"]) == 3
        assert row["formula"] == STATISTICS[row["statistic"]].formula
    norm_rows = [row for row in rows if (row["statistic"], row["site"]) == ("norm_out_rms", "mlp.out")]
    assert [row["layer"] for row in norm_rows] == ["layer 1", "layer 2", "layer 3"]
    expected = profiles.get("norm_out_rms")["mlp.out"][:, 1:4]
    assert np.array_equal(np.array([row["values"] for row in norm_rows], dtype=np.float32).T, expected)
    (share,) = json.loads(command(run.run_id, "grad_share", "--json")[1])[:1]
    assert (share["layer"], share["site"]) == ("", "embed")


def test_spikes(command: Command, run: RunFolder) -> None:
    code, out, err = command(run.run_id, "spikes")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["spikes", "to read", ""]
    assert [line.split()[0] for line in lines[5:]] == ["loss_olmo_core", "grad_norm_olmo_core", "clipped"]
    rows = {row["rule"]: row for row in json.loads(command(run.run_id, "spikes", "--json")[1])}
    clipped = [row["step"] for row in run.rows("train").rows if row["clip"] < 1]
    assert (rows["clipped"]["at"], rows["clipped"]["of steps"]) == (clipped, 21)
    assert (rows["loss_olmo_core"]["spikes"], rows["loss_olmo_core"]["share"]) == (0, None)


def test_unknown_statistic_is_an_error(command: Command, run: RunFolder) -> None:
    code, out, err = command(run.run_id, "resid_rsm")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: unknown statistic 'resid_rsm'")
    assert "did you mean 'resid_rms'" in err


def test_run_without_statistics_is_an_error(overrides: list[str], run_command: Command, tmp_path: Path) -> None:
    folder = train(compose_run([*overrides, "stats=off"]), trackers=[]).folder
    code, _, err = run_command("inspect", str(folder.path))
    assert code == 2
    assert err.startswith(f"error: run {folder.run_id} has no statistics: it was trained with stats=off, or has not ")
    overrides += ["stats=off", "stats.also=[adj_cos]", "run.fresh=true"]
    folder = train(compose_run(overrides), trackers=[]).folder
    assert {row["statistic"] for row in inspect(folder)} == {"adj_cos"}
    code, _, err = run_command("inspect", str(folder.path), "resid_crest")
    assert (code, err) == (2, "error: resid_crest: is derived from resid_absmax, which was not measured\n")
    code, _, err = run_command("inspect", str(folder.path), "grad_share")
    assert (code, err) == (2, "error: grad_share: is derived from grad_norm, which was not measured\n")
    code, _, err = run_command("inspect", str(folder.path), "erank")
    expected = "error: erank: was not measured; train with stats=full run.fresh=true to measure it\n"
    assert (code, err) == (2, expected)


def test_damaged_rows_are_left_out_with_a_warning(overrides: list[str], run_command: Command) -> None:
    folder = train(compose_run([*overrides, "stats.every=2"]), trackers=[]).folder
    path = folder.path / "stats" / "core.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    code, out, err = run_command("inspect", str(folder.path), "logz", "--json")
    assert code == 0
    changed = f"the statistics (core.bin) of run {folder.run_id} are not those that were written; restore a copy"
    assert err == f"warning: {folder.path / 'stats'}: damaged rows, left out: 1\nwarning: {changed}\n"
    assert len(json.loads(out)[0]["steps"]) == 5


def test_changed_statistics_of_a_finished_run_have_no_effect(
    measured: tuple[RunFolder, int], overrides: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    train(compose_run([*overrides, "stats.every=2"]), trackers=[])
    assert "no effect" not in capfd.readouterr().err
    train(compose_run([*overrides, "stats=full"]), trackers=[])
    (expected,) = [line for line in capfd.readouterr().err.splitlines() if "no effect" in line]
    assert all(f"stats.{name}=" in expected for name in ("tiers", "every", "extended_every"))
    assert "run.fresh=true" in expected


@pytest.fixture
def measured(overrides: list[str]) -> tuple[RunFolder, int]:
    """A run measured at steps 0, 2, ..., 10, and the bytes of a row."""
    folder = train(compose_run([*overrides, "stats.every=2"]), trackers=[]).folder
    return folder, (folder.path / "stats" / "core.bin").stat().st_size // 6


def test_half_a_row_is_a_warning_unless_the_run_is_writing(
    measured: tuple[RunFolder, int], run_command: Command
) -> None:
    folder, length = measured
    os.truncate(folder.path / "stats" / "core.bin", 3 * length + 1)
    half = f"warning: {folder.path / 'stats' / 'core.bin'}: incomplete last row, left out"
    lost = f"warning: the statistics (core.bin) of run {folder.run_id} have 3 rows where 6 were written; restore a copy"
    assert run_command("inspect", str(folder.path), "logz")[2].splitlines() == [half, lost]
    with folder.lock():
        folder.write_status(folder.status() | {"state": "running"})
        assert run_command("inspect", str(folder.path), "logz")[2] == ""


@pytest.mark.parametrize("gone", ["core.bin", "core.json", "*"])
def test_run_without_its_rows_is_an_error(gone: str, measured: tuple[RunFolder, int], run_command: Command) -> None:
    folder, _ = measured
    for path in (folder.path / "stats").glob(gone):
        path.unlink()
    code, out, err = run_command("inspect", str(folder.path), "resid_rms")
    assert (code, out) == (2, "")
    expected = (
        f"error: {folder.path / 'stats'}: has no intact statistics of run {folder.run_id}; restore them from a copy"
    )
    assert err.splitlines()[-1] == expected


def test_run_without_its_metrics_is_an_error(measured: tuple[RunFolder, int], run_command: Command) -> None:
    folder, _ = measured
    os.truncate(folder.metrics_path, 0)
    code, _, err = run_command("inspect", str(folder.path), "spikes")
    assert code == 2
    assert re.fullmatch(
        rf"error: the metrics of run {folder.run_id} have 0 rows where \d+ were written; restore a copy\n", err
    )


def test_noise_scale_averages_across_the_parts_of_a_run(overrides: list[str], run_command: Command) -> None:
    """Adam's statistics start a new part after the first update; the averages continue across it."""
    folder = train(
        compose_run([*overrides, "stats.tiers=[core,extended]", "stats.extended_every=2"]), trackers=[]
    ).folder
    parts, _ = folder.statistics.read(EXTENDED)
    assert [part.steps.tolist() for part in parts] == [[0], [2, 4, 6, 8, 10]]
    trace, square = (
        np.concatenate([part.get(name)["head.close.affine.gain"][:, -1] for part in parts]).astype(float)
        for name in ("gns_trace", "gns_square")
    )
    rows = {(row["site"], row["layer"]): row for row in inspect(folder, "gns")}
    row = rows["head.close.affine.gain", "head"]
    assert (row["steps"], row["n"]) == ([0, 2, 4, 6, 8, 10], [1, 1, 2, 2, 3, 3])
    assert row["values"][0] == trace[0] / square[0]
    assert row["values"][5] == pytest.approx(trace[3:].mean() / square[3:].mean(), rel=1e-6)
    assert len(rows["all", ""]["values"]) == 6


def test_undefined_noise_scales_are_noted(tmp_path: Path) -> None:
    columns = [NumberOf("gns_trace", "w", 1), NumberOf("gns_square", "w", 1)]
    layout, order = Layout.of(columns, 1, {})
    folder = RunFolder.create(tmp_path / "run", Record().run() | {"run_id": "run"})
    (folder.path / "stats").mkdir()
    folder.statistics.append(EXTENDED, Profiles(layout, np.array([2, 4]), np.array([[6, -1], [6, 3]])[:, order]))
    (row, *_) = inspect(folder, "gns")
    assert (str(row["values"]), row["n"]) == ("[nan, 2.0]", [1, 1])
    assert row["notes"] == [f"nan: {STATISTICS['gns'].undefined}"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep `it's a sweep` of two placements, two depths and two seeds, and the incomplete sweep `gaps`."""
    folder = tmp_path_factory.mktemp("results")
    options = itertools.product(("pre", "post"), (2, 4), (0, 1))
    records = [Record(placement=p, depth=d, seed=s, steps=40, width=32, context=32) for p, d, s in options]
    write_sweep(folder, "it's a sweep", records)
    # No run has the first level of both factors, post and 2.
    records = [Record(placement=p, depth=d, steps=40, width=16, context=32) for p, d in (("post", 4), ("pre", 2))]
    write_sweep(folder, "gaps", records)
    return folder


@pytest.mark.parametrize("where", [["placement=post,model.depth=4,seed=0"], ["depth>2", "seed<1", "placement!=pre"]])
def test_a_run_of_a_sweep_is_named_by_its_factors(results: Path, run_command: Command, where: list[str]) -> None:
    run_id = Record(placement="post", depth=4, seed=0, steps=40, width=32, context=32).run_id
    flags = ["--results-dir", str(results)]
    named = run_command("inspect", "it's a sweep", *where, "resid_rms", "--json", *flags)
    assert named == run_command("inspect", run_id, "resid_rms", "--json", *flags)
    assert named[0] == 0
    assert run_command("inspect", str(results / "sweeps" / "it's a sweep"), *where, *flags)[0] == 0
    assert normlab.load("it's a sweep", results, where=",".join(where)).folder.run_id == run_id


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (["depth=4,seed=1"], "it's a sweep depth=4,seed=1: 2 runs, which differ in placement post, pre; select one, "),
        (
            ["placement=post,depth=4", "seed>1"],
            "it's a sweep seed>1: no run with placement=post,model.depth=4 matches; seed is 0, 1\n",
        ),
        (["depth=4", "resid_rms", "logz"], "resid_rms logz: name one statistic"),
    ],
)
def test_factors_that_name_no_run_or_several(
    results: Path, run_command: Command, where: list[str], message: str
) -> None:
    code, out, err = run_command("inspect", "it's a sweep", *where, "--results-dir", str(results))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize("command", ["inspect", "sample"])
def test_example_in_the_error_names_a_run(results: Path, run_command: Command, command: str) -> None:
    code, _, err = run_command(command, "gaps", "--results-dir", str(results))
    (example,) = re.findall(r"which differ in .*; select one, for example with '(.*)'\n", err)
    assert code == 2
    assert normlab.load("gaps", results, where=example).folder.path.is_dir()


def test_runs_that_differ_in_no_option_are_named_by_id(tmp_path: Path, run_command: Command) -> None:
    write_sweep(tmp_path, "one", [record := Record(steps=40, width=16, context=32)])
    again = RunFolder.create(tmp_path / "runs" / "copy", record.run() | {"run_id": "copy"})  # as run.fresh=true does
    again.write_status({"state": "interrupted"})
    code, out, err = run_command("inspect", str(tmp_path), "depth>0", "--results-dir", str(tmp_path))
    message = f"{tmp_path} depth>0: 2 runs, which differ in no option; give the id of one, for example copy\n"
    assert (code, out, err) == (2, "", f"error: {message}")
    assert run_command("inspect", "one", "--results-dir", str(tmp_path))[0] == 0


def test_table_of_a_deep_model_is_thinned(tmp_path: Path) -> None:
    columns = [NumberOf("resid_rms", "", place) for place in range(1, 202)]
    layout, order = Layout.of(columns, 200, {})
    folder = RunFolder.create(tmp_path / "run", Record().run() | {"run_id": "run"})
    values = np.random.default_rng(0).random((30, 201)).astype(np.float32)
    (folder.path / "stats").mkdir()
    folder.statistics.append("core", Profiles(layout, np.arange(30), values[:, order]))
    rows = inspect(folder, "resid_rms")
    assert len(rows) == 201
    shown = table_rows(rows)
    assert len(shown) == MAX_LAYERS
    few = [row | {"steps": row["steps"][:5], "values": row["values"][:5]} for row in rows[:24]]
    assert [bool(notes(each)) for each in (rows, rows[:24], few)] == [True, True, False]
    assert (shown[0]["layer"], shown[-1]["layer"]) == ("layer 1", "head")
    assert [key for key in shown[0] if key.startswith("step")] == [f"step {step}" for step in (0, 7, 14, 22, 29)]


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([1, 10, 100, 1000], "▁▃▆█"),
        ([-1, 0, 1], "▁▅█"),
        ([5, 5.01], "▄▄"),
        ([1, math.nan, 3], "▁?█"),
        ([math.inf, math.inf], "??"),
        ([], ""),
        ([-1e300, 1e300], "▁█"),
    ],
)
def test_sparkline(values: list[float], drawn: str) -> None:
    assert sparkline(values) == drawn
