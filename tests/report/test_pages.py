"""What every page is made of, in a real browser: data arrive as they are, and nothing that they say can run."""

from __future__ import annotations

import errno
import math
import os
import re

import pytest
from browser import opened

from normlab.errors import ConfigError, StoreError
from normlab.report.pages.shell import check_page, page, write_page
from normlab.store.schema import encode

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>"
DATA = {
    HOSTILE: HOSTILE,
    "lines": "one\u2028two\u2029three\nfour\x00\u007f",
    "numbers": [math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324, 2**53 - 1],
    "others": [None, True, "", "nan", "&lt;&amp;", "\U0001f600", "]]>", "\\u003c"],
}
INJECTED = {
    "an element's handler": "document.body.innerHTML = DATA.markup",
    "a script element": "document.body.append(Object.assign(document.createElement('script'), { text: DATA.script }))",
    "a script from data": "document.body.append(Object.assign(document.createElement('script'), { src: DATA.url }))",
    "a link": "document.body.innerHTML = DATA.link; setTimeout(() => document.querySelector('a').click())",
    "text as code": "try { new Function(DATA.script)() } catch {}",
}
RUNS = "document.documentElement.dataset.ran = 'yes'"
ATTACK = {
    "markup": f'<img src=x onerror="{RUNS}">',
    "script": RUNS,
    "url": f"data:text/javascript,{RUNS}",
    "link": f'<a href="javascript:void({RUNS})">x</a>',
}


@pytest.fixture
def asset(tmp_path):
    """Writes a script that a page is to have."""

    def write(script: str):
        path = tmp_path / "asset.js"
        path.write_text(script)
        return path

    return write


def test_data_arrive_unchanged(browser, asset, tmp_path):
    shown = asset("document.body.append(make('p', { id: 'said' }, Object.keys(DATA)[0]));")
    write_page(tmp_path / "page.html", page(HOSTILE, "<main></main>", DATA, [shown]))
    with opened(browser, tmp_path / "page.html") as seen:
        assert seen.title() == HOSTILE
        assert seen.evaluate("DATA") == encode(DATA)
        assert seen.evaluate("DATA.numbers.map(number).map(String)") == [
            "NaN", "Infinity", "-Infinity", "0", "0.1", "5e-324", "9007199254740991",
        ]  # fmt: skip
        assert seen.evaluate("Object.is(DATA.numbers[3], -0)")
        assert seen.text_content("#said") == HOSTILE
        assert seen.locator("img").count() == 0
        assert seen.evaluate("typeof Plotly.newPlot") == "function"


def test_plotly_is_left_out_where_it_is_not_wanted():
    assert len(page("t", "", {}, [])) > 1e6 > len(page("t", "", {}, [], plotly=False))


@pytest.mark.slow
@pytest.mark.parametrize("how", INJECTED)
def test_nothing_injected_runs(browser, asset, tmp_path, how):
    text = page("t", "", ATTACK, [asset(INJECTED[how])], plotly=False)
    unguarded = re.sub(r"<meta http-equiv.*", "", text)
    assert unguarded != text
    assert visit(browser, tmp_path / "unguarded.html", unguarded)[0], "the attack is none"
    ran, said = visit(browser, tmp_path / "page.html", text)
    assert not ran
    assert how == "text as code" or "Content Security Policy" in said


def test_a_page_can_ask_nothing_of_a_network(browser, asset, tmp_path):
    told = asset(f"fetch('https://example.invalid/').catch(() => {{ {RUNS} }});")
    refused, said = visit(browser, tmp_path / "page.html", page("t", "", {}, [told], plotly=False))
    assert refused
    assert "Content Security Policy" in said
    assert "ERR_" not in said


def visit(browser, path, text: str) -> tuple[bool, str]:
    """Whether what was put into a page has run, and what Chromium says on the console."""
    write_page(path, text)
    context = browser.new_context(offline=True)
    tab, said = context.new_page(), []
    tab.on("console", lambda message: said.append(message.text))
    tab.goto(path.as_uri())
    tab.wait_for_timeout(200)
    ran = tab.get_attribute("html", "data-ran")
    context.close()
    return ran == "yes", "\n".join(said)


@pytest.mark.parametrize("name", ["page.html", "page.HTM", "page", "new/page.html"])
def test_names_that_a_page_may_have(tmp_path, name):
    check_page(tmp_path / name, "-o")


@pytest.mark.parametrize("name", ["page.png", "page.json", "page.html.gz"])
def test_names_of_something_else_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"^-o .*\.html$"):
        check_page(tmp_path / name, "-o")


@pytest.mark.parametrize("begins", [b"<!doctype html>", b"<!DOCTYPE HTML PUBLIC", b"<HTML>"])
def test_a_page_without_an_ending_may_be_replaced(tmp_path, begins):
    (tmp_path / "page").write_bytes(begins)
    check_page(tmp_path / "page", "-o")


@pytest.mark.parametrize("begins", [b"", b"all:\n\tcc", b" <html", b"<htm"])
def test_a_file_that_is_no_page_is_refused(tmp_path, begins):
    path = tmp_path / "Makefile"
    path.write_bytes(begins)
    with pytest.raises(ConfigError, match=r"^-o .*Makefile: is there, and is no page; choose another name, .*\.html$"):
        check_page(path, "-o")


def test_what_is_no_file_at_all_is_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is there, and is no page"):
        check_page(tmp_path / "pipe", "-o")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=f"is a folder.*{tmp_path / 'page.html'}$"):
        check_page(tmp_path, "-o")


def test_is_written_in_folders_that_are_made_and_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a" / "b" / "page.html"
    write_page(path, "old ä")
    write_page(path, "new ä")
    assert path.read_bytes() == "new ä".encode()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StoreError, match=r"page\.html: cannot be written .*free some space"):
        write_page(path, "newest")
    assert path.read_bytes() == "new ä".encode()
    assert os.listdir(path.parent) == ["page.html"]


def test_one_line_where_it_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"page\.html: cannot be written") as refused:
        write_page(tmp_path / "file" / "page.html", "text")
    assert str(refused.value).endswith("; choose another name (-o)")
    assert "\n" not in str(refused.value)


def test_where_there_is_no_right_another_name_is_advised(tmp_path, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(StoreError, match=r"; make it writable, or choose another name \(-o\)$"):
        write_page(tmp_path / "page.html", "text")
