"""Weights & Biases: a best-effort mirror of the record. Its failures never stop a run.

W&B is imported when a run starts. A tracker works on a thread of its own, so that training waits for W&B at most ten
seconds at the start and at the end, even if W&B's process, its server or the disk hang. It prints its first failure in
one line on stderr and is silent afterwards; the local record has everything.
"""

from __future__ import annotations

import glob
import os
import queue
import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from normlab.config.schema import TrackingConfig
from normlab.errors import notify
from normlab.stats.profiles import Profiles
from normlab.store.status import Status
from normlab.store.throughput import Compute
from normlab.tracking.tracker import Row
from normlab.tracking.wandb_payloads import final_summary, flat_config, payloads, step_metrics
from normlab.tracking.wandb_service import SERVICE, kill_service, no_error_reports, start_run, wandb_environment

WAIT_S = 9.0
"""Longest wait for all trackers of a process to start, and to finish, in seconds."""
LAST_WAIT_S = 1.0
"""Longest further wait, in seconds, once W&B's process has been killed."""
NO_ANSWER = "did not answer and was stopped"
MAX_CALLS = 10_000
"""Most calls that wait for a tracker; a tracker that falls further behind is abandoned."""


class WandbTracker:
    """Mirrors a run to W&B, in `folder`/wandb and, online, to its server.

    No call waits for W&B or raises: a thread makes the calls in order. `wait_for_start` and `wait_for_finish` wait for
    all trackers of a process together.

    Args:
        tracking: Mode, project and labels. The mode `auto` is W&B's own setting (WANDB_MODE), or else online
            with a login and offline without.
        folder: Where W&B makes its own folder; made if needed.
    """

    def __init__(self, tracking: TrackingConfig, folder: Path) -> None:
        self.started, self.finished = threading.Event(), threading.Event()
        """Set by the thread, also after a failure. A join that Ctrl-C interrupts may return too early."""
        self.starts_online = False
        """Whether the run is starting online at this moment."""
        self.is_active = False
        """Whether the tracker has neither finished, failed nor been abandoned."""
        self._tracking = tracking
        self._folder = folder.absolute()  # the printed command works from any folder
        self._earlier: list[Path] = []
        """W&B's folders of earlier offline parts."""
        self._run: Any = None
        self._tokens_per_step = 0
        self._compute = Compute.parse({})
        self._failed = False
        self._sync_printed = False
        """Whether the command that uploads an offline run was printed."""
        self._calls: queue.Queue[tuple[str, Callable[[], None]]] = queue.Queue(MAX_CALLS)
        """The calls to make, each with the text of its failure."""

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Start a W&B run, or resume the one of this id; offline each part is a W&B run of its own."""
        self.is_active = True
        self._call("did not start", partial(self._start, run, first_step))
        threading.Thread(target=self._work, name="normlab W&B", daemon=True).start()

    def log(self, rows: Sequence[Row]) -> None:
        """Send an interval's rows: one W&B row for each step of `payloads`."""
        self._call("stopped", lambda: self._send(payloads(rows, self._tokens_per_step, self._compute)))

    def log_statistics(self, profiles: Profiles) -> None:
        """Send the statistics of a step."""
        self._call("stopped", lambda: self._send([self.statistics_payload(profiles)]))

    def finish(self, status: Status) -> None:
        """Write the summary and end the run; the exit code is 1 for a failed run, 0 for every other state."""
        self._call("did not finish", partial(self._finish, status))

    def abandon(self, why: str) -> None:
        """Print `why` and drop all waiting calls. The caller then kills W&B's process, so that the thread ends."""
        self.is_active, self._failed = False, True
        self._warn(why)
        with suppress(queue.Full):  # wakes a thread that waits for a call
            self._calls.put_nowait(("", lambda: None))

    def _call(self, failure: str, call: Callable[[], None]) -> None:
        if self.is_active:
            try:
                self._calls.put_nowait((failure, call))
            except queue.Full:
                self.abandon(NO_ANSWER)
                kill_service()

    def _work(self) -> None:
        """Make the calls until the run has finished or failed, or is abandoned."""
        while self.is_active:
            failure, call = self._calls.get()
            try:
                if self.is_active:
                    call()
            except Exception as error:
                self._failed = True
                if self.is_active:
                    self.is_active = False
                    self._warn(f"{failure}: {_one_line(error)}")
            self.started.set()
        SERVICE.leave(self, failed=self._failed)
        self.finished.set()

    def _start(self, run: Mapping[str, Any], first_step: int) -> None:
        config = run["config"]
        self._tokens_per_step = config["train"]["batch_size"] * config["model"]["context"]
        self._compute = Compute.parse(run)
        with SERVICE.init, no_error_reports():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._earlier = self._parts("offline-run", "*")
            environment = wandb_environment()
            mode: Any = environment.mode if self._tracking.wandb == "auto" else self._tracking.wandb
            if mode == "disabled":
                self.is_active = False
                return
            SERVICE.users.add(self)
            # Computed first, because an attempt to start online leaves a folder.
            offline_options = self.options(run, self._part(run, first_step, online=False))
            if mode != "online":
                self._run = start_run(mode=mode, **offline_options)
                return
            try:
                # Checked here, because W&B would prompt for a key on the terminal and wait.
                if not environment.has_login:
                    raise PermissionError("no login for W&B; `wandb login` makes one")
                if SERVICE.refusal:
                    raise ConnectionError(SERVICE.refusal)
                self.starts_online = True
                options = self.options(run, self._part(run, first_step, online=True))
                self._run = start_run(mode="online", resume="allow", **options)
            except Exception as error:
                if not self.is_active:
                    raise
                SERVICE.refusal = SERVICE.refusal or _one_line(error)
                # W&B's process reserves the id of a run that failed to start.
                if self.starts_online and SERVICE.users == {self}:
                    SERVICE.end()
                elif self.starts_online:
                    offline_options = self.options(run, self._part(run, first_step, online=False))
                self.starts_online = False
                self._run = start_run(mode="offline", **offline_options)
                self._warn(f"continues offline: {SERVICE.refusal}")
                self._sync_printed = True
            self.starts_online = False

    def _send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._run.log(row)

    def _finish(self, status: Status) -> None:
        self._run.summary.update(final_summary(status))
        self._run.finish(exit_code=int(status.state == "failed"))
        if self.is_active:
            self.is_active = False
            hint = self._sync_hint(with_this=self._run.offline)
            if hint and not self._sync_printed:
                _print(f"W&B was offline: {hint}")

    def statistics_payload(self, profiles: Profiles) -> dict[str, Any]:
        """Return a measured step's payload: numbers, and each profile as a histogram with a bin per layer."""
        from wandb import Histogram

        step = int(profiles.steps[-1])
        metrics = step_metrics(profiles, layers=self._tracking.layers)
        histograms: dict[str, Any] = {}
        for key, values in metrics.profiles.items():
            bins: Any = (values.tolist(), list(range(len(values) + 1)))
            histograms[key] = Histogram(np_histogram=bins)
        axis = {"train/step": step, "train/tokens": step * self._tokens_per_step}
        return {**axis, **metrics.numbers, **histograms}

    def _part(self, run: Mapping[str, Any], first_step: int, *, online: bool) -> str:
        """Return the suffix of the run's id for this part; empty where the id is free.

        `wandb sync` uploads an offline part as the first rows of its id and overwrites those on the server. So an
        offline part takes a new id, and an online part avoids the id of an offline part that is not uploaded yet.
        """
        run_id = self._id(run)
        if run_id is None:  # W&B draws a new one
            return ""
        if first_step == run.get("continued_from", {}).get("step"):
            first_step = 0  # the rows before it are sent again
        suffix = f"-from-{first_step}"
        candidates = ["", suffix] if online or first_step == 0 else [suffix]

        def is_free(part: str) -> bool:
            wandb_id = glob.escape(run_id + part)
            if online:
                return not any(map(_needs_sync, self._parts("offline-run", wandb_id)))
            return not self._parts("*run", wandb_id)

        return next(filter(is_free, chain(candidates, (f"{suffix}.{number}" for number in count(2)))))

    def _parts(self, kind: str, wandb_id: str) -> list[Path]:
        """Return W&B's folders of a kind (run, offline-run) and an id, oldest first; both may be patterns."""
        folders = self._folder.glob(f"wandb/{kind}-????????_??????-{wandb_id}")
        return sorted(folders, key=lambda folder: folder.name.partition("run-")[2])

    def _id(self, run: Mapping[str, Any]) -> str | None:
        """Return the run's id at W&B; None lets W&B choose. W&B's sweep agent or a variable may have set it."""
        chosen = {"WANDB_RUN_ID", "WANDB_SWEEP_ID"} & os.environ.keys()
        return os.environ.get("WANDB_RUN_ID") if chosen else run["run_id"]

    def _sync_hint(self, *, with_this: bool) -> str:
        """Return the text with the command that uploads what is not uploaded yet; empty if nothing is left.

        Args:
            with_this: Whether this part is to be uploaded, besides the earlier ones.
        """
        folders, flag = [str(folder) for folder in self._earlier if _needs_sync(folder)], []
        if with_this and self._run is not None:
            folders.append(self._run.settings.sync_dir)
            flag = [] if self._run.offline else ["--include-online"]
        if not folders:
            return ""
        return f"upload later with: {shlex.join(['wandb', 'sync', *flag, *folders])}"

    def _warn(self, problem: str) -> None:
        hint = self._sync_hint(with_this=True) or "W&B received no data"
        _print(f"W&B {problem}. The local record has everything; {hint}")

    def options(self, run: Mapping[str, Any], part: str = "") -> dict[str, Any]:
        """Return the arguments of `wandb.init` for a run, without mode and settings.

        Args:
            run: The content of run.json.
            part: Suffix of the run's id, for a part that is a W&B run of its own.
        """
        tracking, config = self._tracking, flat_config(run)
        labels = [config["norm"], config["placement"], config["corpus"]]
        run_id = self._id(run)
        return {
            "id": run_id and run_id + part,
            "name": (run["name"] or run["run_id"]) + part.partition(".")[0].replace("-from-", ", from step "),
            "project": tracking.project,
            "entity": tracking.entity,
            "group": tracking.group or f"{config['norm']}-{config['placement']}-d{config['depth']}",
            "job_type": tracking.job_type,
            # W&B refuses a tag of more than 64 characters.
            "tags": [tag[:64] for tag in dict.fromkeys([*tracking.tags, *labels])],
            "dir": str(self._folder),
            "config": config,
            # The caller may have an open W&B run of its own.
            "reinit": "create_new",
        }


