"""The rules of `auto`: one table, and what it decides for the models and devices that its rows are about."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.config import rules
from normlab.config.compose import compose_run
from normlab.config.rules import Workload, pack_size, parallel_packs, value_of, workload
from normlab.training.machine import resolve
from support.pretended_gpus import pretend_gpus

Command = Callable[..., tuple[int, str, str]]
GIB = 2**30


def work_of(overrides: str, device: str, precision: str) -> Workload:
    return workload(compose_run(overrides.split()), device, precision)


@pytest.mark.parametrize(
    ("overrides", "precision", "size"),
    [
        ("model=gpt2_nano", "fp32", "16"),
        ("model=gpt2_nano train.batch_size=16", "fp32", "1"),
        ("model=gpt2_tiny", "fp32", "1"),
        ("model=gpt2_tiny", "bf16", "16"),
        ("model=gpt2_tiny model.context=256", "bf16", "1"),
    ],
)
def test_packs_on_a_cpu_are_those_that_were_measured(overrides: str, precision: str, size: int) -> None:
    assert value_of("sweep.pack", work_of(overrides, "cpu", precision)) == size


@pytest.mark.parametrize(
    ("overrides", "precision", "size"),
    [
        ("model=gpt2_nano", "bf16", "32"),
        ("model=gpt2_tiny", "fp32", "32"),
        ("model=gpt2_tiny train.batch_size=32", "bf16", "8"),
        ("model=gpt2_tiny devices=2", "bf16", "1"),
        ("model=gpt2_tiny", "fp16", "1"),
        ("model=gpt2_mini", "bf16", "1"),
    ],
)
def test_packs_on_a_gpu(overrides: str, precision: str, size: str) -> None:
    assert value_of("sweep.pack", work_of(overrides, "cuda", precision)) == size


def test_memory_limits_packs() -> None:
    work = work_of("model=gpt2_nano", "cpu", "fp32")
    sizes = {size: pack_size(work, lambda runs: runs * GIB, size * GIB) for size in (512, 32, 15, 7, 1)}
    assert sizes == {512: 16, 32: 16, 15: 7, 7: 3, 1: 1}  # a single run is for the check of memory to reject


@pytest.mark.parametrize(
    ("overrides", "cores", "memory_bytes", "jobs"),
    [
        ("model=gpt2_nano", 2, 512 * GIB, 2),
        ("model=gpt2_tiny", 64, 512 * GIB, 64),
        ("model=gpt2_tiny", 64, 31 * GIB, 10),  # twice the bytes of a run, and a process, are 3 GiB
        ("model=gpt2_tiny", 64, GIB, 1),
        ("model=gpt2_tiny train.batch_size=16", 64, 512 * GIB, 1),
        ("model=gpt2_mini", 64, 512 * GIB, 1),
        ("model=gpt2_nano", 0, 512 * GIB, 1),  # a run on more devices than cores
    ],
)
def test_jobs_on_a_cpu(overrides: str, cores: int, memory_bytes: int, jobs: int) -> None:
    assert parallel_packs(work_of(overrides, "cpu", "fp32"), GIB, cores, memory_bytes) == jobs
    assert parallel_packs(work_of(overrides, "cuda", "fp32"), GIB, cores, memory_bytes) == 1


def test_a_short_run_does_not_compile_and_a_long_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)
    monkeypatch.setattr("normlab.training.machine.missing_compiler", lambda device: "")

    def compiled(*overrides: str) -> str:
        return resolve(compose_run(overrides)).compile

    assert [compiled(f"train.steps={steps}") for steps in (500, 5_000, 1_000_000)] == ["off", "off", "on"]
    assert [compiled("model=gpt2_124m", "precision=bf16", f"train.steps={steps}") for steps in (500, 50_000)] == [
        "off", "on",
    ]  # fmt: skip
    assert compiled("compile=on") == "on"
    assert compiled("train.steps=1000000", "device=cpu") == "off"


@pytest.mark.parametrize(
    ("overrides", "device", "mode"),
    [
        ("train.steps=100", "cuda", "on"),
        ("train.steps=99", "cuda", "off"),
        ("train.steps=100 devices=2", "cuda", "off"),
        ("train.steps=100 plugins=[mine.py]", "cuda", "off"),  # a replay runs none of its Python code
        ("train.steps=100", "cpu", "off"),
    ],
)
def test_graphs(overrides: str, device: str, mode: str) -> None:
    Path("mine.py").touch()
    assert value_of("train.graph", work_of(overrides, device, "fp32")) == mode


def test_the_table_is_listed(run_command: Command) -> None:
    code, out, err = run_command("list", "auto")
    assert (code, err) == (0, "")
    rows = json.loads(run_command("list", "auto", "--json")[1])
    assert len(rows) == len(rules.RULES)
    assert [row["option"] for row in rows] == [rule.option for rule in rules.RULES]
    # A narrow table breaks its lines between words.
    assert {word for row in rows for word in row["auto"].split()} <= set(out.split())
    code, _, err = run_command("list", "auto", "compile")
    assert (code, err.count("\n")) == (2, 1)
