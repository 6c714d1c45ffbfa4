"""Steps that are replayed give the same bits as steps that are not. A tape on a CPU stands in for CUDA graphs."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from normlab.analysis.settings import setting
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.store.record import RunRecord
from normlab.store.runs import RunFolder
from normlab.training import checkpoint, graph, machine
from normlab.training.loop import Loop
from normlab.training.optim import Optimizer
from normlab.training.start import train_pack
from normlab.training.step import StepOutput
from support import tape
from support.small_run import small_run

Trained = Callable[[Sequence[str], int], list[RunFolder]]

CASES = [
    [],
    ["norm=batchnorm"],
    ["norm=batchnorm_position", "stats.tiers=[extended]", "stats.every=null"],
    ["placement=ngpt", "norm=none"],  # projects its parameters
    ["train.accumulation=2"],
    ["optim=sgd", "optim.clip=null"],
    ["precision=bf16"],
    ["model=llama_nano", "stats.every=2"],
    ["optim=sgd", "norm=none", "optim.clip=null", "optim.warmup_steps=13", "optim.lr=5"],  # diverges, at step 8 and 9
]


@pytest.fixture(autouse=True)
def _graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "resolve_graph", lambda *args: "on")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def configs_of(results: Path, overrides: Sequence[str], runs: int) -> list[RunConfig]:
    between = ["train.steps=14", "stats.every=3", "eval.every=5", "train.checkpoint_every=4", "stats.extended_every=6"]
    config = compose_run([*small_run(results), "stats.tiers=[core,extended]", "stats.every=3", *between, *overrides])
    config.stats.tiers = [tier for tier in config.stats.tiers if tier != "probe"]  # packs are not probed
    data = [dataclasses.replace(config.data, seed=seed) for seed in range(runs)]
    return [dataclasses.replace(config, seed=seed, data=data[seed]) for seed in range(runs)]


def trained(configs: list[RunConfig]) -> list[RunFolder]:
    return [outcome.folder for outcome in train_pack(configs, [[] for _ in configs])]


def assert_same(found: RunFolder, expected: RunFolder) -> None:
    """Fail unless two runs have the same rows, statistics and state, bit for bit."""
    rows = [[row for row in folder.rows().rows if row["kind"] != "pace"] for folder in (found, expected)]
    np.testing.assert_equal(rows[0], rows[1])  # NaN is equal to NaN
    for tier in ("core", "extended"):
        profiles = [folder.statistics.read(tier)[0] for folder in (found, expected)]
        values = [[(each.steps, each.values) for each in parts] for parts in profiles]
        np.testing.assert_equal(values[0], values[1])
    states = [checkpoint.read_newest(folder.path / checkpoint.FOLDER)[0] for folder in (found, expected)]
    assert states[0] is not None
    assert states[1] is not None
    for name, tensor in states[0].tensors.items():
        torch.testing.assert_close(tensor, states[1].tensors[name], rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[StepOutput]:
    """Let a tape stand in for CUDA graphs; return the captured outputs."""
    outputs: list[StepOutput] = []

    def capture(*args: Any) -> tuple[graph.Replay, StepOutput]:
        replay, output = tape.capture(*args)
        outputs.append(output)
        return replay, output

    monkeypatch.setattr(graph, "capture", capture)
    return outputs


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[RunFolder]]:
    """Return a function that trains without replays."""

    def call(overrides: Sequence[str], runs: int) -> list[RunFolder]:
        with monkeypatch.context() as patches:
            patches.setattr(graph, "WARM_UP", 100)
            return trained(configs_of(tmp_path / "steps", overrides, runs))

    return call


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("overrides", "runs"),
    [
        *zip(CASES, cycle([1, 2])),
        (["precision=fp16"], 1),  # such a run trains alone
        *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in zip(CASES, cycle([2, 1]))),
    ],
    ids=str,
)
def test_a_replayed_run_is_the_run(
    overrides: list[str], runs: int, tmp_path: Path, expected: Trained, captures: list[StepOutput]
) -> None:
    """Also with evaluations, passes of statistics and checkpoints between the steps."""
    found = trained(configs_of(tmp_path / "replays", overrides, runs))
    for pair in zip(found, expected(overrides, runs), strict=True):
        assert_same(*pair)
    assert captures


@pytest.mark.exhaustive
def test_a_stopped_run_is_replayed_from_its_checkpoint(
    tmp_path: Path, expected: Trained, captures: list[StepOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs, real = configs_of(tmp_path / "replays", ["norm=batchnorm"], 2), Loop.take_step

    def stopping(self: Loop, step: int) -> StepOutput:
        if step == 9 and len(captures) == 2:
            raise KeyboardInterrupt
        return real(self, step)

    monkeypatch.setattr(Loop, "take_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        trained(configs)
    monkeypatch.setattr(Loop, "take_step", real)
    for pair in zip(trained(configs), expected(["norm=batchnorm"], 2), strict=True):
        assert_same(*pair)
    assert len(captures) == 3  # after the resume there was one measured step less


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", [(torch.autograd, "grad"), (Optimizer, "update")], ids=["backward", "update"])
def test_without_a_capture_the_run_is_the_same(
    place: tuple[Any, str],
    tmp_path: Path,
    expected: Trained,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def failing(take: Callable[[], StepOutput], pool: object) -> None:
        error = RuntimeError("operation not permitted\nwhen stream is capturing")
        with mock.patch.object(*place, side_effect=error):  # the step has replaced its buffers then
            take()

    monkeypatch.setattr(graph, "capture", failing)
    found = trained(configs_of(tmp_path / "replays", ["norm=batchnorm"], 2))
    line = "train.graph: a step cannot be captured (operation not permitted when stream is capturing)"
    assert capsys.readouterr().err.count(line) == 1
    records = [RunRecord.load(run) for run in found]
    assert [(record.machine.graph, setting(record, "train.graph")) for record in records] == [("on", "off")] * 2
    for pair in zip(found, expected(["norm=batchnorm"], 2), strict=True):
        assert_same(*pair)
