"""Weights & Biases: a mirror of the record, best effort. Whatever becomes of it, the run goes on.

W&B is imported when a run starts and not before. The first thing that goes wrong is said in one line on
stderr, and from then on the sink is silent; the local record has everything.
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

from normlab.config import TrackingConfig
from normlab.stats.profiles import Profiles
from normlab.store.outcome import final_losses
from normlab.tracking.base import Row
from normlab.tracking.inside import SUMMED_BY_MAX, keys_of

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
"""Quiet, nothing taken from the machine, and bounded waits: at most 8 s for W&B's server at the end, and at most
2 s of rows not yet on disk. At the beginning whoever waits cuts W&B off before its own time is over, so that the
two never come at once. Those that the installed version does not know are left out."""


class WandbSink:
    """Mirrors a run to W&B, in `folder`/wandb and, online, to its server.

    Args:
        tracking: Mode, project and labels. `auto` is what W&B itself is set to (WANDB_MODE), or else online
            with a login and offline without.
        folder: Where W&B makes its own folder; created if need be.
    """

    def __init__(self, tracking: TrackingConfig, folder: Path) -> None:
        self._tracking = tracking
        self._folder = folder.absolute()  # the command that is named works from anywhere
        self._earlier: list[Path] = []
        """W&B's folders of the offline parts before this one."""
        self._run: Any = None
        self._tokens_per_step = 0
        self._cut_off = False
        self._tries_online = False
        self._told = False
        """Whether the command that sends an offline run has been named."""
        self._over = False
        """Whether there is nothing more to do or to say."""

    def start(self, run: Mapping[str, Any], first_step: int) -> None:
        """Begin a W&B run, or go on with the one of this id; offline each part is a W&B run of its own."""
        config = run["config"]
        self._tokens_per_step = config["train"]["batch_size"] * config["model"]["context"]
        with _SERVICE.init, self._guarded("did not start"), _no_error_reports():
            self._earlier = self._parts("offline-run", "*")
            self._run = self._init(run, first_step)
            self._over = self._over or self._run is None

    def log(self, rows: Sequence[Row]) -> None:
        """Send an interval's rows: one W&B row for each step that has something besides the training loss."""
        if self._run is not None:
            with self._guarded("stopped"):
                for payload in payloads(rows, self._tokens_per_step):
                    self._run.log(payload)

    def look(self, profiles: Profiles) -> None:
        """Send what was seen inside a step."""
        if self._run is not None:
            with self._guarded("stopped"):
                self._run.log(self.inside(profiles))

    def inside(self, profiles: Profiles) -> dict[str, Any]:
        """What W&B is told of a measured step: numbers, and each profile as a histogram whose bins are the places."""
        from wandb import Histogram

        step = int(profiles.steps[-1])
        told = keys_of(profiles, layers=self._tracking.layers)
        shapes: dict[str, Any] = {}
        for key, values in told.profiles.items():
            bins: Any = (values.tolist(), list(range(len(values) + 1)))
            shapes[key] = Histogram(np_histogram=bins)
        axis = {"train/step": step, "train/tokens": step * self._tokens_per_step}
        return {**axis, **told.numbers, **shapes}

    def finish(self, status: Mapping[str, Any]) -> None:
        """Write the summary and end the run; its exit code is 1 for a failed run, 0 for every other end."""
        if self._run is not None:
            with self._guarded("did not finish"):
                summary = {key: status.get(key) for key in ("state", "outcome", "best_val_loss")}
                summary["val_loss"], summary["last_val_loss"] = final_losses(status["state"], status)
                summary |= {f"spike/{rule}": found["spikes"] for rule, found in status.get("spikes", {}).items()}
                self._run.summary.update({key: value for key, value in summary.items() if value is not None})
                self._run.finish(exit_code=int(status["state"] == "failed"))
                if (later := self._later(with_this=self._run.offline)) and not self._told and not self._over:
                    _say(f"W&B was offline: {later}")
                self._run, self._over = None, True
                _SERVICE.leave(self)

    def cut_off(self) -> bool:
        """Return whether the run is starting online; if so, it starts offline once W&B's process is killed."""
        self._cut_off = self._tries_online
        return self._tries_online

    def abandon(self, why: str) -> None:
        """Print `why` unless the run has finished, and print nothing more."""
        if not self._over:
            self._over = True
            self._warn(why)

    def release(self) -> None:
        """Let W&B forget its process, which is killed; called from the sink's own thread."""
        self._run = None
        _SERVICE.leave(self)
        _SERVICE.end()

    def _init(self, run: Mapping[str, Any], first_step: int) -> Any:
        self._folder.mkdir(parents=True, exist_ok=True)
        seen = outlook()
        mode: Any = seen.mode if self._tracking.wandb == "auto" else self._tracking.wandb
        if mode == "disabled":
            return None
        _SERVICE.enter(self)
        # Before anything is tried, because the try leaves a folder.
        alone = self.options(run, self._part(run, first_step, online=False))
        if mode != "online":
            return _start_run(mode=mode, **alone)
        try:
            # Asked here, because W&B would ask for a key on the terminal and wait.
            if not seen.has_login:
                raise PermissionError("no login for W&B; `wandb login` makes one")
            if _SERVICE.refusal:
                raise ConnectionError(_SERVICE.refusal)
            self._tries_online = True
            options = self.options(run, self._part(run, first_step, online=True))
            self._run = _start_run(mode="online", resume="allow", **options)
        except Exception as error:
            if self._over:
                raise
            reason = self._reason(error)
            why = _SERVICE.refusal = _SERVICE.refusal or reason
            if self._tries_online:
                # W&B's process keeps the id of a run that failed to start.
                if _SERVICE.is_used_only_by(self):
                    _SERVICE.end()
                else:
                    alone = self.options(run, self._part(run, first_step, online=False))
            self._run = _start_run(mode="offline", **alone)
            self._warn(f"goes on offline: {why}")
            self._told = True
        self._tries_online = False
        return self._run

    def _part(self, run: Mapping[str, Any], first_step: int, *, online: bool) -> str:
        """What is added to the run's id for this part of it; nothing where W&B can tell it from the others.

        What was written offline is sent as the first rows of its id, over those that the server has. So an offline
        part takes an id that is new, and an online one leaves alone what was written offline and is still to be sent.
        """
        run_id = self._id(run)
        if run_id is None:  # W&B draws a new one
            return ""
        if first_step == run.get("continued_from", {}).get("step"):
            first_step = 0  # the rows before it are sent again
        own = f"-from-{first_step}"
        candidates = ["", own] if online or first_step == 0 else [own]

        def is_free(part: str) -> bool:
            wandb_id = glob.escape(run_id + part)
            if online:
                return not any(map(_is_unsent, self._parts("offline-run", wandb_id)))
            return not self._parts("*run", wandb_id)

        return next(filter(is_free, chain(candidates, (f"{own}.{number}" for number in count(2)))))

    def _parts(self, kind: str, wandb_id: str) -> list[Path]:
        """W&B's folders of a kind (run, offline-run) and an id, oldest first; both may be patterns."""
        found = self._folder.glob(f"wandb/{kind}-????????_??????-{wandb_id}")
        return sorted(found, key=lambda folder: folder.name.partition("run-")[2])

    def _id(self, run: Mapping[str, Any]) -> str | None:
        """The id of the whole run at W&B. A sweep's agent, or whoever set a variable, has already chosen it."""
        chosen = {"WANDB_RUN_ID", "WANDB_SWEEP_ID"} & os.environ.keys()
        return os.environ.get("WANDB_RUN_ID") if chosen else run["run_id"]

    def _later(self, *, with_this: bool) -> str:
        """The words that name the command for what is still to be sent; none where nothing is.

        Args:
            with_this: Whether this part is still to be sent, besides those before it.
        """
        folders, flag = [str(folder) for folder in self._earlier if _is_unsent(folder)], []
        if with_this and self._run is not None:
            folders.append(self._run.settings.sync_dir)
            flag = [] if self._run.offline else ["--include-online"]
        if not folders:
            return ""
        return f"what W&B has can be sent later: {shlex.join(['wandb', 'sync', *flag, *folders])}"

    def _warn(self, what: str) -> None:
        later = self._later(with_this=True) or "W&B got nothing"
        _say(f"W&B {what}. The local record has everything; {later}")

    def options(self, run: Mapping[str, Any], part: str = "") -> dict[str, Any]:
        """What W&B is told of a run when it begins: the arguments of `wandb.init`, mode and settings aside.

        Args:
            run: The content of run.json.
            part: What is added to the run's id, for a part that is a W&B run of its own.
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
            # A run of the caller's own that is still open is none of our business.
            "reinit": "create_new",
        }

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._over:
                self._warn(f"{what}: {self._reason(error)}")
            self._run, self._over = None, True
            _SERVICE.leave(self, failed=True)

    def _reason(self, error: Exception) -> str:
        """What failed; where that is our own doing, why we did it."""
        was, self._cut_off = self._cut_off, False
        return "it does not answer" if was else _one_line(error)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What W&B is set to on this machine."""

    mode: str
    """What `tracking.wandb=auto` comes to: online, offline, disabled, ..."""
    host: str
    """The server's."""
    has_login: bool
    """Whether there are credentials for it."""


