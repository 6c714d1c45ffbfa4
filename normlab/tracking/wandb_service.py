"""W&B on this machine: its settings and login, its process wandb-core, and the start of a run there."""

from __future__ import annotations

import netrc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from normlab.tracking.wandb_payloads import SUMMARIZED_BY_MAX

SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_git": True,
    "disable_code": True,
    "save_code": False,
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_save_requirements": False,
    "init_timeout": 10.0,
    "finish_timeout": 8.0,
    "finish_timeout_raises": True,
    "x_transaction_log_flush_interval": 2.0,
}
"""No output, no data about the machine, and bounded waits: 8 s for W&B's server at the end, and 2 s of rows that are
not yet on disk. The trackers' `WAIT_S` ends before `init_timeout`, so that the two never coincide. Settings that the
installed version lacks are left out."""


class WandbEnvironment(NamedTuple):
    """W&B's settings on this machine."""

    mode: str
    """Mode of `tracking.wandb=auto`: online, offline, disabled, ..."""
    host: str
    """Host name of the server."""
    has_login: bool
    """Whether there are credentials for the server."""


def wandb_environment() -> WandbEnvironment:
    """Return W&B's mode, host and login from its settings and variables; sends and starts nothing."""
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    mode = {"run": "online", "dryrun": "offline"}.get(settings.mode, settings.mode)
    has_login = _has_login(settings)
    if mode == "online" and not has_login:
        mode = "offline"
    return WandbEnvironment(mode, urlsplit(settings.base_url).netloc, has_login)


def start_run(**options: Any) -> Any:
    """Start a W&B run; `options` are those of `wandb.init`, without settings."""
    import wandb

    available = wandb.Settings.model_fields
    settings = wandb.Settings(**{key: value for key, value in SETTINGS.items() if key in available})
    run = wandb.init(settings=settings, **options)
    # W&B counts the steps of each part from 0, so the axis is `train/step`.
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    run.define_metric("eval/loss", step_metric="train/step", summary="min")
    for key in SUMMARIZED_BY_MAX:
        run.define_metric(key, step_metric="train/step", summary="max")
    return run


def _has_login(settings: Any) -> bool:
    """Whether W&B finds credentials for its server without a prompt."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.api_key:
        return True
    try:
        entries = netrc.netrc(os.path.expanduser(os.environ.get("NETRC") or "~/.netrc"))
    except (OSError, netrc.NetrcParseError):
        return False
    entry = entries.authenticators(urlsplit(settings.base_url).netloc)
    return bool(entry and entry[2])


@contextmanager
def no_error_reports() -> Iterator[None]:
    """Turn off W&B's reports about its own errors, which only an environment variable can; then restore it."""
    before = os.environ.get("WANDB_ERROR_REPORTING")
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_ERROR_REPORTING"]
        else:
            os.environ["WANDB_ERROR_REPORTING"] = before


class Service:
    """W&B's process, wandb-core, which all trackers of this process share."""

    def __init__(self) -> None:
        self.init = threading.Lock()
        """Held while a run starts: W&B starts its process and its runs one at a time."""
        self.refusal = ""
        """Why the server rejected a run; the other runs that share the process then start offline."""
        self.users: set[object] = set()
        self._lock = threading.Lock()
        self._failed = False

    def leave(self, tracker: object, *, failed: bool) -> None:
        """Remove a user; end the process after the last one if one of them failed.

        Otherwise W&B's exit hook would wait for the unsent rows of a failed run, and a later run would reuse the
        process.
        """
        with self._lock:
            self.users.discard(tracker)
            self._failed |= failed
            if not self.users:
                if self._failed:
                    self.end()
                self._failed, self.refusal = False, ""

    def end(self) -> None:
        """Kill the process and make W&B discard it, which ends every W&B run of this process."""
        kill_service()
        if "wandb" in sys.modules:
            # teardown raises if the process is gone, and may call sys.exit; by then it has released everything.
            with suppress(Exception, SystemExit):
                import wandb

                wandb.teardown()


SERVICE = Service()


def kill_service() -> None:
    """Kill the processes that W&B started from this one, on Linux; what they wrote stays.

    Calls that wait for them then fail. W&B offers no public handle on them.
    """
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, task.read_text().split()):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core":
                    os.kill(pid, signal.SIGKILL)
