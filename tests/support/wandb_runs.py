"""Commands with the settings of an imitation of W&B's server, and a reader of W&B's files."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.small_run import small_run
from support.wandb_server import Server

ROOT = Path(__file__).parents[2]
NORMLAB = (sys.executable, "-m", "normlab")


def overrides_of(home: Path, *overrides: str) -> list[str]:
    """Return the overrides of a small run with evaluations and statistics, and W&B online."""
    common = [each for each in small_run(home / "results") if not each.startswith(("tracking.", "train.steps="))]
    return [*common, "train.steps=60", "eval.every=20", "stats.every=15", "tracking.wandb=online", *overrides]


def environment(home: Path, server: Server | None = None) -> dict[str, str]:
    """Return the variables of a process whose only settings of W&B are those of the server."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "NETRC", "XDG"))}
    # W&B sends what it has every 15 s; a run of the tests would have ended by then.
    interval = {"WANDB__FILE_STREAM_TRANSMIT_INTERVAL": "1"}
    return {**kept, **interval, "HOME": str(home), "PYTHONPATH": str(ROOT), **(server.login if server else {})}


def call(
    home: Path, server: Server | None, *arguments: str, program: tuple[str, ...] = NORMLAB, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed."""
    return subprocess.run(
        [*program, *arguments], env=environment(home, server) | variables, cwd=home, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def start(home: Path, server: Server | None, *arguments: str) -> subprocess.Popen[str]:
    """Start a command."""
    return subprocess.Popen(
        [*NORMLAB, *arguments], env=environment(home, server), cwd=home, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def followers(home: Path) -> list[int]:
    """Return the followers that were started by commands with this home folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_follower = b"normlab.tracking.follower" in (entry / "cmdline").read_bytes()
            if is_follower and b"\0HOME=%b\0" % os.fsencode(home) in b"\0" + (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def read_offline(folder: Path) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """Return the run, the rows and the summary in a folder of W&B."""
    run, rows, summary = None, [], {}
    for record in _records(folder):
        if record.HasField("run"):
            run = record.run
        elif record.HasField("history"):
            rows.append({_name(item): json.loads(item.value_json) for item in record.history.item})
        elif record.HasField("summary"):
            summary |= {_name(item): json.loads(item.value_json) for item in record.summary.update}
    return run, rows, summary


def _name(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def _records(folder: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: 7 bytes of header, then LevelDB's log, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]  # made at import

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
