"""Profiles: those of `inspect` at their steps, of every run, or of many the means over a cell's seeds."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

from normlab.report.compare.depths import FEWEST_STEPS, MOST_STEPS, _mean_of_finite, _of_runs, choose, within
from normlab.report.compare.depths import profiles as profiles_of
from normlab.stats.profiles import Column, Layout, Profiles
from normlab.stats.statistic import CORE, STATISTICS
from normlab.store.query import examine
from normlab.store.runs import RunFolder


def unpacked(unit, layout):
    """By statistic, site and place, the unit's numbers at its steps."""
    values = np.frombuffer(base64.b64decode(unit["values"]), "<f4").reshape(len(unit["steps"]), -1)
    keys = [(name, site, place) for name, site, places in layout["columns"] for place in places]
    assert values.shape[1] == len(keys)
    return dict(zip(keys, values.T, strict=True))


def called(place, depth):
    return "" if place is None else "embed" if place == 0 else "head" if place > depth else f"block {place}"


def inspected(run_command, tmp_path, run_id):
    code, out, _ = run_command("inspect", run_id, "--json", "--results-dir", str(tmp_path))
    assert code == 0
    return {(row["statistic"], row["site"], row["place"]): row for row in json.loads(out)}


def as_inspected(shown, run_command, tmp_path):
    for unit in shown["profiles"]["units"]:
        layout = shown["profiles"]["layouts"][unit["layout"]]
        rows = inspected(run_command, tmp_path, shown["runs"][unit["runs"][0]]["id"])
        seen = {(name, site, called(at, layout["depth"])): v for (name, site, at), v in unpacked(unit, layout).items()}
        core = {key for key in rows if STATISTICS[key[0]].tier == CORE}
        assert set(seen) == core
        for key, values in seen.items():
            row = rows[key]
            known = dict(zip(row["steps"], row["values"], strict=True))
            expected = [float(known[step]) if step in known else np.nan for step in unit["steps"]]
            assert np.array_equal(values, np.array(expected, np.float32), equal_nan=True), key


def test_profiles_are_those_of_inspect(trained, compare, run_command, tmp_path):
    trained("a", measured=range(0, 20, 2), steps=20)
    trained("b", measured=range(0, 200, 2), steps=200, norm="layernorm", depth=3, warmup=77)
    shown = compare()
    first, second = shown["profiles"]["units"]
    assert shown["profiles"]["of"] == "run"
    assert [layout["depth"] for layout in shown["profiles"]["layouts"]] == [2, 3]
    assert (first["label"], first["runs"], first["n"], first["steps"]) == ("a", [0], 1, list(range(0, 20, 2)))
    assert (first["init"], first["warmup"], first["end"]) == (0, 3, 9)
    assert len(second["steps"]) == MOST_STEPS
    assert (second["steps"][0], second["steps"][second["warmup"]], second["steps"][-1]) == (0, 78, 198)
    as_inspected(shown, run_command, tmp_path)
    update = shown["profiles"]["statistics"]["update_ratio"]
    assert update == {word: getattr(STATISTICS["update_ratio"], word) for word in update}
    assert set(update) == {"formula", "unit", "of", "question", "source", "merge"}


def test_a_real_run_of_every_kind_of_statistic(run_command, words, compare, tmp_path):
    code, _, err = run_command("train", *words, f"results_dir={tmp_path}", "stats=full", "stats.every=3")
    assert code == 0, err
    shown = compare()
    assert len(shown["profiles"]["units"]) == 1
    as_inspected(shown, run_command, tmp_path)


def test_parts_with_more_to_measure_later_are_joined(trained, compare, run_command, tmp_path):
    folder = trained("a", measured=[0, 5])
    other = Layout.of([Column("resid_rms", "", 1), Column("mlp_rms", "", 2)], 2, {})[0]
    with folder.lock():
        folder.arrays.append("core", Profiles(other, np.array([10, 15]), np.array([[1.0, 2.0], [np.nan, np.inf]])))
    shown = compare()
    (unit,) = shown["profiles"]["units"]
    assert unit["steps"] == [0, 5, 10, 15]
    as_inspected(shown, run_command, tmp_path)


