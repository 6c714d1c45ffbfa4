"""A run on several devices equals the run on one: losses, statistics, evaluations; and what happens if a rank dies."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from normlab.config.compose import compose_run
from normlab.config.devices import micro_batches, rows_of_device
from normlab.errors import ConfigError
from normlab.options import plain_tree
from normlab.store.plans import read_plan
from normlab.store.runs import RunFolder
from normlab.training import rank
from normlab.training.launch import RESUMES
from support.pretended_gpus import pretend_gpus
from support.processes import children_of, wait_for, workers_of
from support.small_run import small_run

DOUBLE = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
HANGING = """
import os, time
from normlab.training.loop import Loop

take_step = Loop.take_step

def hang(self, step):
    while step > 10 and os.environ.get("RANK") == "1":
        time.sleep(1)
    return take_step(self, step)

Loop.take_step = hang
"""
"""A plugin with which the second rank stays in a step after the first checkpoint: a signal does not end it."""
LONG = ("train.steps=3000", "train.checkpoint_every=10", "eval.every=0", "stats=off")


SHORT = ("train.steps=50", "eval.every=25", "stats.every=5")


def overrides_of(folder: Path, name: str, *overrides: str) -> list[str]:
    """Return the overrides of a run in float64: a plugin sets torch's default dtype in every process."""
    plugin = folder / "double.py"
    plugin.write_text(DOUBLE)
    common = [each for each in small_run(folder / name) if not each.startswith(("train.steps=", "train.batch_size="))]
    return [*common, "train.batch_size=8", f"plugins=[{plugin}]", *overrides]


def start(*overrides: str, command: str = "train") -> subprocess.Popen[str]:
    """Start a command in a process of its own: the plugin changes torch's default dtype."""
    arguments = [sys.executable, "-m", "normlab", command, *overrides]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(*overrides: str) -> tuple[int, str, str]:
    process = start(*overrides)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def folder_of(results: Path) -> RunFolder:
    (path,) = (results / "runs").iterdir()
    return RunFolder(path)


def record_of(run: RunFolder) -> dict[str, np.ndarray]:
    """Return all numbers of a run's record, except times."""
    train, evals = run.rows("train").rows, run.rows("eval").rows
    numbers = {name: np.array([row[name] for row in train]) for name in ("loss", "grad_norm", "clip", "lr")}
    numbers |= {f"eval {name}": np.array([row[name] for row in evals]) for name in evals[0] if name.startswith("loss")}
    for tier in ("core", "extended"):
        for part in run.statistics.read(tier)[0]:
            for name in part.names():
                numbers |= {f"stats {tier} {name} {site}": values for site, values in part.get(name).items()}
    return numbers


CASES = {
    "batchnorm": ["norm=batchnorm", "placement=pre"],
    "layernorm": ["norm=layernorm", "placement=pre", "train.accumulation=4"],
    "deepnorm": ["norm=layernorm", "placement=deepnorm"],
    "batchnorm_past": ["norm=batchnorm_past", "placement=pre", "train.accumulation=2"],
    "batchnorm_position": ["norm=batchnorm_position", "placement=post", "stats=full", "stats.probe_share=null"],
}
SLOW = [pytest.mark.process]


@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("batchnorm", 2),
        pytest.param("batchnorm", 4, marks=SLOW),
        *(pytest.param(case, devices, marks=SLOW) for case in ("layernorm", "deepnorm") for devices in (2, 4)),
        pytest.param("batchnorm_past", 2, marks=SLOW),
        pytest.param("batchnorm_position", 2, marks=SLOW),
    ],
)
def test_several_devices_equal_one(tmp_path: Path, case: str, devices: int) -> None:
    for name, count in (("one", 1), ("several", devices)):
        code, _, err = train(*overrides_of(tmp_path, name, *SHORT, *CASES[case], f"devices={count}"))
        assert code == 0, err
        assert "at step 50/50" in err
    one, several = (folder_of(tmp_path / name) for name in ("one", "several"))
    assert_equal_runs(one, several)


@pytest.mark.process
def test_a_sweep_mixes_runs_on_one_and_on_two_devices(tmp_path: Path) -> None:
    """The runs of depth 1 are a pack on one device, and each run of depth 2 has two devices."""
    grid = ["model.depth=1,2", "seed=0,1", "sweep.name=x", "sweep.pack=2", "stats.every=5"]
    for name, devices in (("one", "1"), ("mixed", "${model.depth}")):
        process = start(*overrides_of(tmp_path, name, *grid), f"devices={devices}", command="sweep")
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        plan = read_plan(tmp_path / name / "sweeps" / "x")
        assert [len(pack.runs) for pack in plan.packs] == ([2, 2] if name == "one" else [2, 1, 1])
    runs = sorted((tmp_path / "mixed" / "runs").iterdir())
    assert [each.run()["resolved"]["devices"] for each in map(RunFolder, runs)] == [1, 1, 2, 2]
    for run in runs:
        assert_equal_runs(RunFolder(tmp_path / "one" / "runs" / run.name), RunFolder(run))


def assert_equal_runs(one: RunFolder, several: RunFolder) -> None:
    """Assert that two runs are the same run, with equal numbers up to the rounding of float64."""
    assert one.run_id == several.run_id
    expected, numbers = record_of(one), record_of(several)
    assert expected.keys() == numbers.keys()
    for name, values in expected.items():
        is_statistic = name.startswith("stats ")  # float32 in the record
        rtol, atol = (1e-5, 1e-6) if is_statistic else (0, 1e-9)
        np.testing.assert_allclose(numbers[name], values, rtol=rtol, atol=atol, err_msg=name)


