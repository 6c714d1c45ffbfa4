"""Export of a page's figures as PNG by a browser, and the errors without a browser or with a broken page."""

from __future__ import annotations

import builtins
import os
import struct
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.request import urlopen

import pytest

from normlab.errors import NormlabError
from normlab.report.pages import browser as page_browser
from normlab.report.pages.browser import export_images
from normlab.report.pages.shell import page, write_page
from support.browser import executable

DRAWING_SCRIPT = """
async function exportFigures() {
  return DATA.sizes.map(([name, width, height]) => {
    const canvas = make("canvas", { width, height });
    const pen = canvas.getContext("2d");
    pen.fillStyle = "#0b5cad";
    pen.fillRect(0, 0, width, height);
    return { name, png: canvas.toDataURL("image/png") };
  });
}
"""


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a page with a script."""

    def write_with(script: str, **data):
        asset, path = tmp_path / "asset.js", tmp_path / "a page, é #1.html"
        asset.write_text(script)
        write_page(path, page("t", "", data, [asset], plotly=False))
        return path

    return write_with


def refused(path) -> str:
    """Return the error of an export, one line."""
    with pytest.raises(NormlabError) as error:
        export_images(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def pixel(png: bytes) -> tuple[int, int, bytes]:
    """Return the width, height and first pixel of a PNG."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, colours = struct.unpack(">IIBB", png[16:26])
    assert (depth, colours) in ((8, 6), (8, 2))
    body, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        body += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    return width, height, zlib.decompress(body)[1:4]  # row filters do not change the first pixel


@pytest.mark.browser
def test_exported_images_equal_the_pages_figures(write):
    executable()
    images = export_images(write(DRAWING_SCRIPT, sizes=[["one", 3, 5], ["two, ü", 700, 400]]))
    assert {name: pixel(png) for name, png in images.items()} == {
        "one": (3, 5, b"\x0b\x5c\xad"),
        "two, ü": (700, 400, b"\x0b\x5c\xad"),
    }


def test_export_inside_a_running_event_loop(browser, write):
    assert list(export_images(write(DRAWING_SCRIPT, sizes=[["one", 3, 5]]))) == ["one"]


@pytest.mark.browser
def test_browser_has_no_network(tmp_path):
    executable()
    requests: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    path = tmp_path / "page.html"
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        urlopen(f"{url}/by-the-test").close()
        path.write_text(  # a page without a security policy
            f"""<script>async function exportFigures() {{
                const name = await fetch("{url}/by-the-page", {{ mode: "no-cors" }}).then(() => "answer", () => "none");
                return [{{ name, png: "" }}];
            }}</script>"""
        )
        assert list(export_images(path)) == ["none"]
        server.shutdown()
    assert requests == ["/by-the-test"]


@pytest.mark.browser
def test_page_without_figures(write):
    executable()
    assert "has no figures to export" in refused(write("const other = 1;"))


@pytest.mark.browser
def test_page_whose_script_fails(write):
    executable()
    message = refused(write("async function exportFigures() { throw new Error('the canvas\\n is gone'); }"))
    assert "the canvas" in message


@pytest.mark.browser
def test_missing_page(tmp_path):
    executable()
    assert "ERR_FILE_NOT_FOUND" in refused(tmp_path / "none.html")


@pytest.mark.browser
@pytest.mark.parametrize("body", ["for (;;) {}", "return new Promise(() => {});"])
def test_page_that_never_finishes(write, monkeypatch, body):
    executable()
    monkeypatch.setattr(page_browser, "TIMEOUT_S", 3.0)
    assert "did not draw the figures within 3 s" in refused(write(f"async function exportFigures() {{ {body} }}"))


@pytest.mark.parametrize("rest", ["", "; echo '#0 0x5581c8d0' >&2"])
def test_browser_that_crashes(write, tmp_path, monkeypatch, rest):
    program = tmp_path / "bin" / "chromium"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'FATAL: no usable display' >&2{rest}\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    message = refused(write(DRAWING_SCRIPT, sizes=[]))
    assert str(program) in message
    assert "no usable display" in message


@pytest.mark.browser
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's Chromium reports that it has a sandbox")
def test_sandbox_is_on_without_root(write, monkeypatch):
    executable()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "without --no-sandbox is not supported" in refused(write(DRAWING_SCRIPT, sizes=[]))


def test_error_without_a_browser(write, monkeypatch):
    monkeypatch.setenv("PATH", "")
    message = refused(write(DRAWING_SCRIPT, sizes=[]))
    assert "apt-get install chromium" in message
    assert "google-chrome" in message


def test_error_without_playwright(write, monkeypatch):
    real_import = builtins.__import__

    def absent(name, *rest):
        if name.partition(".")[0] == "playwright":
            raise ModuleNotFoundError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert "pip install 'normlab[images]'" in refused(write(DRAWING_SCRIPT, sizes=[]))
