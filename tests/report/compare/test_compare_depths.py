"""Layer profiles on the page equal those of `inspect`, per run or as means over a cell's seeds."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from normlab.report.compare.layer_profiles import (
    MAX_STEPS,
    MIN_STEPS,
    choose_steps,
    layer_profiles,
    limit_size,
    mean_of_finite,
    run_profiles,
)
from normlab.stats.profiles import Column, Layout, Profiles
from normlab.stats.registry import STATISTICS
from normlab.stats.statistic import CORE
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder


def unpacked(unit, layout):
    """Return the unit's values over its steps by (statistic, site, layer)."""
    values = np.frombuffer(base64.b64decode(unit["values"]), "<f4").reshape(len(unit["steps"]), -1)
    keys = [(name, site, layer) for name, site, layers in layout["columns"] for layer in layers]
    assert values.shape[1] == len(keys)
    return dict(zip(keys, values.T, strict=True))


def layer_name(layer, depth):
    return "" if layer is None else "embed" if layer == 0 else "head" if layer > depth else f"block {layer}"


def inspected(run_command, tmp_path, run_id):
    code, out, _ = run_command("inspect", run_id, "--json", "--results-dir", str(tmp_path))
    assert code == 0
    return {(row["statistic"], row["site"], row["layer"]): row for row in json.loads(out)}


def assert_as_inspected(data, run_command, tmp_path):
    for unit in data["profiles"]["units"]:
        layout = data["profiles"]["layouts"][unit["layout"]]
        rows = inspected(run_command, tmp_path, data["runs"][unit["runs"][0]]["id"])
        values_of = {
            (name, site, layer_name(at, layout["depth"])): v for (name, site, at), v in unpacked(unit, layout).items()
        }
        core = {key for key in rows if STATISTICS[key[0]].tier == CORE}
        assert set(values_of) == core
        for key, values in values_of.items():
            row = rows[key]
            known = dict(zip(row["steps"], row["values"], strict=True))
            expected = [float(known[step]) if step in known else np.nan for step in unit["steps"]]
            assert np.array_equal(values, np.array(expected, np.float32), equal_nan=True), key


def test_profiles_equal_those_of_inspect(trained, compare, run_command, tmp_path):
    trained("a", measured=range(0, 20, 2), steps=20)
    trained("b", measured=range(0, 200, 2), steps=200, norm="layernorm", depth=3, warmup=77)
    data = compare()
    first, second = data["profiles"]["units"]
    assert data["profiles"]["of"] == "run"
    assert [layout["depth"] for layout in data["profiles"]["layouts"]] == [2, 3]
    assert (first["label"], first["runs"], first["steps"]) == ("a", [0], list(range(0, 20, 2)))
    assert first["after_warmup"] == 3
    assert len(second["steps"]) == MAX_STEPS
    assert (second["steps"][0], second["steps"][second["after_warmup"]], second["steps"][-1]) == (0, 78, 198)
    assert_as_inspected(data, run_command, tmp_path)
    update = data["profiles"]["statistics"]["update_ratio"]
    assert update == {key: getattr(STATISTICS["update_ratio"], key) for key in update}
    assert set(update) == {"formula", "unit", "of", "question", "source"}


def test_profiles_of_a_trained_run_with_all_statistics(run_command, overrides, compare, tmp_path):
    code, _, err = run_command("train", *overrides, f"results_dir={tmp_path}", "stats=full", "stats.every=3")
    assert code == 0, err
    data = compare()
    assert len(data["profiles"]["units"]) == 1
    assert_as_inspected(data, run_command, tmp_path)


def test_parts_with_different_columns_are_joined(trained, compare, run_command, tmp_path):
    folder = trained("a", measured=[0, 5])
    other = Layout.of([Column("resid_rms", "", 1), Column("mlp_rms", "", 2)], 2, {})[0]
    with folder.lock():
        folder.statistics.append("core", Profiles(other, np.array([10, 15]), np.array([[1.0, 2.0], [np.nan, np.inf]])))
    data = compare()
    (unit,) = data["profiles"]["units"]
    assert unit["steps"] == [0, 5, 10, 15]
    assert_as_inspected(data, run_command, tmp_path)


