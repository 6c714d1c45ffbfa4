"""The W&B tracker against W&B itself and an imitation of its server."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

from support.wandb_runs import (
    RUN,
    drive,
    folders,
    prints_the_sync_command,
    quiet,
    read,
    steps_by_part,
    sync,
    sync_command,
    warning,
)
from support.wandb_server import Server


@pytest.mark.network
@pytest.mark.parametrize("when", ["begun", "beginning"])
def test_run_continues_after_its_process_is_stopped(when: str, tmp_path: Path) -> None:
    """W&B's own timeouts are set to 90 seconds, so a call that waits for W&B is noticed on any machine."""
    body = """
    import threading
    def core():
        while True:
            found = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True)
            if found.stdout:
                return int(found.stdout)
            time.sleep(0.001)
    if when == "beginning":
        tracking.WAIT_S = 2.0
        threading.Thread(target=lambda: os.kill(core(), signal.SIGSTOP)).start()
    started = time.monotonic()
    tracker = begin("offline")
    if when == "begun":
        os.kill(core(), signal.SIGSTOP)
        started, tracking.WAIT_S = time.monotonic(), 2.0
    for step in range(0, 20_000, 10):
        tracker.log(interval(step))
    end(tracker)
    assert time.monotonic() - started < PATIENCE, "it waited for W&B"
    print(time.monotonic())
    """
    done = drive(tmp_path, f"when = {when!r}\n" + textwrap.dedent(body))
    assert time.monotonic() - float(done.stdout) < 90, "the process waited for W&B at its end"
    line = warning(done)
    assert "not answer" in line
    if when == "begun":
        assert sync_command(line) == ["wandb", "sync", *map(str, folders(tmp_path, "offline-run"))]
    else:
        assert line.endswith("; W&B received no data")


@pytest.mark.network
def test_unreachable_server_makes_the_run_offline(tmp_path: Path) -> None:
    body = """
    SETTINGS |= {"a_setting_of_another_version": 1, "init_timeout": 2.0}
    tracker = begin("online")
    for step in range(0, 40, 10):
        tracker.log(interval(step))
    end(tracker)
    """
    done = drive(tmp_path, body, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40)
    line = warning(done)
    (folder,) = folders(tmp_path, "offline-run")
    assert "continues offline" in line
    assert line.endswith(f"wandb sync {folder}")
    _, _, rows, _, exit_code = read(folder)
    assert ([row["train/step"] for row in rows], exit_code) == ([10, 20, 30, 40], 0)


@pytest.mark.network
def test_online_and_resumed(tmp_path: Path, server: Server) -> None:
    assert quiet(drive(tmp_path, "mirror('online')", **server.login))
    run = server.runs[RUN["run_id"]]
    assert run.steps() == [10, 20, 30, 40]
    assert run.summary["eval/loss"] == {"min": 2.7}
    assert run.exit_code == 0
    assert quiet(drive(tmp_path, "mirror('online', first=20, state='failed')", **server.login))
    assert run.steps() == [10, 20, 30, 40, 30, 40]
    assert [row["_step"] for row in run.rows] == list(range(6))
    assert run.exit_code == 1
    assert list(server.runs) == [RUN["run_id"]]
    assert not [path for path in server.paths if "/otel/" in path], "W&B reported about itself"


@pytest.mark.network
def test_server_lost_during_the_run(tmp_path: Path, server: Server) -> None:
    body = """
    import urllib.request
    SETTINGS["finish_timeout"] = 2.0
    tracker = begin("online")
    tracker.log(interval(0))
    urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/stop", data=b"{}").read()
    tracker.log(interval(10))
    end(tracker)
    """
    line = warning(drive(tmp_path, body, **server.login))
    assert "did not finish" in line
    server.streams = True
    sync(tmp_path, server, line)
    run = server.runs[RUN["run_id"]]
    assert run.steps() == [10, 20]
    assert run.summary["state"] == "finished"


FIRST_20 = """
tracker = begin(mode)
tracker.log(interval(0))
tracker.log(interval(10))
end(tracker, "interrupted")
"""


