"""The lines about what W&B has of runs, and what is known of W&B's login without importing wandb."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from normlab.config.compose import compose_run
from normlab.store.lock import file_lock
from normlab.store.runs import RunFolder
from normlab.tracking.uploads import Upload, lock_of, may_have_login, mode_of, upload_lines
from normlab.training.start import train
from support.small_run import small_run

Command = Callable[..., tuple[int, str, str]]

HINT = "`normlab sync x` sends what is missing"
NO_PROCESS = "W&B lacks data of 1 run (no process sends it, or none can write to its folder); "
SENT = Upload("http://x", problem="")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder without settings of W&B."""
    for name in [name for name in os.environ if name.startswith(("WANDB", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Return a run of four steps."""
    return train(compose_run([*small_run(tmp_path / "results"), "train.steps=4"]), trackers=[]).folder


@pytest.mark.parametrize(
    ("upload", "line"),
    [
        (Upload(), NO_PROCESS + HINT),
        (SENT, "W&B: http://x"),
        (replace(SENT, problem="Error: gone"), "W&B lacks data of 1 run (Error: gone); " + HINT),
        (Upload(where="wandb", problem=""), "W&B: `wandb sync {run}/wandb/offline-run-*`"),
        # Texts of someone else count as no upload.
        (replace(SENT, where="../../victim"), NO_PROCESS + HINT),
        (replace(SENT, where="http://x\x1b[2J"), NO_PROCESS + HINT),
        (replace(SENT, problem=None), NO_PROCESS + HINT),
    ],
)
def test_lines(upload: Upload, line: str, run: RunFolder) -> None:
    upload.write(run.path)
    assert upload_lines([run.path], ["x"]) == [line.replace("{run}", os.path.relpath(run.path))]


def test_a_follower_that_has_not_come_to_a_run_yet(run: RunFolder) -> None:
    (line,) = upload_lines([run.path], ["x"], has_follower=True)
    assert line.startswith("W&B: sending 1 run continues in the background; ")
    replace(SENT, problem="Error: gone").write(run.path)
    (line,) = upload_lines([run.path], ["x"], has_follower=True)
    assert line.startswith("W&B lacks data of 1 run (Error: gone); ")


def test_several_runs(run: RunFolder, tmp_path: Path) -> None:
    runs = [run.path, *(tmp_path / name for name in "bcd")]
    for path in runs:
        path.mkdir(exist_ok=True)
        replace(SENT, where=f"http://{path.name}").write(path)
    with file_lock(lock_of(runs[2]), "the test"):
        assert upload_lines(runs, ["a b"]) == [
            f"W&B: 3 runs, the first: http://{runs[0].name}",
            "W&B: sending 1 run continues in the background; if it fails, `normlab sync 'a b'` sends what is missing",
        ]


@pytest.mark.parametrize(
    ("netrc", "settings", "base_url", "expected"),
    [
        ("", "", "", False),
        ("machine api.wandb.ai login user password key", "", "", True),
        ("machine github.com login user password key", "", "", False),
        ("machine my.server:8080 login user password key", "", "http://my.server:8080", True),
        ("machine my.server login user password key", "base_url = https://my.server", "", True),
        ("", "base_url = https://my.server", "", False),
        ("this is no netrc", "", "", False),
    ],
)
def test_login(
    netrc: str, settings: str, base_url: str, expected: bool, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".netrc").write_text(netrc)
    if settings:
        (home / ".config" / "wandb").mkdir(parents=True)
        (home / ".config" / "wandb" / "settings").write_text(f"[default]\n{settings}\n")
    if base_url:
        monkeypatch.setenv("WANDB_BASE_URL", base_url)
    assert may_have_login() is expected
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert may_have_login()


@pytest.mark.parametrize(
    ("option", "variable", "has_login", "mode"),
    [
        ("auto", "", True, "auto"),
        ("auto", "", False, None),
        ("auto", "dryrun", False, "offline"),
        ("auto", "disabled", True, None),
        ("off", "online", True, None),
        ("online", "disabled", False, "online"),
    ],
)
def test_mode(option: str, variable: str, has_login: bool, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", variable)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40 if has_login else "")
    assert mode_of(option) == mode


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"run_id": "x"}'])
def test_sync_names_a_damaged_file_before_it_asks_for_a_login(
    content: bytes, run: RunFolder, run_command: Command, tmp_path: Path
) -> None:
    path = run.path / "wandb.json"
    path.write_bytes(content)
    if content.startswith(b"{"):
        path.write_text(json.dumps({"run_id": run.run_id, "where": "ftp://x", "problem": ""}))
    code, out, err = run_command("sync", str(run.path), "--results-dir", str(tmp_path / "results"))
    damage, login = err.splitlines()
    assert (code, out, login) == (2, "", "error: no login at W&B; log in with `wandb login`")
    assert damage.startswith(f"warning: {path}: is damaged (")
    assert damage.endswith("); `normlab sync` asks W&B what it has, and writes the file anew")


def test_sync_names_every_damage_before_it_asks_for_a_login(
    run: RunFolder, run_command: Command, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    other = train(compose_run([*small_run(results), "train.steps=4", "seed=1"]), trackers=[]).folder
    (other.path / "status.json").write_text("{}")
    code, out, err = run_command("sync", run.run_id, other.run_id, "--results-dir", str(results))
    damage, login = err.splitlines()
    assert (code, out, login) == (2, "", "error: no login at W&B; log in with `wandb login`")
    assert f"{other.path / 'status.json'}: is damaged" in damage


def test_sync_needs_a_login_only_to_send_something(run: RunFolder, run_command: Command, tmp_path: Path) -> None:
    command = ("sync", run.run_id, "--results-dir", str(tmp_path / "results"))
    SENT.write(run.path)
    assert run_command(*command) == (0, "W&B: http://x\n", "")
    # A run that was resumed without W&B has newer rows, and an offline run is not at W&B.
    now = time.time() + 60
    os.utime(run.metrics_path, (now, now))
    assert run_command(*command)[0] == 2
    os.utime(run.metrics_path, (0, 0))
    replace(SENT, where="wandb").write(run.path)
    assert run_command(*command) == (2, "", "error: no login at W&B; log in with `wandb login`\n")
