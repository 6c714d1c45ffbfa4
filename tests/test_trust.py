"""A run's folder is data: code that lies in it, or that its plan names, is executed on the user's word alone."""

from __future__ import annotations

import hashlib
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

import normlab
from normlab.errors import StoreError
from normlab.launch import compose_run, compose_sweep
from normlab.norms.base import NORMS
from normlab.store.plans import has_plan, read_plan, sweep_folder, write_plan
from normlab.store.runs import RunFolder
from normlab.sweep.plan import make_plan
from normlab.train.start import train

Command = Callable[..., tuple[int, str, str]]

PLUGIN = """
from dataclasses import dataclass
from torch import nn
from normlab.norms.base import NormConfig, register_norm

@register_norm
@dataclass(kw_only=True, slots=True)
class Mine(NormConfig):
    name: str = "mine"

    def build(self, width):
        return nn.Tanh()
"""
FOREIGN = "\nfrom pathlib import Path\nPath('MARKER').write_text('executed')\n"
"""What a stranger adds: whoever executes it leaves a file in the current folder."""
MARKER = Path("MARKER")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Run each test in a folder of its own, and unregister its norm afterwards."""
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    yield
    NORMS.pop("mine", None)
    ConfigStore.instance().repo["norm"].pop("mine.yaml", None)
    for name in set(sys.modules) - modules:
        if name.startswith("normlab_plugin_"):
            del sys.modules[name]


@pytest.fixture
def own(words: list[str]) -> list[str]:
    """The overrides of a run of a few steps with a plugin of the user's."""
    Path("my_norm.py").write_text(PLUGIN)
    return [
        *words,
        "results_dir=results",
        "plugins=[my_norm.py]",
        "norm=mine",
        "train.steps=3",
        "train.checkpoint_every=2",
    ]


@pytest.fixture
def stranger(own: list[str]) -> RunFolder:
    """A run whose copy of the plugin holds other code than the user's own file."""
    folder = train(compose_run([*own, "run.name=mine"]), sinks=[]).folder
    with copy_of(folder).open("a") as file:
        file.write(FOREIGN)
    return folder


def copy_of(folder: RunFolder) -> Path:
    (copy,) = (folder.path / "plugins").glob("*.py")
    return copy


def test_no_command_executes_what_lies_in_a_runs_folder(
    stranger: RunFolder, own: list[str], run_command: Command
) -> None:
    reading = [
        ["summarize", "results"],
        ["summarize", "results", "--by", "norm"],
        ["compare", "results", "-o", "page.html"],
        ["list", "runs", "results"],
        ["inspect", "mine"],
        ["inspect", "mine", "spikes"],
        ["sweep", *own, "sweep.pack=off", "--dry-run"],
        ["train", *own],
    ]
    for command in reading:
        code, _, err = run_command(*command)
        assert code == 0, (command, err)
        assert not MARKER.exists(), command
    stranger.write_status({**stranger.status(), "state": "interrupted", "step": 2})
    shutil.rmtree(stranger.path / "checkpoints" / "step_00000003")
    code, _, err = run_command("train", *own)
    assert (code, "resumes from step 2" in err) == (0, True), err
    run = normlab.load("mine")
    assert run.status["state"] == "finished"
    assert run.tokenizer.decode(run.tokenizer.encode("a b")) == "a b"
    assert len(run.metrics)
    assert not MARKER.exists()


@pytest.mark.parametrize(
    "command",
    [["sample", "mine", "--tokens", "1"], ["inspect", "mine", "sharpness", "--probe"]],
    ids=["sample", "probe"],
)
def test_a_model_with_foreign_code_needs_trust(stranger: RunFolder, command: list[str], run_command: Command) -> None:
    copy = copy_of(stranger)
    code, out, err = run_command(*command)
    assert (code, out, err.count("\n"), MARKER.exists()) == (2, "", 1, False)
    digest = hashlib.sha256(copy.read_bytes()).hexdigest()
    for told in (f"{copy} (SHA-256 {digest})", f"`less {copy}`", "--trust"):
        assert told in err
    assert run_command(*command, "--trust")[0] == 0
    assert MARKER.exists()


def test_in_python(stranger: RunFolder) -> None:
    for part in ("config", "model"):
        with pytest.raises(StoreError, match="run only if you allow it"):
            getattr(normlab.load("mine"), part)
    assert not MARKER.exists()
    assert normlab.load("mine", trust=True).model
    assert MARKER.exists()


@pytest.mark.slow
def test_the_copy_of_a_plugin_that_this_process_has_run_needs_no_trust(own: list[str]) -> None:
    folder = train(compose_run(own), sinks=[]).folder
    assert normlab.load(folder.path).model
    code = "import sys, normlab; normlab.load(sys.argv[1]).model"
    done = subprocess.run([sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True)
    assert "StoreError: run mine-pre" in done.stderr


def test_what_is_executed_is_what_can_be_read(stranger: RunFolder) -> None:
    """Python itself would execute compiled code that lies beside a file, whatever the file says."""
    copy, other = copy_of(stranger), Path("other.py")
    other.write_text(copy.read_text())
    copy.write_text(f"{PLUGIN}\n# read by a person\n")
    cached = copy.parent / "__pycache__" / f"{copy.stem}.{sys.implementation.cache_tag}.pyc"
    cached.parent.mkdir()
    py_compile.compile(
        str(other), cfile=str(cached), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    assert normlab.load("mine", trust=True).model
    assert not MARKER.exists()


def test_trust_without_a_model_is_refused(stranger: RunFolder, run_command: Command) -> None:
    code, _, err = run_command("inspect", "mine", "--trust")
    assert (code, MARKER.exists()) == (2, False)
    assert "--trust: has no effect without --probe" in err


@pytest.mark.slow
def test_a_sweep_executes_the_plugins_of_its_command_and_not_those_of_its_plan(
    own: list[str], run_command: Command
) -> None:
    Path("foreign.py").write_text(PLUGIN + FOREIGN)
    command = [*own, "sweep.name=shared", "sweep.pack=off"]
    made = make_plan(*compose_sweep(command)).plan
    (job,) = made.jobs
    folder = sweep_folder("results", "shared")
    folder.mkdir(parents=True)
    foreign = {**job.config, "plugins": [str(Path("foreign.py").absolute())]}
    write_plan(folder, replace(made, jobs=[replace(job, config=foreign)]))
    assert has_plan(folder)
    code, out, err = run_command("sweep", *command)
    assert (code, "1 finished" in out) == (0, True), err
    assert not MARKER.exists()
    assert [job.config["plugins"] for job in read_plan(folder).jobs] == [["my_norm.py"]]
