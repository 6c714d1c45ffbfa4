"""The lines about what W&B has of runs, and what is known of W&B's login without importing wandb."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from normlab.config.compose import compose_run
from normlab.store.lock import file_lock
from normlab.store.runs import RunFolder
from normlab.tracking.uploads import Upload, lock_of, may_have_login, mode_of, upload_lines
from normlab.training.start import train
from support.small_run import small_run

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
