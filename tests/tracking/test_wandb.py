"""W&B gets each step of a run once, from the real client, whatever happens; and the run never notices."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normlab.store.format import METRICS_FILE
from normlab.store.runs import RunFolder
from normlab.tracking.uploads import Upload
from support.disk import fill
from support.processes import children_of, wait_for
from support.wandb_runs import call, followers, overrides_of, read_offline, start
from support.wandb_server import Server, UploadedRun

pytestmark = pytest.mark.network

ALL_STEPS = list(range(61))
SYNC = ("sync", "results")
SLOW = ("train.steps=3000", "eval.every=500", "train.checkpoint_every=100", "stats.every=500")


def start_and_pause(home: Path, server: Server) -> subprocess.Popen[str]:
    """Start a slow run, stop its process in the middle, and wait until the server has some of its steps.

    On a busy machine the run would end before W&B has started, and a test would interrupt nothing.
    """
    process = start(home, server, "train", *overrides_of(home, *SLOW))
    wait_for(lambda: any(path.stat().st_size > 50_000 for path in home.glob("results/runs/*/metrics.jsonl")))
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: any(len(run.rows) > 150 for run in server.runs.values()))
    return process


def folder_of(home: Path) -> RunFolder:
    (path,) = (home / "results" / "runs").iterdir()
    return RunFolder(path)


def wait_for_no_follower(home: Path) -> None:
    wait_for(lambda: not followers(home))


def assert_complete(server: Server, home: Path, steps: list[int] = ALL_STEPS) -> UploadedRun:
    """Assert that the server has each step of the only run once, with the numbers of the record."""
    folder = folder_of(home)
    assert list(server.runs) == [folder.run_id]
    run = server.runs[folder.run_id]
    assert run.steps() == steps
    rows = {row["_step"]: row for row in run.rows}
    for row in folder.rows("train").rows:
        assert (rows[row["step"]]["train/loss"], rows[row["step"]]["train/lr"]) == (row["loss"], row["lr"])
    for row in folder.rows("eval").rows:
        assert rows[row["step"]]["eval/loss"] == row["loss"]
    return run


def test_live_then_sent_again(server: Server, tmp_path: Path) -> None:
    """The run is sent while it trains; the process that trains imports no wandb; a second time sends nothing."""
    script = "import sys; from normlab.cli import main\ntry: main()\nfinally: print('wandb' in sys.modules)"
    done = call(tmp_path, server, "train", *overrides_of(tmp_path), program=(sys.executable, "-c", script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    wait_for_no_follower(tmp_path)  # on a busy machine it may take longer than the command waits
    upload = Upload.read(folder_of(tmp_path).path)
    where, still_sending = f"normlab: W&B: {upload.where}", "normlab: W&B: sending 1 run continues in the background; "
    assert done.stderr.splitlines()[-1].startswith((where, still_sending))
    run = assert_complete(server, tmp_path)
    assert (run.summary["state"], run.exit_code, upload.problem) == ("finished", 0, "")
    profile = folder_of(tmp_path).statistics.read("core")[0][-1]
    sent = {row["_step"]: row for row in run.rows if "resid/resid_rms/L01" in row}
    assert list(sent) == [0, 15, 30, 45]
    assert sent[45]["resid/resid_rms/L01"] == profile.single_site("resid_rms")[-1, 1]
    before = [dict(row) for row in run.rows]
    again = call(tmp_path, server, *SYNC)
    assert (again.returncode, again.stdout) == (0, f"W&B: {upload.where}\n")
    assert run.rows == before
    assert not (folder_of(tmp_path).path / "wandb").exists()


def test_sent_late_with_the_labels_of_its_sweep(server: Server, tmp_path: Path) -> None:
    grid = overrides_of(tmp_path, "tracking.wandb=auto", "norm=layernorm,rmsnorm", "seed=0,1", "sweep.name=first")
    done = call(tmp_path, None, "sweep", *grid)
    assert (done.returncode, "W&B" in done.stderr, list(tmp_path.glob("results/runs/*/wandb*"))) == (0, False, [])
    done = call(tmp_path, server, "sync", "first")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("W&B: 4 runs, the first: http")
    assert [run.steps() for run in server.runs.values()] == [ALL_STEPS] * 4
    labels = [
        [run.known[key] for key in ("groupName", "jobType", "displayName", "tags")] for run in server.runs.values()
    ]
    assert sorted(labels) == [
        ["first", f"norm={norm}", f"norm={norm} seed={seed}", [f"norm={norm}", f"seed={seed}"]]
        for norm in ("layernorm", "rmsnorm")
        for seed in (0, 1)
    ]
    config = json.loads(next(iter(server.runs.values())).known["config"])
    assert config["optim"]["value"]["lr"] == 1e-3


@pytest.mark.process
def test_a_follower_that_is_killed_in_the_middle(server: Server, tmp_path: Path) -> None:
    process = start_and_pause(tmp_path, server)
    for pid in followers(tmp_path):
        os.killpg(pid, signal.SIGKILL)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    path = folder_of(tmp_path).path
    assert err.splitlines()[-1] == (
        "normlab: W&B lacks data of 1 run (no process sends it, or none can write to its folder); "
        f"`normlab sync results/runs/{path.name}` sends what is missing"
    )
    assert len(next(iter(server.runs.values())).rows) < 3001
    assert call(tmp_path, server, *SYNC).returncode == 0
    assert_complete(server, tmp_path, list(range(3001)))
    assert not (path / "wandb").exists()


@pytest.mark.process
def test_a_process_of_wandb_that_is_killed(server: Server, tmp_path: Path) -> None:
    """The follower starts another one and continues, as after a lack of memory."""
    process = start_and_pause(tmp_path, server)
    (follower,) = followers(tmp_path)
    started = children_of(follower)
    for pid in started:
        os.kill(pid, signal.SIGKILL)
    assert started
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    wait_for_no_follower(tmp_path)
    assert assert_complete(server, tmp_path, list(range(3001))).summary["state"] == "finished"


@pytest.mark.process
@pytest.mark.parametrize("at_once", [False, True])
def test_a_run_that_is_killed_and_resumed(server: Server, tmp_path: Path, at_once: bool) -> None:
    process = start_and_pause(tmp_path, server)
    process.kill()
    process.communicate()
    run = next(iter(server.runs.values()))
    if not at_once:  # else the first follower still sends the run when the second one starts
        wait_for_no_follower(tmp_path)
        assert 150 < len(run.rows) < 3001
        assert run.summary["state"] == "killed"
    done = call(tmp_path, server, "train", *overrides_of(tmp_path, *SLOW))
    assert done.returncode == 0, done.stderr
    wait_for_no_follower(tmp_path)
    assert assert_complete(server, tmp_path, list(range(3001))).summary["state"] == "finished"


@pytest.mark.process
@pytest.mark.parametrize(
    ("when", "outage_s"),
    [
        ("before", 3),
        ("during", 3),
        pytest.param("before", 75, marks=pytest.mark.exhaustive),  # longer than W&B's client waits for a start
        pytest.param("during", 60, marks=pytest.mark.exhaustive),
    ],
)
def test_a_server_that_is_dead_for_a_while(server: Server, tmp_path: Path, when: str, outage_s: int) -> None:
    server.is_dead = when == "before"
    if when == "during":
        process = start_and_pause(tmp_path, server)
        server.is_dead = True
        process.send_signal(signal.SIGCONT)
    else:
        process = start(tmp_path, server, "train", *overrides_of(tmp_path, *SLOW))
        wait_for(lambda: any(path.stat().st_size > 50_000 for path in tmp_path.glob("results/runs/*/metrics.jsonl")))
        # On a fast machine the run would end during the outage, and its follower gives up a minute later.
        process.send_signal(signal.SIGSTOP)
    time.sleep(outage_s)
    server.is_dead = False
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    wait_for_no_follower(tmp_path)
    assert_complete(server, tmp_path, list(range(3001)))


@pytest.mark.parametrize("case", ["no login", "wrong key", "no server", "full disk"])
def test_the_run_does_not_notice(case: str, server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    reference = tmp_path / "reference"
    reference.mkdir()
    done = call(reference, None, "train", *overrides_of(reference, "tracking.wandb=off"))
    assert done.returncode == 0
    assert "W&B" not in done.stderr
    variables = {}
    server.rejects = case == "wrong key"
    if case == "no server":
        variables["WANDB_BASE_URL"] = "http://127.0.0.1:9"
    if case == "full disk":
        variables["TMPDIR"] = str(disk := request.getfixturevalue("disk"))
        fill(disk, leave=20_000)
    done = call(tmp_path, None if case == "no login" else server, "train", *overrides_of(tmp_path), **variables)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    folder, expected = folder_of(tmp_path), folder_of(reference)
    assert (folder.path / METRICS_FILE).read_text().count('"train"') == 60
    assert [row["loss"] for row in folder.rows("train").rows] == [row["loss"] for row in expected.rows("train").rows]
    line = done.stderr.splitlines()[-1]
    assert line.startswith("normlab: ")
    assert "normlab sync" in line or case == "full disk"  # W&B may do without its files
    for pid in followers(tmp_path):
        os.killpg(pid, signal.SIGKILL)


def test_offline_is_written_anew_and_uploaded_by_wandb(server: Server, tmp_path: Path) -> None:
    overrides = overrides_of(tmp_path, "tracking.wandb=offline")
    process = start(tmp_path, None, "train", *overrides, "train.checkpoint_every=20")
    wait_for(lambda: any(tmp_path.glob("results/runs/*/checkpoints/*")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    wait_for_no_follower(tmp_path)
    done = call(tmp_path, None, "train", *overrides, "train.checkpoint_every=20")
    assert done.returncode == 0, done.stderr
    wait_for_no_follower(tmp_path)
    (offline,) = (folder_of(tmp_path).path / "wandb").glob("offline-run-*")
    run, rows, summary = read_offline(offline)
    assert run.run_id == folder_of(tmp_path).run_id
    assert [int(row["_step"]) for row in rows] == ALL_STEPS
    assert summary["state"] == "finished"
    wandb = (str(Path(sys.executable).with_name("wandb")),)
    assert call(tmp_path, server, "sync", str(offline), program=wandb).returncode == 0
    assert_complete(server, tmp_path)


@pytest.mark.process
def test_sync_while_the_run_trains(server: Server, tmp_path: Path) -> None:
    """It sends the steps so far, and does not end the run at W&B."""
    process = start(tmp_path, None, "train", *overrides_of(tmp_path, *SLOW, "tracking.wandb=off"))
    wait_for(lambda: any(path.stat().st_size > 50_000 for path in tmp_path.glob("results/runs/*/metrics.jsonl")))
    process.send_signal(signal.SIGSTOP)  # on a slow machine the run would end before the upload does
    done = call(tmp_path, server, *SYNC)
    process.send_signal(signal.SIGCONT)
    (run,) = server.runs.values()
    assert (done.returncode, run.summary["state"], run.exit_code) == (0, "running", None)
    steps = run.steps()
    assert steps == ALL_STEPS[:10] + list(range(10, len(steps)))
    assert done.stdout.startswith("W&B: http")
    process.communicate(timeout=300)
    assert call(tmp_path, server, *SYNC).returncode == 0
    assert assert_complete(server, tmp_path, list(range(3001))).exit_code == 0


def test_rows_that_the_server_rejects_are_reported(server: Server, tmp_path: Path) -> None:
    """W&B's client gives them up without an error."""
    assert call(tmp_path, server, "train", *overrides_of(tmp_path, "tracking.wandb=off")).returncode == 0
    server.rejects_rows = 400
    done = call(tmp_path, server, *SYNC, WANDB__FILE_STREAM_RETRY_MAX="1")
    assert done.returncode == 2
    assert "the server has the steps before 0 of 61" in done.stdout
    server.rejects_rows = 0
    assert call(tmp_path, server, *SYNC).returncode == 0
    assert_complete(server, tmp_path)


def test_an_id_in_the_environment_is_not_that_of_several_runs(server: Server, tmp_path: Path) -> None:
    for seed in (0, 1):
        overrides = overrides_of(tmp_path, "tracking.wandb=off", f"seed={seed}")
        assert call(tmp_path, server, "train", *overrides).returncode == 0
    assert call(tmp_path, server, *SYNC, WANDB_RUN_ID="xyz").returncode == 0
    assert {run_id: run.steps() for run_id, run in server.runs.items()} == {
        path.name: ALL_STEPS for path in (tmp_path / "results" / "runs").iterdir()
    }


@pytest.mark.process
def test_ctrl_c_ends_sync_and_its_follower(server: Server, tmp_path: Path) -> None:
    assert call(tmp_path, server, "train", *overrides_of(tmp_path, "tracking.wandb=off")).returncode == 0
    server.is_dead = True
    process = start(tmp_path, server, *SYNC)
    wait_for(lambda: len(followers(tmp_path)) == 1)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    wait_for_no_follower(tmp_path)