def test_a_unit_is_a_cell_with_more_than_fifty_runs(trained, compare, tmp_path):
    for seed in range(13):
        for norm, depth in (("rmsnorm", 2), ("rmsnorm", 3), ("layernorm", 2), ("dyt", 2)):
            measured = [] if norm == "dyt" else [0, 5, 10] if seed == 3 else [0, 5, 10, 15]
            trained(f"{norm}{depth}{seed:02}", 2 + seed / 100, norm=norm, depth=depth, seed=seed, measured=measured)
    trained("worse", 3.0, norm="layernorm", lr=1e-2, measured=[0, 5, 10, 15])
    data = compare("--by", "norm")
    assert data["profiles"]["of"] == "cell"
    units = data["profiles"]["units"]
    assert [unit["label"] for unit in units] == ["layernorm", "rmsnorm, depth 2", "rmsnorm, depth 3"]
    for unit in units:
        layout = data["profiles"]["layouts"][unit["layout"]]
        assert (len(unit["runs"]), unit["steps"]) == (13, [0, 5, 10, 15])
        ids = [data["runs"][index]["id"] for index in unit["runs"]]
        assert "worse" not in ids
        tables = []
        for run_id in ids:
            (part,), _ = RunRecord.read(_folder(tmp_path, run_id)).folder.statistics.read("core")
            values = np.full((4, part.layout.depth + 2), np.nan)
            values[: len(part.steps)] = part.single_site("resid_rms")
            tables.append(values)
        means = np.nanmean(np.stack(tables)[:, :, 1:], axis=0)
        mean = unpacked(unit, layout)
        for layer in range(1, layout["depth"] + 2):
            assert mean["resid_rms", "", layer] == pytest.approx(means[:, layer - 1], rel=1e-6)
    noted = [run for run in data["runs"] if "no statistics on record" in run["note"]]
    assert {run["norm"] for run in noted} == {"dyt"}


def test_mean_excludes_nonfinite_values():
    tables = np.array([[[1.0, np.nan, np.inf]], [[3.0, np.nan, 5.0]]])
    assert np.array_equal(mean_of_finite(tables), [[2.0, np.nan, 5.0]], equal_nan=True)


@pytest.mark.parametrize("warmup", [None, 0, 1, 50, 333, 989, 990, 991, 5000])
@pytest.mark.parametrize("most", [3, 6, 32])
@pytest.mark.parametrize("total", [1, 2, 5, 33, 100])
def test_chosen_steps_include_the_ends_and_the_end_of_warmup(warmup, most, total):
    steps = np.arange(total) * 10
    kept = choose_steps(steps, warmup, most)
    assert len(kept) <= most
    assert len(kept) == min(total, most)
    assert kept[0] == steps[0]
    assert kept[-1] == steps[-1]
    if warmup is not None and warmup <= steps[-1]:
        assert -(-warmup // 10) * 10 in kept


def test_fewer_steps_if_the_page_would_be_too_large(trained):
    entries = [RunRecord.read(trained(f"run{number}", steps=400, measured=range(400))) for number in range(4)]
    data, problems = layer_profiles(entries, [], [5] * 4)
    assert problems == []
    assert [len(unit["steps"]) for unit in data["units"]] == [MAX_STEPS] * 4
    profiles = run_profiles(entries, [], [5] * 4, [])
    width = profiles[0].layout.width
    fewer = limit_size(profiles, 4 * 4 * width * 10)
    assert {len(profile.steps) for profile in fewer} == {10}
    assert all({0, 399} <= set(profile.steps.tolist()) for profile in fewer)
    assert all((profile.steps[(profile.steps >= 5)][0]) in profiles[0].steps for profile in fewer)
    assert {len(profile.steps) for profile in limit_size(profiles, 1)} == {MIN_STEPS}


def test_damaged_rows_are_left_out_and_reported(trained, compare, run_command, tmp_path):
    good, bad, gone, mute = (trained(name, measured=[0, 5, 10], seed=i) for i, name in enumerate("abcd"))
    path = bad.path / "stats" / "core.bin"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(bytes(content) + b"half")
    (gone.path / "stats" / "core.json").write_text("{")
    (mute.path / "stats" / "core.bin").unlink()
    code, _, err = run_command("compare", str(tmp_path), "-o", str(tmp_path / "x.html"))
    assert code == 0
    assert [line.split(": ")[:2] for line in err.splitlines()] == [["warning", f"run {name}"] for name in "bcd"]
    data = compare()
    assert [unit["label"] for unit in data["profiles"]["units"]] == ["a", "b"]
    assert data["profiles"]["units"][1]["steps"] == [5, 10]
    assert "damaged rows, left out: 1" in data["runs"][1]["note"]
    assert "the statistics of run c are missing" in data["runs"][2]["note"]
    assert "the statistics of run d are missing" in data["runs"][3]["note"]
    assert good.run_id == "a"


def _folder(tmp_path, run_id):
    return RunFolder(tmp_path / "runs" / run_id)
