"""No command changes a file outside of the folder of a run or a sweep, whatever a record of someone else holds."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normlab.base.errors import StoreError
from normlab.config.compose import compose_run, compose_sweep
from normlab.store.files import AppendFile, check_links, is_file_name
from normlab.store.lock import file_lock, try_lock
from normlab.store.plans import read_plan
from normlab.store.runs import RunFolder
from normlab.studies.report import write_report
from normlab.sweeps.files import read_queue, slurm_folder, write_plan, write_queue
from normlab.sweeps.plan import make_plan
from normlab.tracking.uploads import Upload
from normlab.training.start import train
from support.run_folders import contents
from support.small_run import small_run, without_replaced

Command = Callable[..., tuple[int, str, str]]

OVERRIDES = small_run(Path("results"), "model.depth=1", "train.steps=2", "train.checkpoint_every=1")
PATHS = [
    "../../../../victim",
    "..",
    ".",
    "/victim",
    "a/b",
    ".hidden",
    "a\0b",
    "a\nb",
    "\x1b[2J",
    "\ud800",
    "x" * 300,
    3,
]
"""Values that are no name of a file in the folder of a record."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the results of a run, interrupted after its first step, and with a sweep of this run."""
    home = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        folder = train(compose_run(OVERRIDES), trackers=[]).folder
        shutil.rmtree(folder.path / "checkpoints" / "step_00000002")
        folder.write_status({**folder.status(), "state": "interrupted", "step": 1, "checkpoint": 1})
        planned = make_plan(*compose_sweep([*OVERRIDES, "sweep.name=first"]))
        planned.folder.mkdir(parents=True)
        write_plan(planned.folder, planned.plan)
    return home


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    """Return the run in a copy of the results, in the current folder, which has a victim too."""
    shutil.copytree(trained / "results", tmp_path / "results")
    for name in ("stats/.core.json.01234567.tmp", ".status.json.01234567.tmp", "state.safetensors", "lock"):
        path = tmp_path / "victim" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("keep")
    (path,) = (tmp_path / "results" / "runs").iterdir()
    return RunFolder(path)


def make_link(path: Path, target: Path) -> None:
    """Replace a file or a folder with a symbolic link; a folder's content moves to the target."""
    if path.is_dir():
        shutil.copytree(path, target, dirs_exist_ok=True)
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def of_run(run: RunFolder) -> list[list[str]]:
    name = str(run.path.relative_to(Path.cwd()))
    return [
        ["train", *without_replaced([*OVERRIDES, "tracking.wandb=offline"])],
        ["sweep", *OVERRIDES, "sweep.name=first"],
        ["sync", name],
    ]


OF_SWEEP = [["sweep", *OVERRIDES, "sweep.name=first"], ["compare", "first"]]


@pytest.mark.parametrize("link", ["", "lock"])
def test_a_link_in_a_run_is_refused(link: str, run: RunFolder, tmp_path: Path, run_command: Command) -> None:
    victim = tmp_path / "victim"
    make_link(run.path / link, victim / "new" if link == "lock" else victim)
    before = contents(victim)
    for command in of_run(run):
        code, _, err = run_command(*command)
        assert (code, err.count("\n")) == (2, 1), (command, err)
        assert f"{run.path / link}: is a symbolic link to {victim}" in err
        assert contents(victim) == before, command


def test_sync_refuses_a_link_without_a_login_too(run: RunFolder, tmp_path: Path, run_command: Command) -> None:
    Upload(where="wandb").write(run.path)
    make_link(run.path / "wandb", tmp_path / "victim")
    code, out, err = run_command("sync", "first")
    assert (code, out) == (2, "")
    assert f"{run.path / 'wandb'}: is a symbolic link to {tmp_path / 'victim'}" in err


@pytest.mark.parametrize("link", ["", "logs"])
def test_a_link_in_a_sweep_is_refused(link: str, run: RunFolder, tmp_path: Path, run_command: Command) -> None:
    victim, sweep = tmp_path / "victim", tmp_path / "results" / "sweeps" / "first"
    make_link(sweep / link, victim / "new" if link == "lock" else victim)
    before = contents(victim)
    for command in OF_SWEEP:
        code, _, err = run_command(*command)
        assert (code, err.count("\n")) == (2, 1), (command, err)
        assert f"{sweep / link}: is a symbolic link to {victim}" in err
        assert contents(victim) == before, command


