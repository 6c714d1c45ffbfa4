"""A run at Weights & Biases. Only the follower's process imports this module, and with it wandb."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from normlab.errors import NormlabError
from normlab.store.format import FAILED, KILLED
from normlab.tracking.payloads import Labels, Payload
from normlab.tracking.settings import current_name, has_credentials
from normlab.tracking.uploads import Upload

SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "x_stats_track_process_tree": True,
    "init_timeout": 60.0,
    "x_file_stream_retry_wait_max_seconds": 10.0,
    "x_graphql_retry_wait_max_seconds": 10.0,
    "finish_timeout": 300.0,
    "finish_timeout_raises": True,
}
"""No output, and no data about the machine except system metrics. Settings that the installed version does not have are
left out."""


NO_LOGIN = "no login"
"""The mode where W&B would ask for a login."""
CHECK_S = 10.0
"""Seconds that the server has to show the last step after the end of the upload."""


class WandbEnvironment(NamedTuple):
    """W&B's settings on this machine."""

    mode: str
    """Mode of `tracking.wandb=auto`: online, offline, disabled, ..., or `NO_LOGIN`."""
    host: str
    """Host name of the server."""


def wandb_environment() -> WandbEnvironment:
    """Return W&B's mode and host from its settings and variables; sends and starts nothing.

    Importing wandb makes two temporary folders, for media and artifacts, which normlab never sends. They are deleted at
    once, because a killed process could not delete them.
    """
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as tempfile.tempdir:
        try:
            import wandb
        finally:
            tempfile.tempdir = before
    settings = wandb.setup(wandb.Settings(silent=True)).settings
    mode, host = current_name(settings.mode), urlsplit(settings.base_url).netloc
    if mode == "online" and not (settings.api_key or has_credentials(host)):
        mode = NO_LOGIN
    return WandbEnvironment(mode, host)


def restart_client() -> None:
    """End W&B's process. It refuses to start a run again that it failed to start; the next start uses a new process."""
    import wandb

    with contextlib.suppress(ConnectionError):  # it was killed
        wandb.teardown()


class WandbRun:
    """A run at W&B, where the step of a row is the training step.

    Online, it continues the W&B run of the same id, and `next_step` is the first step that the server lacks. W&B's own
    files are temporary, because the record has all numbers. Offline, the run is written anew to `folder`/wandb. The
    caller holds the lock of the run.

    Args:
        folder: The run's folder.
        config: The options and the record of the run.
        labels: Its labels.
        tracking: The options `tracking.*`.
        mode: online or offline.
        process: Id of the training process for the system metrics; None: no system metrics.
        may_end: Whether `finish` ends the run at W&B.

    Raises:
        Exception: W&B did not start the run.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        labels: Labels,
        tracking: Mapping[str, Any],
        mode: str,
        process: int | None,
        *,
        may_end: bool = True,
    ) -> None:
        known = Upload.read(folder, mode)
        run_id = os.environ.get("WANDB_RUN_ID") or known.id or folder.name
        self._temporary = folder / "wandb-temporary" if mode == "online" else None
        self.close()  # a killed follower leaves files
        if self._temporary is not None:
            self._temporary.mkdir(exist_ok=True)
        else:
            for old in (folder / "wandb").glob("offline-run-*"):
                if old.name.endswith(f"-{run_id}"):
                    shutil.rmtree(old, ignore_errors=True)
        self._settings = SETTINGS | {
            "x_stats_pid": process or os.getpid(), "x_disable_stats": process is None, "x_update_finish_state": may_end,
        }  # fmt: skip
        self._options: dict[str, Any] = {
            "id": run_id,
            "resume": "allow" if mode == "online" else None,
            "mode": "online" if mode == "online" else "offline",
            "name": labels.name,
            "group": labels.group,
            "job_type": labels.job_type,
            "tags": labels.tags,
            "project": known.project or tracking["project"],
            "entity": known.entity or tracking["entity"],
            "config": dict(config),
            "dir": str(self._temporary or folder),
            "reinit": "create_new",
        }
        try:
            self._run = self._open()
        except BaseException:
            self.close()
            raise
        if mode == "online":
            self.next_step = self._first_step = int(self._run.starting_step)
            self.upload = Upload(run_id, self._run.project, self._run.entity, self._run.url, self.next_step)
        else:
            self.next_step = 0
            path = os.path.relpath(self._run.settings.sync_dir, folder)
            self.upload = replace(known, where=path, steps=0, problem="")

    def _open(self) -> Any:
        """Start the run at W&B, or continue it."""
        import wandb

        available = wandb.Settings.model_fields
        settings = wandb.Settings(**{key: value for key, value in self._settings.items() if key in available})
        return wandb.init(**self._options, settings=settings)

    def log(self, step: int, payload: Payload) -> None:
        """Send the numbers of a step."""
        self._run.log(payload, step=step)
        self.next_step = step + 1

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        """Send the summary, and wait until the server has everything.

        Raises:
            Exception: The server does not have everything.
        """
        exit_code = int(state in (FAILED, KILLED))
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=exit_code)
        if self._temporary is not None and self.next_step > self._first_step:
            self._check_server(exit_code)

    def close(self) -> None:
        """Delete W&B's own files of an online run."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _check_server(self, exit_code: int) -> None:
        """Check, by another start of the run, that the server has the last step.

        W&B's client drops the rows that the server rejects, without an error.

        Raises:
            NormlabError: It does not have the step within `CHECK_S`.
        """
        deadline = time.monotonic() + CHECK_S
        while True:
            run = self._open()
            step = int(run.starting_step)
            run.finish(exit_code=exit_code)
            if step >= self.next_step:
                return
            if time.monotonic() > deadline:
                raise NormlabError(f"the server has the steps before {step} of {self.next_step}")
            time.sleep(2)
