"""The estimate of a plan's time on a GPU that is not at hand."""

import re
from pathlib import Path

import pytest

from normlab.sweeps.named_devices import NAMED_DEVICES
from support.run_folders import Command
from support.small_run import small_run

PAGES = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("name", NAMED_DEVICES)
def test_measured_steps_take_their_time(name: str) -> None:
    device = NAMED_DEVICES[name]
    for flops, seconds in device.steps:
        assert device.seconds_of_step(flops, 1) == pytest.approx(seconds)
    largest, seconds = device.steps[-1]
    assert device.seconds_of_step(3 * largest, 1) == pytest.approx(3 * seconds)
    smallest, seconds = device.steps[0]
    assert device.seconds_of_step(smallest / 100, 1) == pytest.approx(seconds)
    assert device.seconds_of_step(smallest / 100, 100) == pytest.approx(100 * device.seconds_per_block)


@pytest.mark.parametrize("name", NAMED_DEVICES)
def test_measured_steps_are_those_of_the_page(name: str) -> None:
    """The largest is that of GPT-2 124M: 6 FLOPs for each of its 124 million weights and tokens, and attention."""
    device = NAMED_DEVICES[name]
    page = (PAGES.parent / device.source).read_text()
    times = re.findall(r"compiled, graph \| \d+ \| ([\d.]+) \|", page)
    assert {f"{1000 * seconds:.3g}" for _, seconds in device.steps} <= set(times)
    attention = 12 * 12 * 768 * 1024
    assert device.steps[-1][0] == pytest.approx((6 * 124e6 + attention) * 16 * 1024, rel=0.03)


def test_a_plan_has_its_time_on_a_gpu(run_command: Command, tmp_path: Path) -> None:
    sweep = ("sweep", *small_run(tmp_path, "model.depth=2,4", "seed=0,1", "train.steps=1000"))
    code, out, _ = run_command(*sweep, "--on", "h200")
    assert code == 0
    # Two packs, each with a start of 60 s and 1,000 steps of 0.8 ms, less than which no measured step took.
    assert re.search(r"^h200 +about 2 min 2 s on one H200 \(0.034 GPU hours\), a rough estimate", out, re.MULTILINE)
    assert not any(tmp_path.iterdir())


def test_an_unknown_gpu_is_an_error(run_command: Command) -> None:
    assert run_command("sweep", "seed=0,1", "--on", "h100") == (
        2,
        "",
        "error: --on h100: unknown measured GPU 'h100' (did you mean 'h200'?): choose one of h200\n",
    )
