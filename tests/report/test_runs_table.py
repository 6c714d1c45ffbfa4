import math
import os

import pytest
from synthetic_runs import Record

from normlab.base.errors import StoreError
from normlab.report.runs_table import summarize


def test_row_has_settings_and_losses(make_run, tmp_path):
    make_run("abc", preset="rmsnorm_llama", run={"name": "mine"}, seed=3)
    assert summarize(tmp_path) == [
        {
            "run": "mine",
            "id": "abc",
            "state": "finished",
            "norm": "rmsnorm_llama",
            "placement": "pre",
            "depth": 4,
            "width": 128,
            "seed": 3,
            "lr": 1e-3,
            "step": 100,
            "steps": 100,
            "val_loss": 2.0,
            "val_loss_ema": None,
            "best_val_loss": 2.0,
            "train_loss": 1.9,
            "vs_bigram": -0.5,
            "corpus": "stdlib",
            "corpus_sha256": "a" * 64,
            "device": "cpu",
            "precision": "fp32",
            "tokens_per_s": 12345.6,
            "flops_per_token": Record().flops_per_token,
            "flops_per_s": Record().flops_per_token * 12345.6,
            "mfu": None,
            "seconds": 65.43,
            "pack": None,
            "note": "",
            "folder": os.path.relpath(tmp_path / "runs" / "abc"),
        }
    ]


def test_empty_folder_is_an_error_that_suggests_train(tmp_path):
    with pytest.raises(StoreError, match=r"no runs in .*: train one with `normlab train`"):
        summarize(tmp_path)


def test_rows_are_sorted_by_corpus_and_loss(make_run, tmp_path):
    files = {"corpus": {"name": "files", "sha256": "f" * 64}}
    make_run("worse", status={"val_loss": 2.2})
    make_run("best", status={"val_loss": 1.8})
    make_run("nan", status={"val_loss": math.nan})
    make_run("stopped", "interrupted", status={"val_loss": 1.0})
    make_run("other", status={"val_loss": 9.0}, run=files)
    make_run("broken").path.joinpath("run.json").write_text("{")
    assert [row["id"] for row in summarize(tmp_path)] == [
        "other",
        "best",
        "worse",
        "nan",
        "stopped",
        "broken",
    ]


def test_unfinished_runs_have_a_state_and_a_note(make_run, tmp_path):
    last = {"step": 41, "loss": 7.12345, "grad_norm": 5234.5}
    diverged = {"step": 42, "loss": math.nan, "grad_norm": math.inf, "last_finite": last}
    make_run("diverged", "diverged", status={"step": 42, "val_loss": math.nan, "diverged": diverged})
    make_run("failed", "failed", status={"step": 3, "error": "OutOfMemoryError: no\nmore"})
    make_run("interrupted", "interrupted", status={"step": 50})
    make_run("killed", "running", status={"step": 60})
    rows = {row["id"]: row for row in summarize(tmp_path)}
    assert {run_id: row["state"] for run_id, row in rows.items()} == {
        "diverged": "diverged",
        "failed": "failed",
        "interrupted": "interrupted",
        "killed": "killed",
    }
    assert rows["diverged"]["note"] == (
        "diverged at step 42: loss nan, gradient norm inf; last finite at step 41: loss 7.1235, gradient norm 5234"
    )
    assert rows["failed"]["note"] == "failed at step 3 of 100: OutOfMemoryError: no"
    assert rows["interrupted"]["note"].startswith("interrupted at step 50 of 100; the same command resumes")
    assert rows["killed"]["note"].startswith("killed at step 60 of 100; the same command resumes")


def test_locked_run_is_running(make_run, tmp_path):
    folder = make_run("live", "running")
    with folder.lock():
        (row,) = summarize(tmp_path)
    assert (row["state"], row["note"]) == ("running", "")


def test_final_loss_of_nan_is_a_divergence(make_run, tmp_path):
    make_run("odd", status={"val_loss": math.nan, "best_val_loss": None})
    (row,) = summarize(tmp_path)
    assert (row["state"], row["val_loss"]) == ("diverged", None)
    assert row["note"] == "diverged at step 100: its final validation loss is nan"


def test_diverged_runs_have_no_final_loss_and_the_lowest_rank(make_run, tmp_path):
    numbers = {"step": 40, "loss": math.nan, "grad_norm": math.nan, "last_finite": None}
    make_run("diverged", "diverged", status={"val_loss": 1.5, "best_val_loss": 1.5, "diverged": numbers})
    make_run("large", status={"val_loss": 2.3e9, "best_val_loss": 5.4})
    make_run("poor", status={"val_loss": 5.0, "best_val_loss": 5.0})
    make_run("stuck", status={"val_loss": 3.25, "best_val_loss": 3.25})
    make_run("regressed", status={"val_loss": 3.4, "best_val_loss": 2.9})
    found = {row["id"]: row for row in summarize(tmp_path)}
    assert list(found) == ["stuck", "regressed", "poor", "diverged", "large"]
    assert {run: row["state"] for run, row in found.items()} == {
        "stuck": "stuck", "regressed": "regressed", "poor": "finished", "diverged": "diverged", "large": "diverged",
    }  # fmt: skip
    of_diverged = [(row["val_loss"], row["vs_bigram"]) for row in list(found.values())[3:]]
    assert of_diverged == [(None, None), (None, None)]
    assert found["large"]["note"].startswith(
        "diverged at step 100: its final validation loss is 2.3e+09, more than 1 nat above ln V 5.5000"
    )
