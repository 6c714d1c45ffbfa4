"""A page's pictures as PNG, by a real browser; and what is said where there is none, or where it fails."""

from __future__ import annotations

import builtins
import os
import struct
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.request import urlopen

import pytest
from browser import executable

from normlab.errors import NormlabError
from normlab.report.pages import browser as pictures
from normlab.report.pages.browser import export_images
from normlab.report.pages.shell import page, write_page

DRAWS = """
async function exportPictures() {
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
    """Writes a page with a script."""

    def written(script: str, **data):
        asset, path = tmp_path / "asset.js", tmp_path / "a page, é #1.html"
        asset.write_text(script)
        write_page(path, page("t", "", data, [asset], plotly=False))
        return path

    return written


def refused(path) -> str:
    """The one line that is said."""
    with pytest.raises(NormlabError) as error:
        export_images(path)
    assert "\n" not in str(error.value)
    return str(error.value)


def pixel(png: bytes) -> tuple[int, int, bytes]:
    """Width, height and the first pixel of a PNG that a canvas wrote."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, colours = struct.unpack(">IIBB", png[16:26])
    assert (depth, colours) in ((8, 6), (8, 2))
    body, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        body += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    return width, height, zlib.decompress(body)[1:4]  # a first pixel is what it is, whatever the row's filter


def test_pictures_are_those_that_the_page_draws(write):
    executable()
    found = export_images(write(DRAWS, sizes=[["one", 3, 5], ["two, ü", 700, 400]]))
    assert {name: pixel(png) for name, png in found.items()} == {
        "one": (3, 5, b"\x0b\x5c\xad"),
        "two, ü": (700, 400, b"\x0b\x5c\xad"),
    }


def test_beside_a_running_event_loop(browser, write):
    assert list(export_images(write(DRAWS, sizes=[["one", 3, 5]]))) == ["one"]


@pytest.mark.slow
def test_the_browser_has_no_network(tmp_path):
    executable()
    asked: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    path = tmp_path / "page.html"
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        urlopen(f"{url}/by-the-test").close()
        path.write_text(  # a page that has no policy of its own
            f"""<script>async function exportPictures() {{
                const name = await fetch("{url}/by-the-page", {{ mode: "no-cors" }}).then(() => "answer", () => "none");
                return [{{ name, png: "" }}];
            }}</script>"""
        )
        assert list(export_images(path)) == ["none"]
        server.shutdown()
    assert asked == ["/by-the-test"]


@pytest.mark.slow
def test_a_page_that_draws_none(write):
    executable()
    assert "draws no pictures" in refused(write("const other = 1;"))


def test_a_page_whose_drawing_fails(write):
    executable()
    said = refused(write("async function exportPictures() { throw new Error('the canvas\\n is gone'); }"))
    assert "the canvas" in said


def test_a_page_that_is_gone(tmp_path):
    executable()
    assert "ERR_FILE_NOT_FOUND" in refused(tmp_path / "none.html")


@pytest.mark.slow
@pytest.mark.parametrize("body", ["for (;;) {}", "return new Promise(() => {});"])
def test_a_page_that_never_comes_to_an_end(write, monkeypatch, body):
    executable()
    monkeypatch.setattr(pictures, "PATIENCE_S", 3.0)
    assert "not drawn its pictures in 3 s" in refused(write(f"async function exportPictures() {{ {body} }}"))


@pytest.mark.parametrize("rest", ["", "; echo '#0 0x5581c8d0' >&2"])
def test_a_browser_that_dies(write, tmp_path, monkeypatch, rest):
    program = tmp_path / "bin" / "chromium"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'FATAL: no usable display' >&2{rest}\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    said = refused(write(DRAWS, sizes=[]))
    assert str(program) in said
    assert "no usable display" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's Chromium says whether it has a sandbox")
def test_who_is_not_root_keeps_the_sandbox(write, monkeypatch):
    executable()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "without --no-sandbox is not supported" in refused(write(DRAWS, sizes=[]))


def test_without_a_browser(write, monkeypatch):
    monkeypatch.setenv("PATH", "")
    said = refused(write(DRAWS, sizes=[]))
    assert "apt-get install chromium" in said
    assert "google-chrome" in said


def test_without_playwright(write, monkeypatch):
    there = builtins.__import__

    def absent(name, *rest):
        if name.partition(".")[0] == "playwright":
            raise ModuleNotFoundError(name)
        return there(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert "pip install 'normlab[images]'" in refused(write(DRAWS, sizes=[]))