def outlook() -> Outlook:
    """Look at W&B's settings, its variables and its login; asks nothing and starts nothing."""
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True)).settings
    mode = {"run": "online", "dryrun": "offline"}.get(settings.mode, settings.mode)
    has_login = _has_login(settings)
    if mode == "online" and not has_login:
        mode = "offline"
    return Outlook(mode, urlsplit(settings.base_url).netloc, has_login)


def payloads(rows: Sequence[Row], tokens_per_step: int) -> list[dict[str, float]]:
    """What W&B is told of an interval, oldest first: a dict for each step, its evaluation and pace merged in.

    Of the training rows the last one is sent, a call of W&B's for each step being too dear. The largest loss
    of the interval goes with it (NaN if one was), so that a spike between two of them is seen.
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
    """The W&B config of a run: what one groups by at the top level, and the full tree under `config`."""
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
        "fingerprint": run.get("fingerprint"),  # records of before have none
        "causal": run["norm"]["causal"],
        "config": config,
        "versions": run["versions"],
        "git": run["git"],
    }


def _start_run(**options: Any) -> Any:
    """Start a W&B run; `options` are those of `wandb.init`, without settings."""
    import wandb

    known = wandb.Settings.model_fields
    settings = wandb.Settings(**{key: value for key, value in SETTINGS.items() if key in known})
    run = wandb.init(settings=settings, **options)
    # W&B counts the steps of each part from 0; our own step is the axis.
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    run.define_metric("eval/loss", step_metric="train/step", summary="min")
    for key in SUMMED_BY_MAX:
        run.define_metric(key, step_metric="train/step", summary="max")
    return run


def _has_login(settings: Any) -> bool:
    """Whether W&B would find credentials for its server without asking."""
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
    """W&B's reports about itself are off. It reads the variable only, which is put back as it was."""
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
    """W&B's own process, wandb-core: all sinks of this process share one."""

    def __init__(self) -> None:
        self.init = threading.Lock()
        """Held while a run starts: W&B starts its process, and runs, one at a time."""
        self.refusal = ""
        """Why the server did not take a run; the others that share the process then start offline."""
        self._lock = threading.Lock()
        self._users: set[WandbSink] = set()
        self._failed = False

    def enter(self, sink: WandbSink) -> None:
        """Count a sink among the users."""
        with self._lock:
            self._users.add(sink)

    def is_used_only_by(self, sink: WandbSink) -> bool:
        """Whether no other sink uses the process."""
        with self._lock:
            return self._users <= {sink}

    def leave(self, sink: WandbSink, *, failed: bool = False) -> None:
        """Take a sink from the users; end the process with the last one if one of them failed.

        Otherwise W&B's exit hook would wait for what a failed run still has to send, and a later run would inherit
        the process.
        """
        with self._lock:
            self._users.discard(sink)
            self._failed |= failed
            if not self._users:
                if self._failed:
                    self.end()
                self._failed, self.refusal = False, ""

    def end(self) -> None:
        """Kill the process and let W&B forget it, which ends every W&B run of this process."""
        end_service()
        if "wandb" in sys.modules:
            # It raises if the process is gone, and may call sys.exit; by then it has released what it held.
            with suppress(Exception, SystemExit):
                import wandb

                wandb.teardown()


_SERVICE = _Service()


def end_service() -> None:
    """Kill the processes that W&B started from this one, on Linux: what waits for them fails; what they wrote stays.

    W&B keeps its handle on them to itself.
    """
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, task.read_text().split()):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "wandb-core":
                    os.kill(pid, signal.SIGKILL)


def _is_unsent(folder: Path) -> bool:
    """Whether W&B's folder of a part has something that `wandb sync`, which leaves a mark, has not sent."""
    return any(folder.glob("*.wandb")) and not any(folder.glob("*.wandb.synced"))


def _say(line: str) -> None:
    with suppress(OSError, ValueError):
        print(f"normlab: {line}", file=sys.stderr)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__} {error}".split()).rstrip(".")
