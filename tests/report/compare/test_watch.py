"""The server of `normlab compare --watch`: what it answers, and when it reads the records again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from normlab.errors import ConfigError, StoreError
from normlab.report.compare import watch
from normlab.report.compare.data import ReadCache
from normlab.report.compare.write import ComparePage
from normlab.report.figure_points import CurveReader, read_curves
from normlab.store import added
from normlab.store.plans import Plan, PlannedRun, sweep_folder
from normlab.store.reading import parse_rows
from normlab.store.record import RunRecord
from normlab.sweeps.files import write_plan
from support.processes import children_of, wait_for


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Look at the files at every request, and use ports that no `normlab` of this machine has by default."""
    monkeypatch.setattr(watch, "SHORTEST_S", 0)
    monkeypatch.setattr(watch, "LOAD", 1e9)
    monkeypatch.setattr(watch, "LAST_S", 0)
    monkeypatch.setattr(watch, "PORT", 26061)


@contextmanager
def serve(page: ComparePage) -> Iterator[str]:
    """Serve a page in this process, as `watch.main` does in one of its own."""
    server = watch.LiveServer(watch.LivePage(page), watch.listen(None))
    with server.running():
        yield f"http://{watch.HOST}:{server.socket.getsockname()[1]}"


@contextmanager
def connected(address: str) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)
    with closing(connection):
        yield connection


