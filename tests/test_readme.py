"""The README is true: every command in it runs, every file that it names is there."""

import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.data.tokenizers import train_bpe
from normlab.report.tables import render

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SMALL = [
    "train.steps=2", "train.batch_size=2", "model.context=8", "model.width=16", "model.heads=2", "eval.sequences=2",
    "optim.warmup_steps=1", "tracking.wandb=off", "device=cpu",
]  # fmt: skip
"""What makes the README's runs take a second; nothing of what they show."""

Command = Callable[..., tuple[int, str, str]]


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("normlab ")]


def block_of(name: str) -> str:
    (block,) = (block for block in blocks("python", README + CONTRIBUTING) if block.startswith(f"# {name}"))
    return block


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the README speaks of, and one run."""
    text = "a line of text for a small model to learn\n" * 60
    Path("my_text.txt").write_text(text)
    Path("README.md").write_text(README)
    # What the README has from the hub: a folder of a dataset's name is taken for it, and so is a tokenizer's.
    for name in ("roneneldan/TinyStories", "stanfordnlp/imdb"):
        Path(name).mkdir(parents=True)
        Path(name, "train.jsonl").write_text("".join(json.dumps({"text": text[i:]}) + "\n" for i in range(30)))
    Path("gpt2").mkdir()
    Path("gpt2", "tokenizer.json").write_text(train_bpe([text]).definition)
    for name in ("my_norm.py", "my_row.py", "my_wiring.py", "my_study.py"):
        Path(name).write_text(block_of(name).replace("train.steps=200 seed=range(6)", "train.steps=2 seed=range(3)"))
    return tmp_path


def test_its_tables_are_as_the_commands_print_them() -> None:
    (block,) = (part for part in README.split("```\n") if part.startswith("placement  model.depth"))
    tables = block.split("...\n")
    assert (len(tables), tables.pop()) == (3, "")
    for table in tables:
        header, _, *lines = table.splitlines()
        starts = [found.start() for found in re.finditer(r"(?:(?<=  )|^)\S", header)]
        columns = list(itertools.pairwise([*starts, None]))
        titles = [header[start:end].strip() for start, end in columns]
        rows = [[line[start:end].strip() for start, end in columns] for line in lines]
        assert render([dict(zip(titles, row, strict=True)) for row in rows], width=160) == table.rstrip()
        p_values = [text for row in rows for title, text in zip(titles, row, strict=True) if title in ("p", "p (Holm)")]
        assert [f"{float(p):.2g}" for p in p_values] == p_values


def test_it_has_at_most_250_lines() -> None:
    assert README.count("\n") <= 250


@pytest.mark.process
def test_the_commands_one_after_the_other_then_the_python_block(folder: Path, run_command: Command) -> None:
    for command in commands():
        small = SMALL if command[1] in ("train", "sweep") else []
        if "train.steps=0" in command:
            small = [override for override in small if "steps" not in override]
        code, out, err = run_command(*command[1:], *small)
        assert code == 0, (command, err)
        assert out, command
    (block,) = (block for block in blocks("python") if "normlab.load" in block)
    Path("look.py").write_text(block)
    names = runpy.run_path("look.py")
    assert names["run"].metrics["kind"].tolist().count("train") == 2
    assert not names["run"].model.training


@pytest.mark.process
@pytest.mark.parametrize(
    "override", ["plugins=[my_row.py] placement=half", "plugins=[my_wiring.py] placement=gated_parallel"]
)
def test_the_placements_as_plugins(override: str, folder: Path, run_command: Command) -> None:
    code, out, err = run_command("verify", *override.split())
    assert code == 0, err + out


@pytest.mark.process
def test_the_same_file_and_row_inside_the_package(tmp_path: Path) -> None:
    """In a copy of the package: its plugins also work as a norm file and a row of the package."""
    shutil.copytree(ROOT / "normlab", tmp_path / "normlab")
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "normlab" / "norms" / "softsign.py").write_text(block_of("my_norm.py"))
    table = tmp_path / "normlab" / "placements" / "table.py"
    *_, half, formula, register = block_of("my_row.py").strip().splitlines()
    row = register.removeprefix("register_row(").removesuffix(")")
    source = table.read_text().replace(
        "ROWS: tuple[Row, ...] = (\n", f"{half}\n{formula}\nROWS: tuple[Row, ...] = (\n    {row},\n"
    )
    table.write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    overrides = ["norm=softsign", "placement=half"]
    subprocess.run([sys.executable, "-m", "normlab.catalogue.entries"], cwd=tmp_path, env=environment, check=True)
    for command in (["list", "norms", "softsign"], ["verify", *overrides], ["train", *overrides, *SMALL]):
        done = subprocess.run(
            [sys.executable, "-m", "normlab", *command], cwd=tmp_path, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        assert "softsign" in done.stdout
        if command[0] == "list":
            text = " ".join(done.stdout.split())  # its lines are folded
            assert "scale=1.0: Magnitude at which the output is half of its maximum, unit of x." in text


@pytest.mark.process
def test_the_demo(folder: Path) -> None:
    """The script itself, on runs of seconds; its install step finds everything there."""
    done = subprocess.run(
        [str(ROOT / "scripts" / "demo"), *SMALL, "model.depth=1"],
        env={**os.environ, "RESULTS": str(folder / "results")}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "demo: 6 runs, 6 finished" in done.stdout
    _, found, cells = done.stdout.rpartition("placement  model.depth  ")
    assert found
    for placement in ("pre", "post", "deepnorm"):
        assert re.search(rf"^{placement} +1 +2 .*\(n=2\)", cells, flags=re.MULTILINE)
    page = folder / "results" / "compare.html"
    assert done.stdout.rstrip().endswith(f"The results are in {folder / 'results'}; open {page} in a browser")
    assert '<section id="tables"' in page.read_text()


def test_every_file_that_it_names_is_there() -> None:
    named = re.findall(r"`((?:scripts|tests|normlab|conf|results)/[\w./]+)`", README)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists() and not name.startswith("results/runs")] == []
