"""The page of `normlab compare --watch` in a browser, while runs write their records."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normlab.store.format import DIVERGED
from support.compare_pages import normlab

HANG_S = 120
"""A test that waits longer fails."""


LAST = "DATA.figures.find(({id}) => id === 'unfinished')?.variants.train_loss.panels[0].lines[0][1].at(-1)[0]"
"""The last step of the figure of unfinished runs."""


@pytest.fixture
def watching(tmp_path):
    """Return a function that starts `normlab compare --watch`; the process is ended with the test."""
    processes = []

    def start():
        command = [sys.executable, "-m", "normlab", "compare", str(tmp_path), "--watch"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        address = next(word for word in process.stdout.readline().split() if word.startswith("http"))
        return process, address

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def until(page, expression: str):
    """Wait until an expression of JavaScript is true."""
    deadline = time.monotonic() + HANG_S
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"{expression}: {page.locator('#live').text_content()}"
        page.wait_for_timeout(100)


def data_of(path: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def row(step: int) -> dict:
    return {"kind": "train", "step": step, "loss": 4.0, "grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}


def test_new_points_come_without_a_reload_and_choices_stay(browser, trained, tmp_path, watching):
    for number, norm in enumerate(("rmsnorm", "layernorm", "dyt")):
        for depth in (2, 4):
            trained(f"{norm}{depth}", 2 + number, norm=norm, depth=depth, measured=[0, 5])
    running = trained("running", norm="rmsnorm", depth=4, seed=1, state="running")
    process, address = watching()
    errors: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 700})
    page.on("pageerror", lambda error: errors.append(str(error)))
    with running.lock():
        page.goto(address)
        until(page, "document.querySelector('#live')?.textContent.startsWith('live · updated')")
        # What the user chooses.
        page.evaluate("globalThis.isSamePage = true")
        page.locator("[data-figure=loss] [data-label=RMSNorm]").click()
        page.locator("[data-figure=loss] select").select_option("train_loss")
        page.locator("#runs summary").click()
        page.locator("#runs .sort").nth(1).click()
        page.locator("[data-figure=loss]").scroll_into_view_if_needed()
        scrolled = page.evaluate("scrollY")

        def choices():
            return page.evaluate("""() => [
              globalThis.isSamePage, scrollY, document.querySelector('[data-label=RMSNorm]').ariaPressed,
              document.querySelector('[data-figure=loss] select').value,
              document.querySelector('#runs').open, document.querySelector('#runs th[aria-sort]').textContent,
            ]""")

        before = choices()
        assert before == [True, scrolled, "false", "train_loss", True, "norm"]
        lines = page.evaluate("document.querySelectorAll('[data-figure=unfinished] svg[role=img] path').length")
        running.append([row(20), row(21)])
        until(page, f"{LAST} === 21")
        assert choices() == before
        shown = "document.querySelectorAll('[data-figure=unfinished] svg[role=img] path').length"
        assert page.evaluate(shown) == lines > 0

        # A run with a new level of a factor, before the hidden one.
        trained("batchnorm2", 3.0, norm="batchnorm", depth=2)
        until(page, "document.querySelector('[data-label=BatchNorm]') !== null")
        assert choices() == before

        # The run diverges.
        status = {"step": 22, "val_loss": float("nan"), "state": DIVERGED}
        running.write_status(
            {**running.status(), **status, "diverged": {"step": 22, "loss": math.nan, "grad_norm": math.nan}}
        )
    until(page, "document.querySelector('#facts').textContent.includes('1 diverged')")
    until(page, "document.querySelector('[data-figure=unfinished]').hidden")
    assert choices() == [before[0], page.evaluate("scrollY"), *before[2:]]
    final = page.evaluate("DATA")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=HANG_S)
    until(page, "document.querySelector('#live').textContent.startsWith('not connected')")
    assert choices()[0] is True
    assert errors == []
    assert process.returncode == 0
    path = tmp_path / "compare.html"
    assert out.splitlines()[-1] == str(path)
    file = data_of(path)
    assert {**final, "written": 0} == {**file, "written": 0, "error": ""}
    assert normlab("compare", str(tmp_path)).splitlines()[-1] == str(path)
    assert {**data_of(path), "written": 0} == {**file, "written": 0}
