"""`scripts/gpu` and the benchmarks without a GPU, with a stand-in for a clone of nanoGPT."""

import argparse
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_gpu
import bench_sweep
import bench_train
import nanogpt
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

ROOT = Path(__file__).parents[1]
STAND_IN = """
import pickle, sys, time
import numpy as np
options = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
width, vocab_size = int(options["n_embd"]), pickle.load(open("data/text/meta.pkl", "rb"))["vocab_size"]
assert np.fromfile("data/text/train.bin", np.uint16).max() < vocab_size
for step in range(int(options["max_iters"]) + 1):
    time.sleep(0.001)
    if step % int(options["log_interval"]) == 0:
        print(f"iter {step}: loss 1.0, width {width}")
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with the files of nanoGPT; its train.py only prints the lines of the loss."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in nanogpt.FILES:
        (folder / name).write_text(STAND_IN if name == "train.py" else "")
    return folder


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / bench_gpu.MEASUREMENTS).read_text().splitlines()]


def with_parts(monkeypatch: pytest.MonkeyPatch, **parts: bench_gpu.Part) -> None:
    machine = {"machine": bench_gpu.Part(5, lambda options: iter([{"device_name": "NVIDIA H200 (pretended)"}]))}
    monkeypatch.setattr(bench_gpu, "PARTS", machine | parts)


@pytest.mark.exhaustive
def test_a_part_that_fails_or_takes_too_long_is_one_line_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(options: bench_gpu.Options) -> Iterator[bench_gpu.Measurement]:
        """One side and an error."""
        yield {"side": "first", "ms_per_step": 17.0}
        raise RuntimeError("no memory")

    def hangs(options: bench_gpu.Options) -> Iterator[bench_gpu.Measurement]:
        """One side, and then nothing."""
        yield {"side": "second", "ms_per_step": 18.0}
        time.sleep(600)

    def works(options: bench_gpu.Options) -> Iterator[bench_gpu.Measurement]:
        """One side."""
        yield {"side": "third", "ms_per_step": 19.0}

    with_parts(
        monkeypatch, fails=bench_gpu.Part(5, fails), hangs=bench_gpu.Part(2, hangs), works=bench_gpu.Part(5, works)
    )
    minutes = sum(part.seconds for part in bench_gpu.PARTS.values()) / 60
    assert bench_gpu.main(["--out", str(tmp_path), "--minutes", str(minutes)]) == 1
    lines = read_lines(tmp_path)
    assert [(line["part"], line.get("side")) for line in lines[1:]] == [
        ("fails", "first"),
        ("fails", None),
        ("hangs", "second"),
        ("hangs", None),
        ("works", "third"),
    ]
    assert "no memory" in lines[2]["error"]
    assert re.match(r"stopped after \d+ s", lines[4]["error"])
    assert "no memory" in capfd.readouterr().out
    page = (tmp_path / bench_gpu.PAGE).read_text()
    assert "H200 (pretended)" in page
    assert all(text in page for text in ("| 17 |", "| 18 |", "| 19 |", "no memory"))
    assert len([*tmp_path.iterdir()]) <= 8
    with pytest.raises(SystemExit, match="2"):
        bench_gpu.main(["--out", str(tmp_path)])
    assert "has measurements; choose another folder" in capfd.readouterr().err
    assert read_lines(tmp_path) == lines


def test_without_a_gpu_it_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if bench_gpu.nvidia_smi() is not None:
        pytest.skip("there is a GPU")
    assert bench_gpu.main(["--out", str(tmp_path)]) == 2
    assert "torch sees no GPU" in capfd.readouterr().err
    assert [line["part"] for line in read_lines(tmp_path)] == ["machine"]


@pytest.mark.process
def test_dry_run_of_every_part(tmp_path: Path, clone: Path) -> None:
    subprocess.run([ROOT / "scripts" / "gpu", "--dry-run", "--out", tmp_path, "--nanogpt", clone], check=True)
    lines = read_lines(tmp_path)
    assert [*dict.fromkeys(line["part"] for line in lines)] == [*bench_gpu.PARTS]
    assert [line for line in lines if "error" in line] == []
    assert not [line for line in lines if "skipped_part" in line]
    steps = [line for line in lines if "ms_per_step" in line]
    assert all(line["ms_per_step"] > 0 for line in steps)
    parts = {line["part"] for line in lines if {"ms_per_step", "seconds"} & {*line}}
    assert parts == {*bench_gpu.PARTS} - {"machine"}
    assert {line["part"] for line in lines if "nanoGPT" in line.get("side", "")} >= {"single", "packs", "sweeps"}


@pytest.mark.process
def test_sides_take_turns_with_a_clone(clone: Path) -> None:
    options = argparse.Namespace(nanogpt=clone, packs=[2])
    rows = {row["side"]: row for row in bench_train.measure(bench_train.works_of("2x32", False, options), 2)}
    assert [*rows] == ["plain loop", "nanoGPT", "normlab", "normlab, pack of 2"]
    assert rows["nanoGPT"]["ms_per_step"] > 1  # a step of a millisecond
    assert rows["normlab"]["nanoGPT"] > 0
    assert rows["normlab, pack of 2"]["ms_per_step_and_run"] == rows["normlab, pack of 2"]["ms_per_step"] / 2


@pytest.mark.process
def test_wall_clock_of_processes_of_a_clone(clone: Path) -> None:
    start = time.perf_counter()
    seconds = bench_sweep.nanogpt_seconds(clone, ["model=gpt2_nano", "device=cpu"], runs=3, steps=10, at_once=2)
    assert 0.02 < seconds < time.perf_counter() - start  # two of the three are one after the other
