"""Fixtures of all tests: a working folder, a cache and a results folder, and the corpus in the repository."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from normlab.system.openmp import limit_spinning

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from slurm_cluster import SlurmCluster

# Before any import of the hub's libraries, which read it once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before any import of torch, as in a run.
limit_spinning()
# One test runs on each core, and bits must not depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A failed assertion of a helper shows its values.
pytest.register_assert_rewrite("support")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell started the tests in the background. Child processes would inherit that and ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses the browser or Slurm, and the cases that `few` leaves to `scripts/test --all`."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        for name in {"browser", "slurm"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(name)
        if (few := item.get_closest_marker("few")) and not item.get_closest_marker("exhaustive"):
            cases.setdefault((item.nodeid.partition("[")[0], few.args[0]), []).append(item)
    for (_, few), of_a_test in cases.items():
        kept = {round(index * (len(of_a_test) - 1) / max(few - 1, 1)) for index in range(few)}
        for index, item in enumerate(of_a_test):
            if index not in kept:
                item.add_marker("exhaustive")


@pytest.fixture(scope="session", autouse=True)
def _isolated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's working folder, cache and W&B login out of the tests; all tests of a worker share one cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("working"))
        for name in [*filter(re.compile("WANDB_|NETRC$").match, os.environ)]:
            patch.delenv(name)
        patch.setenv("NORMLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        # It takes milliseconds and protects from power failures only; processes that tests kill have the real one.
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def _working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test in its own folder: the default results folder is `results` of the working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _plugins() -> Iterator[None]:
    """Forget the plugins of every test: tests have norms of the same name."""
    from support.plugins import forget_plugins

    with forget_plugins():
        yield


@pytest.fixture(scope="session")
def slurm(_isolated: None) -> Iterator[SlurmCluster]:
    """Return a Slurm cluster of one node; without Slurm skip the test, or fail if `NORMLAB_SLURM=required` is set."""
    from slurm_cluster import SlurmCluster, missing

    if problem := missing():
        give_up = pytest.fail if os.environ.get("NORMLAB_SLURM") == "required" else pytest.skip
        give_up(f"cannot start a Slurm cluster: {problem}")
    # Not pytest's folder, whose path may be too long for a socket.
    with tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as home:
        cluster = SlurmCluster(Path(home))
        os.environ.update(cluster.environment)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
            os.environ.pop("SLURM_CONF")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a disk of its own, of 2 MiB."""
    from support.disk import small_disk

    with small_disk(tmp_path / "disk") as place:
        yield place


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """Return the overrides of a small run with results in the test's folder."""
    from support.small_run import small_run  # after register_assert_rewrite

    return small_run(tmp_path / "results")


@pytest.fixture
def run_command(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that calls the command line in this process and returns (exit code, stdout, stderr)."""
    from normlab.cli import main

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = 0
        try:
            main(list(arguments))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.fixture
def command(tmp_path: Path, run_command: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs `normlab train` with OVERRIDES: exit code, stdout, stderr."""
    from support.run_folders import OVERRIDES
    from support.small_run import without_replaced

    def train(*overrides: str) -> tuple[int, str, str]:
        return run_command("train", *without_replaced([*OVERRIDES, f"results_dir={tmp_path / 'results'}", *overrides]))

    return train


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of OVERRIDES, on one thread."""
    import torch

    from normlab.config.compose import compose_run
    from normlab.training.start import train
    from support.run_folders import OVERRIDES

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = tmp_path_factory.mktemp("reference")
    outcome = train(compose_run([*OVERRIDES, f"results_dir={results}"]))
    torch.set_num_threads(threads)
    assert outcome.state == "finished"
    return outcome.folder.path


@pytest.fixture
def run_without_root_privileges() -> Callable[..., tuple[int, str, str]]:
    """Return a function that calls the command line in a process without root's access to any file."""
    before: list[str] = []
    if os.geteuid() == 0:
        before = ["setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search,-fowner"]
        if shutil.which("setpriv") is None or subprocess.run([*before, "true"], capture_output=True).returncode:
            pytest.skip("needs setpriv to drop root's capabilities")

    def call(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run([*before, sys.executable, "-m", "normlab", *arguments], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a browser for the tests of one module.

    `asyncio.run` fails while Playwright's driver runs, so the browser must not live for the session.
    """
    from support.browser import start_browser  # only these tests need Playwright

    with start_browser() as chromium:
        yield chromium