@pytest.mark.parametrize("name", ["metrics.jsonl", "stats/core.bin", "lock"])
def test_a_file_with_another_name_is_not_changed(
    name: str, run: RunFolder, tmp_path: Path, run_command: Command
) -> None:
    """A stranger's record may share a file with a folder of the user, and a copy by `cp -al` shares them all."""
    victim = tmp_path / "victim" / "linked"
    if (path := run.path / name).exists() and path.stat().st_size:
        victim.write_bytes(path.read_bytes() + b"torn")
    else:
        victim.write_text("mine")
    path.unlink(missing_ok=True)
    os.link(victim, path)
    before = contents(victim.parent)
    code, _, err = run_command("train", *without_replaced([*OVERRIDES, "tracking.wandb=off"]))
    assert code == 0, err
    assert run.state() == "finished"
    assert contents(victim.parent) == before
    assert (victim.stat().st_nlink, path.stat().st_nlink) == (1, 1)


def test_a_copy_by_hard_links_stays_as_it_is(run: RunFolder, tmp_path: Path, run_command: Command) -> None:
    """As by `cp -al` or `rsync --link-dest`, before the run resumes and is deleted."""
    shutil.copytree(tmp_path / "results", tmp_path / "backup", copy_function=os.link)
    before = contents(tmp_path / "backup")
    code, _, err = run_command("train", *without_replaced([*OVERRIDES, "tracking.wandb=off"]))
    assert (code, run.state()) == (0, "finished"), err
    assert run_command("rm", run.run_id, "first", "--yes")[0] == 0
    assert not run.path.exists()
    assert contents(tmp_path / "backup") == before


@pytest.mark.parametrize("kind", ["symbolic link", "pipe"])
def test_only_a_file_is_opened_to_change_it(kind: str, tmp_path: Path) -> None:
    path, victim = tmp_path / "rows", tmp_path / "victim"
    victim.write_bytes(b"mine")
    make = {"symbolic link": os.symlink, "pipe": lambda _, path: os.mkfifo(path)}
    make[kind](victim, path)
    for change in (lambda file: file.append(b"row"), lambda file: file.truncate(0)):
        with pytest.raises(StoreError, match=f"{path}: (cannot be .*symbolic link|is a pipe)"):
            change(AppendFile(path, lines=True))
    assert victim.read_bytes() == b"mine"


def test_a_lock_with_another_name_keeps_its_owner(tmp_path: Path) -> None:
    """A copy is made while a run trains: neither the run nor its copy gets a second process, nor changes the other."""
    path, other = tmp_path / "lock", tmp_path / "other"
    with file_lock(path, "run a"):
        owner = path.read_bytes()
        os.link(path, other)
        for name in (path, other):
            with pytest.raises(StoreError, match=f"{name}: another process has locked it; wait for it"):
                try_lock(name)
        assert path.read_bytes() == owner
    with file_lock(path, "run a"), file_lock(other, "run b"):
        assert not os.path.samefile(path, other)


@pytest.mark.exhaustive
def test_of_all_that_want_a_lock_with_another_name_one_gets_it(tmp_path: Path) -> None:
    path, other = tmp_path / "lock", tmp_path / "other"

    def attempt(_: int) -> int | None:
        try:
            return try_lock(path)
        except StoreError:
            return None

    for _ in range(20):
        path.unlink(missing_ok=True)
        other.write_text("mine")
        os.link(other, path)
        with ThreadPoolExecutor(4) as pool:
            locks = [lock for lock in pool.map(attempt, range(4)) if lock is not None]
        assert len(locks) == 1
        os.close(locks[0])
        assert other.read_text() == "mine"


def test_a_link_in_place_of_a_report_is_refused(tmp_path: Path) -> None:
    nothing: Any = None
    (tmp_path / "report").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="is a symbolic link"):
        write_report(nothing, nothing, tmp_path / "report")


@pytest.mark.parametrize("link", ["results", "results/runs"])
def test_results_may_be_on_another_disk(link: str, run: RunFolder, tmp_path: Path, run_command: Command) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    make_link(tmp_path / link, disk)
    code, out, err = run_command("train", *OVERRIDES)
    assert (code, "resumes from step 1" in out + err) == (0, True), err
    assert run_command("compare", "first")[0] == 0
    assert RunFolder(run.path).state() == "finished"


def test_links_of_wandb_are_no_error(tmp_path: Path) -> None:
    record = tmp_path / "record"
    (record / "wandb" / "offline-run-1").mkdir(parents=True)
    (record / "wandb" / "latest-run").symlink_to("offline-run-1")
    (record / "wandb" / "debug.log").symlink_to("offline-run-1/logs/debug.log")
    (record / "wandb" / "offline-run-1" / "debug-core.log").symlink_to(tmp_path / "core.log")
    check_links(record)
    check_links(tmp_path / "nothing")
    (record / "wandb" / "offline-run-2").symlink_to(tmp_path)
    with pytest.raises(StoreError, match="wandb/offline-run-2: is a symbolic link"):
        check_links(record)
    (record / "wandb" / "offline-run-2").unlink()
    for target in ("../..", "../../record-2", "/", "../../record/../victim"):
        (record / "wandb" / "link").symlink_to(target)
        with pytest.raises(StoreError, match="wandb/link: is a symbolic link"):
            check_links(record)
        (record / "wandb" / "link").unlink()


