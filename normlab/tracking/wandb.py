"""A run at Weights & Biases. Only the follower's process imports this module, and with it wandb."""

import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from normlab.base.errors import NormlabError
from normlab.store.format import FAILED, KILLED
from normlab.tracking.payloads import Payload, config_of
from normlab.tracking.uploads import WANDB, Upload, current_name, may_have_login

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


def wandb_environment() -> tuple[str, str]:
    """Return the mode of `tracking.wandb=auto` (online, offline, disabled, ..., or `NO_LOGIN`), and the server's host.

    They are those of W&B's settings and variables; nothing is sent or started.
    """
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    mode = current_name(settings.mode)
    has_login = mode != "online" or settings.api_key or may_have_login()
    return mode if has_login else NO_LOGIN, urlsplit(settings.base_url).netloc


def restart_client() -> None:
    """End W&B's process. It refuses to start a run again that it failed to start; the next start uses a new process."""
    import wandb

    with contextlib.suppress(ConnectionError):  # it was killed
        wandb.teardown()


class WandbRun:
    """A run at W&B, where the step of a row is the training step.

    Online, it continues the W&B run of the same id, and `next_step` is the first step that the server lacks; W&B's own
    files are deleted at the end, and at the next start. Offline, the run is written anew. The caller holds the lock of
    the run. Without the id of the training `process`, there are no system metrics. `finish` ends the run at W&B only
    if it `may_end`.

    Raises:
        Exception: W&B did not start the run.
    """

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        labels: Mapping[str, Any],
        mode: str,
        process: int | None,
        *,
        may_end: bool,
    ) -> None:
        tracking, self._is_online = run["config"]["tracking"], mode == "online"
        self._files = folder / WANDB
        shutil.rmtree(self._files, ignore_errors=True)
        self._settings = SETTINGS | {
            "x_stats_pid": process or os.getpid(), "x_disable_stats": process is None, "x_update_finish_state": may_end,
        }  # fmt: skip
        self._options: dict[str, Any] = {
            **labels,
            "id": folder.name,
            "resume": "allow" if self._is_online else None,
            "mode": mode,
            "project": tracking["project"],
            "entity": tracking["entity"],
            "config": config_of(run),
            "dir": str(folder),
            "reinit": "create_new",
        }
        self._run = self._open()
        self.next_step = self._first_step = 0
        self.upload = Upload(WANDB)
        if self._is_online:
            self.next_step = self._first_step = int(self._run.starting_step)
            self.upload = Upload(self._run.url)

    def _open(self) -> Any:
        """Start the run at W&B, or continue it."""
        import wandb

        available = wandb.Settings.model_fields
        settings = wandb.Settings(**{key: value for key, value in self._settings.items() if key in available})
        return wandb.init(**self._options, settings=settings)

    def log(self, step: int, payload: Payload) -> None:
        self._run.log(payload, step=step)
        self.next_step = step + 1

    def finish(self, summary: Mapping[str, Any], state: str) -> None:
        """Send the summary, and wait until the server has everything.

        W&B's client drops the rows that the server rejects, without an error, so the run is started again to see
        whether the server has the last step.

        Raises:
            Exception: The server does not have everything.
        """
        exit_code = int(state in (FAILED, KILLED))
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=exit_code)
        deadline = time.monotonic() + CHECK_S
        while self._is_online and self.next_step > self._first_step:
            run = self._open()
            step = int(run.starting_step)
            run.finish(exit_code=exit_code)
            if step >= self.next_step:
                break
            if time.monotonic() > deadline:
                raise NormlabError(f"the server has the steps before {step} of {self.next_step}")
            time.sleep(2)
        if self._is_online:
            shutil.rmtree(self._files, ignore_errors=True)  # the record has all numbers
