"""The lines about what a service has of runs, and what is known of W&B's login without importing wandb."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from normlab.config.compose import compose_run
from normlab.store.lock import file_lock
from normlab.store.runs import RunFolder
from normlab.tracking.settings import may_have_login, services_of
from normlab.tracking.uploads import DISABLED, NO_LOGIN, Upload, lock_of, names_of, sync_hint, upload_lines
from normlab.training.start import train
from support.small_run import small_run
from support.wandb_runs import call, overrides_of
from support.wandb_server import Server

HINT = "`normlab sync x` sends what is missing"
NO_PROCESS = "W&B lacks data of 1 run (no process sends it, or none can write to its folder); "


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
        (
            Upload(where="http://x"),
            NO_PROCESS + HINT,
        ),
        (
            Upload(where="http://x", steps=3),
            NO_PROCESS + HINT,
        ),  # resumed since
        (Upload(where="http://x", steps=5), "W&B: http://x"),
        (Upload(where="http://x", problem="Error: gone"), "W&B lacks data of 1 run (Error: gone); " + HINT),
        (
            Upload(where="http://x", steps=5, problem="Error: gone"),
            "W&B has the steps of 1 run; the last upload was not complete (Error: gone)",
        ),
        (Upload(where="wandb/offline-run-1", steps=5), "W&B: `wandb sync {run}/wandb/offline-run-1` uploads it"),
        (Upload(where="wandb/offline-run-2", steps=5), NO_PROCESS + HINT),
        (Upload(problem=NO_LOGIN), "W&B lacks data of 1 run (no login; `wandb login` makes one); " + HINT),
        (Upload(problem=DISABLED), None),
    ],
)
def test_lines(upload: Upload, line: str | None, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    upload.write(run.path, "online")
    (run.path / "wandb" / "offline-run-1").mkdir(parents=True)
    expected = [] if line is None else [line.replace("{run}", os.path.relpath(run.path))]
    assert upload_lines([run.path], "auto", ["x"]) == expected


def test_without_a_login_no_process_is_to_blame(run: RunFolder) -> None:
    for upload in (Upload(), Upload(where="http://x", steps=3)):
        upload.write(run.path, "online")
        (line,) = upload_lines([run.path], "auto", ["x"])
        assert line == "W&B lacks data of 1 run (no login; `wandb login` makes one); " + HINT
    assert "no process sends it" in upload_lines([run.path], "offline", ["x"])[0]


def test_several_runs(run: RunFolder, tmp_path: Path) -> None:
    others = [train(compose_run([*small_run(tmp_path / "results"), "train.steps=4", f"seed={seed}"]), trackers=[])
              for seed in (1, 2, 3)]  # fmt: skip
    runs = [run.path, *(other.folder.path for other in others)]
    for path in runs:
        Upload(where=f"http://{path.name}", steps=5).write(path, "online")
    with file_lock(lock_of(runs[2], "online"), "the test"), RunFolder(runs[3]).lock():
        assert upload_lines(runs, "online", ["x"]) == [
            f"W&B: 2 runs, the first: http://{runs[0].name}",
            "W&B: the upload of 1 run continues in the background; if it fails, " + HINT,
            "W&B has the steps so far of 1 run; after the training, " + HINT,
        ]


@pytest.mark.parametrize("service", ["offline", "tensorboard"])
def test_a_service_that_only_gets_files_has_no_upload(service: str, run: RunFolder) -> None:
    with file_lock(lock_of(run.path, service), "the test"):
        (line,) = upload_lines([run.path], service, ["x"])
    assert "writing the files of 1 run continues in the background" in line
    assert "upload" not in line


def test_the_command_may_be_pasted() -> None:
    names = names_of([Path("results/runs/a b"), *map(Path, "cde")])
    assert sync_hint(names, "online").startswith("`normlab sync 'results/runs/a b' c d e` ")
    assert sync_hint(names[1:], "tensorboard").startswith("`normlab sync --to tensorboard c d e` ")


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
    ("option", "variable", "services"),
    [
        ("auto", "", ["auto"]),
        ("auto", "dryrun", ["offline"]),
        ("auto", "disabled", []),
        ("auto", "foo", []),
        ("off", "online", []),
        ("online", "disabled", ["online"]),
    ],
)
def test_services(option: str, variable: str, services: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    assert services_of(option, []) == services
    assert services_of(option, ["tensorboard"]) == [*services, "tensorboard"]


@pytest.mark.network
def test_a_sweep_reports_each_service(server: Server, tmp_path: Path) -> None:
    grid = overrides_of(tmp_path, "seed=0,1", "sweep.name=x", "tracking.wandb=offline", "tracking.also=[tensorboard]")
    done = call(tmp_path, None, "sweep", *grid)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()[-2:]
    assert lines[0].startswith("normlab: W&B: 2 runs, the first: `wandb sync results/runs/")
    assert lines[1] == "normlab: TensorBoard: 2 runs, `tensorboard --logdir results/runs` shows them"


@pytest.mark.network
def test_a_sweep_with_a_disabled_client_prints_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = disabled\n")
    done = call(tmp_path, server, "sweep", *overrides_of(tmp_path, "seed=0,1", "sweep.name=x", "tracking.wandb=auto"))
    assert (done.returncode, "W&B" in done.stderr, server.runs) == (0, False, {})


def test_a_folder_that_cannot_be_searched_has_no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", "x" * 5000)  # longer than a path may be
    assert not may_have_login()
