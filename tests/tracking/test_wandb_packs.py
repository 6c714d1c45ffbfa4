"""The W&B trackers of a pack, which share one W&B process, with a server that hangs or is slow."""

from __future__ import annotations

import contextlib
import subprocess
import textwrap
from pathlib import Path

import pytest

from normlab.store.runs import RunFolder
from support.processes import wait_for
from support.wandb_runs import ROOT, drive, quiet, read, sync_command
from support.wandb_server import Server

PACK = """
from normlab.config.compose import compose_run
from normlab.training.run import train_pack

SETTINGS |= {"init_timeout": 3.0, "finish_timeout": 2.0}
overrides = ["model=gpt2_nano", "data=files", f"data.path=[{corpus}]", "train.batch_size=2", "eval.sequences=2",
             "device=cpu", "stats=off", "tracking.wandb=online", f"results_dir={folder}"]
def configs(*more):
    return [compose_run([*overrides, *more, f"seed={seed}"]) for seed in range(3)]
"""


def train_pack(home: Path, server: Server, body: str) -> tuple[subprocess.CompletedProcess[str], list[RunFolder]]:
    """Train a pack of three runs in a process; return it, and the runs once no W&B process is left."""
    script = f"corpus = {str(ROOT / 'tests/corpus.txt')!r}\n" + PACK + textwrap.dedent(body)
    done = drive(home, script, WANDB_ERROR_REPORTING="false", **server.login)
    wait_for(lambda: not wandb_processes(server))
    return done, [RunFolder(path) for path in sorted((home / "run" / "runs").iterdir())]


def wandb_processes(server: Server) -> list[str]:
    """The processes that were started with this server's address."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if server.login["WANDB_BASE_URL"].encode() in (path / "environ").read_bytes():
                found.append((path / "comm").read_text().strip())
    return found


@pytest.mark.network
def test_pack_with_a_hanging_server_waits_once_and_runs_offline(tmp_path: Path, server: Server) -> None:
    """One member asks the server; what the members then start offline is complete."""
    server.hangs = "/"
    done, runs = train_pack(tmp_path, server, "train_pack(configs('train.steps=20', 'train.log_every=10'))")
    assert done.returncode == 0, done.stderr
    assert server.paths == ["/graphql"]
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all("continues offline: " in line for line in lines)
    for run in runs:
        assert run.status()["state"] == "finished"
        (part,) = run.path.glob("wandb/offline-run-*")
        _, _, rows, summary, exit_code = read(part)
        assert (rows[-1]["train/step"], summary["state"], exit_code) == (20, "finished", 0)


@pytest.mark.network
def test_pack_with_a_server_that_hangs_at_the_end(tmp_path: Path, server: Server) -> None:
    """Each run names the command that sends it, and why; none reports the end of the process that they share."""
    server.hangs = "file_stream"
    body = "SETTINGS['init_timeout'] = 90.0; train_pack(configs('train.steps=20'))"
    done, runs = train_pack(tmp_path, server, body)
    assert done.returncode == 0, done.stderr
    assert [run.status()["state"] for run in runs] == ["finished"] * 3
    lines = done.stderr.splitlines()
    assert all("did not finish: TimeoutError" in line for line in lines), done.stderr
    sent = {sync_command(line)[-1] for line in lines}
    assert sent == {str(part) for run in runs for part in run.path.glob("wandb/run-*")}
    assert len(sent) == len(lines) == 3


@pytest.mark.network
def test_pack_interrupted_twice_while_its_server_hangs(tmp_path: Path, server: Server) -> None:
    server.hangs = "file_stream"
    body = """
    import threading
    SETTINGS |= {"init_timeout": 90.0, "finish_timeout": 90.0}
    def interrupt():
        while not list(folder.glob("runs/*/metrics.jsonl")):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    train_pack(configs("train.steps=1000000", "train.log_every=1"))
    """
    done, runs = train_pack(tmp_path, server, body)
    assert "KeyboardInterrupt" in done.stderr or done.returncode == 0, done.stderr
    assert [run.status()["state"] for run in runs] == ["interrupted"] * 3


@pytest.mark.network
def test_pack_with_a_slow_server_is_mirrored_completely(tmp_path: Path, server: Server) -> None:
    server.delay_s = 0.2
    body = "SETTINGS['init_timeout'] = SETTINGS['finish_timeout'] = 90.0; train_pack(configs('train.steps=20'))"
    done, runs = train_pack(tmp_path, server, body)
    assert quiet(done), done.stderr
    assert {run_id: kept.steps()[-1] for run_id, kept in server.runs.items()} == {run.run_id: 20 for run in runs}
    assert {kept.exit_code for kept in server.runs.values()} == {0}
