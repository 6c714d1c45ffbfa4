"""Files of a corpus: their order, their hash, and the documents that are read from them."""

import errno
import gzip
import hashlib
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.base.errors import DataError
from normlab.catalogue.corpora import DataConfig, FilesData, StdlibData
from normlab.data.documents import Spool
from normlab.data.files import FilesText, find_sources, source_sha256

Files = Callable[..., FilesData]


def source_names(config: DataConfig) -> list[str]:
    return [source.name for source in find_sources(config)]


def test_stdlib_is_twelve_megabytes_of_sorted_text_without_tests() -> None:
    sources = find_sources(StdlibData())
    assert 10.5e6 < sum(source.path.stat().st_size for source in sources) < 14e6
    names = [source.name for source in sources]
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "asyncio/__init__.py", "__future__.py"} <= {*names}
    excluded = ("/test/", "/tests/", "/idle_test/", "site-packages", "dist-packages", "/_bundled/", "_sysconfigdata")
    assert not [name for name in names for part in excluded if part in f"/{name}"]


def test_stdlib_excludes_tests_packages_and_other_encodings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="no source files of Python's standard library"):
        find_sources(StdlibData())
    for name in ("b.py", "a/c.py", "a/tests/t.py", "site-packages/x.py", "config-3.11/y.py", "_sysconfigdata_z.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "data.txt").write_text("no source")
    assert source_names(StdlibData()) == ["a/c.py", "b.py"]


def test_folders_are_read_recursively_without_hidden_files_and_results(files: Files, tmp_path: Path) -> None:
    users = {"b.txt": "b", "a/z.txt": "z", "a/b/c.rst": "", "a.md": "a", "results/runs/mine.txt": "m"}
    config = files(users)
    before = source_sha256(find_sources(config))
    files({
        ".hidden": "no", ".git/config": "no", "a/.ds/x.txt": "no", "results/runs/begun/lock": "",
        "results/runs/other/run.json": "{}", "results/sweeps/s/plan.json": "{}", "results/studies/s/report.json": "{}",
    })  # fmt: skip
    (tmp_path / "text" / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "text" / "pipe")
    assert source_names(config) == sorted(users)
    assert source_sha256(find_sources(config)) == before


def test_paths_keep_their_order_and_repeats_are_dropped(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = files({"x.txt": "x", "y.txt": "y", ".named": "yes"})
    root = tmp_path / "text"
    config.path = [f"{root}/.named", f"{root}/y.txt", f"{root}", f"{root}/../text/y.txt"]
    assert source_names(config) == [".named", "y.txt", "x.txt"]
    monkeypatch.setenv("HOME", str(root))
    assert source_names(FilesData(path=["~/x.txt"])) == ["x.txt"]


def test_prose_markup_and_source_code_are_text(files: Files) -> None:
    names = ["README", "a.txt", "b.Py", "c.md", "d.rs"]
    assert source_names(files(dict.fromkeys(names, "x"))) == names


@pytest.mark.parametrize("name", ["a.JSONL", "a.json", "a.ndjson", "a.parquet", "a.csv", "a.tsv", "a.arrow"])
def test_error_for_a_table_names_the_data_that_reads_it(name: str, files: Files) -> None:
    config = files({"a.txt": "a", f"deep/{name}": '{"text": "a"}'})
    suffix = Path(name).suffix.lower()
    hint = (
        "write its text into a .txt file, or, to train on it, put such files into a folder and set data=hub "
        "data.name=FOLDER"
    )
    for path in (config.path[0], f"{config.path[0]}/deep/{name}"):
        with pytest.raises(DataError, match=rf"deep/{name}: {suffix} is a format of tables, not of text; {hint}$"):
            find_sources(FilesData(path=[path]))


@pytest.mark.parametrize("name", ["a.jsonl~", "a.jsonl.bak", "a.jsonl.gz", "a.ipynb", "a.html", "README~"])
def test_unknown_suffix_is_rejected(name: str, files: Files) -> None:
    """Braces, keys and the syntax of backups would become text."""
    config = files({"a.txt": "a", f"deep/{name}": '{"text": "a"}'})
    suffix = "~" if name.endswith("~") else Path(name).suffix
    for path in (config.path[0], f"{config.path[0]}/deep/{name}"):
        with pytest.raises(DataError, match=rf"deep/{name}: {suffix} is the suffix of no known format; leave it out"):
            find_sources(FilesData(path=[path]))


@pytest.mark.parametrize("path", ["nowhere.txt", "x" * 5000])
def test_error_names_a_missing_path(path: str) -> None:
    with pytest.raises(DataError, match=f"data.path={path}: no such file or folder"):
        find_sources(FilesData(path=[path]))


def test_a_path_that_is_neither_a_file_nor_a_folder_is_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    for path in ("/dev/null", str(tmp_path / "pipe"), str(tmp_path / "link")):
        with pytest.raises(
            DataError, match=f"data.path={path}: is a device, a pipe, a socket or a broken link; choose"
        ):
            find_sources(FilesData(path=[path]))


def test_files_of_the_kernel_are_empty(tmp_path: Path) -> None:
    """Their size is 0, and reading them fails (mem), never ends (pagemap), or waits (kmsg)."""
    names = ("mem", "pagemap", "cmdline")
    paths = [path for name in names if Path(path := f"/proc/self/{name}").is_file()]
    if not paths:
        pytest.skip("this system has no /proc")
    text = FilesText(FilesData(path=paths))
    assert list(text.documents(tmp_path)) == []
    assert text.counts.empty == len(paths)


def test_empty_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("x")
    with pytest.raises(DataError, match=r"has no files, or only hidden files"):
        find_sources(FilesData(path=[str(tmp_path)]))


def test_hash_depends_only_on_names_bytes_and_order(files: Files, tmp_path: Path) -> None:
    def sha256() -> str:
        return source_sha256(find_sources(config))

    config = files({"a.txt": "one", "b.txt": "two"})
    first = sha256()
    os.utime(tmp_path / "text" / "a.txt", (0, 0))
    assert sha256() == first
    hashes = {first}
    for contents in (
        {"a.txt": "onetwo", "b.txt": ""},
        {"a.txt": "two", "b.txt": "one"},
        {"a.txt": "one", "b.txt": "twp"},  # of the same length
        {"a.txt": "one", "b.txt": "two", "c.txt": ""},
    ):
        files(contents)
        hashes.add(sha256())
    (tmp_path / "text" / "c.txt").rename(tmp_path / "text" / "d.txt")
    hashes.add(sha256())
    (tmp_path / "text" / "d.txt").unlink()
    assert len(hashes) == 6
    config.path = [str(tmp_path / "text" / name) for name in ("a.txt", "b.txt")]
    files({"a.txt": "one", "b.txt": "two"})
    assert sha256() == first  # the same files, named one by one
    (tmp_path / "text").rename(tmp_path / "elsewhere")
    config.path = [str(tmp_path / "elsewhere")]
    assert sha256() == first
    config.path = [str(tmp_path / "elsewhere" / name) for name in ("b.txt", "a.txt")]
    assert sha256() != first


def test_error_names_an_unreadable_file(files: Files, tmp_path: Path) -> None:
    sources = find_sources(files({"a.txt": "x"}))
    (tmp_path / "text" / "a.txt").unlink()
    (tmp_path / "text" / "a.txt").mkdir()
    with pytest.raises(DataError, match=r"a\.txt: cannot be read \(Is a directory\)"):
        source_sha256(sources)


def test_error_names_a_file_whose_disk_fails(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error has no file name once the file is open."""
    sources = find_sources(files({"a.txt": "x"}))

    def failing(file: object, digest: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hashlib, "file_digest", failing)
    with pytest.raises(DataError, match=r"/a\.txt: cannot be read \(Input/output error\); make it readable"):
        source_sha256(sources)


# Documents


@pytest.fixture
def read(tmp_path: Path) -> Callable[[FilesData], list[str]]:
    def documents(config: FilesData) -> list[str]:
        spool = Spool(tmp_path / "documents", FilesText(config).documents(tmp_path))
        texts = list(spool)
        assert list(spool) == texts  # documents can be iterated again
        return texts

    return documents


Read = Callable[[FilesData], list[str]]


def test_text_file_is_one_document(files: Files, read: Read) -> None:
    contents = {"a.txt": "one\ntwo\n", "b.py": "x = '\u00e9\U0001f600'", "c": "  \n\n ", "d.md": "1,2\n"}
    assert read(files(contents)) == list(contents.values())
    assert read(files({"e.txt": "a\r\nb\rc\n"}))[-1] == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "a \0 b", "has a NUL character, as binary files and UTF-16 have; convert the file"),
        ("a.txt", "abc".encode("utf-16-le"), "has a NUL character"),
        ("a.txt", "abc".encode("utf-16"), r"not UTF-8 \(.* position 0: .*\); convert the file"),
        ("a.txt", b"caf\xe9", r"not UTF-8 \(.*byte 0xe9 in position 3.*\); convert the file \(iconv -t utf-8\)"),
        ("a.txt", gzip.compress(b"{}", mtime=0), r"not UTF-8 \(.*\); convert the file \(iconv -t utf-8\), unpack it"),
    ],
)  # fmt: skip
def test_error_names_the_file_and_the_problem(
    name: str, content: str | bytes, message: str, files: Files, read: Read
) -> None:
    with pytest.raises(DataError, match=rf"{name}: {message}") as caught:
        read(files({"0.txt": "fine", name: content}))
    assert "\n" not in str(caught.value)


def test_byte_order_marks_are_removed(files: Files, read: Read) -> None:
    assert read(files({"a.txt": "\ufeffone\n\ufefftwo"})) == ["one\ntwo"]  # cat one.txt two.txt


def test_empty_files_are_counted(files: Files, tmp_path: Path) -> None:
    text = FilesText(files({"a.txt": "", "b.txt": "b", "c": "c"}))
    assert list(text.documents(tmp_path)) == ["b", "c"]
    assert (text.counts.documents, text.counts.empty) == (2, 1)
