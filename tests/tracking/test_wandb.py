"""The W&B tracker against W&B itself: offline files read back, a server of our own, and the ways it can fail.

W&B runs in processes of their own: it starts one more, keeps sockets open until exit and patches `sys.exit`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normlab.config.schema import TrackingConfig
from normlab.store.runs import RunFolder
from normlab.store.status import Status
from normlab.tracking import wandb as tracking
from normlab.tracking.wandb import WandbTracker, flat_config, payloads
from support.processes import wait_for

ROOT = Path(__file__).parents[2]

RUN: dict[str, Any] = {
    "run_id": "derf-peri-3fa9c1",
    "name": "derf peri, seed 3",
    "config": {
        "norm": {"name": "derf", "preset": "", "alpha": 0.5},
        "placement": {"name": "peri"},
        "model": {"preset": "nano", "depth": 4, "width": 128, "heads": 2, "context": 64},
        "data": {"name": "stdlib", "tokenizer": "bytes", "seed": 7},
        "optim": {"name": "adamw", "lr": 0.002},
        "train": {"steps": 40, "batch_size": 16},
        "tracking": {"wandb": "auto"},
        "seed": 3,
    },
    "resolved": {
        "device": "cpu",
        "precision": "fp32",
        "compile": "off",
        "deterministic": True,
        "threads": 2,
        "init": "gpt2",
    },
    "corpus": {
        "name": "stdlib",
        "sha256": "ab" * 32,
        "vocab_size": 257,
        "train_tokens": 1000,
        "val_tokens": 100,
        "baselines": {"uniform": 5.5491, "unigram": 3.2134, "bigram": 2.5046, "targets": 8192},
    },
    "fingerprint": "cd" * 32,
    "norm": {"causal": True},
    "versions": {"torch": "2.13"},
    "git": {"commit": "c0ffee", "dirty": False},
    "created": "2026-01-01T00:00:00Z",
}

PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from normlab.config.schema import TrackingConfig
from normlab.store.parts import parse_part
from normlab.store.status import Status
from normlab.tracking import wandb as tracking
from normlab.tracking.wandb import SETTINGS, WandbTracker, wait_for_finish, wait_for_start

# A busy machine is slow. Tests of the limits set them shorter.
PATIENCE = tracking.WAIT_S = 90.0
SETTINGS |= {"init_timeout": PATIENCE, "finish_timeout": PATIENCE}

run, folder = json.loads(sys.argv[1]), Path(sys.argv[2])

def interval(first, odd_loss=None):
    rows = [{"kind": "train", "step": s, "loss": 4 - s / 100, "grad_norm": 1.5, "clip": 0.66, "lr": 0.002}
            for s in range(first + 1, first + 11)]
    if odd_loss is not None:
        rows[3]["loss"] = odd_loss
    return rows + [{"kind": "eval", "step": first + 10, "loss": 3 - first / 100},
                   {"kind": "pace", "step": first + 10, "seconds": 0.5, "tokens_per_s": 20480.0}]

def begin(mode, first=0):
    tracker = WandbTracker(TrackingConfig(wandb=mode, tags=["mine"]), folder)
    tracker.start(run, first)
    wait_for_start([tracker])
    return tracker

def end(tracker, state="finished"):
    ended = {"state": state, "step": 40, "steps": 40, "val_loss": 2.7, "best_val_loss": 2.6}
    spikes = {"loss_lightning": {"spikes": 1, "of_steps": 9}, "clipped": {"spikes": 3, "of_steps": 9}}
    tracker.finish(parse_part(Status, {**ended, "spikes": spikes}))
    wait_for_finish([tracker])

def mirror(mode, first=0, state="finished", odd_loss=9.0):
    tracker = begin(mode, first)
    for step in range(first, 40, 10):
        tracker.log(interval(step, odd_loss if step == 20 else None))
    end(tracker, state)
"""


