"""Weights & Biases: a best-effort mirror of the record. Its failures never stop a run.

W&B is imported when a run starts. The sink prints its first failure in one line on stderr and is silent afterwards; the
local record has everything.
"""

from __future__ import annotations

import glob
import math
import netrc
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from normlab.config.schema import TrackingConfig
from normlab.stats.profiles import Profiles
from normlab.store.outcome import final_losses
from normlab.tracking.base import Row
from normlab.tracking.step_metrics import SUMMARIZED_BY_MAX, step_metrics

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
not yet on disk. At the start `background.WAIT_S` ends before `init_timeout`, so that the two never coincide. Settings
that the installed version lacks are left out."""


class WandbSink:
    """Mirrors a run to W&B, in `folder`/wandb and, online, to its server.

    Args:
        tracking: Mode, project and labels. The mode `auto` is W&B's own setting (WANDB_MODE), or else online
            with a login and offline without.
        folder: Where W&B makes its own folder; made if needed.
    """

    def __init__(self, tracking: TrackingConfig, folder: Path) -> None:
        self._tracking = tracking
        self._folder = folder.absolute()  # the printed command works from any folder
        self._earlier: list[Path] = []
        """W&B's folders of earlier offline parts."""
        self._run: Any = None
        self._tokens_per_step = 0
        self._cut_off = False
        self._tries_online = False
        self._sync_printed = False
        """Whether the command that uploads an offline run was printed."""
        self._closed = False
        """Whether the sink has nothing more to do or to print."""

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Start a W&B run, or resume the one of this id; offline each part is a W&B run of its own."""
        config = run["config"]
        self._tokens_per_step = config["train"]["batch_size"] * config["model"]["context"]
        with _SERVICE.init, self._guarded("did not start"), _no_error_reports():
            self._earlier = self._parts("offline-run", "*")
            self._run = self._init(run, first_step)
            self._closed = self._closed or self._run is None

    def log(self, rows: Sequence[Row]) -> None:
        """Send an interval's rows: one W&B row for each step of `payloads`."""
        if self._run is not None:
            with self._guarded("stopped"):
                for payload in payloads(rows, self._tokens_per_step):
                    self._run.log(payload)

    def log_statistics(self, profiles: Profiles) -> None:
        """Send the statistics of a step."""
        if self._run is not None:
            with self._guarded("stopped"):
                self._run.log(self.statistics_payload(profiles))

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

    def finish(self, status: Mapping[str, Any]) -> None:
        """Write the summary and end the run; the exit code is 1 for a failed run, 0 for every other state."""
        if self._run is not None:
            with self._guarded("did not finish"):
                summary = {key: status.get(key) for key in ("state", "outcome", "best_val_loss")}
                summary["val_loss"], summary["last_val_loss"] = final_losses(status["state"], status.get("val_loss"))
                summary |= {f"spike/{rule}": spikes["spikes"] for rule, spikes in status.get("spikes", {}).items()}
                self._run.summary.update({key: value for key, value in summary.items() if value is not None})
                self._run.finish(exit_code=int(status["state"] == "failed"))
                hint = self._sync_hint(with_this=self._run.offline)
                if hint and not self._sync_printed and not self._closed:
                    _print(f"W&B was offline: {hint}")
                self._run, self._closed = None, True
                _SERVICE.leave(self)

    def cut_off(self) -> bool:
        """Return whether the run is starting online; if so, it starts offline once W&B's process is killed."""
        self._cut_off = self._tries_online
        return self._tries_online

    def abandon(self, why: str) -> None:
        """Print `why` unless the run has finished, and print nothing more."""
        if not self._closed:
            self._closed = True
            self._warn(why)

    def release(self) -> None:
        """Discard W&B's killed process; called from the sink's own thread."""
        self._run = None
        _SERVICE.leave(self)
        _SERVICE.end()

    def _init(self, run: Mapping[str, Any], first_step: int) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = wandb_environment()
        mode: Any = environment.mode if self._tracking.wandb == "auto" else self._tracking.wandb
        if mode == "disabled":
            return None
        _SERVICE.enter(self)
        # Computed first, because an attempt to start online leaves a folder.
        offline_options = self.options(run, self._part(run, first_step, online=False))
        if mode != "online":
            return _start_run(mode=mode, **offline_options)
        try:
            # Checked here, because W&B would prompt for a key on the terminal and wait.
            if not environment.has_login:
                raise PermissionError("no login for W&B; `wandb login` makes one")
            if _SERVICE.refusal:
                raise ConnectionError(_SERVICE.refusal)
            self._tries_online = True
            options = self.options(run, self._part(run, first_step, online=True))
            self._run = _start_run(mode="online", resume="allow", **options)
        except Exception as error:
            if self._closed:
                raise
            reason = self._reason(error)
            why = _SERVICE.refusal = _SERVICE.refusal or reason
            if self._tries_online:
                # W&B's process reserves the id of a run that failed to start.
                if _SERVICE.is_used_only_by(self):
                    _SERVICE.end()
                else:
                    offline_options = self.options(run, self._part(run, first_step, online=False))
            self._run = _start_run(mode="offline", **offline_options)
            self._warn(f"continues offline: {why}")
            self._sync_printed = True
        self._tries_online = False
        return self._run

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

    @contextmanager
    def _guarded(self, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._closed:
                self._warn(f"{problem}: {self._reason(error)}")
            self._run, self._closed = None, True
            _SERVICE.leave(self, failed=True)

    def _reason(self, error: Exception) -> str:
        """Return the error as text; an error that `cut_off` caused means that W&B did not answer."""
        cut_off, self._cut_off = self._cut_off, False
        return "it does not answer" if cut_off else _one_line(error)


@dataclass(frozen=True, slots=True)
class WandbEnvironment:
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
    """W&B's process, wandb-core, which all sinks of this process share."""

    def __init__(self) -> None:
        self.init = threading.Lock()
        """Held while a run starts: W&B starts its process and its runs one at a time."""
        self.refusal = ""
        """Why the server rejected a run; the other runs that share the process then start offline."""
        self._lock = threading.Lock()
        self._users: set[WandbSink] = set()
        self._failed = False

    def enter(self, sink: WandbSink) -> None:
        """Add a user."""
        with self._lock:
            self._users.add(sink)

    def is_used_only_by(self, sink: WandbSink) -> bool:
        """Whether no other sink uses the process."""
        with self._lock:
            return self._users <= {sink}

    def leave(self, sink: WandbSink, *, failed: bool = False) -> None:
        """Remove a user; end the process after the last one if one of them failed.

        Otherwise W&B's exit hook would wait for the unsent rows of a failed run, and a later run would reuse the
        process.
        """
        with self._lock:
            self._users.discard(sink)
            self._failed |= failed
            if not self._users:
                if self._failed:
                    self.end()
                self._failed, self.refusal = False, ""

    def end(self) -> None:
        """Kill the process and make W&B discard it, which ends every W&B run of this process."""
        end_service()
        if "wandb" in sys.modules:
            # teardown raises if the process is gone, and may call sys.exit; by then it has released everything.
            with suppress(Exception, SystemExit):
                import wandb

                wandb.teardown()


_SERVICE = _Service()


def end_service() -> None:
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
        print(f"normlab: {line}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split()).rstrip(".")
