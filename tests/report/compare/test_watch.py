"""The server of `normlab compare --watch`: what it answers, and when it reads the records again."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from normlab.errors import ConfigError
from normlab.report.compare import watch
from normlab.report.compare.watch import serve
from normlab.report.compare.write import ComparePage
from normlab.store.plans import Plan, PlannedRun, sweep_folder
from normlab.sweeps.files import write_plan
from support.compare_pages import lines_of


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Look at the files at every request, and use ports that no `normlab` of this machine has by default."""
    monkeypatch.setattr(watch, "SHORTEST_S", 0)
    monkeypatch.setattr(watch, "LOAD", 1e9)
    monkeypatch.setattr(watch, "LAST_S", 0)
    monkeypatch.setattr(watch, "PORT", 26061)


def get(address: str, path: str = "/data", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    with closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=60)) as connection:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.headers, response.read()


def data_of(address: str) -> dict:
    return json.loads(get(address)[2])


def last_point(data: dict, figure: str = "unfinished", series: str = "train_loss") -> list[float]:
    """Return the last point of the first line of a figure."""
    return next(iter(lines_of(data, figure, series).values()))[-1]


def states(address: str) -> list[str]:
    return [run["state"] for run in data_of(address)["run_table"]["rows"]]


def test_the_data_are_made_once_until_a_record_changes(trained, tmp_path, monkeypatch):
    trained("a", norm="rmsnorm")
    running = trained("b", norm="layernorm", state="running")
    made, data = [], ComparePage.data
    monkeypatch.setattr(ComparePage, "data", lambda *args: made.append(args) or data(*args))
    with running.lock(), serve(ComparePage(names=[str(tmp_path)])) as address:
        status, headers, body = get(address)
        number = len(made)
        assert (status, headers["Content-Type"]) == (200, "application/json")
        assert last_point(json.loads(body))[0] == 19
        assert get(address, If_None_Match=headers["ETag"])[::2] == (304, b"")
        assert get(address, If_None_Match='"other"')[0] == 200
        assert len(made) == number
        running.append([{"kind": "train", "step": 20, "loss": 3.25, "grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}])
        status, after, body = get(address, If_None_Match=headers["ETag"])
        assert (status, after["ETag"] != headers["ETag"]) == (200, True)
        assert last_point(json.loads(body))[:2] == [20, 3.25]


def test_a_killed_run_and_a_new_run_are_noticed(trained, tmp_path):
    running = trained("b", norm="layernorm", state="running")
    with serve(ComparePage(names=[str(tmp_path)])) as address:
        with running.lock():
            assert states(address) == ["running"]
        assert states(address) == ["killed"]  # no file has changed
        trained("c", norm="dyt")
        assert [run["id"] for run in data_of(address)["run_table"]["rows"]] == ["b", "c"]


def test_a_damaged_record_is_named_and_the_others_stay(trained, tmp_path):
    trained("a", norm="rmsnorm")
    broken = trained("b", norm="layernorm")
    with serve(ComparePage(names=[str(tmp_path)])) as address:
        assert states(address) == ["finished", "finished"]
        (broken.path / "status.json").write_bytes(b"{")
        data = data_of(address)
        assert ([run["state"] for run in data["run_table"]["rows"]], data["error"]) == (["finished", "damaged"], "")
        assert any("b" in line and "damaged" in line for line in data["warnings"])


def test_an_error_is_shown_with_the_last_data(trained, tmp_path, monkeypatch):
    run = trained("a", norm="rmsnorm")
    with serve(ComparePage(names=[str(tmp_path)])) as address:
        before = data_of(address)
        with monkeypatch.context() as patched:
            patched.setattr(ComparePage, "data", lambda *_: 1 / 0)
            run.append([{"kind": "eval", "step": 30, "loss": 1.5}])
            assert data_of(address) == before | {"error": "ZeroDivisionError: division by zero"}
        after = data_of(address)
    assert (after["error"], last_point(after, "loss", "val_loss")[0]) == ("", 30)


def test_a_sweep_without_a_plan_or_without_a_run(trained, tmp_path):
    folder = sweep_folder(tmp_path, "first")
    with serve(ComparePage(names=[str(folder)])) as address:
        assert str(folder) in data_of(address)["error"]
        folder.mkdir(parents=True)
        write_plan(folder, Plan("first", "off", [PlannedRun("a", [], {}), PlannedRun("b", [], {})], []))
        data = data_of(address)
        assert (data["error"], data["title"]) == ("", "first")
        assert "not started (2)" in data["summary"][1]
        page = ComparePage(names=[str(folder)], channels={"x": "norm"}, where=["norm=rmsnorm"])
        assert page.data(page.select(must_have_started=False))["summary"] == data["summary"]  # no conditions yet
        trained("a", norm="rmsnorm")
        assert states(address) == ["finished", "not started"]


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:1", 200), ("localhost", 200), ("normlab.example:6061", 403), ("localhost.example", 403), ("", 403)],
)
def test_a_page_of_another_site_is_rejected(trained, tmp_path, host, status):
    trained("a")
    with serve(ComparePage(names=[str(tmp_path)])) as address:
        assert [get(address, path, Host=host)[0] for path in ("/", "/data")] == [status] * 2


def test_the_page_may_connect_to_its_server_only(trained, tmp_path):
    trained("a")
    page = ComparePage(names=[str(tmp_path)])
    with serve(page) as address:
        status, headers, body = get(address, "/")
        assert get(address, "/../run.json")[0] == 404
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"connect-src 'self'" in body
    text = page.write()[1].read_text()
    assert "connect-src" not in text
    assert "fetch(" not in text


def test_ports(trained, tmp_path):
    trained("a")
    page = ComparePage(names=[str(tmp_path)])
    with serve(page) as first, serve(page) as second:
        ports = [urlsplit(address).port for address in (first, second)]
        assert watch.PORT <= ports[0] < ports[1] < watch.PORT + watch.PORTS
        with pytest.raises(ConfigError, match=f"--port {ports[0]}: cannot be used"), serve(page, ports[0]):
            pass
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", ports[0]), timeout=5):
        pass


@pytest.mark.parametrize(
    ("arguments", "problem"), [(["--port", "8000"], "has no effect"), (["--watch", "--where", "dpeth=2"], "dpeth")]
)
def test_a_wrong_argument_is_an_error_of_the_command(arguments, problem, trained, tmp_path, run_command):
    trained("a")
    code, _, err = run_command("compare", str(tmp_path), *arguments)
    assert (code, problem in err) == (2, True)
