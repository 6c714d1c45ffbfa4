"""A run on several devices equals the run on one: losses, statistics, evaluations; and what happens if a rank dies."""

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

from normlab.base.errors import ConfigError
from normlab.base.options import plain_tree
from normlab.config.compose import compose_run
from normlab.store.runs import RunFolder
from normlab.training import rank
from normlab.training.launch import RESUMES
from support.pretended_gpus import pretend_gpus
from support.processes import children_of, wait_for
from support.small_run import small_run

DOUBLE = "import torch\n\ntorch.set_default_dtype(torch.float64)\n"
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
    "layernorm": ["norm=layernorm", "placement=pre", "train.accumulation=4", "eval.ema=0.9", "optim.qk_clip=0.01"],
    "normuon": ["norm=rmsnorm", "placement=pre", "optim=normuon", "optim.qkv=together", "optim.decay_mode=cautious"],
    "muon": ["norm=rmsnorm", "placement=peri", "optim=muon", "train.accumulation=2"],
    "hyperball": ["norm=rmsnorm", "placement=pre", "optim=hyperball", "train.accumulation=2"],
    # Keys without biases, whose gradient is rounding alone, of which lion takes the sign.
    "lion": ["norm=dyt", "placement=pre", "optim=lion", "optim.groups.embed.lr=3", "model.bias=false"],
    "taper": ["norm=rmsnorm", "placement=pre", "norm.taper_warmup=10", "norm.taper_steps=20", "train.accumulation=2"],
    "past": ["norm=batchnorm_past", "placement=post", "train.accumulation=2", "stats.tiers=[core,extended]"],
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "devices"),
    [
        ("batchnorm", 2),
        *(pytest.param(*pair, marks=pytest.mark.process) for pair in (("layernorm", 4), ("past", 2))),
        *((name, 2) for name in ("muon", "normuon", "hyperball", "lion", "taper")),
    ],
)
def test_several_devices_equal_one(tmp_path: Path, case: str, devices: int) -> None:
    for name, count in (("one", 1), ("several", devices)):
        code, _, err = train(*overrides_of(tmp_path, name, *SHORT, *CASES[case], f"devices={count}"))
        assert code == 0, err
        assert "at step 50/50" in err
    one, several = (folder_of(tmp_path / name) for name in ("one", "several"))
    assert_equal_runs(one, several)


def assert_equal_runs(one: RunFolder, several: RunFolder) -> None:
    """Assert that two runs are the same run, with equal numbers up to the rounding of float64."""
    assert one.run_id == several.run_id
    expected, numbers = record_of(one), record_of(several)
    assert expected.keys() == numbers.keys()
    for name, values in expected.items():
        is_statistic = name.startswith("stats ")  # float32 in the record
        rtol, atol = (1e-5, 1e-6) if is_statistic else (0, 1e-9)
        np.testing.assert_allclose(numbers[name], values, rtol=rtol, atol=atol, err_msg=name)


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
@pytest.mark.parametrize("victim", [0, None])
def test_a_killed_process_ends_the_run_and_fewer_ranks_resume_it(tmp_path: Path, victim: int | None) -> None:
    """The victim is a rank, or (None) the process that started the ranks."""
    results = tmp_path / "run"
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
    for name, number in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, number)
    config = compose_run([*small_run(tmp_path), f"device={device}", "devices=2"])
    assert rank.main({"config": plain_tree(config), "pack": None, "folder": str(tmp_path)}) == 2
    assert groups == ([gpu] if gpu else []) + [(backend, gpu)]
