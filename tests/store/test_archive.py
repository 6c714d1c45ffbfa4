"""`normlab share` and `normlab open`: a zip file holds records only, and a hostile one leaves no file."""

import os
import shutil
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_runs import Record, write_sweep

from normlab.store import archive
from normlab.store.archive import unpack_archive
from support.run_folders import Command, contents, flip_a_bit

Make = Callable[[zipfile.ZipFile], object]

SHORT = ["model.depth=1", "model.width=8", "model.heads=1", "train.batch_size=2", "train.steps=1", "tracking.wandb=off"]
RUN, METRICS = "runs/a/run.json", "runs/a/metrics.jsonl"


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return the folder of a sweep of two runs with every kind of file, in the results folder."""
    records = [Record(steps=20, depth=1, width=8, seed=seed, warmup_steps=2) for seed in range(2)]
    folder = write_sweep(tmp_path / "results", "first", records)
    (folder / "compare.html").write_text("page")
    (folder / "ends.jsonl").write_text("{}")
    for run in (tmp_path / "results" / "runs").iterdir():
        for name in ("checkpoints/step_00000020/manifest.json", "plugins/00_mine.py", "tokenizer.json", "wandb/log"):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text("text")
    return folder


def test_a_sweep_has_the_same_records_after_open(sweep: Path, run_command: Command) -> None:
    assert run_command("share", "first", "-o", "new/it.zip") == (0, "new/it.zip\n", "")
    assert run_command("open", "new/it.zip") == (0, "normlab summarize first --results-dir it\n", "")
    before, after = contents(Path("results")), contents(Path("it"))
    left_out = ("checkpoints/", "wandb/", "ends.jsonl", "/lock", "compare.html")
    assert after == {name: content for name, content in before.items() if not any(part in name for part in left_out)}
    assert sorted(os.listdir("new")) == ["it.zip"]
    assert stat.S_IMODE(os.stat("it").st_mode) == stat.S_IMODE(os.stat("results").st_mode)


def test_the_page_of_a_stranger_is_not_unpacked(run_command: Command) -> None:
    """Files of older versions have pages."""
    with zipfile.ZipFile("it.zip", "w") as made:
        made.writestr(RUN, "{}")
        made.writestr("sweeps/a/plan.json", "{}")
        made.writestr("sweeps/a/compare.html", "<script>steal()</script>")
    assert run_command("open", "it.zip", "-o", "new")[0] == 0
    assert sorted(contents(Path("new"))) == [RUN, "sweeps/a/plan.json"]


def test_a_sweep_with_its_search_and_a_run_are_one_file(sweep: Path, run_command: Command) -> None:
    second = write_sweep(Path("results"), "first-search", [Record(steps=20, depth=1, width=8, seed=7, warmup_steps=2)])
    run = next(Path("results", "runs").iterdir())
    assert run_command("share", "first", run.name, "-o", "it.zip") == (0, "it.zip\n", "")
    lines = "normlab summarize first --results-dir it\nnormlab summarize first-search --results-dir it\n"
    assert run_command("open", "it.zip") == (0, lines, "")
    assert len(list(Path("it", "runs").iterdir())) == 3
    assert (Path("it", "sweeps", "first-search", "plan.json")).read_bytes() == (second / "plan.json").read_bytes()


def test_checkpoints_are_added_on_request_and_a_run_has_no_sweep(sweep: Path, run_command: Command) -> None:
    run = next(Path("results", "runs").iterdir())
    assert run_command("share", str(run), "-o", "run.zip", "--checkpoints")[0] == 0
    assert run_command("open", "run.zip", "-o", "a b") == (0, "normlab summarize 'a b'\n", "")
    assert (Path("a b", "runs", run.name, "checkpoints", "step_00000020", "manifest.json")).read_text() == "text"
    assert [path.name for path in Path("a b", "runs").iterdir()] == [run.name]
    assert not Path("a b", "sweeps").exists()


def test_no_file_is_replaced(sweep: Path, run_command: Command) -> None:
    Path("first.zip").symlink_to("missing")
    code, _, err = run_command("share", "first", "-o", "first.zip")
    assert (code, err) == (2, "error: -o first.zip: exists; give the name of a new file\n")
    assert run_command("share", "first", "-o", "it.zip")[0] == 0
    Path("it").mkdir()
    code, _, err = run_command("open", "it.zip")
    assert (code, err) == (2, "error: it: exists; name a new folder with -o FOLDER\n")


@pytest.mark.exhaustive
def test_share_names_the_paths_that_travel(run_command: Command) -> None:
    """A record has no path of its own machine but those that the user named."""
    Path("a text.txt").write_text("some words of text " * 400)
    absolute = Path("words.txt").resolve()
    absolute.write_text("other words of text " * 400)
    settings = [*SHORT, "data=files", f"results_dir={Path('results').resolve()}"]
    assert run_command("sweep", "sweep.name=one", "norm=none,rmsnorm", 'data.path="a text.txt"', *settings)[0] == 0
    assert run_command("share", "one", "-o", "one.zip") == (0, "one.zip\n", "")
    with zipfile.ZipFile("one.zip") as made:
        for name in made.namelist():
            assert str(Path.cwd()).encode() not in made.read(name), name
    assert run_command("train", f"data.path={absolute}", "run.name=two", *settings)[0] == 0
    code, out, err = run_command("share", "two", "-o", "two.zip")
    assert (code, out) == (0, "two.zip\n")
    assert err == f"warning: -o two.zip: has the names of folders of this machine, {absolute}\n"


def test_share_names_damaged_files(run_command: Command) -> None:
    """The archive has them as they are: whoever reads it names them too."""
    Path("text.txt").write_text("some words of text " * 400)
    settings = [*SHORT, "data=files", "data.path=text.txt", "run.name=one", "stats.every=1"]
    assert run_command("train", *settings)[0] == 0
    (folder,) = Path("results", "runs").iterdir()
    for name, message in (
        ("tokenizer.json", "tokenizer.json: is missing or damaged"),
        ("metrics.jsonl", f"the metrics of run {folder.name} "),
        ("stats/core.bin", f"the statistics (core.bin) of run {folder.name} "),
        ("status.json", "status.json: is damaged"),
    ):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-1])
        code, out, err = run_command("share", "one", "-o", "one.zip")
        assert (code, out, message in err, err.count("\n")) == (0, "one.zip\n", True, 1), err
        (folder / name).write_bytes(content)
        Path("one.zip").unlink()
    assert run_command("share", "one", "-o", "one.zip") == (0, "one.zip\n", "")


def test_a_link_to_another_file_is_not_shared(sweep: Path, run_command: Command) -> None:
    Path("secret").write_text("secret")
    run = next(Path("results", "runs").iterdir())
    (run / "tokenizer.json").unlink()
    (run / "tokenizer.json").symlink_to(Path("secret").absolute())
    code, _, err = run_command("share", "first", "-o", "it.zip")
    assert (code, "is a symbolic link to" in err, Path("it.zip").exists()) == (2, True, False)


def test_a_failed_write_leaves_no_file(sweep: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "sync", full)
    before = sorted(os.listdir())
    code, _, err = run_command("share", "first", "-o", "it.zip")
    assert (code, err.count("\n"), "free some space" in err) == (2, 1, True)
    assert sorted(os.listdir()) == before


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


HOSTILE: dict[str, tuple[str, Make]] = {
    **{
        f"name {name}": (
            "is no file of a record",
            lambda made, name=name: made.writestr(entry(name), "x"),
        )
        for name in (
            "../victim", "/victim", "runs/../../victim", "runs/../run.json", "runs/./run.json",
            "runs/a/../../run.json", "runs\\a\\run.json", "C:/run.json", "runs/a/wandb/x", "runs/a/lock",
            "runs/.a/run.json", "runs/a/stats/..", "runs/a/plugins/__init__.pyc", "sweeps/a/logs/pack_001.log",
            "runs/a/", "runs/a\x1b/run.json", "runs/a/run.json/", "runs/a/run.json\n", f"runs/{'a' * 300}/run.json",
            "conf/train.yaml", "runs//run.json", "runs/a/stats/a/b.json",
        )
    },
    "a link": ("a link or a device", lambda made: made.writestr(entry(METRICS, stat.S_IFLNK | 0o777), "/etc/passwd")),
    "a device": ("a link or a device", lambda made: made.writestr(entry(METRICS, stat.S_IFCHR | 0o666), "")),
    "a pipe": ("a link or a device", lambda made: made.writestr(entry(METRICS, stat.S_IFIFO | 0o666), "")),
    "another method": (
        "compressed by another method",
        lambda made: made.writestr(METRICS, "x", compress_type=zipfile.ZIP_LZMA),
    ),
    "two files": ("two files have one name", lambda made: made.writestr("runs/A/run.json", "x")),
}  # fmt: skip


def check_rejected(path: Path, message: str, run_command: Command) -> None:
    before = contents(Path.cwd())
    code, out, err = run_command("open", str(path), "-o", "new")
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert message in err
    assert contents(Path.cwd()) == before
    assert sorted(os.listdir()) == ["it.zip"]


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_file_is_rejected(attack: str, run_command: Command) -> None:
    message, add = HOSTILE[attack]
    with zipfile.ZipFile("it.zip", "w") as made:
        made.writestr(entry(RUN), "{}")
        add(made)
    check_rejected(Path("it.zip"), message, run_command)


def test_a_file_that_is_twice_in_it_is_rejected(run_command: Command) -> None:
    with zipfile.ZipFile("it.zip", "w") as made:
        made.writestr(RUN, "{}")
        with pytest.warns(UserWarning, match="Duplicate name"):
            made.writestr(RUN, "[]")
    check_rejected(Path("it.zip"), "two files have one name", run_command)


def test_a_second_name_in_an_extra_field_is_rejected(run_command: Command) -> None:
    """Newer versions of Python read the field, and older ones the name; no file is written by the second name."""
    info, name = entry(METRICS), b"../../victim"
    content = b"\1" + struct.pack("<I", zlib.crc32(METRICS.encode())) + name
    info.extra = struct.pack("<HH", 0x7075, len(content)) + content
    with zipfile.ZipFile("it.zip", "w") as made:
        made.writestr(RUN, "{}")
        made.writestr(info, "x")
    code, _, _ = run_command("open", "it.zip", "-o", "new")
    assert code == (2 if sys.version_info >= (3, 12) else 0)
    assert not list(Path.cwd().rglob("victim"))


def test_a_sweep_without_runs_is_not_shared(sweep: Path, run_command: Command) -> None:
    shutil.rmtree(Path("results", "runs"))
    code, _, err = run_command("share", "first", "-o", "it.zip")
    assert (code, "no run has started" in err, Path("it.zip").exists()) == (2, True, False)


def test_a_bomb_is_rejected(run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LARGEST", 2**20)
    with zipfile.ZipFile("it.zip", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(RUN, bytes(2**20 + 1))
    check_rejected(Path("it.zip"), f"1 file of {2**20 + 1} bytes", run_command)


@pytest.mark.parametrize("declared", [0, 10, 2**21])
def test_a_file_of_another_size_than_it_declares_is_rejected(declared: int, run_command: Command) -> None:
    """Not more than the declared bytes are written: the limit on these is a limit on the disk."""
    with zipfile.ZipFile("it.zip", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(RUN, bytes(2**20))
    content = Path("it.zip").read_bytes()
    Path("it.zip").write_bytes(content.replace(struct.pack("<I", 2**20), struct.pack("<I", declared)))
    check_rejected(Path("it.zip"), "it.zip: is not a file of `normlab share` (", run_command)


def test_a_damaged_or_encrypted_file_is_rejected(run_command: Command) -> None:
    with zipfile.ZipFile("it.zip", "w") as made:
        made.writestr(RUN, "x" * 1000)
    content = Path("it.zip").read_bytes()
    encrypted = bytearray(content)
    encrypted[6] |= 1
    encrypted[content.rindex(b"PK\1\2") + 8] |= 1
    cases = [(b"", "not a zip file"), (content[:50], "not a zip file"), (bytes(encrypted), "is encrypted")]
    for damaged, message in cases:
        Path("it.zip").write_bytes(damaged)
        check_rejected(Path("it.zip"), message, run_command)
    Path("it.zip").write_bytes(content)
    flip_a_bit(Path("it.zip"))
    check_rejected(Path("it.zip"), "Bad CRC-32", run_command)
    with zipfile.ZipFile("it.zip", "w") as made:
        made.writestr("sweeps/a/plan.json", "{}")
    check_rejected(Path("it.zip"), "it holds no run", run_command)


def test_a_missing_file_or_a_pipe_is_no_zip_file(run_command: Command, tmp_path: Path) -> None:
    os.mkfifo("pipe")
    for name in ("missing.zip", "pipe", "."):
        code, _, err = run_command("open", name, "-o", "new")
        assert (code, err) == (2, f"error: {name}: is not a file; name a zip file of `normlab share`\n")


def test_a_file_that_is_no_zip_file_is_no_folder_that_exists(run_command: Command) -> None:
    """Without -o, a file without a suffix has the name of its folder."""
    Path("a1").write_text("no zip file")
    code, _, err = run_command("open", "a1")
    assert (code, err.partition("(")[0]) == (2, "error: a1: is not a file of `normlab share` ")


def test_an_interrupted_open_leaves_no_folder(
    sweep: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command("share", "first", "-o", "it.zip")[0] == 0
    before = sorted(os.listdir())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(archive, "has_plan", interrupt)
    with pytest.raises(KeyboardInterrupt):
        unpack_archive(Path("it.zip"), Path("new"))
    assert sorted(os.listdir()) == before
