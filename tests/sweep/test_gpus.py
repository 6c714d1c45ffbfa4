"""A GPU for each pack, on pretended GPUs: choice and placement; real workers print what they see."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from normlab.base.errors import ConfigError
from normlab.config.compose import compose_run, compose_sweep
from normlab.data.corpus import open_corpus
from normlab.store.plans import Pack, Plan, PlannedRun, read_plan, run_of, sweep_folder
from normlab.sweeps import plan as sweep_plan
from normlab.sweeps import worker
from normlab.sweeps.files import log_of, read_outcomes, write_plan
from normlab.sweeps.plan import make_plan, visible_gpus
from normlab.sweeps.supervisor import supervise
from normlab.training.identity import identity
from normlab.training.machine import resolve
from support.fake_workers import FakeSweeps, FakeWorker
from support.pretended_gpus import MEMORY, UUIDS, gpus, pretend_gpus
from support.processes import RecordingDisplay

Command = Callable[..., tuple[int, str, str]]

FULL = [f"GPU-{uuid}" for uuid in UUIDS]


# The choice.


@pytest.mark.parametrize(
    ("outside", "chosen"),
    [(None, [0, 1, 2, 3]), ("2,3", [2, 3]), (f"{FULL[3]},{FULL[0]}", [3, 0])],
)
def test_all_visible_gpus(outside: str | None, chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gets the UUID, whatever the user writes into CUDA_VISIBLE_DEVICES."""
    set_visible(monkeypatch, outside)
    pretend_gpus(monkeypatch)
    found = visible_gpus()
    assert [gpu.uuid for gpu in found] == [FULL[number] for number in chosen]
    assert [gpu.memory_bytes for gpu in found] == [MEMORY[number] for number in chosen]


def set_visible(monkeypatch: pytest.MonkeyPatch, outside: str | None) -> None:
    if outside is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outside)


# The plan and the record.


