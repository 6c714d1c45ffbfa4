"""A Hugging Face hub on loopback, with the part of its HTTP API that `datasets` and `huggingface_hub` use.

The clients are the real libraries, over sockets. The server follows the documented API of the hub: repository
information, trees, path information, and files by HEAD and GET with ranges, ETag and X-Repo-Commit.
"""

import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"

Repositories = dict[str, dict[str, bytes]]


class Hub:
    """Serves repositories, `datasets/org/name` or `models/org/name`, as soon as it is constructed.

    Args:
        repositories: Their files by path.
        gated: Repositories with denied access.
        fails_after: Bytes of files after which the server closes every connection, also within a file.
        response: Status and body of every response, as from a proxy.
    """

    def __init__(
        self,
        repositories: Repositories,
        gated: tuple[str, ...] = (),
        fails_after: int | None = None,
        response: tuple[int, bytes] | None = None,
    ) -> None:
        self.repositories, self.gated, self.bytes_left, self.response = repositories, gated, fails_after, response
        self.requests: list[str] = []
        self.sent = 0
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.rfile_body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.hub
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        if hub.bytes_left is not None and hub.bytes_left <= 0:
            self.close_connection = True
            return
        if hub.response is not None:
            self._respond(*hub.response, {"Content-Type": "text/html"})
        elif match := re.fullmatch(r"/api/(datasets|models)/([^/]+(?:/[^/]+)?)(?:/revision/(.+))?", path):
            kind, name, revision = match.groups()
            if files := self._repository(f"{kind}/{name}", revision):
                siblings = [{"rfilename": file} for file in files]
                self._send_json(
                    {"id": name, "_id": "1", "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
                )
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", path):
            name, revision, folder = match.groups()
            if files := self._repository(f"datasets/{name}", revision):
                prefix = folder + "/" if folder else ""
                below = {file: content for file, content in files.items() if file.startswith(prefix)}
                if "recursive=true" in self.path.lower():
                    self._send_json([_info(file, content) for file, content in below.items()])
                else:
                    names = {prefix + file[len(prefix) :].split("/")[0] for file in below}
                    self._send_json([
                        _info(name, files[name]) if name in files else {"type": "directory", "path": name, "oid": "0"}
                        for name in sorted(names)
                    ])  # fmt: skip
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/(.+)", path):
            if files := self._repository(f"datasets/{match[1]}", match[2]):
                try:
                    paths = json.loads(self.rfile_body)["paths"]
                except ValueError:
                    paths = urllib.parse.parse_qs(self.rfile_body.decode())["paths"]
                self._send_json([_info(file, files[file]) for file in paths if file in files])
        elif match := re.fullmatch(r"/(datasets/)?([^/]+(?:/[^/]+)?)/resolve/([^/]+|refs/[^/]+/[^/]+)/(.+)", path):
            kind, name, revision, file = match.groups()
            key = f"{'datasets' if kind else 'models'}/{name}"
            if key in hub.gated:
                self._send_error(403, "GatedRepo")
            elif files := self._repository(key, revision):
                self._send_error(404, "EntryNotFound") if file not in files else self._send_file(files[file])
        else:
            self._send_error(404, "")

    def _repository(self, key: str, revision: str | None) -> dict[str, bytes] | None:
        if key not in self.hub.repositories:
            self._send_error(404, "RepoNotFound")
        elif revision not in (None, "main", COMMIT):
            self._send_error(404, "RevisionNotFound")
        else:
            return self.hub.repositories[key]
        return None

    def _send_error(self, status: int, code: str) -> None:
        self._respond(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send_json(self, value: object) -> None:
        self._respond(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, content: bytes) -> None:
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(match[1]), min(int(match[2] or len(content) - 1), len(content) - 1)
            if start >= len(content):
                return self._respond(416, b"", headers)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            return self._respond(206, content[start : end + 1], headers, is_file=True)
        return self._respond(200, content, headers, is_file=True)

    def _respond(self, status: int, body: bytes, headers: dict[str, str], is_file: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        try:
            for start in range(0, len(body), 1 << 16):
                chunk = body[start : start + (1 << 16)]
                if is_file:
                    if self.hub.bytes_left is not None:
                        chunk = chunk[: self.hub.bytes_left]
                        self.hub.bytes_left -= len(chunk)
                    self.hub.sent += len(chunk)
                self.wfile.write(chunk)
                if self.hub.bytes_left is not None and self.hub.bytes_left <= 0:
                    self.close_connection = True
                    return
        except OSError:
            self.close_connection = True  # the client closed the connection


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _info(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}