def test_names_of_files() -> None:
    assert not any(map(is_file_name, PATHS))
    assert all(map(is_file_name, ["rmsnorm-pre-d1w8-5063b4e56a.2", "a b", "*", "[a]", "ü", "x" * 200]))


@pytest.mark.parametrize("value", PATHS, ids=ascii)
def test_the_place_in_a_record_of_uploads_is_checked(value: object, tmp_path: Path) -> None:
    record = {"run_id": tmp_path.name, "where": value, "problem": ""}
    (tmp_path / "wandb.json").write_text(json.dumps(record))
    assert Upload.read(tmp_path) == Upload()


def test_a_record_of_uploads_is_that_of_its_run(tmp_path: Path) -> None:
    upload = Upload("https://wandb.ai/x/y/runs/z", "")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    upload.write(tmp_path / "one")
    assert Upload.read(tmp_path / "one") == upload
    (tmp_path / "one" / "wandb.json").rename(tmp_path / "two" / "wandb.json")
    assert Upload.read(tmp_path / "two") == Upload()


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b'{"steps": true}', b'{"problem": 3}'])
def test_a_damaged_record_of_uploads_counts_as_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "wandb.json").write_bytes(content)
    assert Upload.read(tmp_path) == Upload()


def test_ids_in_a_plan_are_checked(run: RunFolder, run_command: Command) -> None:
    sweep = Path("results", "sweeps", "first")
    plan: Any = read_plan(sweep)
    for value in (3, "", *PATHS[:-1]):
        write_plan(sweep, replace(plan, runs=[replace(plan.runs[0], run_id=value)]))
        with pytest.raises(StoreError, match="is not a run id" if value != 3 else "got `int`"):
            read_plan(sweep)
    for command in (["summarize", "first"], ["sync", "first"], OF_SWEEP[0]):
        code, _, err = run_command(*command)
        assert (code, err.count("\n"), "is not a run id" in err) == (2, 1, True), (command, err)


def test_every_field_of_a_plan_is_checked(run: RunFolder) -> None:
    sweep = Path("results", "sweeps", "first")
    plan: Any = read_plan(sweep)
    (pack,), (planned,) = plan.packs, plan.runs
    changes = [{"packs": [pack, pack]}, {"packs": [pack, replace(pack, number=2)]}]
    changes += [{"packs": [replace(pack, number=value)]} for value in ("../../victim", 1.5, -1, 10**4000)]
    changes += [{"packs": [replace(pack, runs=value)]} for value in ([True], [0, 0], [], {}, "", 0)]
    changes += [{"packs": [replace(pack, halved_from=value)]} for value in ("x", "", True)]
    changes += [{"runs": [replace(planned, overrides=value)]} for value in ([3], None, "abc")]
    changes += [{"runs": [replace(planned, config=value)]} for value in (None, "abc", [1])]
    changes += [{"name": "../first"}, {"pack": 3}, {"pack": None}]
    changes += [{"notes": value} for value in ("abc", [1], None, {})]
    changes += [{"memory_bytes": value} for value in ("y", -1, 0.5, True)]
    changes += [{"parallel_packs": value} for value in ("x", None, 0, -3, 1.5, True)]
    changes += [{"threads": value} for value in ("x", 0, -3, 1.5, True)]
    for change in changes:
        write_plan(sweep, replace(plan, **change))
        with pytest.raises(StoreError, match=r"plan.json: is (damaged|not a valid plan) \(.*\); delete this one file"):
            read_plan(sweep)


@pytest.mark.exhaustive
def test_a_text_in_a_plan_is_one_line(overrides: list[str], run_command: Command) -> None:
    arguments = ["sweep", *overrides, "sweep.name=first", "seed=0"]
    assert run_command(*arguments)[0] == 0
    sweep = Path("results", "sweeps", "first")
    write_plan(sweep, replace(read_plan(sweep), notes=["a\nb\tc\u2028d"]))
    code, out, _ = run_command(*arguments, "--dry-run")
    assert (code, out.splitlines().count("note    a\\nb\\tc\\u2028d")) == (0, 1), out


@pytest.mark.parametrize("job", ["../../victim", "1; reboot", "", 3, "1_2_3"])
def test_jobs_in_a_queue_are_checked(job: Any, tmp_path: Path) -> None:
    slurm_folder(tmp_path).mkdir()
    write_queue(tmp_path, {1: job})
    with pytest.raises(StoreError, match=r"queue.json: is damaged .* check with `squeue`"):
        read_queue(tmp_path)
