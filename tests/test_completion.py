"""Tab completion: the candidates, and how real shells complete them."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normlab.cli import completion
from normlab.config.compose import compose_run
from normlab.options import flatten_options

COMMANDS = {
    "train": [],
    "sweep": ["--dry-run", "--retry-failed"],
    "summarize": ["--format"],
    "compare": ["--x"],
    "list": ["--json"],
    "sample": ["--prompt", "--tokens"],
}


def candidates(line: str) -> list[str]:
    return completion.candidates(line, COMMANDS)


@pytest.mark.process
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("normlab tr", ["train"]),
        ("normlab train nor", ["norm.", "norm="]),
        ("normlab train norm=layernorm_g", ["norm=layernorm_gpt2"]),
        ("normlab train   seed=1 norm=rmsnorm,layernorm_g", ["norm=rmsnorm,layernorm_gpt2"]),
        ("normlab train norm=batchnorm norm.mom", ["norm.momentum="]),
        ("normlab train norm=rmsnorm norm.mom", []),
        ("normlab train norm=rmsnorm_gemma norm.unit", ["norm.unit_offset="]),
        ("normlab train optim=sgd optim.nest", ["optim.nesterov="]),
        ("normlab train optim.schedule=w", ["optim.schedule=wsd"]),
        ("normlab train model.tie_embeddings=", ["model.tie_embeddings=false", "model.tie_embeddings=true"]),
        ("normlab train init=x", ["init=xavier", "init=xavier_scaled"]),
        ("normlab --debug train norm=layernorm_g", ["norm=layernorm_gpt2"]),
        ("normlab train --mul", ["--multirun"]),
        ("normlab train --cfg j", ["job"]),
        ("normlab train data.path=a", []),
        ("normlab train optim.na", []),
        ("normlab train data=hub data.na", ["data.name="]),
        ("normlab train swe", []),
        ("normlab sweep swe", ["sweep."]),
        ("normlab sweep norm=rmsnorm,layernorm_g", ["norm=rmsnorm,layernorm_gpt2"]),
        ("normlab sweep norm=rmsnorm sweep.ti", ["sweep.timeout_minutes="]),
        ("normlab sweep sweep.on=l", ["sweep.on=local"]),
        ("normlab sweep sweep.slurm.pa", ["sweep.slurm.partition="]),
        ("normlab sweep sweep.slurm.cluster=s", ["sweep.slurm.cluster=slurm"]),
        ("normlab sweep norm=rmsnorm --re", ["--retry-failed"]),
        ("normlab list pl", ["placements"]),
        ("normlab list ini", ["init"]),
        ("normlab summarize --format m", ["markdown"]),
        ("normlab summarize --format l", ["latex"]),
        ("normlab compare first --format p", []),
        ("normlab sample run --to", ["--tokens"]),
        ("normlab completion z", ["zsh"]),
        ("normlab nothing of ours", []),
    ],
)
def test_candidates(line: str, expected: list[str]) -> None:
    assert candidates(line) == expected


REGISTERED = """
from normlab.config.corpora import DATA
from normlab.config.optim import OPTIMIZERS
from normlab.norms.base import NORMS, load_all as load_norms
from normlab.placements.base import PLACEMENTS, load_all as load_placements

load_norms(), load_placements()
for group, names in (("norm", NORMS), ("placement", PLACEMENTS), ("data", DATA), ("optim", OPTIMIZERS)):
    print(*(f"{group}={name}" for name in names))
"""


def test_every_registered_name_is_offered() -> None:
    # In a process of its own, because other tests register plugins.
    listed = subprocess.run([sys.executable, "-c", REGISTERED], capture_output=True, text=True, check=True).stdout
    groups = [line.split() for line in listed.splitlines()]
    assert len(groups) == 4
    for names in groups:
        assert set(names) <= set(candidates(f"normlab train {names[0].partition('=')[0]}="))


@pytest.mark.process
@pytest.mark.parametrize(
    "overrides",
    [[], ["norm=batchnorm", "optim=sgd", "data=files", "data.path=x"]],
)
def test_every_option_is_offered(overrides: list[str]) -> None:
    """Without overrides this also compares the defaults with conf/train.yaml."""
    for option in flatten_options(compose_run(overrides)):
        section, _, name = option.rpartition(".")
        if name not in ("name", "preset") or section == "run":
            assert f"{option}=" in candidates(f"normlab train {' '.join(overrides)} {option}")


def test_completion_loads_no_heavy_package() -> None:
    script = "import sys, normlab.cli.completion; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "hydra", "wandb", "datasets"} & set(loaded)


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(normlab completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u; eval "$(normlab completion zsh)"'),
}


@pytest.mark.process
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("normlab tra\t", "normlab train "),
        ("normlab train norm=layernorm_g\t", "normlab train norm=layernorm_gpt2 "),
        ("normlab train norm=layernorm_gpt2 norm.gai\t", "normlab train norm=layernorm_gpt2 norm.gain="),
        ("normlab train optim.schedule=w\t", "normlab train optim.schedule=wsd "),
        ("normlab train data.path=a_te\t", "normlab train data.path=a_text.txt "),
    ],
)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes(shell: str, typed: str, completed: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "a_text.txt").touch()
    command, setup = SHELLS[shell]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "dumb", "HOME": str(tmp_path)}
    # The completed line becomes the arguments of `save`, which writes them to a file.
    define = "save() { printf '%s ' \"$@\" > line; }"
    master, slave = pty.openpty()
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, env=environment, start_new_session=True
    ) as process:
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
