import csv
import io
import json
import math
import re

import pytest

from normlab.base.errors import NormlabError
from normlab.report.runs_table import render_runs, summarize
from normlab.report.tables import render

MARKUP = ["<img src=x onerror=alert(1)>", "a|b\\|c", "*bold* _under_ `code` ~~gone~~", "&lt;b&gt;"]


@pytest.fixture
def rows(make_run, tmp_path):
    make_run("aa11", norm="layernorm", status={"val_loss": 1.23456, "best_val_loss": 1.2})
    make_run("bb22", depth=12, seed=1, status={"val_loss": 2.5})
    last = {"step": 41, "loss": 7.1, "grad_norm": 5.0}
    make_run(
        "cc33",
        "diverged",
        norm="none",
        status={
            "step": 42,
            "val_loss": math.nan,
            "diverged": {"step": 42, "loss": math.inf, "grad_norm": math.nan, "last_finite": last},
        },
    )
    return summarize(tmp_path)


def test_csv_is_complete(rows):
    read = list(csv.DictReader(io.StringIO(render_runs(rows, "csv"))))
    assert list(read[0]) == list(rows[0])
    assert float(read[0]["val_loss"]) == 1.23456
    assert read[2]["val_loss"] == read[2]["vs_bigram"] == ""
    assert read[2]["note"].startswith("diverged at step 42: loss inf")


def test_csv_has_the_keys_of_all_rows():
    assert render([{"a": 1}, {"a": 2, "b": "x"}], "csv").splitlines() == ["a,b", "1,", "2,x"]


def test_markdown_has_every_column_and_rounds(rows):
    lines = render_runs(rows, "markdown").splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| 1.2346 |" in lines[2]
    assert "| -1.2654 |" in lines[2]
    assert "nan |" not in lines[4]
    assert "diverged at step 42" in lines[4]


@pytest.mark.parametrize("name", MARKUP)
def test_markdown_shows_names_as_they_are(name):
    line = render([{"run": name}, {"run": "plain"}], "markdown").splitlines()[2]
    (_, cell, _) = re.split(r"(?<!\\)(?:\\\\)*\|", line)
    shown = re.sub(r"\\([!-/:-@[-`{-~])", r"\1", cell)
    assert shown.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").strip() == name
    assert "<" not in line


@pytest.mark.parametrize("width", [56, 80, 100, 160, 300])
def test_table_fits_the_width_and_names_the_columns_left_out(rows, make_run, tmp_path, width):
    make_run("dd44-" + "very-long-" * 12, norm="a_rather_long_name", run={"name": "words " * 20})
    make_run("ee55", "failed", status={"error": "no " * 100})
    text = render_runs(summarize(tmp_path), "table", width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    shown = " ".join(text.split())
    for heading in ("norm", "placement", "depth", "seed", "step", "val loss", "vs bigram", "seconds"):
        is_above = heading == "placement"
        in_head = heading in next(line for line in lines if line.startswith("run "))
        left_out = heading in shown[shown.find("not shown:") :] if "not shown:" in shown else False
        assert in_head + left_out + is_above == 1
    assert "1.2346" in shown
    assert "in common: placement pre" in shown


def test_long_texts_fold():
    formula = " ".join(["y = x / rms(x) * gain"] * 5)
    source = " ".join(["Zhang 2019"] * 4)
    rows = [{"norm": f"a_very_long_word_of_a_name_{index}", "formula": formula, "source": source} for index in range(3)]
    text = render(rows, "table", 80)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["norm", "formula", "source"]
    assert "not shown" not in text
    assert text.count("rms(x)") == 15
    assert text.count("Zhang") == 12
    assert all(f"a_very_long_word_of_a_name_{index}" in text for index in range(3))


def test_numbers_are_aligned_to_the_right(rows):
    lines = render_runs(rows, "table", 160).splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("run "))
    end = lines[head].index("val loss") + len("val loss")
    assert [line[:end].rsplit(" ", 1)[1] for line in lines[head + 2 : head + 5]] == ["1.2346", "2.5000", ""]
    assert set(lines[head + 1]) == {"-"}


def test_single_run_has_a_line_for_each_value(rows):
    lines = render_runs(rows[:1], "table", 80).splitlines()
    assert "norm           layernorm" in lines
    assert "val loss       1.2346" in lines
    assert not any(line.startswith("note") for line in lines)


def test_equal_names_are_followed_by_ids(make_run, tmp_path):
    for run_id in ("aa11", "bb22"):
        make_run(run_id, run={"name": "same"})
    make_run("cc33", run={"name": "other"})
    make_run("same")
    text = render_runs(summarize(tmp_path), "table", 160)
    assert [line.split()[1] for line in text.splitlines() if line.startswith("same ")] == ["aa11", "bb22", "same"]


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_different_corpora_are_a_warning(make_run, tmp_path, format):
    make_run("aa11")
    make_run("bb22")
    assert "corpora" not in render_runs(summarize(tmp_path), format, 160)
    make_run("cc33", run={"corpus": {"name": "stdlib", "sha256": "b" * 64}})
    text = render_runs(summarize(tmp_path), format, 160)
    expected = (
        "2 corpora: losses are comparable only within one corpus (stdlib aaaaaaaa: 2 runs, stdlib bbbbbbbb: 1 run)"
    )
    assert expected in text


def test_width_without_a_terminal_is_160(rows, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    assert render_runs(rows) == render_runs(rows, "table", 160)
    monkeypatch.setenv("COLUMNS", "80")
    assert render_runs(rows) == render_runs(rows, "table", 80)


def test_unknown_format_is_an_error(rows):
    with pytest.raises(NormlabError, match=r"unknown format 'jsn' .did you mean 'json'..: choose one of csv, json"):
        render_runs(rows, "jsn")


def test_empty_report_renders_to_nothing():
    assert json.loads(render([], "json")) == []
    assert render([], "table") == render([], "csv") == render([], "markdown") == ""