@pytest.mark.network
@pytest.mark.parametrize("sent", ["each", "only the last"])
def test_two_offline_parts_are_both_uploaded(sent: str, tmp_path: Path, server: Server) -> None:
    first = drive(tmp_path, "mode = 'offline'\n" + FIRST_20).stderr
    if sent == "each":
        sync(tmp_path, server, first)
    second = drive(tmp_path, "mirror('offline', first=20)").stderr
    assert len(sync_command(second)) == (3 if sent == "each" else 4), "what was sent is named again"
    sync(tmp_path, server, second)
    assert steps_by_part(server) == {"": [10, 20], "-from-20": [30, 40]}


@pytest.mark.network
def test_offline_part_after_an_online_one(tmp_path: Path, server: Server) -> None:
    assert quiet(drive(tmp_path, "mode = 'online'\n" + FIRST_20, **server.login))
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    line = warning(drive(tmp_path, "SETTINGS['init_timeout'] = 2.0; mirror('online', first=20)", **unreachable))
    assert "continues offline" in line
    sync(tmp_path, server, line)
    assert steps_by_part(server) == {"": [10, 20], "-from-20": [30, 40]}
    assert quiet(drive(tmp_path, "mirror('online', first=30)", **server.login))
    assert steps_by_part(server) == {"": [10, 20, 40], "-from-20": [30, 40]}


@pytest.mark.network
@pytest.mark.parametrize("sent", ["before", "after"])
def test_online_part_after_an_offline_one(sent: str, tmp_path: Path, server: Server) -> None:
    """What was not yet sent keeps the id, and is named at the end of the run that went online too."""
    line = drive(tmp_path, "mode = 'offline'\n" + FIRST_20).stderr
    if sent == "before":
        sync(tmp_path, server, line)
    done = drive(tmp_path, "mirror('online', first=20)", **server.login)
    if sent == "before":
        assert quiet(done)
        assert steps_by_part(server) == {"": [10, 20, 30, 40]}
    else:
        assert sync_command(done.stderr) == sync_command(line)
        sync(tmp_path, server, done.stderr)
        assert steps_by_part(server) == {"": [10, 20], "-from-20": [30, 40]}


@pytest.mark.network
def test_sync_command_names_a_killed_offline_part(tmp_path: Path, server: Server) -> None:
    body = """
    tracker = begin("offline")
    tracker.log(interval(0))
    time.sleep(3)  # longer than the flush interval, so that the row is on disk
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert drive(tmp_path, body).returncode == -9
    done = drive(tmp_path, "mirror('offline')")
    killed, whole = folders(tmp_path, "offline-run")
    assert sync_command(done.stderr) == ["wandb", "sync", str(killed), str(whole)]
    sync(tmp_path, server, done.stderr)
    assert steps_by_part(server)["-from-0"] == [10, 20, 30, 40]
    assert "" in steps_by_part(server)


@pytest.mark.network
@pytest.mark.parametrize(
    ("variables", "login", "kinds"),
    [
        ({}, "", ["offline-run"]),
        ({}, "netrc", ["run"]),
        ({}, "key", ["run"]),
        ({"WANDB_MODE": "offline"}, "key", ["offline-run"]),
        ({"WANDB_MODE": "disabled"}, "key", []),
    ],
)
def test_auto(tmp_path: Path, server: Server, variables: dict[str, str], login: str, kinds: list[str]) -> None:
    known = dict(server.login)
    key = known.pop("WANDB_API_KEY")
    if login == "key":
        known["WANDB_API_KEY"] = key
    elif login == "netrc":
        netrc = tmp_path / ".netrc"
        netrc.write_text(f"machine 127.0.0.1:{server.server_port} login user password {key}\n")
        netrc.chmod(0o600)
    done = drive(tmp_path, "mirror('auto')", WANDB_RUN_ID="chosen", **known, **variables)
    assert prints_the_sync_command(done, tmp_path) if kinds == ["offline-run"] else quiet(done), done.stderr
    assert [kind for kind in ("run", "offline-run") for _ in folders(tmp_path, kind)] == kinds
    for kind in kinds:
        assert read(folders(tmp_path, kind)[0])[0].run_id == "chosen"
