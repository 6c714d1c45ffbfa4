"""The shared page shell in a browser: data arrives unchanged, and no script inside the data can run."""

import math
import re

import pytest

from normlab.report.pages.shell import page, write_output
from normlab.store.format import encode
from support.browser import opened

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
    """Return a function that writes a script for a page."""

    def write(script: str):
        path = tmp_path / "asset.js"
        path.write_text(script)
        return path

    return write


def test_data_arrives_unchanged(browser, asset, tmp_path):
    script = asset("document.body.append(make('p', { id: 'text' }, Object.keys(DATA)[0]));")
    write_output(tmp_path / "page.html", page(HOSTILE, "<main></main>", DATA, [script]).encode())
    with opened(browser, tmp_path / "page.html") as tab:
        assert tab.title() == HOSTILE
        assert tab.evaluate("DATA") == encode(DATA)
        assert tab.evaluate("Object.is(DATA.numbers[3], -0)")
        assert tab.text_content("#text") == HOSTILE
        assert tab.locator("img").count() == 0


@pytest.mark.parametrize("how", INJECTED)
def test_injected_script_does_not_run(browser, asset, tmp_path, how):
    text = page("t", "", ATTACK, [asset(INJECTED[how])])
    unguarded = re.sub(r"<meta http-equiv.*", "", text)
    assert unguarded != text
    assert visit(browser, tmp_path / "unguarded.html", unguarded)[0], "the attack has no effect without the policy"
    ran, console = visit(browser, tmp_path / "page.html", text)
    assert not ran
    assert how == "text as code" or "Content Security Policy" in console


def test_page_makes_no_network_request(browser, asset, tmp_path):
    script = asset(f"fetch('https://example.invalid/').catch(() => {{ {RUNS} }});")
    refused, console = visit(browser, tmp_path / "page.html", page("t", "", {}, [script]))
    assert refused
    assert "Content Security Policy" in console
    assert "ERR_" not in console


def visit(browser, path, text: str) -> tuple[bool, str]:
    """Return whether the injected script ran, and the console's messages."""
    write_output(path, text.encode())
    context = browser.new_context(offline=True)
    tab, messages = context.new_page(), []
    tab.on("console", lambda message: messages.append(message.text))
    tab.goto(path.as_uri())
    tab.wait_for_timeout(200)
    ran = tab.get_attribute("html", "data-ran")
    context.close()
    return ran == "yes", "\n".join(messages)


@pytest.mark.few(1)
@pytest.mark.parametrize("existing", [False, True])
def test_a_folder_that_cannot_be_written_is_named(existing, make_run, tmp_path, run_without_root_privileges):
    make_run("one")
    if existing:
        (tmp_path / "compare.html").write_text("old")
    tmp_path.chmod(0o555)
    code, _, err = run_without_root_privileges("compare", str(tmp_path))
    assert (code, err.splitlines()[-1]) == (
        2,
        f"error: {tmp_path}/compare.html: cannot be written (Permission denied); make {tmp_path} writable, or choose "
        "another name (-o)",
    )