def drive(home: Path, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `body` after the preamble, in a process without this machine's W&B settings."""
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(body), json.dumps(RUN), str(home / "run")],
        env=environment(home, **variables),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def environment(home: Path, **variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "NETRC", "XDG"))}
    return {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT), **variables}


def quiet(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 0 and done.stderr == ""


def sync_command(line: str) -> list[str]:
    """The command that a line names."""
    return shlex.split(line.partition("upload later with: ")[2])


def prints_the_sync_command(done: subprocess.CompletedProcess[str], home: Path) -> bool:
    """Whether an offline run said one thing, at the end of each of its parts: how all folders so far are sent."""
    lines, made = done.stderr.splitlines(), {str(folder) for folder in folders(home, "offline-run")}
    offline = all(line.startswith("normlab: W&B was offline: ") for line in lines)
    named = [set(sync_command(line)[2:]) for line in lines if sync_command(line)[:2] == ["wandb", "sync"]]
    grows = [len(each) for each in named] == list(range(1, len(lines) + 1))
    return done.returncode == 0 and offline and grows and named[-1] == made


def sync(home: Path, server: Server, line: str) -> None:
    """Run the command that a line names, from another folder."""
    command = sync_command(line)
    command[0] = str(Path(sys.executable).with_name(command[0]))
    subprocess.run(command, env=environment(home, **server.login), cwd="/", check=True, timeout=180)


def warning(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a run said, and nothing else said anything."""
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("normlab: W&B ")
    assert "The local record has everything" in line
    return line


def folders(home: Path, kind: str) -> list[Path]:
    """W&B's folders of runs, `run` or `offline-run`, oldest first."""
    return sorted((home / "run" / "wandb").glob(f"{kind}-*"))


def read(folder: Path) -> tuple[Any, dict[str, Any], list[dict[str, Any]], dict[str, Any], int | None]:
    """W&B's record of a run: itself, its config, its rows, its summary and its exit code."""
    run, config, rows, summary, exit_code = None, {}, [], {}, None
    for record in records(folder):
        if record.HasField("run"):
            run = record.run
            config |= {item.key: json.loads(item.value_json) for item in run.config.update}
        elif record.HasField("history"):
            rows.append({name(item): json.loads(item.value_json) for item in record.history.item})
        elif record.HasField("summary"):
            summary |= {name(item): json.loads(item.value_json) for item in record.summary.update}
        elif record.HasField("exit"):
            exit_code = record.exit.exit_code
    return run, config, rows, summary, exit_code


def name(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def records(folder: Path) -> Iterator[Any]:
    """The records of a .wandb file: 7 bytes of header, then LevelDB's log, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data = path.read_bytes()
    at, whole, last_part = 7, b"", (1, 4)
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if part in last_part:
            yield Record.FromString(whole)
            whole = b""


@dataclass
class Kept:
    """What a server keeps of a run."""

    known: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def steps(self) -> list[int]:
        return [row["train/step"] for row in self.rows]


class Server(ThreadingHTTPServer):
    """As much of W&B's server as runs need to start, stream, end and be resumed; keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, Kept] = {}
        """By their ids."""
        self.paths: list[str] = []
        self.streams = True
        self.hangs = ""
        """The part of a path whose requests are never answered; none if empty."""
        self.delay_s = 0.0
        """How long every answer takes."""
        self.closing = threading.Event()

    def steps(self) -> dict[str, list[int]]:
        """The steps of each run's rows, by what follows the id of RUN in its own."""
        return {name.removeprefix(RUN["run_id"]): kept.steps() for name, kept in self.runs.items()}

    @property
    def login(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.server_port}", "WANDB_API_KEY": "a" * 40}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """W&B's process drops its connections when it ends; that is no error here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.paths.append(self.path)
        if self.server.hangs and self.server.hangs in self.path:
            self.server.closing.wait()
            self.close_connection = True
            return
        time.sleep(self.server.delay_s)
        if "/otel/" in self.path:
            self.answer({})
            return
        body = json.loads(data)
        if self.path == "/graphql":
            self.answer({"data": self.graphql(body["query"], body.get("variables") or {})})
        elif self.path == "/stop":
            self.server.streams = False
            self.answer({})
        elif not self.server.streams:
            self.answer({}, status=503)
        else:
            self.stream(body)

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        server = self.server
        project = {"id": "p", "name": "normlab", "entity": {"id": "e", "name": "me"}}
        if "RunResumeStatus" in query:
            kept = server.runs.get(variables["name"])
            bucket = kept and kept.known | {
                "historyLineCount": len(kept.rows),
                "historyTail": json.dumps([json.dumps(row) for row in kept.rows[-1:]]),
                "summaryMetrics": json.dumps(kept.summary),
                "logLineCount": 0,
                "eventsLineCount": 0,
                "eventsTail": "[]",
                "wandbConfig": '{"t": 1}',
            }
            return {"model": project | {"bucket": bucket}}
        if "UpsertBucket" in query:
            known = {"id": "r", "name": variables["name"], "displayName": "x", "project": project}
            server.runs.setdefault(variables["name"], Kept()).known |= known | {
                key: value for key, value in variables.items() if value is not None
            }
            return {"upsertBucket": {"bucket": known, "inserted": True}}
        if "CreateRunFiles" in query:
            url = server.login["WANDB_BASE_URL"] + "/upload"
            files = [{"name": file, "uploadUrl": url} for file in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, body: dict[str, Any]) -> None:
        kept, files = self.server.runs[self.path.split("/")[-2]], body.get("files", {})
        history = files.get("wandb-history.jsonl")
        if history:
            lines = [json.loads(line) for line in history["content"]]
            kept.rows[history["offset"] :] = lines
        for line in files.get("wandb-summary.json", {}).get("content", []):
            kept.summary = json.loads(line)
        if body.get("complete"):
            kept.exit_code = body["exitcode"]
        self.answer({})

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield running
        running.closing.set()
        running.shutdown()
        thread.join()


def test_offline_run_is_complete_on_disk(tmp_path: Path) -> None:
    done = drive(tmp_path, "mirror('offline'); print([key for key in os.environ if 'REPORTING' in key])")
    assert prints_the_sync_command(done, tmp_path), done.stderr
    assert done.stdout == "[]\n"
    (folder,) = folders(tmp_path, "offline-run")
    run, config, rows, summary, exit_code = read(folder)
    labels = (run.run_id, run.display_name, run.project, run.run_group, run.job_type)
    assert labels == ("derf-peri-3fa9c1", "derf peri, seed 3", "normlab", "derf-peri-d4", "train")
    assert set(run.tags) == {"mine", "derf", "peri", "stdlib"}
    assert {key: config[key] for key in flat_config(RUN)} == flat_config(RUN)
    assert [row["train/step"] for row in rows] == [10, 20, 30, 40]
    assert [row["train/tokens"] for row in rows] == [10240, 20480, 30720, 40960]
    assert [row["train/loss"] for row in rows] == pytest.approx([3.9, 3.8, 3.7, 3.6])
    assert [row["train/loss_max"] for row in rows] == pytest.approx([3.99, 3.89, 9.0, 3.69])
    assert [row["eval/loss"] for row in rows] == pytest.approx([3.0, 2.9, 2.8, 2.7])
    assert {row["perf/tokens_per_s"] for row in rows} == {20480.0}
    assert (summary["state"], summary["val_loss"], summary["best_val_loss"]) == ("finished", 2.7, 2.6)
    assert (summary["spike/loss_lightning"], summary["spike/clipped"]) == (1, 3)
    assert exit_code == 0


def test_each_offline_part_of_a_run_has_a_folder_and_the_steps_of_the_run(tmp_path: Path) -> None:
    body = """
    mirror("offline", first=20, state="interrupted")
    mirror("offline", first=30, state="failed")
    mirror("offline", first=20, state="diverged", odd_loss=float("nan"))
    """
    done = drive(tmp_path, body)
    assert prints_the_sync_command(done, tmp_path), done.stderr
    parts = [read(folder) for folder in folders(tmp_path, "offline-run")]
    ids = {run.run_id.removeprefix("derf-peri-3fa9c1") for run, *_ in parts}
    assert ids == {"-from-20", "-from-30", "-from-20.2"}
    assert {run.run_group for run, *_ in parts} == {"derf-peri-d4"}
    names = sorted(run.display_name for run, *_ in parts)
    assert names == [f"derf peri, seed 3, from step {step}" for step in (20, 20, 30)]
    steps = [[row["train/step"] for row in rows] for _, _, rows, _, _ in parts]
    ends = {summary.get("state"): code for _, _, _, summary, code in parts}
    assert sorted(steps) == [[30, 40], [30, 40], [40]]
    assert ends == {"interrupted": 0, "failed": 1, "diverged": 0}
    (diverged,) = [rows for _, _, rows, summary, _ in parts if summary.get("state") == "diverged"]
    assert math.isnan(diverged[0]["train/loss_max"])


def test_the_summary_has_the_outcome_and_no_final_loss_of_a_diverged_run(tmp_path: Path) -> None:
    def summary_of(**status: Any) -> dict[str, Any]:
        tracker: Any = WandbTracker(TrackingConfig(wandb="offline"), tmp_path)
        tracker._run = SimpleNamespace(summary={}, finish=lambda exit_code: None, offline=False)
        kept = tracker._run.summary
        tracker._finish(Status(val_loss=7.5, best_val_loss=5.5, **status))
        return kept

    diverged = {"state": "diverged", "outcome": "diverged", "best_val_loss": 5.5, "last_val_loss": 7.5}
    assert summary_of(state="diverged", outcome="diverged") == diverged
    stuck = {"state": "finished", "outcome": "stuck", "val_loss": 7.5, "best_val_loss": 5.5}
    assert summary_of(state="finished", outcome="stuck") == stuck


@pytest.mark.network
def test_run_continues_after_its_process_is_killed(tmp_path: Path) -> None:
    body = """
    tracker = begin("offline")
    tracker.log(interval(0))
    time.sleep(3)  # longer than the flush interval, so that the row is on disk
    core = subprocess.check_output(["pgrep", "-P", str(os.getpid()), "wandb-core"], text=True)
    os.kill(int(core), signal.SIGKILL)
    started = time.monotonic()
    for step in range(10, 2000, 10):
        tracker.log(interval(step))
        time.sleep(0.001)
    end(tracker)
    assert time.monotonic() - started < PATIENCE, "it waited for the killed process"
    print("then", file=sys.stderr)
    mirror("offline")
    import wandb
    print("x_transaction_log_flush_interval" in wandb.Settings.model_fields)
    """
    done = drive(tmp_path, body)
    line, then, last = done.stderr.splitlines()
    assert (done.returncode, then) == (0, "then")
    assert "The local record has everything; upload later with: " in line
    assert last.startswith("normlab: W&B was offline: ")
    killed, after = sorted((read(folder) for folder in folders(tmp_path, "offline-run")), key=lambda p: len(p[2]))
    assert "stopped" in line
    # W&B before 0.31 flushes every 15 s, whatever it is asked.
    assert [row["train/step"] for row in killed[2]] == ([10] if done.stdout == "True\n" else [])
    assert killed[4] is None
    assert ([row["train/step"] for row in after[2]], after[4]) == ([10, 20, 30, 40], 0)


def test_waits_are_ten_seconds_at_most() -> None:
    assert tracking.WAIT_S + tracking.LAST_WAIT_S <= 10
    assert tracking.SETTINGS["init_timeout"] > tracking.WAIT_S, "W&B's own timeout would come first"


@pytest.mark.network
@pytest.mark.parametrize("when", ["begun", "beginning"])
def test_run_continues_after_its_process_is_stopped(when: str, tmp_path: Path) -> None:
    """It neither answers nor dies: the run waits `WAIT_S` and `LAST_WAIT_S` at either end, and never for W&B itself.

    W&B's own timeouts are set to 90 seconds: a call that waits for them, or for ever, is seen on any machine.
    """
    body = """
    import threading
    wait, waits = tracking._wait, []
    tracking._wait = lambda events, seconds: (waits.append(seconds), wait(events, seconds))[1]
    def core():
        while True:
            found = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True)
            if found.stdout:
                return int(found.stdout)
            time.sleep(0.001)
    if when == "beginning":
        tracking.WAIT_S = 2.0
        threading.Thread(target=lambda: os.kill(core(), signal.SIGSTOP)).start()
    started = time.monotonic()
    tracker = begin("offline")
    assert waits == [tracking.WAIT_S]
    if when == "begun":
        os.kill(core(), signal.SIGSTOP)
        started, tracking.WAIT_S = time.monotonic(), 2.0
    for step in range(0, 20_000, 10):
        tracker.log(interval(step))
    end(tracker)
    assert waits[1:] == [2.0, 1.0]
    assert time.monotonic() - started < PATIENCE, "it waited for W&B"
    print(time.monotonic())
    """
    done = drive(tmp_path, f"when = {when!r}\n" + textwrap.dedent(body))
    assert time.monotonic() - float(done.stdout) < 90, "the process waited for W&B at its end"
    line = warning(done)
    assert "not answer" in line
    if when == "begun":
        assert sync_command(line) == ["wandb", "sync", *map(str, folders(tmp_path, "offline-run"))]
    else:
        assert line.endswith("; W&B got nothing")


@pytest.mark.network
def test_unreachable_server_makes_the_run_offline(tmp_path: Path) -> None:
    body = """
    SETTINGS |= {"a_setting_of_another_version": 1, "init_timeout": 2.0}
    tracker = begin("online")
    for step in range(0, 40, 10):
        tracker.log(interval(step))
    end(tracker)
    """
    done = drive(tmp_path, body, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40)
    line = warning(done)
    (folder,) = folders(tmp_path, "offline-run")
    assert "continues offline" in line
    assert line.endswith(f"wandb sync {folder}")
    _, _, rows, _, exit_code = read(folder)
    assert ([row["train/step"] for row in rows], exit_code) == ([10, 20, 30, 40], 0)


@pytest.mark.network
def test_online_and_resumed(tmp_path: Path, server: Server) -> None:
    assert quiet(drive(tmp_path, "mirror('online')", **server.login))
    run = server.runs[RUN["run_id"]]
    assert run.steps() == [10, 20, 30, 40]
    assert run.summary["eval/loss"] == {"min": 2.7}
    assert run.exit_code == 0
    assert quiet(drive(tmp_path, "mirror('online', first=20, state='failed')", **server.login))
    assert run.steps() == [10, 20, 30, 40, 30, 40]
    assert [row["_step"] for row in run.rows] == list(range(6))
    assert run.exit_code == 1
    assert list(server.runs) == [RUN["run_id"]]
    assert not [path for path in server.paths if "/otel/" in path], "W&B reported about itself"


@pytest.mark.network
def test_server_lost_during_the_run(tmp_path: Path, server: Server) -> None:
    body = """
    import urllib.request
    SETTINGS["finish_timeout"] = 2.0
    tracker = begin("online")
    tracker.log(interval(0))
    urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/stop", data=b"{}").read()
    tracker.log(interval(10))
    end(tracker)
    """
    line = warning(drive(tmp_path, body, **server.login))
    assert "did not finish" in line
    server.streams = True
    sync(tmp_path, server, line)
    run = server.runs[RUN["run_id"]]
    assert run.steps() == [10, 20]
    assert run.summary["state"] == "finished"


PACK = """
from normlab.config.compose import compose_run
from normlab.train.run import train_pack

SETTINGS |= {"init_timeout": 3.0, "finish_timeout": 2.0}
overrides = ["model=gpt2_nano", "data=files", f"data.path=[{corpus}]", "train.batch_size=2", "eval.sequences=2",
             "device=cpu", "stats=off", "tracking.wandb=online", f"results_dir={folder}"]
def configs(*more):
    return [compose_run([*overrides, *more, f"seed={seed}"]) for seed in range(3)]
"""


def train_pack(home: Path, server: Server, body: str) -> tuple[subprocess.CompletedProcess[str], list[RunFolder]]:
    """Train a pack of three runs in a process; return it, and the runs once no W&B process is left."""
    script = f"corpus = {str(ROOT / 'tests/corpus.txt')!r}\n" + PACK + textwrap.dedent(body)
    done = drive(home, script, WANDB_ERROR_REPORTING="false", **server.login)
    wait_for(lambda: not wandb_processes(server))
    return done, [RunFolder(path) for path in sorted((home / "run" / "runs").iterdir())]


def wandb_processes(server: Server) -> list[str]:
    """The processes that were started with this server's address."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if server.login["WANDB_BASE_URL"].encode() in (path / "environ").read_bytes():
                found.append((path / "comm").read_text().strip())
    return found


@pytest.mark.network
def test_pack_with_a_hanging_server_waits_once_and_runs_offline(tmp_path: Path, server: Server) -> None:
    """One member asks the server; what the members then start offline is complete."""
    server.hangs = "/"
    done, runs = train_pack(tmp_path, server, "train_pack(configs('train.steps=20', 'train.log_every=10'))")
    assert done.returncode == 0, done.stderr
    assert server.paths == ["/graphql"]
    lines = done.stderr.splitlines()
    assert len(lines) == 3
    assert all("continues offline: " in line for line in lines)
    for run in runs:
        assert run.status()["state"] == "finished"
        (part,) = run.path.glob("wandb/offline-run-*")
        _, _, rows, summary, exit_code = read(part)
        assert (rows[-1]["train/step"], summary["state"], exit_code) == (20, "finished", 0)


@pytest.mark.network
def test_pack_with_a_server_that_hangs_at_the_end(tmp_path: Path, server: Server) -> None:
    """Each run names the command that sends it, and why; none reports the end of the process that they share."""
    server.hangs = "file_stream"
    body = "SETTINGS['init_timeout'] = 90.0; train_pack(configs('train.steps=20'))"
    done, runs = train_pack(tmp_path, server, body)
    assert done.returncode == 0, done.stderr
    assert [run.status()["state"] for run in runs] == ["finished"] * 3
    lines = done.stderr.splitlines()
    assert all("did not finish: TimeoutError" in line for line in lines), done.stderr
    sent = {sync_command(line)[-1] for line in lines}
    assert sent == {str(part) for run in runs for part in run.path.glob("wandb/run-*")}
    assert len(sent) == len(lines) == 3


@pytest.mark.network
def test_pack_interrupted_twice_while_its_server_hangs(tmp_path: Path, server: Server) -> None:
    server.hangs = "file_stream"
    body = """
    import threading
    SETTINGS |= {"init_timeout": 90.0, "finish_timeout": 90.0}
    def interrupt():
        while not list(folder.glob("runs/*/metrics.jsonl")):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt, daemon=True).start()
    train_pack(configs("train.steps=1000000", "train.log_every=1"))
    """
    done, runs = train_pack(tmp_path, server, body)
    assert "KeyboardInterrupt" in done.stderr or done.returncode == 0, done.stderr
    assert [run.status()["state"] for run in runs] == ["interrupted"] * 3


@pytest.mark.network
def test_pack_with_a_slow_server_is_mirrored_completely(tmp_path: Path, server: Server) -> None:
    server.delay_s = 0.2
    body = "SETTINGS['init_timeout'] = SETTINGS['finish_timeout'] = 90.0; train_pack(configs('train.steps=20'))"
    done, runs = train_pack(tmp_path, server, body)
    assert quiet(done), done.stderr
    assert {run_id: kept.steps()[-1] for run_id, kept in server.runs.items()} == {run.run_id: 20 for run in runs}
    assert {kept.exit_code for kept in server.runs.values()} == {0}


FIRST_20 = """
tracker = begin(mode)
tracker.log(interval(0))
tracker.log(interval(10))
end(tracker, "interrupted")
"""


@pytest.mark.network
@pytest.mark.parametrize("sent", ["each", "only the last"])
def test_two_offline_parts_are_both_uploaded(sent: str, tmp_path: Path, server: Server) -> None:
    first = drive(tmp_path, "mode = 'offline'\n" + FIRST_20).stderr
    if sent == "each":
        sync(tmp_path, server, first)
    second = drive(tmp_path, "mirror('offline', first=20)").stderr
    assert len(sync_command(second)) == (3 if sent == "each" else 4), "what was sent is named again"
    sync(tmp_path, server, second)
    assert server.steps() == {"": [10, 20], "-from-20": [30, 40]}


@pytest.mark.network
def test_offline_part_after_an_online_one(tmp_path: Path, server: Server) -> None:
    assert quiet(drive(tmp_path, "mode = 'online'\n" + FIRST_20, **server.login))
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    line = warning(drive(tmp_path, "SETTINGS['init_timeout'] = 2.0; mirror('online', first=20)", **unreachable))
    assert "continues offline" in line
    sync(tmp_path, server, line)
    assert server.steps() == {"": [10, 20], "-from-20": [30, 40]}
    assert quiet(drive(tmp_path, "mirror('online', first=30)", **server.login))
    assert server.steps() == {"": [10, 20, 40], "-from-20": [30, 40]}


@pytest.mark.network
@pytest.mark.parametrize("sent", ["before", "after"])
def test_online_part_after_an_offline_one(sent: str, tmp_path: Path, server: Server) -> None:
    """What was not yet sent keeps the id, and is named at the end of the run that went online too."""
    line = drive(tmp_path, "mode = 'offline'\n" + FIRST_20).stderr
    if sent == "before":
        sync(tmp_path, server, line)
    done = drive(tmp_path, "mirror('online', first=20)", **server.login)
    if sent == "before":
        assert quiet(done)
        assert server.steps() == {"": [10, 20, 30, 40]}
    else:
        assert sync_command(done.stderr) == sync_command(line)
        sync(tmp_path, server, done.stderr)
        assert server.steps() == {"": [10, 20], "-from-20": [30, 40]}


@pytest.mark.network
def test_sync_command_names_a_killed_offline_part(tmp_path: Path, server: Server) -> None:
    body = """
    tracker = begin("offline")
    tracker.log(interval(0))
    time.sleep(3)  # longer than the flush interval, so that the row is on disk
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert drive(tmp_path, body).returncode == -9
    done = drive(tmp_path, "mirror('offline')")
    killed, whole = folders(tmp_path, "offline-run")
    assert sync_command(done.stderr) == ["wandb", "sync", str(killed), str(whole)]
    sync(tmp_path, server, done.stderr)
    assert server.steps()["-from-0"] == [10, 20, 30, 40]
    assert "" in server.steps()


def test_continued_run_has_all_rows_under_its_id(tmp_path: Path) -> None:
    body = """
    run["continued_from"] = {"run_id": "a shorter run", "step": 20}
    tracker = begin("offline", 20)
    tracker.log(interval(0) + interval(10))
    tracker.log(interval(20))
    end(tracker)
    """
    done = drive(tmp_path, body)
    assert prints_the_sync_command(done, tmp_path), done.stderr
    (folder,) = folders(tmp_path, "offline-run")
    run, _, rows, _, _ = read(folder)
    assert run.run_id == RUN["run_id"]
    assert [row["train/step"] for row in rows] == [10, 20, 30]


@pytest.mark.network
@pytest.mark.parametrize(
    ("variables", "login", "kinds"),
    [
        ({}, "", ["offline-run"]),
        ({}, "netrc", ["run"]),
        ({}, "key", ["run"]),
        ({"WANDB_MODE": "offline"}, "key", ["offline-run"]),
        ({"WANDB_MODE": "disabled"}, "key", []),
    ],
)
def test_auto(tmp_path: Path, server: Server, variables: dict[str, str], login: str, kinds: list[str]) -> None:
    known = dict(server.login)
    key = known.pop("WANDB_API_KEY")
    if login == "key":
        known["WANDB_API_KEY"] = key
    elif login == "netrc":
        netrc = tmp_path / ".netrc"
        netrc.write_text(f"machine 127.0.0.1:{server.server_port} login user password {key}\n")
        netrc.chmod(0o600)
    done = drive(tmp_path, "mirror('auto')", WANDB_RUN_ID="chosen", **known, **variables)
    assert prints_the_sync_command(done, tmp_path) if kinds == ["offline-run"] else quiet(done), done.stderr
    assert [kind for kind in ("run", "offline-run") for _ in folders(tmp_path, kind)] == kinds
    for kind in kinds:
        assert read(folders(tmp_path, kind)[0])[0].run_id == "chosen"


def test_online_without_a_login_prompts_for_nothing(tmp_path: Path) -> None:
    line = warning(drive(tmp_path, "mirror('online')"))
    assert "no login" in line
    (folder,) = folders(tmp_path, "offline-run")
    assert len(read(folder)[2]) == 4


def test_sync_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    home = tmp_path / "a folder's home"
    home.mkdir()
    done = drive(home, "mirror('offline')")
    assert prints_the_sync_command(done, home), done.stderr


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in its place")
    assert "did not start: FileExistsError" in warning(drive(tmp_path, "mirror('offline')"))


def test_importing_the_tracker_does_not_import_wandb(tmp_path: Path) -> None:
    done = drive(tmp_path, "WandbTracker(TrackingConfig(), folder); print('wandb' in sys.modules)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def train(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0, "clip": 0.5, "lr": 1e-3}


def test_rows_of_one_step_are_one_payload() -> None:
    rows = [
        {"kind": "eval", "step": 0, "loss": 5.5},
        train(1, 5.0),
        {"kind": "eval", "step": 1, "loss": 4.5, "loss_batch_statistics": 4.4},
        train(2, 7.0),
        train(3, 4.0),
        {"kind": "pace", "step": 3, "seconds": 0.1, "tokens_per_s": 10.0},
    ]
    assert payloads(rows, tokens_per_step=8) == [
        {"train/step": 0, "train/tokens": 0, "eval/loss": 5.5},
        {"train/step": 1, "train/tokens": 8, "eval/loss": 4.5, "eval/loss_batch_statistics": 4.4},
        {
            "train/step": 3,
            "train/tokens": 24,
            "train/loss": 4.0,
            "train/loss_max": 7.0,
            "train/grad_norm": 1.0,
            "train/clip_coef": 0.5,
            "train/lr": 1e-3,
            "perf/seconds": 0.1,
            "perf/tokens_per_s": 10.0,
        },
    ]


@pytest.mark.parametrize("losses", [[math.nan, 1.0, 2.0], [1.0, math.nan, 2.0], [math.inf, 1.0, math.nan]])
def test_nan_loss_is_the_largest_of_its_interval(losses: list[float]) -> None:
    (payload,) = payloads([train(step, loss) for step, loss in enumerate(losses)], 8)[-1:]
    assert math.isnan(payload["train/loss_max"])


def test_preset_labels_the_norm() -> None:
    tree = RUN["config"] | {"norm": {"name": "rmsnorm", "preset": "rmsnorm_bare"}}
    assert flat_config(RUN | {"config": tree})["norm"] == "rmsnorm_bare"
