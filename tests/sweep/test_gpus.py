"""A GPU for each pack, on pretended GPUs: choice, placement and faults; real workers print what they see."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normlab.config.compose import compose_run, compose_sweep
from normlab.config.sweep_options import SweepOptions
from normlab.data.corpus import open_corpus
from normlab.errors import ConfigError
from normlab.store import plans
from normlab.store.plans import (
    FINISHED,
    GPU_FAULT,
    HUNG,
    Pack,
    PackOutcome,
    Plan,
    PlannedRun,
    log_of,
    read_outcomes,
    run_of,
    sweep_folder,
)
from normlab.store.runs import RunFolder
from normlab.sweeps import local, process, supervisor, worker
from normlab.sweeps import plan as sweep_plan
from normlab.sweeps.gpus import choose_gpus
from normlab.sweeps.plan import make_plan
from normlab.sweeps.supervisor import SweepResult, supervise
from normlab.training.identity import describe, identity
from normlab.training.machine import Gpu, resolve
from support.pretended_gpus import MEMORY, UUIDS, gpus, pretend_gpus
from support.processes import RecordingDisplay, wait_for, workers_of
from support.small_run import one_run_at_a_time

Command = Callable[..., tuple[int, str, str]]

ECC = "CUDA error: uncorrectable ECC error encountered"
FULL = [f"GPU-{uuid}" for uuid in UUIDS]


# The option.


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("sweep.gpus=all", "all"),
        ("sweep.gpus=0", "0"),
        ("sweep.gpus=0,2,5", "0,2,5"),
        ("sweep.gpus=GPU-1a,GPU-2b", "GPU-1a,GPU-2b"),
        ("sweep.gpus=MIG-GPU-1a/1/0,MIG-2b", "MIG-GPU-1a/1/0,MIG-2b"),
    ],
)
def test_spellings(override: str, value: str) -> None:
    assert compose_sweep([override])[0].gpus == value


@pytest.mark.parametrize("value", ["0,,1", "range(2)", "null", "{a:1}"])
def test_what_is_not_a_gpu(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^sweep\.gpus="):
        compose_sweep([f"sweep.gpus={value}"])


def test_option_without_effect(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^sweep\.gpus=0,1: has no effect with device=cpu"):
        make_plan(*compose_sweep([*overrides, "sweep.gpus=0,1"]))
    with pytest.raises(ConfigError, match=r"^sweep\.gpus=0: has no effect with sweep\.on=slurm"):
        compose_sweep(["sweep.gpus=0", "sweep.on=slurm"])
    assert make_plan(*compose_sweep([*overrides, "sweep.gpus=all"])).gpus == []


# The choice.


@pytest.mark.parametrize(
    ("outside", "choice", "chosen"),
    [
        (None, "all", [0, 1, 2, 3]),
        (None, "0,2", [0, 2]),
        (None, "3,1", [3, 1]),
        (None, FULL[2], [2]),
        (None, "GPU-2a2,0", [2, 0]),
        ("2,3", "all", [2, 3]),
        ("3,1", "1", [1]),
        ("3,1", f"{FULL[1]},0", [1, 3]),
        (f"{FULL[3]},{FULL[0]}", "all", [3, 0]),
        ("2,9,1", "all", [2, 1]),
    ],
)
def test_choice(outside: str | None, choice: str, chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices count within CUDA_VISIBLE_DEVICES; a worker gets the UUID."""
    set_visible(monkeypatch, outside)
    pretend_gpus(monkeypatch)
    found = choose_gpus(choice)
    assert [gpu.uuid for gpu in found] == [FULL[number] for number in chosen]
    assert [gpu.memory_bytes for gpu in found] == [MEMORY[number] for number in chosen]


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        ("5", "no visible GPU is named 5"),
        ("GPU-ffff", "no visible GPU is named GPU-ffff"),
        ("GPU-", "more than one visible GPU is named GPU-"),
        ("1,1", "GPU 1 is listed twice"),
        (f"0,{FULL[3]}", "GPU 0 is listed twice"),
    ],
)
def test_unknown_and_repeated_gpus(choice: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_visible(monkeypatch, "3,1")
    pretend_gpus(monkeypatch)
    with pytest.raises(ConfigError) as error:
        choose_gpus(choice)
    options = f"0 (Pretended, {FULL[3]}), 1 (Pretended, {FULL[1]})"
    assert str(error.value) == f"sweep.gpus={choice}: {problem}; choose from {options}"


def test_mig_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA lists one of them, and takes the name of any."""
    pretend_gpus(monkeypatch, "Pretended MIG 1g.10gb")
    set_visible(monkeypatch, "MIG-a,MIG-b,MIG-c")
    assert [gpu.uuid for gpu in choose_gpus("all")] == ["MIG-a", "MIG-b", "MIG-c"]
    assert [gpu.uuid for gpu in choose_gpus("MIG-c,0")] == ["MIG-c", "MIG-a"]
    with pytest.raises(ConfigError, match="no visible GPU is named MIG-d; choose from 0 "):
        choose_gpus("MIG-d")
    set_visible(monkeypatch, None)
    assert [gpu.uuid for gpu in choose_gpus("MIG-x,MIG-y")] == ["MIG-x", "MIG-y"]
    assert choose_gpus("all")[0].uuid == f"MIG-{UUIDS[0]}"


def set_visible(monkeypatch: pytest.MonkeyPatch, outside: str | None) -> None:
    if outside is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", outside)


# The plan and the record.


def test_plan_of_gpus(overrides: list[str], run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    set_visible(monkeypatch, None)
    pretend_gpus(monkeypatch)
    on_gpu = [override for override in overrides if override != "device=cpu"]
    code, out, err = run_command(
        "sweep", *on_gpu, "seed=range(20)", "sweep.gpus=0,2", "sweep.jobs=2", "--dry-run", "sweep.name=x"
    )
    assert code == 0, err
    assert "\ngpus    0, 2 (Pretended), 2 packs at once on each (sweep.jobs=2)\n" in out
    lines = out.splitlines()
    (memory,) = [line for line in lines if line.startswith("memory")]
    assert memory.startswith("memory  at least ")
    assert memory.endswith(" for the largest pack")
    assert memory.split()[3] in next(line for line in lines if "seed=0" in line)
    # The smallest of the chosen GPUs is shared by two packs.
    planned = make_plan(*compose_sweep([*on_gpu, "seed=0", "sweep.gpus=0,2", "sweep.jobs=2"]))
    assert planned.plan.memory_bytes == MEMORY[2] // 2
    planned = make_plan(*compose_sweep([*on_gpu, "seed=0", "sweep.gpus=0,1"]))
    assert planned.plan.memory_bytes == MEMORY[0]
    # A run that the largest GPU holds and the smallest does not.
    large = ["model.width=4096", "model.heads=32", "model.depth=16"]
    make_plan(*compose_sweep([*on_gpu, *large, "sweep.gpus=0"]))
    with pytest.raises(ConfigError, match="the GPU has 40 GiB"):
        make_plan(*compose_sweep([*on_gpu, *large, "sweep.gpus=0,2"]))


def test_precision_that_depends_on_the_gpu(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan takes the precision of the chosen GPUs, not that of torch's current one."""
    set_visible(monkeypatch, None)
    pretend_gpus(monkeypatch, major=(7, 8, 9, 7))
    on_gpu = [override for override in overrides if override != "device=cpu"]

    def run_id(*more: str) -> str:
        return make_plan(*compose_sweep([*on_gpu, *more])).plan.runs[0].run_id

    assert run_id("sweep.gpus=1,2") == run_id("sweep.gpus=1", "precision=bf16")
    assert run_id("sweep.gpus=0,3") == run_id("sweep.gpus=0", "precision=fp32")
    with pytest.raises(ConfigError, match=r"^precision=auto: depends on the GPU, and GPU 0 \(.*\) has no bf16"):
        run_id()
    run_id("precision=fp32")


def test_record_has_the_uuid(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The UUID is in run.json, and not in the identity."""
    config = compose_run([*(override for override in overrides if override != "device=cpu"), "device=cuda"])
    corpus = open_corpus(config.data)
    set_visible(monkeypatch, "2")
    pretend_gpus(monkeypatch)
    record = describe(config, resolve(config), corpus)
    assert record["resolved"]["device_name"] == "Pretended"
    assert record["resolved"]["device_uuid"] == FULL[2]
    set_visible(monkeypatch, "1")
    assert record["identity"] == identity(config, resolve(config), corpus)
    assert resolve(compose_run(overrides)).device_uuid is None


# Placement and faults, with pretended processes.


class PretendedProcess:
    """Replaces `RunningPack`: ends after a few polls, with the outcome that `ways` gives for the GPU's index."""

    ways: dict[int, str] = {}
    running: list[PretendedProcess] = []
    loads: list[tuple[int, dict[int, int]]] = []
    """For each start: the index of the first GPU, and the number of packs on each GPU before."""
    placed: list[tuple[int, list[int]]] = []
    """For each start: the number of the pack, and the indices of its GPUs."""
    threads: list[int | None] = []
    """The number of threads of each process."""
    is_lost = False
    idle_worker = None
    answers = 0
    """Standard input, which is readable in a test."""

    def __init__(
        self, folder: Path, plan: Any, pack: Any, threads: int | None, timeout: float, on: Sequence[Gpu], worker: None
    ) -> None:
        self.folder, self.runs, self.pack, self.gpus, self.gpu = folder, plan.runs_of(pack), pack, on, on[0]
        self.threads.append(threads)
        self.uuids = ",".join(gpu.uuid for gpu in on)
        self.polls = 3 + pack.number % 3
        self.loads.append((self.gpu.index, Counter(gpu.index for process in self.running for gpu in process.gpus)))
        self.placed.append((pack.number, [gpu.index for gpu in on]))
        self.running.append(self)

    def poll(self) -> PackOutcome | None:
        self.polls -= 1
        if self.polls:
            return None
        self.running.remove(self)
        cause = next((self.ways[gpu.index] for gpu in self.gpus if gpu.index in self.ways), FINISHED)
        self.is_lost = cause == HUNG
        if cause == "memory" and len(self.runs) == 1:
            cause = FINISHED
        for run in self.runs if cause == FINISHED else ():
            RunFolder.create(run_of(self.folder, run).path, {"run_id": run.run_id}).write_status({"state": "finished"})
        return PackOutcome(self.pack.number, cause, ECC if cause == GPU_FAULT else "", 1, 1.0, 1.0, self.uuids)

    def close(self) -> None:
        """Do nothing."""


Supervise = Callable[..., tuple[SweepResult, list[Any], Path]]


@pytest.fixture
def pretended_sweep(monkeypatch: pytest.MonkeyPatch, overrides: list[str]) -> Supervise:
    """Supervise a sweep with pretended processes on pretended GPUs."""
    monkeypatch.setattr(local, "RunningPack", PretendedProcess)
    monkeypatch.setattr(supervisor, "POLL_EVERY_S", 0.0)

    def call(*more: str, on: list[Gpu], ways: dict[int, str] | None = None) -> tuple[SweepResult, list[Any], Path]:
        for name, value in {"ways": ways or {}, "running": [], "loads": [], "threads": [], "placed": []}.items():
            monkeypatch.setattr(PretendedProcess, name, value)
        name = [] if "sweep.name=y" in more else ["sweep.name=x"]
        options, composed = compose_sweep([*overrides, *one_run_at_a_time(more), *name, *more])
        planned, display = make_plan(options, composed), RecordingDisplay()
        return supervise(planned.folder, planned.plan, options, display, on), display.events, planned.folder

    return call


@pytest.mark.parametrize(("number", "jobs"), [(1, 1), (3, 1), (3, 2), (4, 3)])
def test_pack_goes_to_the_gpu_with_the_fewest(pretended_sweep: Supervise, number: int, jobs: int) -> None:
    result, events, folder = pretended_sweep("seed=range(13)", f"sweep.jobs={jobs}", on=gpus(*range(number)))
    assert result.code == 0
    starts = PretendedProcess.loads
    assert len(starts) == 13
    for index, load in starts:
        assert load.get(index, 0) == min(load.get(other, 0) for other in range(number))
        assert load.get(index, 0) < jobs
    assert [index for index, _ in starts[: number * jobs]] == [*range(number)] * jobs
    assert max(sum(load.values()) for _, load in starts) == number * jobs - 1
    assert [event[2] for event in events if event[0] == "started"] == [index for index, _ in starts]
    assert {outcome.gpu for outcome in read_outcomes(folder)} == set(FULL[:number])


@pytest.fixture
def on_several_gpus(pretended_sweep: Supervise, monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """As `pretended_sweep`, but the runs have 1, 2, 3, 1, 2, ... devices."""
    original = plans.Plan.runs_of

    def runs_of(plan: Plan, pack: Pack) -> list[PlannedRun]:
        return [replace(run, config={**run.config, "devices": 1 + pack.runs[0] % 3}) for run in original(plan, pack)]

    monkeypatch.setattr(plans.Plan, "runs_of", runs_of)
    return pretended_sweep


def test_run_on_several_gpus_gets_as_many_and_waits_for_them(on_several_gpus: Supervise) -> None:
    result, _, folder = on_several_gpus("seed=range(6)", "sweep.pack=off", on=gpus(0, 1, 2))
    assert result.code == 0
    placed = PretendedProcess.placed
    assert [(number, len(on)) for number, on in placed] == list(zip(range(1, 7), [1, 2, 3] * 2, strict=True))
    assert all(len(set(on)) == len(on) for _, on in placed)
    assert all(load.get(index, 0) == 0 for index, load in PretendedProcess.loads)
    assert [len(outcome.gpu.split(",")) for outcome in sorted(read_outcomes(folder), key=lambda each: each.pack)] == [
        1, 2, 3, 1, 2, 3,
    ]  # fmt: skip


def test_run_that_needs_more_gpus_than_are_left_does_not_stop_the_others(on_several_gpus: Supervise) -> None:
    result, _, folder = on_several_gpus("seed=range(6)", "sweep.pack=off", on=gpus(0, 1, 2), ways={2: GPU_FAULT})
    assert (result.code, result.failed) == (1, {})
    finished = {outcome.pack for outcome in read_outcomes(folder) if outcome.cause == FINISHED}
    assert finished >= {1, 4}
    assert not finished & {3, 6}


def test_threads_are_shared_by_the_packs_of_all_gpus(
    pretended_sweep: Supervise, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_plan, "allowed_cores", lambda: 24)
    monkeypatch.delenv("OMP_NUM_THREADS")
    pretended_sweep("seed=0", "sweep.jobs=2", on=gpus(0, 1, 3))
    assert PretendedProcess.threads == [12], "the plan was made for a CPU"
    set_visible(monkeypatch, None)
    pretend_gpus(monkeypatch)
    on_gpu = [override for override in overrides if override != "device=cpu"]
    for choice, jobs, threads in (("0,1,3", 2, 4), ("0", 1, torch.get_num_threads())):
        options = (f"sweep.gpus={choice}", f"sweep.jobs={jobs}", "seed=range(12)")
        made = make_plan(*compose_sweep([*on_gpu, *options])).plan
        assert made.threads == threads
        assert len(made.packs) == jobs * len(choice.split(",")), "every GPU has a pack for each of its jobs"


def test_gpu_that_faults_is_taken_out(pretended_sweep: Supervise) -> None:
    """Both packs that run on it go elsewhere, and nothing has failed."""
    result, events, folder = pretended_sweep("seed=range(8)", "sweep.jobs=2", on=gpus(0, 1, 2), ways={1: GPU_FAULT})
    assert (result.code, result.failed) == (0, {})
    lines = [event for event in events if isinstance(event, str) and "GPU" in event]
    assert lines == [f"GPU 1 (Pretended, {FULL[1]}) is taken out of the sweep ({ECC}): its packs go to GPU 0, 2"]
    outcomes = read_outcomes(folder)
    assert [(outcome.pack, outcome.gpu) for outcome in outcomes if outcome.cause == GPU_FAULT] == [
        (2, FULL[1]), (5, FULL[1]),
    ]  # fmt: skip
    assert sorted(outcome.pack for outcome in outcomes if outcome.cause == FINISHED) == [*range(1, 9)]


def test_no_gpu_is_left_and_the_same_command_resumes(pretended_sweep: Supervise) -> None:
    result, events, _ = pretended_sweep("seed=range(4)", on=gpus(0, 1), ways={0: GPU_FAULT, 1: GPU_FAULT})
    assert (result.code, result.failed, result.incomplete) == (1, {}, 4)
    assert events[-3:-1] == [
        f"GPU 1 (Pretended, {FULL[1]}) is taken out of the sweep ({ECC})",
        "too few GPUs are left for 4 packs; the same command resumes the sweep",
    ]
    result, events, _ = pretended_sweep("seed=range(4)", on=gpus(0, 1))
    assert result.code == 0
    assert events[0] == ("start", [1, 2, 3, 4], 0, [])


def test_halves_are_placed_like_other_packs(pretended_sweep: Supervise) -> None:
    result, events, _ = pretended_sweep("seed=range(4)", "sweep.pack=4", on=gpus(0, 1), ways={0: "memory"})
    assert result.code == 0
    assert [event for event in events if event[0] == "started"] == [
        ("started", 1, 0), ("started", 2, 0), ("started", 3, 1), ("started", 4, 0), ("started", 5, 1),
    ]  # fmt: skip


def test_process_that_cannot_be_killed(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as hung, and its GPU is taken out."""

    class Stuck:
        pid = 2**22 + 1

        def __init__(self, *command: Any, **options: Any) -> None:
            self.stdin, self.stdout = io.BytesIO(), open(os.devnull, "rb")  # noqa: SIM115

        def poll(self) -> None:
            """Return that the process runs."""

        def send_signal(self, number: int) -> None:
            """Do nothing, as a process in a driver."""

    for name, value in {"GRACE_S": 0.0, "UNKILLABLE_S": 0.0}.items():
        monkeypatch.setattr(process, name, value)
    monkeypatch.setattr(process, "subprocess", SimpleNamespace(Popen=Stuck, PIPE=subprocess.PIPE))
    options, composed = compose_sweep([*overrides, "seed=0", "sweep.name=x", "sweep.timeout_minutes=0.0001"])
    planned, display = make_plan(options, composed), RecordingDisplay()
    result = supervise(planned.folder, planned.plan, options, display, gpus(0))
    assert result.code == 1
    assert result.failed[1].cause == HUNG
    assert result.failed[1].detail == "process 4194305 cannot be killed; reset its device, or restart the machine"
    assert any("GPU 0" in event and "is taken out" in event for event in display.events if isinstance(event, str))


@pytest.mark.parametrize(
    ("code", "log", "cause"),
    [
        (1, ["Traceback", f"error: AcceleratorError: {ECC} CUDA kernel errors might be reported"], GPU_FAULT),
        (2, ["error: device=cuda: torch sees no GPU here; use device=cpu"], GPU_FAULT),
        (1, ["error: RuntimeError: No CUDA GPUs are available"], GPU_FAULT),
        (-6, ["terminate called after throwing", f"  what():  {ECC}", "frame #0"], GPU_FAULT),
        (1, ["error: AcceleratorError: CUDA error: device-side assert triggered"], "raised"),
        (1, ["error: AcceleratorError: CUDA error: an illegal memory access was encountered"], "raised"),
        (1, ["error: RuntimeError: CUDA error: unspecified launch failure"], "raised"),
        (1, [ECC, "error: ValueError: no"], "raised"),
        (12, ["error: the memory ran out"], "memory"),
        (-6, ["CUDA out of memory"], "memory"),
        (143, [ECC], "interrupted"),
    ],
)
def test_cause_of_an_exit_on_a_gpu(code: int, log: list[str], cause: str) -> None:
    """The errors are those of the CUDA runtime (cudaGetErrorString) and of torch."""
    exits = {"completed": False, "stopped": None, "memory_kill": False}
    assert process.cause_of_exit(code, log, **exits, on_gpu=True)[0] == cause
    assert process.cause_of_exit(code, log, **exits, on_gpu=False)[0] != GPU_FAULT


def test_worker_whose_gpu_is_gone(
    overrides: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With device=auto, the worker would train on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    grid = [override for override in overrides if override != "device=cpu"]
    planned = make_plan(*compose_sweep([*grid, "device=auto", "sweep.name=x"]))
    planned.folder.mkdir(parents=True)
    local.plans.write_plan(planned.folder, planned.plan)
    code = worker.Worker(planned.folder, on_gpu=True).train(1)
    log = capfd.readouterr().err.splitlines()
    exits = {"completed": False, "stopped": None, "memory_kill": False}
    assert process.cause_of_exit(code, log, **exits, on_gpu=True)[0] == GPU_FAULT
    assert not run_of(planned.folder, planned.plan.runs[0]).exists()


# Real supervisors and workers.

PRINTING = f'''
import os
from dataclasses import dataclass
import torch
from normlab.norms.base import NormConfig, register_norm

@register_norm
@dataclass(kw_only=True, slots=True)
class PrintingConfig(NormConfig):
    name: str = "printing"

    def build(self, width):
        return Printing()

class Printing(torch.nn.Module):
    """Prints the visible GPUs when it is built, and fails as a broken GPU does."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        print("sees", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)

    def forward(self, x):
        self.calls += self.training
        if self.calls > 5 and os.environ["CUDA_VISIBLE_DEVICES"] == os.environ.get("FAULTY"):
            raise RuntimeError("{ECC}")
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
def test_workers_see_one_gpu_each_and_one_gpu_faults(printing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four GPUs are visible, two packs train at once on each, and one GPU breaks in the sixth step."""
    set_visible(monkeypatch, "3,1")
    monkeypatch.setenv("FAULTY", FULL[1])
    with monkeypatch.context() as patched:
        pretend_gpus(patched)
        chosen = choose_gpus("all")
    options, composed = compose_sweep([*printing, "seed=range(6)", "sweep.jobs=2", "train.checkpoint_every=2"])
    planned, display = make_plan(options, composed), RecordingDisplay()
    result = supervise(planned.folder, planned.plan, options, display, chosen)
    assert (result.code, result.failed) == (0, {})
    assert [event[1:] for event in display.events if event[0] == "started"][:4] == [(1, 0), (2, 1), (3, 0), (4, 1)]
    assert [seen_in(planned.folder, pack) for pack in (1, 2, 3, 4)] == [
        [FULL[3]], [FULL[1], FULL[3]], [FULL[3]], [FULL[1], FULL[3]],
    ]  # fmt: skip
    assert {gpu for pack in (5, 6) for gpu in seen_in(planned.folder, pack)[-1:]} == {FULL[3]}
    lines = [event for event in display.events if isinstance(event, str) and "taken out" in event]
    assert lines == [
        f"GPU 1 (Pretended, {FULL[1]}) is taken out of the sweep (RuntimeError: {ECC}): its packs go to GPU 0"
    ]
    assert all(run_of(planned.folder, run).state() == "finished" for run in planned.plan.runs)


SUPERVISE = """
import sys
from normlab.config.compose import compose_sweep
from normlab.sweeps.plan import make_plan
from normlab.sweeps.progress import ProgressDisplay
from normlab.sweeps.supervisor import supervise
from normlab.training.machine import Gpu

options, composed = compose_sweep(sys.argv[1:])
planned = make_plan(options, composed)
gpus = [Gpu(0, "GPU-a", "Pretended", 2**30, True), Gpu(1, "GPU-b", "Pretended", 2**30, True)]
sys.exit(supervise(planned.folder, planned.plan, options, ProgressDisplay(planned.folder), gpus).code)
"""


@pytest.mark.process
def test_sweep_resumes_on_the_gpus_that_are_left(printing: list[str], tmp_path: Path) -> None:
    """The supervisor is killed; the next one has one of the two GPUs."""
    grid = [*printing, "seed=0,1,2", "train.log_every=1", "train.checkpoint_every=10", "train.steps=100", "stats=off"]
    folder = sweep_folder(tmp_path / "results", "x")
    options, composed = compose_sweep(grid)
    planned = make_plan(options, composed)
    parent = subprocess.Popen([sys.executable, "-c", SUPERVISE, *grid], stderr=subprocess.DEVNULL)
    wait_for(lambda: all(run_of(folder, run).size() > 2_000 for run in planned.plan.runs[:2]))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not workers_of(folder))
    options, composed = compose_sweep(grid)
    result = supervise(folder, planned.plan, options, RecordingDisplay(), [Gpu(1, "GPU-b", "Pretended", 2**30, True)])
    assert result.code == 0
    assert [seen_in(folder, pack)[-1] for pack in (1, 2, 3)] == ["GPU-b"] * 3
    assert seen_in(folder, 1)[0] == "GPU-a"
    for run in planned.plan.runs:
        steps = [row["step"] for row in run_of(folder, run).rows("train").rows]
        assert steps == list(range(100))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_sweep_on_the_gpus_of_this_machine(overrides: list[str], run_command: Command, tmp_path: Path) -> None:
    """Two packs train at once on each GPU, and the record of each run names the GPU that its pack had."""
    visible = choose_gpus("all")
    grid = [override for override in overrides if override != "device=cpu"]
    runs = f"seed=range({2 * len(visible)})"
    code, _, err = run_command("sweep", *grid, "device=cuda", runs, "sweep.pack=off", "sweep.jobs=2", "sweep.name=x")
    assert code == 0, err
    folder = sweep_folder(tmp_path / "results", "x")
    plan = local.plans.read_plan(folder)
    given = {outcome.pack: outcome.gpu for outcome in read_outcomes(folder)}
    assert set(given.values()) == {gpu.uuid for gpu in visible}
    for pack in plan.packs:
        (run,) = plan.runs_of(pack)
        assert run_of(folder, run).run()["resolved"]["device_uuid"] == given[pack.number]


def test_default_choice() -> None:
    assert SweepOptions().gpus == "all"
