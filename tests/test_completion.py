"""Tab completion: the candidates of each shell, and how a real bash completes them."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normlab.base.options import flatten_options
from normlab.catalogue.corpora import DATA
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.optimizers.options import OPTIMIZERS
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.cli import main
from normlab.config.compose import compose_run


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> object:
    """Return a function that completes a line as fish does, or as bash does, which splits it at `=`."""

    def complete(line: str, shell: str = "fish") -> list[str]:
        words = line.replace("=", " = ").split(" ") if shell == "bash" else []
        words = [word for number, word in enumerate(words) if word or (number == len(words) - 1 and words[-2] != "=")]
        for name, value in {
            "_NORMLAB_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args", "COMP_WORDS": "\n".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        if shell == "fish":
            monkeypatch.delenv("COMP_WORDS")
        with pytest.raises(SystemExit):
            main([])
        return [line.split("\t")[0] for line in capsys.readouterr().out.splitlines() if line]

    return complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("normlab tr", ["train"]),
        ("normlab train seed=1 norm=rmsnorm,layernorm_g", ["norm=rmsnorm,layernorm_gpt2"]),
        ("normlab train norm=batchnorm norm.mom", ["norm.momentum=", "norm.momentum=0.1"]),
        ("normlab train norm=rmsnorm_gemma norm.unit", ["norm.unit_offset=true", "norm.unit_offset=false"]),
        ("normlab train optim.schedule=w", ["optim.schedule=wsd"]),
        ("normlab train init=x", ["init=xavier", "init=xavier_scaled"]),
        ("normlab --debug train norm=layernorm_g", ["norm=layernorm_gpt2"]),
        ("normlab train data.path=a", []),
        ("normlab train data=hub data.na", ["data.name=", "data.name=hub"]),
        ("normlab train swe", []),
        ("normlab sweep sweep.on=s", ["sweep.on=slurm"]),
        ("normlab sweep norm=rmsnorm --re", ["--results-dir", "--retry-failed"]),
        ("normlab list pl", ["placements"]),
        ("normlab summarize --format m", ["markdown"]),
    ],
)
def test_candidates(line: str, expected: list[str], candidates) -> None:
    assert sorted(candidates(line)) == sorted(expected)
    if "--" not in line:
        # bash replaces only the text behind the last `=` of the line.
        hidden = line.rpartition(" ")[2].rpartition("=")[0]
        of_bash = [each.removeprefix(f"{hidden}=") if hidden else each for each in expected]
        assert sorted(candidates(line, "bash")) == sorted(of_bash)


def test_every_registered_name_is_offered(candidates) -> None:
    groups = {"norm": load_norms(), "placement": load_placements(), "data": DATA, "optim": OPTIMIZERS}
    for group, known in groups.items():
        assert {f"{group}={name}" for name in known} <= set(candidates(f"normlab train {group}="))


@pytest.mark.parametrize("overrides", [[], ["norm=batchnorm", "optim=sgd", "data=files", "data.path=x"]])
def test_every_option_is_offered(overrides: list[str], candidates) -> None:
    """Without overrides this also compares the defaults with conf/train.yaml."""
    sections = {option.rpartition(".")[0] for option in flatten_options(compose_run(overrides))}
    offered = {
        text.partition("=")[0]
        for section in sections
        for text in candidates(f"normlab train {' '.join(overrides)} {section and section + '.'}")
    }
    for option in flatten_options(compose_run(overrides)):
        section, _, name = option.rpartition(".")
        assert (option in offered) == (name not in ("name", "preset") or section == "run"), option


@pytest.mark.process
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("normlab train norm=layernorm_g\t", "normlab train norm=layernorm_gpt2 "),
        ("normlab train norm=layernorm_gpt2 norm.gai\t", "normlab train norm=layernorm_gpt2 norm.gain="),
        ("normlab train data.path=a_te\t", "normlab train data.path=a_text.txt "),
    ],
)
def test_a_real_bash_completes(typed: str, completed: str, tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    (tmp_path / "a_text.txt").touch()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "dumb", "HOME": str(tmp_path)}
    setup = 'eval "$(_NORMLAB_COMPLETE=source_bash normlab)"'
    # The completed line becomes the arguments of `save`, which writes them to a file.
    define = "save() { printf '%s ' \"$@\" > line; }"
    master, slave = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path,
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            _type(master, f"{setup}; {define}; touch ready\n")
            _wait_for(master, tmp_path / "ready")
            _type(master, typed)
            time.sleep(1.5)
            _type(master, "x")  # the shell adds a space before it if the argument is complete
            # Control-A moves to the start of the line.
            _type(master, "\x01save \n")
            _wait_for(master, tmp_path / "line")
        finally:
            process.kill()
    os.close(master)
    os.close(slave)
    assert (tmp_path / "line").read_text() == completed + "x "


def _type(terminal: int, text: str) -> None:
    os.write(terminal, text.encode())


def _wait_for(terminal: int, path: Path) -> None:
    """Read the shell's output until a file exists and has content."""
    start = time.monotonic()
    output = b""
    while not path.exists() or (path.name == "line" and not path.read_text()):
        assert time.monotonic() - start < 300, output.decode(errors="replace")
        if select.select([terminal], [], [], 0.05)[0]:
            output += os.read(terminal, 4096)
