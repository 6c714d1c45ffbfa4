"""The W&B tracker against W&B itself, without a server; the files of W&B are read back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from normlab.tracking.wandb_payloads import flat_config
from support.wandb_runs import RUN, drive, folders, prints_the_sync_command, read, warning


def test_offline_run_is_complete_on_disk(tmp_path: Path) -> None:
    home = tmp_path / "a folder's home"  # the printed command is quoted for a shell
    home.mkdir()
    done = drive(home, "mirror('offline'); print([key for key in os.environ if 'REPORTING' in key])")
    assert prints_the_sync_command(done, home), done.stderr
    assert done.stdout == "[]\n"
    (folder,) = folders(home, "offline-run")
    run, config, rows, summary, exit_code = read(folder)
    labels = (run.run_id, run.display_name, run.project, run.run_group, run.job_type)
    assert labels == ("derf-peri-3fa9c1", "derf peri, seed 3", "normlab", "derf-peri-d4", "train")
    assert set(run.tags) == {"mine", "derf", "peri", "stdlib"}
    assert {key: config[key] for key in flat_config(RUN)} == flat_config(RUN)
    assert [row["train/step"] for row in rows] == [10, 20, 30, 40]
    assert [row["train/tokens"] for row in rows] == [10240, 20480, 30720, 40960]
    assert [row["train/loss"] for row in rows] == pytest.approx([3.9, 3.8, 3.7, 3.6])
    assert [row["train/loss_max"] for row in rows] == pytest.approx([3.99, 3.89, 9.0, 3.69])
    assert [row["eval/loss"] for row in rows] == pytest.approx([3.0, 2.9, 2.8, 2.7])
    assert {row["perf/tokens_per_s"] for row in rows} == {20480.0}
    assert (summary["state"], summary["val_loss"], summary["best_val_loss"]) == ("finished", 2.7, 2.6)
    assert (summary["spike/loss_lightning"], summary["spike/clipped"]) == (1, 3)
    assert exit_code == 0


def test_each_offline_part_of_a_run_has_a_folder_and_the_steps_of_the_run(tmp_path: Path) -> None:
    body = """
    mirror("offline", first=20, state="interrupted")
    mirror("offline", first=30, state="failed")
    mirror("offline", first=20, state="diverged", odd_loss=float("nan"))
    """
    done = drive(tmp_path, body)
    assert prints_the_sync_command(done, tmp_path), done.stderr
    parts = [read(folder) for folder in folders(tmp_path, "offline-run")]
    ids = {run.run_id.removeprefix("derf-peri-3fa9c1") for run, *_ in parts}
    assert ids == {"-from-20", "-from-30", "-from-20.2"}
    assert {run.run_group for run, *_ in parts} == {"derf-peri-d4"}
    names = sorted(run.display_name for run, *_ in parts)
    assert names == [f"derf peri, seed 3, from step {step}" for step in (20, 20, 30)]
    steps = [[row["train/step"] for row in rows] for _, _, rows, _, _ in parts]
    ends = {summary.get("state"): code for _, _, _, summary, code in parts}
    assert sorted(steps) == [[30, 40], [30, 40], [40]]
    assert ends == {"interrupted": 0, "failed": 1, "diverged": 0}
    (diverged,) = [rows for _, _, rows, summary, _ in parts if summary.get("state") == "diverged"]
    assert math.isnan(diverged[0]["train/loss_max"])


@pytest.mark.network
def test_run_continues_after_its_process_is_killed(tmp_path: Path) -> None:
    body = """
    tracker = begin("offline")
    tracker.log(interval(0))
    time.sleep(3)  # longer than the flush interval, so that the row is on disk
    core = subprocess.check_output(["pgrep", "-P", str(os.getpid()), "wandb-core"], text=True)
    os.kill(int(core), signal.SIGKILL)
    started = time.monotonic()
    for step in range(10, 2000, 10):
        tracker.log(interval(step))
        time.sleep(0.001)
    end(tracker)
    assert time.monotonic() - started < PATIENCE, "it waited for the killed process"
    print("then", file=sys.stderr)
    mirror("offline")
    import wandb
    print("x_transaction_log_flush_interval" in wandb.Settings.model_fields)
    """
    done = drive(tmp_path, body)
    line, then, last = done.stderr.splitlines()
    assert (done.returncode, then) == (0, "then")
    assert "The local record has everything; upload later with: " in line
    assert last.startswith("normlab: W&B was offline: ")
    killed, after = sorted((read(folder) for folder in folders(tmp_path, "offline-run")), key=lambda p: len(p[2]))
    assert "stopped" in line
    # W&B before 0.31 flushes every 15 s, whatever it is asked.
    assert [row["train/step"] for row in killed[2]] == ([10] if done.stdout == "True\n" else [])
    assert killed[4] is None
    assert ([row["train/step"] for row in after[2]], after[4]) == ([10, 20, 30, 40], 0)


def test_continued_run_has_all_rows_under_its_id(tmp_path: Path) -> None:
    body = """
    run["continued_from"] = {"run_id": "a shorter run", "step": 20}
    tracker = begin("offline", 20)
    tracker.log(interval(0) + interval(10))
    tracker.log(interval(20))
    end(tracker)
    """
    done = drive(tmp_path, body)
    assert prints_the_sync_command(done, tmp_path), done.stderr
    (folder,) = folders(tmp_path, "offline-run")
    run, _, rows, _, _ = read(folder)
    assert run.run_id == RUN["run_id"]
    assert [row["train/step"] for row in rows] == [10, 20, 30]


def test_online_without_a_login_prompts_for_nothing(tmp_path: Path) -> None:
    line = warning(drive(tmp_path, "mirror('online')"))
    assert "no login" in line
    (folder,) = folders(tmp_path, "offline-run")
    assert len(read(folder)[2]) == 4


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in its place")
    assert "did not start: FileExistsError" in warning(drive(tmp_path, "mirror('offline')"))


def test_importing_the_tracker_does_not_import_wandb(tmp_path: Path) -> None:
    done = drive(tmp_path, "WandbTracker(TrackingConfig(), folder); print('wandb' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")
