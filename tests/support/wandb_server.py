"""An imitation of W&B's server on loopback."""

import json
import sys
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class UploadedRun:
    """What the server received of a run."""

    known: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]


class Server(ThreadingHTTPServer):
    """Answers the requests with which runs start, stream, finish and resume; keeps what it receives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, UploadedRun] = {}
        """By run id."""
        self.is_dead = False
        """Whether every connection is closed without an answer."""
        self.rejects_rows = 0
        """The status with which rows are rejected; 0 accepts them."""
        self.rejects = False
        """Whether every request is answered with 401."""

    @property
    def login(self) -> dict[str, str]:
        return {"WANDB_BASE_URL": f"http://127.0.0.1:{self.server_port}", "WANDB_API_KEY": "a" * 40}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that W&B's process drops when it ends."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]  # only a Server makes a Handler

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.is_dead:
            self.close_connection = True
            return
        if self.server.rejects:
            self.answer({"errors": [{"message": "permission denied"}]}, status=401)
            return
        if "/otel/" in self.path:
            self.answer({})
            return
        body = json.loads(data)
        if self.path == "/graphql":
            self.answer({"data": self.graphql(body["query"], body.get("variables") or {})})
        elif self.server.rejects_rows:
            self.answer({}, status=self.server.rejects_rows)
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
            known = server.runs.setdefault(variables["name"], UploadedRun()).known
            known |= {key: value for key, value in variables.items() if value is not None}
            known["id"], known["project"] = "r", project
            known.setdefault("displayName", "named by the server")
            bucket = {key: known[key] for key in ("id", "name", "displayName", "project")}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if "CreateRunFiles" in query:
            url = server.login["WANDB_BASE_URL"] + "/upload"
            files = [{"name": file, "uploadUrl": url} for file in variables["files"]]
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": files}}
        if "Viewer" in query:
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
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
