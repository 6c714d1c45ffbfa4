from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.catalogue.corpora import FilesData


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test its own cache and home folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("NORMLAB_CACHE", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., FilesData]:
    """Write files below tmp_path/text and return their config: files({"a.txt": "hello"}, val_fraction=0.4)."""

    def write(contents: dict[str, str | bytes], **options: object) -> FilesData:
        for name, content in contents.items():
            path = tmp_path / "text" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        options.setdefault("path", [str(tmp_path / "text")])
        return FilesData(**options)  # pyright: ignore[reportArgumentType]

    return write