def get(address: str, path: str = "/data", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    with connected(address) as connection:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def data_of(address: str) -> dict:
    return json.loads(get(address)[2])


def test_the_data_are_sent_once_until_a_record_changes(trained, tmp_path):
    trained("a", norm="rmsnorm")
    running = trained("b", norm="layernorm", state="running")
    with running.lock(), serve(ComparePage(names=[str(tmp_path)])) as address:
        status, headers, body = get(address)
        assert (status, headers["Content-Type"]) == (200, "application/json")
        (unfinished,) = json.loads(body)["unfinished"]
        assert (unfinished["state"], unfinished["curves"]["train_loss"][-1][0]) == ("running", 19)
        assert get(address, If_None_Match=headers["ETag"])[0] == 304
        assert get(address, If_None_Match='"other"')[0] == 200
        running.append([{"kind": "train", "step": 20, "loss": 3.25, "grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}])
        status, after, body = get(address, If_None_Match=headers["ETag"])
        assert status == 200
        assert after["ETag"] != headers["ETag"]
        assert json.loads(body)["unfinished"][0]["curves"]["train_loss"][-1][:2] == [20, 3.25]


def test_a_killed_run_and_a_new_run_are_noticed(trained, tmp_path):
    running = trained("b", norm="layernorm", state="running")
    with serve(ComparePage(names=[str(tmp_path)])) as address:
        with running.lock():
            assert [run["state"] for run in data_of(address)["unfinished"]] == ["running"]
        assert [run["state"] for run in data_of(address)["unfinished"]] == ["killed"]  # no file has changed
        trained("c", norm="dyt")
        assert [run["id"] for run in data_of(address)["run_table"]["rows"]] == ["b", "c"]


def test_a_run_that_ends_while_the_page_is_made(trained, tmp_path, monkeypatch):
    """The next page has its end, although no file changes any more."""
    trained("a", norm="rmsnorm")
    finished = trained("b", norm="layernorm")
    end = finished.status()
    finished.write_status({"state": "running", "step": 10})
    data, lock = ComparePage.data, contextlib.ExitStack()
    lock.enter_context(finished.lock())

    def late(*arguments):
        finished.write_status({key: value for key, value in end.items() if key != "version"})
        lock.close()
        return data(*arguments)

    with lock, serve(ComparePage(names=[str(tmp_path)])) as address:
        assert [run["state"] for run in data_of(address)["run_table"]["rows"]] == ["finished", "running"]
        with finished.metrics_path.open("ab") as file:
            file.write(b'{"kind":"eval","step":30,"loss":1.5}\n')
        with monkeypatch.context() as patched:
            patched.setattr(ComparePage, "data", late)
            data_of(address)
        (row,) = [row for row in data_of(address)["run_table"]["rows"] if row["id"] == "b"]
    assert row["state"] == "finished"
    assert "20" in row["values"]
    assert "still running" not in row["values"][-1]


def test_only_changed_records_are_read(trained, tmp_path, monkeypatch):
    folders = {name: trained(name, norm=name, measured=[0, 5]) for name in ("rmsnorm", "layernorm", "dyt")}
    live = watch.LivePage(ComparePage(names=[str(tmp_path)]))
    pages: list[object] = []
    data = ComparePage.data
    monkeypatch.setattr(ComparePage, "data", lambda *args: pages.append(args) or data(*args))
    live.snapshot()
    live.snapshot()
    made = len(pages)
    first = live.snapshot()
    assert live.snapshot() is first  # nothing has changed
    assert len(pages) == made

    cache, reads = ReadCache(), list[str]()

    def read(record: RunRecord, problems: list[str]) -> None:
        reads.append(record.run_id)

    for _ in range(2):
        for record in map(RunRecord.read, folders.values()):
            cache.read(read, record, [])
    assert sorted(reads) == sorted(folders)
    with folders["dyt"].metrics_path.open("ab") as file:
        file.write(b'{"kind":"eval","step":30,"loss":1.5}\n')
    assert live.snapshot() is not first
    for record in map(RunRecord.read, folders.values()):
        cache.read(read, record, [])
    assert reads[len(folders) :] == ["dyt"]


@pytest.mark.parametrize("seed", range(4))
def test_the_rows_of_a_run_that_trains_are_read_once(trained, monkeypatch, seed):
    """The curves are those of all rows, after half a row, a cut file, or a damaged row too."""
    folder = trained("a", state="running", steps=60)
    lines = folder.metrics_path.read_bytes().splitlines(keepends=True)
    sizes: list[int] = []
    monkeypatch.setattr(added, "parse_rows", lambda content: sizes.append(len(content)) or parse_rows(content))
    reader, choose = CurveReader(), random.Random(seed)

    def check(content: bytes) -> list[str]:
        folder.metrics_path.write_bytes(content)
        found, expected = list[str](), list[str]()
        curves = reader.read(record := RunRecord.read(folder), found)
        for name, curve in read_curves(record, expected).items():
            np.testing.assert_array_equal(curves[name], curve)
        if content.endswith(b"\n"):
            assert found == expected
        return found

    whole = b"".join(lines)
    with folder.lock():
        for size in [0, *sorted(choose.randrange(len(whole)) for _ in range(9)), len(whole), len(whole)]:
            assert check(whole[:size]) == []
        assert sum(sizes) == len(whole)
        again = [line.replace(b'"loss":', b'"loss":1') for line in lines[choose.randrange(60) :]]
        again.insert(3, b'{"kind":\n')
        resumed = b"".join([*lines[: -len(again) + 1], *again])
        assert check(resumed) == check(resumed) == ["1 line of the metrics cannot be read"]
        assert check(whole) == []
    assert check(whole[:-9]) == ["1 line of the metrics cannot be read"]  # it was killed


def test_a_damaged_record_is_named_and_the_others_stay(trained, tmp_path):
    trained("a", norm="rmsnorm")
    broken = trained("b", norm="layernorm")
    with serve(ComparePage(names=[str(tmp_path)])) as address:
        assert len(data_of(address)["cells"]) == 2
        for name, content in (("status.json", b"{"), ("run.json", b'{"run_id": "b"'), ("metrics.jsonl", b"\xff{\n{")):
            (broken.path / name).write_bytes(content)
            data = data_of(address)
            assert data["error"] == ""
            assert [run["state"] for run in data["run_table"]["rows"]] == ["finished", "damaged"]
        assert any("b" in line and "damaged" in line for line in data["warnings"])


def test_an_error_is_shown_with_the_last_data(trained, tmp_path, monkeypatch):
    run = trained("a", norm="rmsnorm")
    with serve(ComparePage(names=[str(tmp_path)])) as address:
        before = data_of(address)
        with monkeypatch.context() as patched:
            patched.setattr(ComparePage, "data", lambda *_: 1 / 0)
            run.append([{"kind": "eval", "step": 30, "loss": 1.5}])
            during = data_of(address)
        after = data_of(address)
    assert during == before | {"error": "ZeroDivisionError: division by zero"}
    assert after["error"] == ""
    assert after["cells"][0]["curves"]["val_loss"][-1][0] == 30


def test_a_sweep_without_a_plan_or_without_a_run(trained, tmp_path):
    folder = sweep_folder(tmp_path, "first")
    page = ComparePage(names=[str(folder)], channels={"x": "norm"}, where=["norm=rmsnorm,layernorm"])
    with pytest.raises(StoreError, match="no"), watch.serve(page, check=True):
        pass
    page = ComparePage(names=[str(folder)])
    with serve(page) as address:
        assert str(folder) in data_of(address)["error"]
        folder.mkdir(parents=True)
        write_plan(folder, Plan("first", "off", [PlannedRun("a", [], {}), PlannedRun("b", [], {})], []))
        data = data_of(address)
        assert (data["error"], data["title"], data["missing"]) == ("", "first", [["not started", 2]])
        trained("a", norm="rmsnorm")
        assert [run["state"] for run in data_of(address)["run_table"]["rows"]] == ["finished", "not started"]


def test_a_wrong_condition_is_an_error_of_the_command(trained, tmp_path):
    trained("a")
    with (
        pytest.raises(ConfigError, match="dpeth"),
        watch.serve(ComparePage(names=[str(tmp_path)], where=["dpeth=2"]), check=True),
    ):
        pass


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:1", 200),
        ("localhost:8000", 200),
        ("[::1]:9", 200),
        ("normlab.example:6061", 403),
        ("[", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("path", ["/", "/data"])
def test_another_host_is_rejected(trained, tmp_path, host, status, path):
    trained("a")
    with serve(ComparePage(names=[str(tmp_path)])) as address:
        assert get(address, path, Host=host)[0] == status


def test_the_page_may_connect_to_its_server_only(trained, tmp_path):
    trained("a")
    page = ComparePage(names=[str(tmp_path)])
    with watch.serve(page) as address:
        status, headers, body = get(address, "/")
        assert get(address, "/../run.json")[0] == 404
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"connect-src 'self'" in body
    text = page.write()[1].read_text()
    assert "connect-src" not in text
    assert "fetch(" not in text


def test_the_end_waits_for_the_data_of_the_end(trained, tmp_path, monkeypatch):
    """Not for an answer whose data were read before it."""
    running = trained("a", state="running")
    monkeypatch.setattr(watch, "LAST_S", 30)
    is_reading, may_read = threading.Event(), threading.Event()
    read = ComparePage.data

    def slow_read(page, selection, cache=None):
        data = read(page, selection, cache)
        is_reading.set()
        assert may_read.wait(30)
        return data

    def ask_twice(address: str) -> list[int]:
        early = data_of(address)
        time.sleep(0.5)
        return [data["unfinished"][0]["curves"]["train_loss"][-1][0] for data in (early, data_of(address))]

    with ThreadPoolExecutor() as threads, running.lock():
        with serve(ComparePage(names=[str(tmp_path)])) as address:
            get(address)
            monkeypatch.setattr(ComparePage, "data", slow_read)
            row = {"kind": "train", "loss": 3.25, "grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}
            running.append([row | {"step": 20}])
            answers = threads.submit(ask_twice, address)
            assert is_reading.wait(30)
            running.append([row | {"step": 21}])
            threading.Timer(0.5, may_read.set).start()
        assert answers.result() == [20, 21]


def test_idle_connections_do_not_keep_the_page_from_answering(trained, tmp_path):
    """The oldest are closed, and this process has no descriptor of them but its own end."""
    trained("a")
    with watch.serve(ComparePage(names=[str(tmp_path)])) as address, contextlib.ExitStack() as stack:
        port = urlsplit(address).port
        get(address, "/")
        before = len(os.listdir("/proc/self/fd"))
        idle = [stack.enter_context(socket.create_connection((watch.HOST, port), timeout=60)) for _ in range(100)]
        assert len(os.listdir("/proc/self/fd")) == before + len(idle)
        assert get(address, "/")[0] == 200
        for connection in idle[: -watch.CONNECTIONS]:
            assert connection.recv(1) == b""
        idle[-1].sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.0 200"


def test_a_request_has_a_total_time(trained, tmp_path, monkeypatch):
    """A client that sends a byte now and then is closed too."""
    trained("a")
    monkeypatch.setattr(watch, "REQUEST_S", 0.5)
    with (
        serve(ComparePage(names=[str(tmp_path)])) as address,
        socket.create_connection((watch.HOST, urlsplit(address).port), timeout=0.05) as connection,
    ):
        deadline, answer = time.monotonic() + 60, None
        while answer is None:
            assert time.monotonic() < deadline
            with contextlib.suppress(TimeoutError):
                connection.sendall(b"G")
                answer = connection.recv(1)
    assert answer == b""


def test_the_server_ends_with_its_parent(trained, tmp_path):
    """Also after SIGKILL, and a killed server is no error of its parent."""
    trained("a")
    script = "import sys, time; from normlab.report.compare.watch import serve; "
    script += "from normlab.report.compare.write import ComparePage; "
    script += f"page = serve(ComparePage(names=[{str(tmp_path)!r}]), 0); print(page.__enter__(), flush=True); "
    script += "time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        address = parent.stdout.readline().strip()
        assert get(address)[0] == 200
        (server,) = children_of(parent.pid)
        parent.kill()
    wait_for(lambda: not Path(f"/proc/{server}").exists())
    with watch.serve(ComparePage(names=[str(tmp_path)])):
        for pid in children_of(os.getpid()):
            if b"normlab.report.compare.watch" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


@pytest.mark.process
def test_idle_connections_do_not_end_a_sweep(overrides):
    """More of them than the descriptors of its supervisor, while all packs start."""
    command = [sys.executable, "-m", "normlab", "sweep", *overrides, "norm=rmsnorm,layernorm", "tracking.wandb=off"]
    with (
        contextlib.ExitStack() as stack,
        subprocess.Popen(
            [*command, "train.steps=20", "--watch"],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)),
        ) as sweep,
    ):
        address = next(word for line in sweep.stdout for word in line.split() if word.startswith("http://"))
        for _ in range(200):
            stack.enter_context(socket.create_connection((watch.HOST, urlsplit(address).port), timeout=60))
        assert get(address)[0] == 200
        out, _ = sweep.communicate()
    assert sweep.returncode == 0
    assert "2 runs, 2 finished" in out


def test_ports(trained, tmp_path):
    trained("a")
    page = ComparePage(names=[str(tmp_path)])
    with watch.serve(page) as first, watch.serve(page) as second:
        ports = [urlsplit(address).port for address in (first, second)]
        assert watch.PORT <= ports[0] < ports[1] < watch.PORT + watch.PORTS
        with pytest.raises(ConfigError, match=f"--port {ports[0]}: cannot be used"), watch.serve(page, ports[0]):
            pass
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", ports[0]), timeout=5):
        pass


def test_port_needs_watch(run_command):
    code, _, err = run_command("compare", "--port", "8000")
    assert (code, "--port 8000: has no effect without --watch" in err) == (2, True)
