"""What every page is made of: one HTML file with its styles, its scripts and its data inside.

Nothing is loaded, and nothing that is not ours can run: the page's own content security policy allows no request at
all, and no script but those whose SHA-256 it names. What comes from a record is data: it enters as JSON and is put into
the document as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normlab.errors import ConfigError
from normlab.store.files import io_error, write_atomic
from normlab.store.schema import encode

OURS = Path(__file__).parent
"""Where the styles and the scripts are that pages share."""
_BEGINNINGS = (b"<!doctype html", b"<html")
_INSTEAD = "name (-o)"
"""What to choose another of where the system refuses a page."""


def check_page(path: Path, option: str) -> None:
    """Refuse a page's name before anything is read or measured.

    Raises:
        ConfigError: It says that the file is something else, or is a folder's, or that of a file which is no page.
    """
    if path.suffix.lower() not in ("", ".html", ".htm"):
        raise ConfigError(f"{option} {path}: a page is written as HTML; give it a name that ends in .html")
    if os.path.isdir(path):  # unlike Path it says no to a name that is too long
        raise ConfigError(f"{option} {path}: is a folder; name a file in it, as {path / 'page.html'}")
    if not path.suffix and os.path.exists(path) and not _begins_like_a_page(path):
        raise ConfigError(f"{option} {path}: is there, and is no page; choose another name, as {path}.html")


def page(title: str, body: str, data: Mapping[str, Any], assets: Sequence[Path], *, plotly: bool = True) -> str:
    """A page, whole.

    Args:
        title: Of the window; any text.
        body: HTML, ours alone: what a record says comes in `data`.
        data: What the scripts draw, plain values; NaN and infinity are written as the record writes them.
        assets: Styles (.css) and scripts (.js) beside the shared ones, in the order in which they are read. The
            scripts share one scope.
        plotly: Whether Plotly's library is in the page (5 MB).
    """
    styles = _joined([OURS / "base.css", *assets], ".css")
    scripts = [_joined([OURS / "base.js", *assets], ".js")]
    if plotly:
        from plotly.offline import get_plotlyjs

        scripts.insert(0, get_plotlyjs())
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return "\n".join([
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>",
        f"<style>\n{styles}</style>",
        "</head>",
        "<body>",
        body,
        f'<script type="application/json" id="data">{as_json(data)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
        "",
    ])  # fmt: skip


def write_page(path: Path, text: str) -> None:
    """Write a page, or replace it; the folders that it is to be in are made.

    Raises:
        StoreError: The system refused; a page that was there is as it was.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(path, "written", error, setting=_INSTEAD) from error
    write_atomic(path, text.encode(), setting=_INSTEAD)


def as_json(data: Mapping[str, Any]) -> str:
    """Strict JSON that may stand in a script element: nothing in it can end the element, or begin another."""
    text = json.dumps(encode(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _begins_like_a_page(path: Path) -> bool:
    """Whether a file begins as HTML does; one that cannot be read does not."""
    try:
        if not path.is_file():  # of a pipe nothing may ever come
            return False
        with path.open("rb") as file:
            return file.read(len(_BEGINNINGS[0])).lower().startswith(_BEGINNINGS)
    except OSError:
        return False


def _joined(paths: Sequence[Path], suffix: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in paths if path.suffix == suffix)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