def wait_for_start(trackers: Sequence[WandbTracker]) -> None:
    """Return when all trackers have started, or after `WAIT_S` and `LAST_WAIT_S` at most.

    If no tracker has started and one waits for the server, kill W&B's process; all then start offline. If some have
    started, the server answers: the others continue to start in the background, within W&B's own timeouts.
    """
    started = [tracker.started for tracker in trackers]
    if _wait(started, WAIT_S) == len(trackers) and any(tracker.starts_online for tracker in trackers):
        SERVICE.refusal = "it does not answer"
        kill_service()
        _wait(started, LAST_WAIT_S)


def wait_for_finish(trackers: Sequence[WandbTracker]) -> None:
    """Return when all trackers have finished, or after `WAIT_S` and `LAST_WAIT_S` at most; abandon the others."""
    _wait([tracker.finished for tracker in trackers if tracker.is_active], WAIT_S)
    abandon(trackers, NO_ANSWER)


def abandon(trackers: Sequence[WandbTracker], why: str = "was interrupted") -> None:
    """Abandon the active trackers, kill W&B's process, and give their threads `LAST_WAIT_S` to end."""
    active = [tracker for tracker in trackers if tracker.is_active]
    for tracker in active:
        tracker.abandon(why)
    if active:
        kill_service()
        _wait([tracker.finished for tracker in active], LAST_WAIT_S)


def _wait(events: Sequence[threading.Event], seconds: float) -> int:
    """Wait for all events, `seconds` in all; return how many are missing."""
    deadline = time.monotonic() + seconds
    return sum(not event.wait(max(0.0, deadline - time.monotonic())) for event in events)


def _needs_sync(folder: Path) -> bool:
    """Whether W&B's folder of a part has data that `wandb sync`, which leaves a marker, has not uploaded."""
    return any(folder.glob("*.wandb")) and not any(folder.glob("*.wandb.synced"))


def _print(line: str) -> None:
    with suppress(OSError, ValueError):
        notify(line)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split()).rstrip(".")
