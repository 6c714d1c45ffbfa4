"""The rules of `auto`: one table, and what it decides for the models and devices that its rows are about."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import pytest

from normlab.config import rules
from normlab.config.compose import compose_run
from normlab.config.rules import Workload, decide, launches, pack_size, parallel_packs, value_of, workload
from normlab.training.machine import resolve
from support.pretended_gpus import pretend_gpus

Command = Callable[..., tuple[int, str, str]]
GIB = 2**30
OPTIONS = ("compile", "train.graph", "sweep.pack", "sweep.jobs")


def work_of(overrides: str, device: str, precision: str) -> Workload:
    return workload(compose_run(overrides.split()), device, precision)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "another"])
@pytest.mark.parametrize("model", ["gpt2_nano", "gpt2_124m"])
def test_every_run_has_a_row(option: str, device: str, precision: str, model: str) -> None:
    work = work_of(f"model={model}", device, precision)
    rule = decide(option, work)
    assert rule.matches(work)
    assert rules.RULES.index(rule) == min(
        index for index, each in enumerate(rules.RULES) if each.option == option and each.matches(work)
    )


def test_every_row_names_a_bench_or_is_estimated() -> None:
    for rule in rules.RULES:
        is_fact = rule.why.startswith(("a CPU has no", "several devices", "each run has a loss scale"))
        is_rest = rule.condition == "" and rule.why == "not measured for larger models"
        assert (
            is_fact
            or is_rest
            or rule.why.startswith(("results/", "estimated") if rule.device == "cpu" else "estimated")
        )


@pytest.mark.parametrize(
    ("overrides", "precision", "size"),
    [
        ("model=gpt2_nano", "fp32", 16),
        ("model=gpt2_nano train.batch_size=16", "fp32", 1),
        ("model=gpt2_nano model.width=64", "fp32", 1),
        ("model=gpt2_tiny", "fp32", 1),
        ("model=gpt2_tiny", "bf16", 16),
        ("model=gpt2_tiny model.context=256", "bf16", 1),
        ("model=gpt2_mini train.batch_size=2", "bf16", 1),
    ],
)
def test_packs_on_a_cpu_are_those_that_were_measured(overrides: str, precision: str, size: int) -> None:
    assert value_of("sweep.pack", work_of(overrides, "cpu", precision)) == size


def test_packs_on_a_gpu_are_larger_the_less_a_run_computes() -> None:
    """Up to the most, while launches take longer; a compute-bound run trains alone."""
    sizes = [
        value_of("sweep.pack", work_of(overrides, "cuda", "bf16"))
        for overrides in (
            "model=gpt2_nano", "model=gpt2_tiny", "model=gpt2_tiny train.batch_size=32", "model=gpt2_mini",
            "model=gpt2_124m",
        )
    ]  # fmt: skip
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (rules.LARGEST_PACK, 1)
    assert 8 <= int(sizes[1]) < rules.LARGEST_PACK
    tiny, in_fp32 = (work_of("model=gpt2_tiny", "cuda", precision) for precision in ("bf16", "fp32"))
    assert int(value_of("sweep.pack", in_fp32)) < int(value_of("sweep.pack", tiny))
    # At the chosen size the launches still take a fifth of the time of the whole pack's computation, not at one more.
    size = int(value_of("sweep.pack", tiny))
    assert size * tiny.work_s <= 5 * tiny.launch_s < (size + 1) * tiny.work_s
    assert value_of("sweep.pack", work_of("model=gpt2_nano devices=2", "cuda", "bf16")) == 1


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


def test_a_run_pays_its_compilation_by_half_of_its_time() -> None:
    work = work_of("train.steps=1000000", "cuda", "bf16")
    first = next(
        steps for steps in range(0, 10**6, 1000) if work.estimated_seconds * steps / 1e6 >= 2 * rules.COMPILE_S
    )
    for steps, mode in ((first - 1000, "off"), (first, "on")):
        assert value_of("compile", work_of(f"train.steps={steps}", "cuda", "bf16")) == mode


@pytest.mark.parametrize(
    ("overrides", "device", "mode"),
    [
        ("train.steps=100", "cuda", "on"),
        ("train.steps=99", "cuda", "off"),
        ("train.steps=100 devices=2", "cuda", "off"),
        ("train.steps=100", "cpu", "off"),
    ],
)
def test_graphs(overrides: str, device: str, mode: str) -> None:
    assert value_of("train.graph", work_of(overrides, device, "fp32")) == mode


def test_a_plugin_is_not_replayed_unless_the_user_says_so() -> None:
    """A replay runs none of its Python code, which may keep values."""
    work = work_of("train.steps=100", "cuda", "fp32")
    assert value_of("train.graph", dataclasses.replace(work, plugins=1)) == "off"


def test_micro_batches_launch_each_their_own_operations() -> None:
    one, two = (work_of(f"train.accumulation={parts}", "cuda", "bf16") for parts in (1, 2))
    assert two.launch_s == 2 * one.launch_s
    assert two.tokens == one.tokens / 2


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


def test_the_launches_of_a_pack_are_those_of_one_run_and_a_little() -> None:
    """The tests of the pretended GPU count them."""
    for depth in (2, 4, 12):
        assert 1 < launches(depth, 16) / launches(depth) < 1.15
