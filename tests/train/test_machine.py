"""A GPU that torch cannot use is an error with a remedy, and not a silent training on the CPU.

The files of the driver are pretended. Their form is that of drivers 550 and 580.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from normlab.cli import doctor
from normlab.config.compose import compose_run
from normlab.errors import ConfigError
from normlab.sweeps.gpus import choose_gpus, fault_of
from normlab.training import nvidia
from normlab.training.machine import gpu_of, resolve, resolve_device
from support.pretended_gpus import pretend_gpus

Command = Callable[..., tuple[int, str, str]]
MachineWith = Callable[..., None]

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
"""The message of torch's c10/cuda/CUDAFunctions.cpp."""
VERSIONS = {
    "550.54.14": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC: 12",
    "580.65.06": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n",
}


@pytest.fixture
def machine_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineWith:
    """Return a function that pretends a machine on which torch sees no GPU."""

    def pretend(*files: str, cuda: str | None = None, version: str = VERSIONS["550.54.14"]) -> None:
        root = tmp_path / "root"
        for file in files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(version)
        monkeypatch.setattr(nvidia, "ROOT", root)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return pretend


DRIVER, GPU = "proc/driver/nvidia/version", "dev/nvidia0"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_build_of_torch_without_cuda(device: str, machine_with: MachineWith) -> None:
    machine_with(DRIVER, GPU)
    with pytest.raises(ConfigError) as raised:
        resolve_device(compose_run([f"device={device}"]))
    assert str(raised.value) == (
        f"device={device}: torch sees no GPU here: torch {torch.__version__} is built without CUDA, so it cannot use "
        "the NVIDIA GPU (driver 550.54.14); install a build with CUDA, or train on the CPU with device=cpu"
    )
    assert fault_of([str(raised.value)]), "the worker of a sweep on GPUs has lost its GPU"
    assert resolve(compose_run(["device=cpu"])).device == "cpu"