def test_above_fifty_runs_a_unit_is_a_cell(trained, compare, tmp_path):
    for seed in range(13):
        for norm, depth in (("rmsnorm", 2), ("rmsnorm", 3), ("layernorm", 2), ("dyt", 2)):
            measured = [] if norm == "dyt" else [0, 5, 10] if seed == 3 else [0, 5, 10, 15]
            trained(f"{norm}{depth}{seed:02}", 2 + seed / 100, norm=norm, depth=depth, seed=seed, measured=measured)
    trained("worse", 3.0, norm="layernorm", lr=1e-2, measured=[0, 5, 10, 15])
    shown = compare("--by", "norm")
    assert shown["profiles"]["of"] == "cell"
    units = shown["profiles"]["units"]
    assert [unit["label"] for unit in units] == ["layernorm", "rmsnorm, depth 2", "rmsnorm, depth 3"]
    for unit in units:
        layout = shown["profiles"]["layouts"][unit["layout"]]
        assert (unit["n"], len(unit["runs"]), unit["steps"]) == (13, 13, [0, 5, 10, 15])
        assert unit["counts"] == [13, 13, 13, 12]
        ids = [shown["runs"][index]["id"] for index in unit["runs"]]
        assert "worse" not in ids
        tables = []
        for run_id in ids:
            (part,), _ = examine(_folder(tmp_path, run_id)).folder.arrays.read("core")
            own = np.full((4, part.layout.depth + 2), np.nan)
            own[: len(part.steps)] = part.single_site("resid_rms")
            tables.append(own)
        means = np.nanmean(np.stack(tables)[:, :, 1:], axis=0)
        seen = unpacked(unit, layout)
        for place in range(1, layout["depth"] + 2):
            assert seen["resid_rms", "", place] == pytest.approx(means[:, place - 1], rel=1e-6)
    noted = [run for run in shown["runs"] if "nothing was measured" in run["note"]]
    assert {run["norm"] for run in noted} == {"dyt"}


def test_what_is_not_finite_is_in_no_mean():
    tables = np.array([[[1.0, np.nan, np.inf]], [[3.0, np.nan, 5.0]]])
    assert np.array_equal(_mean_of_finite(tables), [[2.0, np.nan, 5.0]], equal_nan=True)


@pytest.mark.parametrize("warmup", [None, 0, 1, 50, 333, 989, 990, 991, 5000])
@pytest.mark.parametrize("most", [3, 6, 32])
@pytest.mark.parametrize("total", [1, 2, 5, 33, 100])
def test_which_steps_are_kept(warmup, most, total):
    steps = np.arange(total) * 10
    kept = choose(steps, warmup, most)
    assert len(kept) <= most
    assert len(kept) == min(total, most)
    assert kept[0] == steps[0]
    assert kept[-1] == steps[-1]
    if warmup is not None and warmup <= steps[-1]:
        assert -(-warmup // 10) * 10 in kept


def test_fewer_steps_where_it_would_be_too_much(trained):
    entries = [examine(trained(f"run{number}", steps=400, measured=range(400))) for number in range(4)]
    found, problems = profiles_of(entries, [], [5] * 4)
    assert problems == []
    assert [len(unit["steps"]) for unit in found["units"]] == [MOST_STEPS] * 4
    units = list(_of_runs(entries, [], [5] * 4, []))
    width = units[0].layers.width
    fewer = within(units, 4 * 4 * width * 10)
    assert {len(unit.steps) for unit in fewer} == {10}
    assert all({0, 399} <= set(unit.steps.tolist()) for unit in fewer)
    assert all((unit.steps[(unit.steps >= 5)][0]) in units[0].steps for unit in fewer)
    assert {len(unit.steps) for unit in within(units, 1)} == {FEWEST_STEPS}


def test_damaged_rows_are_left_out_and_told_of(trained, compare, run_command, tmp_path):
    good, bad, gone, mute = (trained(name, measured=[0, 5, 10], seed=i) for i, name in enumerate("abcd"))
    path = bad.path / "stats" / "core.bin"
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(bytes(content) + b"half")
    (gone.path / "stats" / "core.json").write_text("{")
    (mute.path / "stats" / "core.bin").unlink()
    code, _, err = run_command("compare", str(tmp_path), "-o", str(tmp_path / "x.html"))
    assert code == 0
    assert [line.split(": ")[:2] for line in err.splitlines()] == [["normlab", f"run {name}"] for name in "bcd"]
    shown = compare()
    assert [unit["label"] for unit in shown["profiles"]["units"]] == ["a", "b"]
    assert shown["profiles"]["units"][1]["steps"] == [5, 10]
    assert "damaged rows, left out: 1" in shown["runs"][1]["note"]
    assert "the rows of run c are gone" in shown["runs"][2]["note"]
    assert "the rows of run d are gone" in shown["runs"][3]["note"]
    assert good.run_id == "a"


def _folder(tmp_path, run_id):
    return RunFolder(tmp_path / "runs" / run_id)