def test_plan_of_gpus(overrides: list[str], run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    set_visible(monkeypatch, "0,2")
    pretend_gpus(monkeypatch)
    on_gpu = [override for override in overrides if override != "device=cpu"]
    code, out, err = run_command("sweep", *on_gpu, "seed=range(20)", "sweep.jobs=2", "--dry-run", "sweep.name=x")
    assert code == 0, err
    assert "\ngpus    0, 1 (Pretended), 2 packs at once on each (sweep.jobs=2)\n" in out
    # The smallest of the GPUs is shared by two packs.
    planned = make_plan(*compose_sweep([*on_gpu, "seed=0", "sweep.jobs=2"]))
    assert planned.plan.memory_bytes == MEMORY[2] // 2
    # A run that the largest GPU holds and the smallest does not.
    large = ["model.width=4096", "model.heads=32", "model.depth=16"]
    with pytest.raises(ConfigError, match="the GPU has 40 GiB"):
        make_plan(*compose_sweep([*on_gpu, *large]))
    set_visible(monkeypatch, "0,1")
    make_plan(*compose_sweep([*on_gpu, *large]))
    assert make_plan(*compose_sweep([*on_gpu, "seed=0"])).plan.memory_bytes == MEMORY[0]


def test_precision_that_depends_on_the_gpu(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, major=(7, 8, 9, 7))
    on_gpu = [override for override in overrides if override != "device=cpu"]

    def run_id(visible: str, *more: str) -> str:
        set_visible(monkeypatch, visible)
        return make_plan(*compose_sweep([*on_gpu, *more])).plan.runs[0].run_id

    assert run_id("1,2") == run_id("1", "precision=bf16")
    assert run_id("0,3") == run_id("0", "precision=fp32")
    with pytest.raises(ConfigError, match=r"^precision=auto: depends on the GPU, and GPU 0 \(.*\) has no bf16"):
        run_id("0,1")
    run_id("0,1", "precision=fp32")


def test_record_has_the_uuid(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The UUID is in run.json, and not in the identity."""
    config = compose_run([*(override for override in overrides if override != "device=cpu"), "device=cuda"])
    corpus = open_corpus(config.data)
    set_visible(monkeypatch, "2")
    pretend_gpus(monkeypatch)
    settings = resolve(config)
    assert (settings.device_name, settings.device_uuid) == ("Pretended", FULL[2])
    set_visible(monkeypatch, "1")
    assert identity(config, settings, corpus) == identity(config, resolve(config), corpus)
    assert resolve(compose_run(overrides)).device_uuid is None


# Placement, with fake workers.


@pytest.fixture
def fake_sweep(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> FakeSweeps:
    return FakeSweeps(overrides, monkeypatch)


def placed() -> dict[int, list[int]]:
    """Return the indices of the GPUs of each pack, by its number, for packs that started once."""
    return {pack: [gpu.index for gpu in each.gpus] for each in FakeWorker.all for pack in each.packs}


@pytest.mark.parametrize(("number", "jobs"), [(1, 1), (3, 2)])
def test_pack_goes_to_the_gpu_with_the_fewest(fake_sweep: FakeSweeps, number: int, jobs: int) -> None:
    result, _, folder = fake_sweep("seed=range(13)", f"sweep.jobs={jobs}", on=gpus(*range(number)))
    assert result.code == 0
    for each in FakeWorker.all:
        for load in each.loads:
            assert load[each.gpus[0].index] == min(load[index] for index in range(number)) < jobs
    assert FakeWorker.most_at_once == number * jobs == len(FakeWorker.all)
    assert {end.pack: end.gpu for end in read_outcomes(folder)} == {
        pack: FULL[index] for pack, (index,) in placed().items()
    }


@pytest.fixture
def on_several_gpus(fake_sweep: FakeSweeps, monkeypatch: pytest.MonkeyPatch) -> FakeSweeps:
    """As `fake_sweep`, but the runs have 1, 2, 3, 1, 2, ... devices."""
    original = Plan.runs_of

    def runs_of(plan: Plan, pack: Pack) -> list[PlannedRun]:
        return [replace(run, config={**run.config, "devices": 1 + pack.runs[0] % 3}) for run in original(plan, pack)]

    monkeypatch.setattr(Plan, "runs_of", runs_of)
    return fake_sweep


def test_run_on_several_gpus_gets_as_many_and_waits_for_them(on_several_gpus: FakeSweeps) -> None:
    assert on_several_gpus("seed=range(6)", on=gpus(0, 1, 2))[0].code == 0
    assert {pack: len({*on}) for pack, on in placed().items()} == {1: 1, 2: 2, 3: 3, 4: 1, 5: 2, 6: 3}
    assert all(load[gpu.index] == 0 for each in FakeWorker.all for load in each.loads for gpu in each.gpus)


def test_threads_are_shared_by_the_packs_of_all_gpus(
    fake_sweep: FakeSweeps, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 24)
    monkeypatch.delenv("OMP_NUM_THREADS")
    fake_sweep("seed=0", "sweep.jobs=2", on=gpus(0, 1, 3))
    assert [each.threads for each in FakeWorker.all] == [12], "the plan was made for a CPU"
    pretend_gpus(monkeypatch)
    on_gpu = [override for override in overrides if override != "device=cpu"]
    for visible, jobs, threads in (("0,1,3", 2, 4), ("0", 1, torch.get_num_threads())):
        set_visible(monkeypatch, visible)
        made = make_plan(*compose_sweep([*on_gpu, f"sweep.jobs={jobs}", "seed=range(12)"])).plan
        assert made.threads == threads
        assert len(made.packs) == jobs * len(visible.split(",")), "every GPU has a pack for each of its jobs"


def test_worker_whose_gpu_is_gone(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With device=auto, the worker would train on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    grid = [override for override in overrides if override != "device=cpu"]
    planned = make_plan(*compose_sweep([*grid, "device=auto", "sweep.name=x"]))
    planned.folder.mkdir(parents=True)
    write_plan(planned.folder, planned.plan)
    assert worker.Worker(planned.folder, on_gpu=True).train(1)[0] == "failed"
    assert not run_of(planned.folder, planned.plan.runs[0]).exists()


# Real supervisors and workers.

PRINTING = '''
import os
from dataclasses import dataclass
import torch
from normlab.catalogue.norms.base import NormConfig, register_norm

@register_norm
@dataclass(kw_only=True, slots=True)
class PrintingConfig(NormConfig):
    formula = "tanh(x)"
    name: str = "printing"

    def build(self, width):
        return Printing()

class Printing(torch.nn.Module):
    """Prints the visible GPUs when it is built."""

    def __init__(self):
        super().__init__()
        print("sees", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)

    def forward(self, x):
        return torch.tanh(x)
'''


@pytest.fixture
def printing(overrides: list[str], tmp_path: Path) -> list[str]:
    """Return the overrides of a sweep whose workers print the visible GPUs to the logs of their packs."""
    (tmp_path / "printing.py").write_text(PRINTING)
    return [*overrides, f"plugins=[{tmp_path / 'printing.py'}]", "norm=printing", "sweep.name=x", "sweep.pack=off"]


def seen_in(folder: Path, pack: int) -> list[str]:
    """Return the different values of CUDA_VISIBLE_DEVICES that the workers of a pack printed, in order."""
    lines = log_of(folder, pack).read_text().splitlines()
    return list(dict.fromkeys(line.removeprefix("sees ") for line in lines if line.startswith("sees ")))


@pytest.mark.process
def test_workers_see_one_gpu_each(printing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four GPUs are visible, and two packs train at once on each."""
    set_visible(monkeypatch, "3,1")
    with monkeypatch.context() as patched:
        pretend_gpus(patched)
        chosen = visible_gpus()
    options, composed = compose_sweep([*printing, "seed=range(6)", "sweep.jobs=2", "train.checkpoint_every=2"])
    planned, display = make_plan(options, composed), RecordingDisplay()
    result = supervise(replace(planned, gpus=chosen), options, display)
    assert (result.code, result.failed) == (0, {})
    given = {outcome.pack: outcome.gpu for outcome in read_outcomes(planned.folder)}
    assert {pack: seen_in(planned.folder, pack) for pack in given} == {pack: [gpu] for pack, gpu in given.items()}
    assert [given[pack] for pack in (1, 2, 3, 4)] == [FULL[3], FULL[1], FULL[3], FULL[1]]
    assert all(run_of(planned.folder, run).state() == "finished" for run in planned.plan.runs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_sweep_on_the_gpus_of_this_machine(overrides: list[str], run_command: Command, tmp_path: Path) -> None:
    """Two packs train at once on each GPU, and the record of each run names the GPU that its pack had."""
    visible = visible_gpus()
    grid = [override for override in overrides if override != "device=cpu"]
    runs = f"seed=range({2 * len(visible)})"
    code, _, err = run_command("sweep", *grid, "device=cuda", runs, "sweep.pack=off", "sweep.jobs=2", "sweep.name=x")
    assert code == 0, err
    folder = sweep_folder(tmp_path / "results", "x")
    plan = read_plan(folder)
    given = {outcome.pack: outcome.gpu for outcome in read_outcomes(folder)}
    assert set(given.values()) == {gpu.uuid for gpu in visible}
    for pack in plan.packs:
        (run,) = plan.runs_of(pack)
        assert run_of(folder, run).run()["resolved"]["device_uuid"] == given[pack.number]
