"""A run's folder is data: code in it, or named in its plan, is run only if you allow it."""

import hashlib
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import normlab
from normlab.config.compose import compose_run, compose_sweep
from normlab.store.plans import has_plan, read_plan, sweep_folder
from normlab.store.runs import RunFolder
from normlab.sweeps.files import write_plan
from normlab.sweeps.plan import make_plan
from normlab.training.start import train
from support.plugins import NORM

Command = Callable[..., tuple[int, str, str]]

FOREIGN = "\nfrom pathlib import Path\nPath('MARKER').write_text('executed')\n"
"""Foreign code; executing it leaves a file in the current folder."""
MARKER = Path("MARKER")


@pytest.fixture
def plugin_overrides(overrides: list[str]) -> list[str]:
    """Return the overrides of a short run with a plugin of the user's."""
    Path("my_norm.py").write_text(NORM)
    mine = ["results_dir=results", "plugins=[my_norm.py]", "norm=mine", "train.steps=3", "train.checkpoint_every=2"]
    return [*overrides, *mine]


@pytest.fixture
def foreign_run(plugin_overrides: list[str]) -> RunFolder:
    """Return a run whose copy of the plugin has additional code."""
    folder = train(compose_run([*plugin_overrides, "run.name=mine"]), trackers=[]).folder
    with copy_of(folder).open("a") as file:
        file.write(FOREIGN)
    return folder


def copy_of(folder: RunFolder) -> Path:
    (copy,) = (folder.path / "plugins").glob("*.py")
    return copy


def test_no_command_executes_code_in_a_runs_folder(
    foreign_run: RunFolder, plugin_overrides: list[str], run_command: Command
) -> None:
    reading = [
        ["summarize", "results"],
        ["compare", "results", "-o", "page.html"],
        ["inspect", "mine"],
        ["sweep", *plugin_overrides, "sweep.pack=off", "--dry-run"],
        ["train", *plugin_overrides],
    ]
    for command in reading:
        code, _, err = run_command(*command)
        assert code == 0, (command, err)
        assert not MARKER.exists(), command
    foreign_run.write_status({**foreign_run.status(), "state": "interrupted", "step": 2})
    shutil.rmtree(foreign_run.path / "checkpoints" / "step_00000003")
    code, _, err = run_command("train", *plugin_overrides)
    assert (code, "resumes from step 2" in err) == (0, True), err
    run = normlab.load("mine")
    assert run.status.state == "finished"
    assert run.tokenizer.decode(run.tokenizer.encode("a b")) == "a b"
    assert len(run.metrics)
    assert not MARKER.exists()


@pytest.mark.parametrize(
    "command",
    [["sample", "mine", "--tokens", "1"], ["verify", "mine"]],
    ids=["sample", "verify"],
)
def test_a_model_with_foreign_code_needs_trust(
    foreign_run: RunFolder, command: list[str], run_command: Command
) -> None:
    copy = copy_of(foreign_run)
    code, out, err = run_command(*command)
    assert (code, out, err.count("\n"), MARKER.exists()) == (2, "", 1, False)
    digest = hashlib.sha256(copy.read_bytes()).hexdigest()
    for fragment in (f"{copy} (SHA-256 {digest})", f"`less {copy}`", "--trust"):
        assert fragment in err
    if command[0] != "verify":
        assert run_command(*command, "--trust")[0] == 0
    assert normlab.load("mine", trust=True).model
    assert MARKER.exists()


@pytest.mark.process
def test_a_plugin_that_this_process_has_loaded_needs_no_trust(plugin_overrides: list[str]) -> None:
    folder = train(compose_run(plugin_overrides), trackers=[]).folder
    assert normlab.load(folder.path).model
    code = "import sys, normlab; normlab.load(sys.argv[1]).model"
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True)
    assert "StoreError: run mine-pre" in done.stderr


def test_the_source_is_executed_and_never_a_cached_binary(foreign_run: RunFolder) -> None:
    """Python would execute the compiled file beside a source without comparing them."""
    copy, other = copy_of(foreign_run), Path("other.py")
    other.write_text(copy.read_text())
    copy.write_text(f"{NORM}\n# read by a person\n")
    cached = copy.parent / "__pycache__" / f"{copy.stem}.{sys.implementation.cache_tag}.pyc"
    cached.parent.mkdir()
    py_compile.compile(
        str(other), cfile=str(cached), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    assert normlab.load("mine", trust=True).model
    assert not MARKER.exists()


@pytest.mark.process
def test_a_sweep_executes_the_plugins_of_its_command_but_not_of_its_plan(
    plugin_overrides: list[str], run_command: Command
) -> None:
    Path("foreign.py").write_text(NORM + FOREIGN)
    command = [*plugin_overrides, "sweep.name=shared", "sweep.pack=off"]
    made = make_plan(*compose_sweep(command)).plan
    (job,) = made.runs
    folder = sweep_folder("results", "shared")
    folder.mkdir(parents=True)
    foreign = {**job.config, "plugins": [str(Path("foreign.py").absolute())]}
    write_plan(folder, replace(made, runs=[replace(job, config=foreign)]))
    assert has_plan(folder)
    code, out, err = run_command("sweep", *command)
    assert (code, "1 finished" in out) == (0, True), err
    assert not MARKER.exists()
    assert [job.config["plugins"] for job in read_plan(folder).runs] == [["my_norm.py"]]
