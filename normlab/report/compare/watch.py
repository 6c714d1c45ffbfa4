"""Serve the comparison page on loopback; the page requests its data again and draws them in place.

The records are read when a browser asks, so a page that nobody looks at costs nothing. They are read again only if
their files have changed. Of the metrics of a run that trains, only the added rows are read. Reading takes at most a
share of `LOAD` of one core. The server is a process of its own (`serve`), so that no client can use up the file
descriptors of a sweep.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from normlab.errors import ConfigError, NormlabError, one_line
from normlab.report.compare.data import ReadCache
from normlab.report.compare.write import ComparePage
from normlab.report.pages.shell import as_json
from normlab.report.tables import Row
from normlab.store.format import PLAN_FILE
from normlab.store.query import Selection

HOST = "127.0.0.1"
PORT = 6061
"""The default port; if it is taken, the first free one of the next `PORTS`."""
PORTS = 100
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The hosts of a request. A page of another site can only reach the server under the name of that site."""
SHORTEST_S = 1.0
"""Shortest time, in seconds, between two checks of the files of the runs."""
LOAD = 0.2
"""Largest share of one core that reading the records takes."""
CONNECTIONS = 32
"""Most open connections; a browser opens a few. One more closes the oldest."""
REQUEST_S = 30.0
"""Seconds from accepting a connection to closing it, also if the client still sends or receives."""
LAST_S = 4.0
"""Seconds that a watch waits at its end for an open page to request the last data.

A page requests its data every second; without a request for this long it counts as closed."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The data of the page at one time."""

    data: Row
    json: bytes
    etag: str
    updated: float
    """The latest change of a file of the runs: unix time, seconds."""


class LivePage:
    """A comparison page whose data are read again when the records change; for several threads.

    Args:
        page: The page. Errors of reading are shown on it.
    """

    def __init__(self, page: ComparePage) -> None:
        self._page = page
        self._lock = threading.Lock()
        self._cache = ReadCache()
        self._selection = Selection((), "", Path(page.results_dir))
        self._stamp: object = None
        self._next = 0.0
        self._snapshot = _snapshot_of(page.data(self._selection), time.time())

    def snapshot(self) -> Snapshot:
        """Return the data. They are read again if the last reading ended long enough ago (`SHORTEST_S`, `LOAD`)."""
        with self._lock:
            if time.monotonic() >= self._next:
                start = time.thread_time()  # of the processor, because the training may slow the reading down
                self._refresh()
                self._next = time.monotonic() + max(SHORTEST_S, (time.thread_time() - start) / LOAD)
            return self._snapshot

    def expire(self) -> None:
        """Let the next `snapshot` read the records at once."""
        with self._lock:
            self._next = 0.0

    def html(self) -> str:
        """Return the page."""
        return self._page.html(self.snapshot().data, live=True)

    def _refresh(self) -> None:
        # Taken before the records are read: a change during the reading makes the next stamp differ.
        stamp = ([record.folder.stamp() for record in self._selection.records], _places(self._selection))
        if self._selection.records and stamp == self._stamp:
            return
        error = ""
        try:
            self._selection = self._page.select(must_have_started=False)
            data = self._page.data(self._selection, self._cache)
        except Exception as caught:  # a file in the middle of a change; even after a bug, a watch goes on
            kind = "" if isinstance(caught, NormlabError) else f"{type(caught).__name__}: "
            stamp, data, error = None, self._snapshot.data, f"{kind}{one_line(caught)}"
        self._stamp = stamp
        files = [file for record in self._selection.records for file in record.folder.stamp()[1]]
        updated = max((modified / 1e9 for *_, modified in files), default=self._snapshot.updated)
        self._snapshot = _snapshot_of({**data, "error": error}, updated)


def _places(selection: Selection) -> tuple[object, ...]:
    """Return the modification times of the plan and of the folders in which runs appear."""
    parents = {record.folder.path.parent for record in selection.records}
    times: list[object] = []
    for path in sorted([selection.home / PLAN_FILE, *parents]):
        with contextlib.suppress(OSError):
            times.append((path, path.stat().st_mtime_ns))
    return tuple(times)


def _snapshot_of(data: Row, updated: float) -> Snapshot:
    fixed = as_json({key: value for key, value in data.items() if key != "written"}).encode()
    etag = f'"{hashlib.sha256(fixed).hexdigest()[:32]}"'
    return Snapshot(data, b'{"written":%.3f,' % data["written"] + fixed[1:], etag, updated)