def test_a_driver_that_is_too_old(machine_with: MachineWith, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError(TOO_OLD)

    machine_with(DRIVER, GPU, "dev/nvidia1", cuda="13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    with pytest.raises(ConfigError) as raised:
        resolve(compose_run([]))
    assert str(raised.value) == (
        f"device=auto: torch sees no GPU here: torch {torch.__version__} cannot use the NVIDIA GPUs (driver 550.54.14) "
        "(The NVIDIA driver on your system is too old (found version 11040)); check nvidia-smi, and update the driver "
        "or install a build of torch for an older CUDA than 13.0, or train on the CPU with device=cpu"
    )


@pytest.mark.parametrize(("version", "text"), VERSIONS.items())
def test_the_version_of_a_driver(version: str, text: str, machine_with: MachineWith) -> None:
    machine_with(DRIVER, version=text)
    assert nvidia.driver_version() == version


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_gpu_that_the_user_hides(visible: str, machine_with: MachineWith, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(DRIVER, GPU)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert resolve_device(compose_run([])) == "cpu"


@pytest.mark.parametrize("visible", ["0", "1,0", "GPU-1a1b", "MIG-1a1b"])
def test_a_gpu_that_the_user_names(visible: str, machine_with: MachineWith, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(DRIVER, GPU)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        resolve_device(compose_run([]))


@pytest.mark.parametrize("files", [(), (DRIVER,), (DRIVER, "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-modeset")])
def test_a_process_that_may_use_no_gpu(files: tuple[str, ...], machine_with: MachineWith) -> None:
    """A container sees the driver of its host, and has no files of the GPUs that it was not given."""
    machine_with(*files)
    assert resolve_device(compose_run([])) == "cpu"


@pytest.mark.parametrize(
    ("files", "state", "finding"),
    [
        ((), "ok", "no GPU"),
        ((DRIVER,), "note", "the NVIDIA driver 550.54.14 is loaded, but this process has no access to a GPU"),
        ((DRIVER, GPU), "bad", "is built without CUDA, so it cannot use the NVIDIA GPU (driver 550.54.14)"),
    ],
)
def test_doctor_reports_a_gpu_that_torch_cannot_use(
    files: tuple[str, ...], state: str, finding: str, machine_with: MachineWith
) -> None:
    machine_with(*files)
    (result,) = [result for result in doctor.checks("results") if result["check"] == "device"]
    assert result["state"] == state
    assert finding in result["finding"]
    assert ("device=cpu" in result["remedy"]) == (state != "ok")


def test_training_ends_with_one_line(machine_with: MachineWith, run_command: Command, tmp_path: Path) -> None:
    machine_with(DRIVER, GPU)
    code, out, err = run_command("train", f"results_dir={tmp_path / 'results'}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: device=auto: torch sees no GPU here")
    assert not (tmp_path / "results").exists()


# Kernels.

TEGRA = {53, 62, 72, 87, 101, 110}
"""Integrated GPUs. Code for others does not run there, although the capability says so; torch has builds for them."""


def test_kernels_for_a_gpu_are_those_that_torch_counts() -> None:
    """`torch.cuda` warns at its start where this table lacks the GPU."""
    if not hasattr(torch.cuda, "DEVICE_REQUIREMENT"):
        pytest.skip("this torch has no table")
    table = torch.cuda.DEVICE_REQUIREMENT
    codes = sorted({*table} - TEGRA)
    for code, device in itertools.product(codes, codes):
        expected = torch.cuda._code_compatible_with_device(device, code)
        assert nvidia.has_kernels(divmod(device, 10), [f"sm_{code}"]) == expected, (device, code)


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"], False),  # V100, CUDA 13
        ((7, 0), ["sm_50", "sm_60", "sm_70", "sm_80", "sm_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((9, 1), ["sm_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((12, 0), ["sm_90"], False),
        ((9, 0), ["gfx90a"], True),  # not of CUDA
        ((9, 0), [], True),
    ],
)
def test_kernels(capability: tuple[int, int], architectures: list[str], expected: bool) -> None:
    assert nvidia.has_kernels(capability, architectures) == expected


def test_a_gpu_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, "Tesla V100", major=(7, 9, 9, 9))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    problem = r"torch \S+ has no kernels for GPU 0 .Tesla V100, .*, only for sm_75, sm_90; "
    for setting in ("device=auto", "device=cuda"):
        with pytest.raises(ConfigError, match=rf"^{setting}: {problem}install .* or use device=cpu$"):
            resolve(compose_run([setting]))
    with pytest.raises(ConfigError, match=rf"^sweep.gpus=all: {problem}install .* or use other GPUs by sweep.gpus$"):
        choose_gpus("all")
    assert [gpu.index for gpu in choose_gpus("1,3")] == [1, 3]
    assert resolve(compose_run(["device=auto", "precision=bf16"]), gpu=gpu_of(1)).device == "cuda"
    assert resolve(compose_run(["device=cpu"])).device == "cpu"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**31))
    (result,) = [result for result in doctor.checks("results") if result["check"] == "device"]
    assert (result["state"], "has no kernels for GPU 0" in result["finding"]) == ("bad", True)


# What Triton needs.


@pytest.mark.parametrize(
    ("lacks", "finding"),
    [
        ("triton", "triton is not installed"),
        ("compiler", "the C compiler 'no_such_compiler' was not found"),
        ("headers", "Python.h is missing"),
        ("works", "does not work: fatal error"),
    ],
)
def test_what_triton_needs(lacks: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho fatal error: no assembler >&2\nexit 1\n")
    broken.chmod(0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(nvidia, "find_spec", lambda name: None if lacks == "triton" else name)
    monkeypatch.setattr(nvidia, "python_headers", lambda: tmp_path / ("none" if lacks == "headers" else ""))
    monkeypatch.setenv("CC", "no_such_compiler" if lacks == "compiler" else str(broken))
    (result,) = [result for result in doctor.checks("results") if result["check"] == "compile"]
    assert result["state"] == "note"
    assert finding in result["finding"]
    assert result["remedy"]
    config = compose_run(["compile=on", "precision=bf16"])
    if lacks == "works":  # only a compilation shows it
        assert resolve(config).compile == "on"
    else:
        with pytest.raises(ConfigError, match=rf"^compile=on: .*{finding}; install .*, or use compile=off$"):
            resolve(config)
    assert resolve(compose_run(["compile=off", "precision=bf16"])).compile == "off"


def test_the_compiler_of_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CC, else gcc, else clang: the order of `triton.runtime.build`."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("clang", "gcc"):
        (tmp_path / name).touch(0o755)
        assert nvidia.c_compiler() == name
    monkeypatch.setenv("CC", "icx")
    assert nvidia.c_compiler() == "icx"
