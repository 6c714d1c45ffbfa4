"""Tab completion: the candidates, and what a real shell makes of them."""

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

from normlab import completion
from normlab.config import OPTIMIZERS
from normlab.corpora import DATA
from normlab.launch import compose_run
from normlab.norms.base import NORMS, load_all
from normlab.options import leaves
from normlab.placements.base import PLACEMENTS
from normlab.source import plugin_file

COMMANDS = {
    "train": [],
    "sweep": ["--dry-run", "--retry-failed"],
    "summarize": ["--format"],
    "compare": ["--format"],
    "list": ["--json"],
    "sample": ["--prompt", "--tokens"],
}


def candidates(line: str) -> list[str]:
    return completion.candidates(line, COMMANDS)


@pytest.mark.slow
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
        ("normlab compare first --format p", ["png"]),
        ("normlab sample run --to", ["--tokens"]),
        ("normlab completion z", ["zsh"]),
        ("normlab nothing of ours", []),
    ],
)
def test_candidates(line: str, expected: list[str]) -> None:
    assert candidates(line) == expected


def test_every_registered_name_is_offered() -> None:
    load_all()
    for group, names in (("norm", NORMS), ("placement", PLACEMENTS), ("data", DATA), ("optim", OPTIMIZERS)):
        ours = [name for name in names if plugin_file(group, name) is None]  # other tests register others
        assert {f"{group}={name}" for name in ours} <= set(candidates(f"normlab train {group}="))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[], pytest.param(["norm=batchnorm", "optim=sgd", "data=files", "data.path=x"], marks=pytest.mark.slow)],
)
def test_every_option_is_offered(words: list[str]) -> None:
    """And the defaults here are those of conf/train.yaml."""
    for leaf in leaves(compose_run(words)):
        section, _, name = leaf.rpartition(".")
        if name not in ("name", "preset") or section == "run":
            assert f"{leaf}=" in candidates(f"normlab train {' '.join(words)} {leaf}")


def test_it_is_quick_to_load() -> None:
    script = "import sys, normlab.completion; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "hydra", "wandb", "datasets"} & set(loaded)


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(normlab completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u; eval "$(normlab completion zsh)"'),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("normlab tra\t", "normlab train "),
        ("normlab train norm=layernorm_g\t", "normlab train norm=layernorm_gpt2 "),
        ("normlab train norm=layernorm_gpt2 norm.gai\t", "normlab train norm=layernorm_gpt2 norm.gain="),
        ("normlab train optim.schedule=w\t", "normlab train optim.schedule=wsd "),
        ("normlab train data.path=a_te\t", "normlab train data.path=a_text.txt "),
    ],
)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell(shell: str, typed: str, becomes: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "a_text.txt").touch()
    command, setup = SHELLS[shell]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "dumb", "HOME": str(tmp_path)}
    # What is typed becomes the arguments of `said`, which a Return writes down.
    keep = "said() { printf '%s ' \"$@\" > line; }"
    master, slave = pty.openpty()
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, env=environment, start_new_session=True
    ) as process:
        try:
            _type(master, f"{setup}; {keep}; touch ready\n")
            _wait_for(master, tmp_path / "ready")
            _type(master, typed)
            time.sleep(1.5)
            _type(master, "x")  # after a space where the word is whole, and right behind an = or a dot
            # Back to the beginning of the line, and this in front of it.
            _type(master, "\x01said \n")
            _wait_for(master, tmp_path / "line")
        finally:
            process.kill()
    os.close(master)
    os.close(slave)
    assert (tmp_path / "line").read_text() == becomes + "x "


def _type(terminal: int, text: str) -> None:
    os.write(terminal, text.encode())


def _wait_for(terminal: int, path: Path) -> None:
    """Read what the shell shows until a file is there and has content."""
    since = time.monotonic()
    shown = b""
    while not path.exists() or (path.name == "line" and not path.read_text()):
        assert time.monotonic() - since < 300, shown.decode(errors="replace")
        if select.select([terminal], [], [], 0.05)[0]:
            shown += os.read(terminal, 4096)
