"""Files and folders under hidden names: whole at the end, nothing after a failure, and a leftover is used up."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from normlab.base.errors import DiskError, StoreError
from normlab.store.hidden import delete_folder, finish_deletions, new_file, new_folder

Make = Callable[[Path], AbstractContextManager[Path]]


def fill(hidden: Path) -> None:
    """Write the text `new` into a file, or into a file of a folder."""
    (hidden / "file" if hidden.is_dir() else hidden).write_text("new")


def content(path: Path) -> str:
    return (path / "file" if path.is_dir() else path).read_text()


@pytest.fixture(params=[new_file, new_folder])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def test_the_name_appears_at_the_end(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "it"
    with make(path) as hidden:
        fill(hidden)
        assert os.listdir(tmp_path) == [".it.normlab-new"]
    assert (os.listdir(tmp_path), content(path)) == (["it"], "new")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, FileNotFoundError])
def test_a_failure_leaves_nothing(make: Make, error: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        with make(tmp_path / "it") as hidden:
            fill(hidden)
            raise error

    with pytest.raises(error):
        fail()
    assert os.listdir(tmp_path) == []


def test_what_a_kill_left_is_used_up(make: Make, tmp_path: Path) -> None:
    path, left = tmp_path / "it", tmp_path / ".it.normlab-new"
    if make is new_folder:
        (left / "old" / "deep").mkdir(parents=True)
        (left / "link").symlink_to(tmp_path)
    else:
        left.write_text("much that is old")
    with make(path) as hidden:
        fill(hidden)
    assert (os.listdir(tmp_path), content(path)) == (["it"], "new")
    assert make is new_file or os.listdir(path) == ["file"]


def test_two_processes_do_not_make_the_same(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "it"
    with make(path) as hidden:
        fill(hidden)
        with pytest.raises(StoreError, match="it: another process makes it"), make(path):
            pass
    assert content(path) == "new"


def test_a_link_in_place_of_the_hidden_name_is_not_followed(make: Make, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    if make is new_folder:
        victim.mkdir()
        (victim / "mine").write_text("mine")
    else:
        victim.write_text("mine")
    (tmp_path / ".it.normlab-new").symlink_to(victim)
    with pytest.raises(OSError, match=r"Not a directory|symbolic links"), make(tmp_path / "it"):
        pass
    assert (victim / "mine" if victim.is_dir() else victim).read_text() == "mine"


def test_an_empty_folder_is_replaced_and_a_full_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.mkdir()
    with new_folder(path) as hidden:
        fill(hidden)
    assert content(path) == "new"
    with pytest.raises(OSError, match="not empty"), new_folder(path) as hidden:
        pass
    assert (os.listdir(tmp_path), content(path)) == (["it"], "new")


def test_deletions_finish(tmp_path: Path) -> None:
    for name in (".a.normlab-deleted", ".b.normlab-deleted", "a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("text")
    delete_folder(tmp_path / "a")  # where a killed process had deleted a folder of this name
    assert sorted(os.listdir(tmp_path)) == [".b.normlab-deleted", "c"]
    assert finish_deletions(tmp_path) == ["b"]
    assert finish_deletions(tmp_path) == []
    assert os.listdir(tmp_path) == ["c"]
    with pytest.raises(DiskError, match="missing: cannot be deleted"):
        delete_folder(tmp_path / "missing")