def test_each_sequence_of_a_batch_belongs_to_one_device(tmp_path: Path) -> None:
    for norm, accumulation in (("rmsnorm", 1), ("rmsnorm", 8), ("batchnorm", 1), ("batchnorm", 2)):
        config = compose_run(
            [*small_run(tmp_path), f"norm={norm}", "train.batch_size=16", f"train.accumulation={accumulation}",
             "devices=4"]
        )  # fmt: skip
        rows = [rows_of_device(config, index) for index in range(4)]
        assert sorted(row for each in rows for row in each) == list(range(16))
        assert {len(each) for each in rows} == {4}
        if norm == "batchnorm":  # micro-batch i of all devices together is micro-batch i of one device
            size = 4 // accumulation
            parts = [
                sorted(row for each in rows for row in each[i * size : (i + 1) * size]) for i in range(accumulation)
            ]
            assert parts == [list(range(i * 4 * size, (i + 1) * 4 * size)) for i in range(accumulation)]
        else:  # as few micro-batches as fit into the memory of one on a single device
            assert micro_batches(config) == {1: 1, 8: 2}[accumulation]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["devices=3", "train.batch_size=8"],
            "devices=3: does not divide train.batch_size=8; choose a number that does",
        ),
        (
            ["devices=4", "norm=batchnorm", "train.batch_size=8", "train.accumulation=4"],
            "devices=4: does not divide train.batch_size=8 / train.accumulation=4; choose a number that does",
        ),
        (["devices=0"], "devices=0: "),
    ],
)
def test_devices_that_do_not_divide_the_batch(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        compose_run([*small_run(tmp_path), *overrides])


def ranks_of(launcher: int) -> list[int]:
    """Return the processes of the ranks in order."""
    found: dict[int, int] = {}
    for pid in children_of(launcher):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            found |= {int(each[5:]): pid for each in environment if each.startswith(b"RANK=")}
    return [found[rank] for rank in sorted(found)]


def checkpoint_exists(results: Path) -> Callable[[], bool]:
    return lambda: any(results.glob("runs/*/checkpoints/*/manifest.json"))


@pytest.mark.process
@pytest.mark.parametrize("victim", [0, 2, None])
def test_a_killed_process_ends_the_run_and_fewer_ranks_resume_it(
    tmp_path: Path, victim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victim is a rank, or (None) the process that started the ranks."""
    results, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    overrides = overrides_of(tmp_path, "run", *LONG, "norm=batchnorm")
    process = start(*overrides, "devices=4")
    wait_for(checkpoint_exists(results))
    ranks = ranks_of(process.pid)
    assert len(ranks) == 4
    os.kill(process.pid if victim is None else ranks[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    if victim is not None:
        assert process.returncode == 2
        assert err.splitlines()[-1] == f"error: rank {victim} was killed by SIGKILL; {RESUMES}"
    assert "Traceback" not in err
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert not list(temporary.iterdir())
    process = start(*overrides, "devices=2")
    wait_for(lambda: len(ranks_of(process.pid)) == 2)
    before = folder_of(results).size()
    wait_for(lambda: folder_of(results).size() > before)
    code, _, err = train(*overrides, "devices=2")
    assert code == 2
    assert "is active in process" in err.splitlines()[-1]  # an error of rank 0
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGINT
    assert "warning: since this run started, devices changed from 4 to 2" in err
    assert "interrupted at step" in out
    rows = folder_of(results).rows("train").rows
    assert [row["step"] for row in rows] == list(range(len(rows)))  # none twice, none missing


@pytest.mark.process
def test_a_rank_that_does_not_react_is_killed_with_its_pack(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    plugins = f"plugins=[{tmp_path / 'hanging.py'}]"
    overrides = [*small_run(tmp_path / "results"), *LONG, plugins, "devices=2", "sweep.name=x", "seed=0"]
    supervisor = start(*overrides, command="sweep")
    sweep = tmp_path / "results" / "sweeps" / "x"
    wait_for(checkpoint_exists(tmp_path / "results"))
    (worker,) = workers_of(sweep)
    ranks = ranks_of(worker)
    assert len(ranks) == 2
    supervisor.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        supervisor.communicate(timeout=3)
    assert Path(f"/proc/{ranks[1]}").exists()
    supervisor.send_signal(signal.SIGINT)  # the second signal kills the pack
    supervisor.communicate(timeout=300)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (worker, *ranks)))


@pytest.mark.parametrize(
    ("device", "backend", "gpu"), [("cuda", "nccl", torch.device("cuda", 1)), ("cpu", "gloo", None)]
)
def test_a_rank_gives_its_gpu_to_nccl(
    device: str, backend: str, gpu: torch.device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = []

    def init_process_group(backend: str, **options: object) -> None:
        groups.append((backend, options["device_id"]))
        raise ConfigError("no group here")

    pretend_gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: groups.append(device))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(sys, "argv", sys.argv)
    for name, number in (("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, number)
    config = compose_run([*small_run(tmp_path), f"device={device}", "devices=2"])
    assert rank.main({"config": plain_tree(config), "pack": None, "command": []}) == 2
    assert groups == ([gpu] if gpu else []) + [(backend, gpu)]
