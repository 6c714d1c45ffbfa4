"""The HTML shell of every page: one file that contains its styles, scripts and data.

The page's content security policy allows no request, and no script except the one
with the listed SHA-256. Data from records enters as JSON, and the scripts put it into the document as text.
"""

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from normlab.base.errors import ConfigError, printable
from normlab.store.files import io_error, write_atomic
from normlab.store.format import encode

SHARED = Path(__file__).parent
"""The folder of the shared styles and scripts."""
CHART = (SHARED / "chart.css", SHARED / "chart.js")
"""The assets that draw figures."""
_ALTERNATIVE = "name (-o)"
"""The end of "choose another ..." in error messages."""


def check_page(path: Path) -> None:
    """Check that a page can be written to the path of -o.

    Raises:
        ConfigError: The path is a folder, or has a suffix other than .html or .htm.
    """
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        raise ConfigError(f"-o {path}: is a folder; choose a file in it, such as {path / 'page.html'}")
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"-o {path}: a page is HTML; choose a name that ends in .html")


def page(title: str, body: str, data: Mapping[str, Any], assets: Sequence[Path]) -> str:
    """Return the HTML of a page.

    Args:
        title: The window's title; any text.
        body: Trusted HTML. Text from records belongs in `data`.
        data: JSON values for the scripts; NaN and infinity become strings, as in a record.
        assets: Styles (.css) and scripts (.js) in loading order, after the shared ones. Scripts share one scope.
    """
    script = _read_joined([SHARED / "base.js", *assets], ".js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    shell = Template((SHARED / "shell.html").read_text(encoding="utf-8"))
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:"
    return shell.substitute(
        policy=policy,
        title=html.escape(printable(title)),
        styles=_read_joined([SHARED / "base.css", *assets], ".css"),
        body=body,
        data=as_json(data),
        script=script,
    )


def write_output(path: Path, content: bytes) -> None:
    """Write or replace the file of -o, and create its folders.

    Raises:
        StoreError: The file could not be written; an existing file is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise io_error(path, "written", error, setting=_ALTERNATIVE) from error
    write_atomic(path, content, setting=_ALTERNATIVE)


def as_json(data: Mapping[str, Any]) -> str:
    """Return strict JSON for a script element, escaped so that no text can end the element."""
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a NaN or an infinity; `encode` takes longer than the rest of a large page
        text = json.dumps(encode(data), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read_joined(paths: Sequence[Path], suffix: str) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in paths if path.suffix == suffix)
