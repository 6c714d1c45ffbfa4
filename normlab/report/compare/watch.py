"""Serve the comparison page on loopback; the page requests its data again and draws them in place.

The records are read when a browser asks, so a page that nobody looks at costs nothing. Those that have changed are read
again.
"""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from normlab.errors import ConfigError, one_line
from normlab.report.compare.write import ComparePage
from normlab.report.figure_points import Kept
from normlab.report.pages.shell import as_json
from normlab.store.query import Selection

HOST = "127.0.0.1"
PORT, PORTS = 6061, 100
"""The default port; if it is taken, the first free one of the next `PORTS`."""
SHORTEST_S, LOAD = 1.0, 0.2
"""Shortest time between two readings of the records, seconds; and the largest share of one core that reading takes."""
LAST_S = 2.5
"""Seconds that a watch waits at its end for the last request of an open page, which sends one every second."""


class LiveServer(ThreadingHTTPServer):
    """The server of a live page. Errors of reading are shown on the page."""

    def __init__(self, page: ComparePage, port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.page, self._kept, self._seen, self._lock = page, Kept(), list[object](), threading.Lock()
        self.data = page.data(Selection((), "", Path(page.results_dir)))
        self.json, self.next_reading, self.asked_at = b"", 0.0, -LAST_S

    def refresh(self) -> None:
        """Read the records again if the last reading ended long enough ago."""
        with self._lock:
            self.asked_at = time.monotonic()
            if self.asked_at < self.next_reading:
                return
            start = time.thread_time()  # of the processor, because the training may slow the reading down
            try:
                selection = self.page.select(must_have_started=False)
                # A state that changes before the stamp is taken differs at the next reading.
                seen = [(record.state, record.folder.stamp()) for record in selection.records]
                if seen != self._seen:
                    self.data, self._seen = self.page.data(selection, self._kept) | {"error": ""}, seen
            except Exception as error:  # a file in the middle of a change; even after a bug, a watch goes on
                self.data, self._seen = self.data | {"error": f"{type(error).__name__}: {one_line(error)}"}, []
            self.json = as_json(self.data).encode()
            self.next_reading = time.monotonic() + max(SHORTEST_S, (time.thread_time() - start) / LOAD)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that went away."""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Answer `/` with the page, and `/data` with its data, or with 304 if the browser has them."""
        # A page of another site can only reach the server under the name of that site. The port is that of a tunnel.
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            return self.send_error(403, explain=f"open the page at http://{HOST} or http://localhost")
        if self.path not in ("/", "/data"):
            return self.send_error(404, explain="the page is /")
        server = cast("LiveServer", self.server)
        server.refresh()
        is_page = self.path == "/"
        content = server.page.html(server.data, live=True).encode() if is_page else server.json
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        is_known = self.headers.get("If-None-Match") == etag
        self.send_response(304 if is_known else 200)
        self.send_header("Content-Type", "text/html; charset=utf-8" if is_page else "application/json")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(b"" if is_known else content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print no line for each request."""


@contextmanager
def serve(page: ComparePage, port: int | None = None) -> Iterator[str]:
    """Serve a page on loopback during a `with` block, in threads, and yield its address.

    Without a port, it is `PORT` or the next free one.

    Raises:
        ConfigError: The port cannot be used.
    """
    server = _bind(page, range(PORT, PORT + PORTS) if port is None else [port])
    threading.Thread(target=server.serve_forever, name="live page", daemon=True).start()
    try:
        yield f"http://{HOST}:{server.server_port}"
        server.next_reading = 0.0
        if time.monotonic() < server.asked_at + LAST_S:  # a page is open: let it get the last data
            time.sleep(LAST_S)
    finally:
        server.shutdown()
        server.server_close()


def _bind(page: ComparePage, ports: Sequence[int]) -> LiveServer:
    try:
        return LiveServer(page, ports[0])
    except OSError as error:
        if error.errno == errno.EADDRINUSE and len(ports) > 1:
            return _bind(page, ports[1:])
        raise ConfigError(f"--port {ports[0]}: cannot be used ({error.strerror}); choose another") from error
