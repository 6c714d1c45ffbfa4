"""Weights & Biases: a best-effort mirror of the record. Its failures never stop a run.

W&B is imported when a run starts. A tracker works on a thread of its own, so that training waits for W&B at most ten
seconds at the start and at the end, even if W&B's process, its server or the disk hang. It prints its first failure in
one line on stderr and is silent afterwards; the local record has everything.
"""

from __future__ import annotations

import glob
import math
import netrc
import os
import queue
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from normlab.config.schema import TrackingConfig
from normlab.errors import notify
from normlab.stats.profiles import Profiles
from normlab.store.outcome import final_losses
from normlab.store.status import Status
from normlab.tracking.base import Row
from normlab.tracking.step_metrics import SUMMARIZED_BY_MAX, step_metrics

WAIT_S = 9.0
"""Longest wait for all trackers of a process to start, and to finish, in seconds."""
LAST_WAIT_S = 1.0
"""Longest further wait, in seconds, once W&B's process has been killed."""
NO_ANSWER = "does not answer and is abandoned"
MAX_CALLS = 10_000
"""Most calls that wait for a tracker; a tracker that falls further behind is abandoned."""
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
not yet on disk. `WAIT_S` ends before `init_timeout`, so that the two never coincide. Settings that the installed
version lacks are left out."""


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
        self._call("stopped", lambda: self._send(payloads(rows, self._tokens_per_step)))

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
        _SERVICE.leave(self, failed=self._failed)
        self.finished.set()

    def _start(self, run: Mapping[str, Any], first_step: int) -> None:
        config = run["config"]
        self._tokens_per_step = config["train"]["batch_size"] * config["model"]["context"]
        with _SERVICE.init, _no_error_reports():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._earlier = self._parts("offline-run", "*")
            environment = wandb_environment()
            mode: Any = environment.mode if self._tracking.wandb == "auto" else self._tracking.wandb
            if mode == "disabled":
                self.is_active = False
                return
            _SERVICE.users.add(self)
            # Computed first, because an attempt to start online leaves a folder.
            offline_options = self.options(run, self._part(run, first_step, online=False))
            if mode != "online":
                self._run = _start_run(mode=mode, **offline_options)
                return
            try:
                # Checked here, because W&B would prompt for a key on the terminal and wait.
                if not environment.has_login:
                    raise PermissionError("no login for W&B; `wandb login` makes one")
                if _SERVICE.refusal:
                    raise ConnectionError(_SERVICE.refusal)
                self.starts_online = True
                options = self.options(run, self._part(run, first_step, online=True))
                self._run = _start_run(mode="online", resume="allow", **options)
            except Exception as error:
                if not self.is_active:
                    raise
                _SERVICE.refusal = _SERVICE.refusal or _one_line(error)
                # W&B's process reserves the id of a run that failed to start.
                if self.starts_online and _SERVICE.users == {self}:
                    _SERVICE.end()
                elif self.starts_online:
                    offline_options = self.options(run, self._part(run, first_step, online=False))
                self.starts_online = False
                self._run = _start_run(mode="offline", **offline_options)
                self._warn(f"continues offline: {_SERVICE.refusal}")
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
        hint = self._sync_hint(with_this=True) or "W&B got nothing"
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
        _SERVICE.refusal = "it does not answer"
        kill_service()
        _wait(started, LAST_WAIT_S)


def wait_for_finish(trackers: Sequence[WandbTracker]) -> None:
    """Return when all trackers have finished, or after `WAIT_S` and `LAST_WAIT_S` at most; abandon the others."""
    _wait([tracker.finished for tracker in trackers if tracker.is_active], WAIT_S)
    abandon(trackers, NO_ANSWER)


def abandon(trackers: Sequence[WandbTracker], why: str = "is not waited for") -> None:
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


def payloads(rows: Sequence[Row], tokens_per_step: int) -> list[dict[str, float]]:
    """Return an interval's payloads, oldest first: a dict per step, with its evaluation and pace merged in.

    Only the last training row is sent, because a call of W&B's for each step is too expensive. It carries the largest
    loss of the interval (NaN if one was), so that a spike in between is visible.
    """
    training = [row for row in rows if row["kind"] == "train"]
    merged: dict[int, dict[str, float]] = {}
    for row in [*training[-1:], *(row for row in rows if row["kind"] != "train")]:
        step = row["step"]
        payload = merged.setdefault(step, {"train/step": step, "train/tokens": step * tokens_per_step})
        payload |= {name: row[key] for key, name in _NAMES[row["kind"]].items() if key in row}
    if training:
        losses = (row["loss"] for row in training)
        merged[training[-1]["step"]]["train/loss_max"] = max(losses, key=lambda x: (math.isnan(x), x))
    return [merged[step] for step in sorted(merged)]


def final_summary(status: Status) -> dict[str, Any]:
    """Return what the W&B summary holds of the last status: state, outcome, losses and the number of spikes."""
    summary: dict[str, Any] = {key: getattr(status, key) for key in ("state", "outcome", "best_val_loss")}
    summary["val_loss"], summary["last_val_loss"] = final_losses(status.state, status.val_loss)
    summary |= {f"spike/{rule}": spikes["spikes"] for rule, spikes in (status.spikes or {}).items()}
    return {key: value for key, value in summary.items() if value is not None}


_NAMES = {
    "train": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "clip": "train/clip_coef",
        "lr": "train/lr",
    },
    "eval": {"loss": "eval/loss", "loss_batch_statistics": "eval/loss_batch_statistics"},
    "pace": {"tokens_per_s": "perf/tokens_per_s", "seconds": "perf/seconds"},
}


def flat_config(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the W&B config of a run: settings to group by at the top level, and the full tree under `config`."""
    config, resolved, corpus = run["config"], run["resolved"], run["corpus"]
    model, train = config["model"], config["train"]
    return {
        "norm": config["norm"]["preset"] or config["norm"]["name"],
        "placement": config["placement"]["name"],
        "model": model["preset"],
        **{key: model[key] for key in ("depth", "width", "heads", "context")},
        "seed": config["seed"],
        "data_seed": config["data"]["seed"],
        "optim": config["optim"]["name"],
        "lr": config["optim"]["lr"],
        "batch_size": train["batch_size"],
        "steps": train["steps"],
        "tokens": train["steps"] * train["batch_size"] * model["context"],
        **{key: resolved[key] for key in ("init", "device", "precision")},
        "corpus": corpus["name"],
        "corpus_sha256": corpus["sha256"],
        "vocab_size": corpus["vocab_size"],
        "baselines": corpus["baselines"],
        "fingerprint": run.get("fingerprint"),  # older records have none
        "causal": run["norm"]["causal"],
        "config": config,
        "versions": run["versions"],
        "git": run["git"],
    }


def _start_run(**options: Any) -> Any:
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
def _no_error_reports() -> Iterator[None]:
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


class _Service:
    """W&B's process, wandb-core, which all trackers of this process share."""

    def __init__(self) -> None:
        self.init = threading.Lock()
        """Held while a run starts: W&B starts its process and its runs one at a time."""
        self.refusal = ""
        """Why the server rejected a run; the other runs that share the process then start offline."""
        self.users: set[WandbTracker] = set()
        self._lock = threading.Lock()
        self._failed = False

    def leave(self, tracker: WandbTracker, *, failed: bool) -> None:
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


_SERVICE = _Service()


def kill_service() -> None:
    """Kill the processes that W&B started from this one, on Linux; what they wrote stays.

    Calls that wait for them then fail. W&B offers no public handle on them.
    """
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, task.read_text().split()):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core":
                    os.kill(pid, signal.SIGKILL)


def _needs_sync(folder: Path) -> bool:
    """Whether W&B's folder of a part has data that `wandb sync`, which leaves a marker, has not uploaded."""
    return any(folder.glob("*.wandb")) and not any(folder.glob("*.wandb.synced"))


def _print(line: str) -> None:
    with suppress(OSError, ValueError):
        notify(line)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split()).rstrip(".")