class LiveServer(ThreadingHTTPServer):
    """The server of a live page.

    Args:
        live: The page.
        listener: The socket that accepts the connections, from `listen`.
    """

    def __init__(self, live: LivePage, listener: socket.socket) -> None:
        self.live = live
        self.answered = threading.Event()
        self.answered_at = -LAST_S
        self.expired_at = math.inf
        self._connections: dict[Any, float] = {}
        """The open connections, oldest first, and the time at which each was accepted."""
        super().__init__((HOST, 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener

    @contextmanager
    def running(self) -> Iterator[None]:
        """Answer requests during a `with` block, and send the last data at its end."""
        threading.Thread(target=self.serve_forever, name="live page", daemon=True).start()
        try:
            yield
            self._send_last()
        finally:
            self.shutdown()
            self.server_close()

    def _send_last(self) -> None:
        """Wait until an open page has the latest data, or for `LAST_S`."""
        is_open = time.monotonic() - self.answered_at < LAST_S
        self.live.expire()
        self.expired_at = time.monotonic()
        if is_open:
            self.answered.wait(LAST_S)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread."""
        self._connections[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close the oldest connections above `CONNECTIONS`, and those open for `REQUEST_S`; their threads then end."""
        connections, now = list(self._connections.items()), time.monotonic()
        for number, (connection, accepted_at) in enumerate(connections, 1):
            if number <= len(connections) - CONNECTIONS or now - accepted_at > REQUEST_S:
                with contextlib.suppress(OSError):  # the thread has closed it meanwhile
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that went away."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Answer `/` with the page, and `/data` with its data, or with 304 if the browser has them."""
        if _host_of(self.headers.get("Host", "")) not in LOOPBACK:
            return self.send_error(403, explain=f"open the page at http://{HOST} or http://localhost")
        server, asked_at, path = cast("LiveServer", self.server), time.monotonic(), urlsplit(self.path).path
        if path == "/":
            return self._send("text/html; charset=utf-8", server.live.html().encode())
        if path != "/data":
            return self.send_error(404, explain="the page is /")
        snapshot = server.live.snapshot()
        headers = {"ETag": snapshot.etag, "Last-Modified": formatdate(snapshot.updated, usegmt=True)}
        if self.headers.get("If-None-Match") == snapshot.etag:
            self._send(None, b"", 304, headers)
        else:
            self._send("application/json", snapshot.json, 200, headers)
        server.answered_at = time.monotonic()
        if asked_at >= server.expired_at:
            server.answered.set()

    def _send(
        self, kind: str | None, content: bytes, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", **(headers or {})}
        if kind is not None:
            headers["Content-Type"] = kind
            # A page of many runs has megabytes, and may go by ssh.
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                content, headers["Content-Encoding"] = gzip.compress(content, compresslevel=1), "gzip"
            headers["Content-Length"] = str(len(content))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for each request."""


def _host_of(header: str) -> str | None:
    """Return the host of a Host header; its port is that of a tunnel."""
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


@contextmanager
def serve(page: ComparePage, port: int | None = None, *, check: bool = False) -> Iterator[str]:
    """Serve a page on loopback during a `with` block, in a process of its own, and yield its address.

    Whatever happens to the server, the process of a sweep keeps its file descriptors and goes on. The server ends with
    this process, because it waits for the end of its standard input.

    Args:
        page: The page.
        port: The port; None for `PORT`, or for the next free one.
        check: Whether to read the records once, so that their errors are raised here and not shown on the page.

    Raises:
        ConfigError: The port cannot be used; or with `check`: a condition or a channel is invalid.
        NormlabError: The system has no memory for another process.
        StoreError: With `check`: a name matches nothing.
    """
    if check:
        page.data(page.select(must_have_started=False))
    with listen(port) as listener:
        number = listener.getsockname()[1]
        try:
            server = subprocess.Popen(
                [sys.executable, "-P", "-m", "normlab.report.compare.watch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C does not end it
                pass_fds=[listener.fileno()],
            )
        except OSError as error:
            raise NormlabError(f"the process of the live page did not start: {error.strerror}") from error
        descriptor = listener.fileno()
    assert server.stdin is not None
    try:
        _send(server.stdin, json.dumps({"listener": descriptor, "page": asdict(page)}, default=str))
        yield f"http://{HOST}:{number}"
        _send(server.stdin, "end")
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(LAST_S + 5)
    finally:
        server.kill()
        server.wait()
        with contextlib.suppress(OSError):
            server.stdin.close()


def _send(pipe: IO[str], line: str) -> None:
    with contextlib.suppress(OSError):  # the server was killed
        pipe.write(f"{line}\n")
        pipe.flush()


def listen(port: int | None) -> socket.socket:
    """Return a socket that listens on loopback; arguments and errors as for `serve`."""
    candidates = range(PORT, PORT + PORTS) if port is None else [port]
    for candidate in candidates:
        try:
            return socket.create_server((HOST, candidate))
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise ConfigError(
                    f"--port {candidate}: cannot be used ({error.strerror}); choose another, or leave it out"
                ) from error
    raise ConfigError(f"the ports {PORT} to {PORT + PORTS - 1} are in use; choose another with --port")


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set, in place of ending the process, during a `with` block."""
    interrupted = threading.Event()
    handlers: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell lets its background jobs ignore SIGINT
            handlers[number] = signal.signal(number, lambda number, frame: interrupted.set())
    try:
        yield interrupted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main(task: Mapping[str, Any]) -> None:
    """Serve the page that `serve` has sent, until a line or the end of standard input."""
    fields = task["page"]
    page = ComparePage(**fields | {"output": fields["output"] and Path(fields["output"])})
    with LiveServer(LivePage(page), socket.socket(fileno=task["listener"])).running():
        if not sys.stdin.readline():
            os._exit(1)  # the command was killed, and nobody waits for the last data


if __name__ == "__main__":
    main(json.loads(sys.stdin.readline()))
