"""The README and the pages in docs/ are true: every command runs, every file and link is there."""

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
from typing import Any

import pytest
import typer.main

from normlab.cli import app
from normlab.data.tokenizer_sources import train_bpe
from normlab.report.tables import render

ROOT = Path(__file__).parent.parent
NAMES = (
    "README.md", "docs/train.md", "docs/sweep.md", "docs/read-results.md", "docs/test-a-claim.md",
    "docs/look-inside.md", "docs/verify.md", "docs/extend.md", "docs/gpus-and-clusters.md",
)  # fmt: skip
"""The pages in the order of reading. Their commands run in this order: a page may read what an earlier one trained."""
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
README = PAGES["README.md"]
SMALL = [
    "train.steps=2", "train.batch_size=2", "model.context=8", "model.width=16", "model.heads=2", "eval.sequences=2",
    "optim.warmup_steps=1", "tracking.wandb=off", "device=cpu",
]  # fmt: skip
"""What makes the runs of the pages take a second; nothing of what they show."""
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)

Command = Callable[..., tuple[int, str, str]]


def blocks(language: str, text: str) -> list[str]:
    return [block for name, block in FENCED.findall(text) if name == language]


def commands_of(block: str) -> list[list[str]]:
    lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]
    return [words for words in lines if words[:1] == ["normlab"]]


def commands() -> list[tuple[list[str], list[str]]]:
    """Return each command of the pages in turn, with the lines that its page shows of its output.

    A block without a language shows the output of the commands in the last `sh` block before it. Only the output of a
    command that trains nothing and reads no run is the same in a test: of any other command there are no lines.
    """
    steps: list[tuple[list[str], list[str]]] = []
    for text in PAGES.values():
        for language, block in FENCED.findall(text):
            if language == "sh":
                steps += [(command, []) for command in commands_of(block)]
            elif not language and is_fixed(steps[-1][0]):
                steps[-1][1].extend(line for line in block.splitlines() if line != "...")
    return steps


def is_fixed(command: list[str]) -> bool:
    return command[1] in ("list", "study") or "--cfg" in command or command[1:3] == ["verify", "norm=rmsnorm"]


def block_of(name: str) -> str:
    (block,) = (block for block in blocks("python", PAGES["docs/extend.md"]) if block.startswith(f"# {name}"))
    return block


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the pages speak of, and one run."""
    text = "a line of text for a small model to learn\n" * 60
    Path("my_text.txt").write_text(text)
    Path("README.md").write_text(README)
    # What the pages have from the hub: a folder of a dataset's name is taken for it, and so is a tokenizer's.
    for name in ("roneneldan/TinyStories", "stanfordnlp/imdb"):
        Path(name).mkdir(parents=True)
        Path(name, "train.jsonl").write_text("".join(json.dumps({"text": text[i:]}) + "\n" for i in range(30)))
    Path("gpt2").mkdir()
    Path("gpt2", "tokenizer.json").write_text(train_bpe([text]).definition)
    for name in ("my_norm.py", "my_row.py", "my_wiring.py", "my_study.py"):
        Path(name).write_text(block_of(name).replace("train.steps=200", "train.steps=2"))
    (recipe,) = blocks("yaml", PAGES["docs/extend.md"])
    path = Path(recipe.splitlines()[1].removeprefix("# "))
    path.parent.mkdir(parents=True)
    path.write_text(recipe)
    return tmp_path


def test_its_tables_are_as_the_commands_print_them() -> None:
    (block,) = blocks("", README)
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


def test_it_has_at_most_130_lines() -> None:
    assert README.count("\n") <= 130


def test_it_names_every_command_and_page() -> None:
    table = README.partition("## Commands\n")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", table, flags=re.MULTILINE)))
    group: Any = typer.main.get_command(app)
    assert sorted(named) == sorted(group.commands)
    assert sorted(f"docs/{path.name}" for path in (ROOT / "docs").iterdir()) == sorted(set(NAMES) - {"README.md"})
    assert all(f"]({name}" in README for name in NAMES[1:])


@pytest.mark.process
def test_the_commands_one_after_the_other_then_the_python_block(
    folder: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")  # the width of the outputs on the pages
    for command, shown in commands():
        small = SMALL if command[1] in ("train", "sweep") and "--cfg" not in command else []
        # What these commands show is the number of steps.
        if any(text.startswith(("train.steps=0", "train.tokens_per_parameter=")) for text in command):
            small = [override for override in small if "steps" not in override]
        code, out, err = run_command(*command[1:], *small)
        assert code == 0, (command, err)
        assert out, command
        printed = out.splitlines()
        for line in shown:
            start = line.removesuffix(" ...")
            assert any(text.startswith(start) for text in printed), (command, line, out)
    (block,) = blocks("python", PAGES["docs/look-inside.md"])
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
    (tmp_path / "normlab" / "catalogue" / "norms" / "softsign.py").write_text(block_of("my_norm.py"))
    table = tmp_path / "normlab" / "catalogue" / "placements" / "table.py"
    *_, half, formula, register = block_of("my_row.py").strip().splitlines()
    row = register.removeprefix("register_row(").removesuffix(")")
    source = table.read_text().replace(
        "ROWS: tuple[Row, ...] = (\n", f"{half}\n{formula}\nROWS: tuple[Row, ...] = (\n    {row},\n"
    )
    table.write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    overrides = ["norm=softsign", "placement=half"]
    write_catalogue = [sys.executable, str(ROOT / "scripts" / "prove" / "write_catalogue.py")]
    subprocess.run(write_catalogue, cwd=tmp_path, env=environment, check=True)
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


@pytest.mark.parametrize("name", [*NAMES, "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_is_there(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:scripts|tests|normlab|conf|docs)/[\w./]+)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", [*NAMES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", (ROOT / name).read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            # As GitHub makes them: lower case, without punctuation, with hyphens for spaces.
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, target
