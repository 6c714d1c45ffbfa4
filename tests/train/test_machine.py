"""What a run takes from this machine: a GPU that torch cannot use, what a compiler needs, and the peak memory."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from normlab.base.errors import ConfigError
from normlab.cli import doctor
from normlab.config.compose import compose_run
from normlab.loaded.run import load
from normlab.system import compilers, process_memory
from normlab.system.process_memory import PeakMemory
from normlab.training import machine
from normlab.training.machine import resolve, resolve_device
from normlab.training.start import train, train_pack
from support.pretended_gpus import pretend_gpus

Command = Callable[..., tuple[int, str, str]]
MIB = 2**20


@pytest.fixture
def gpu_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend a machine with the device file of a GPU, of which torch sees none."""
    monkeypatch.setattr(machine, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()  # a container has this file without a GPU
    (tmp_path / "dev/nvidia0").touch()
    return tmp_path / "dev/nvidia0"


@pytest.mark.usefixtures("gpu_file")
def test_a_gpu_that_torch_cannot_use_is_an_error(run_command: Command, tmp_path: Path) -> None:
    """And not a silent training on the CPU."""
    code, out, err = run_command("train", f"results_dir={tmp_path / 'results'}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: device=auto: torch sees no GPU here, but this process has access to an NVIDIA GPU; ")
    assert err.endswith("or train on the CPU with device=cpu\n")
    assert not (tmp_path / "results").exists()
    (result,) = [result for result in doctor.checks("results") if result["check"] == "device"]
    assert (result["state"], "device=cpu" in result["remedy"]) == ("bad", True)
    assert resolve(compose_run(["device=cpu"])).device == "cpu"


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "0", "1,0", "GPU-1a1b", "MIG-1a1b", None])
def test_a_gpu_that_the_user_hides_or_the_process_lacks(
    visible: str | None, gpu_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        gpu_file.unlink()
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if visible in ("0", "1,0", "GPU-1a1b", "MIG-1a1b"):
        with pytest.raises(ConfigError, match="torch sees no GPU here"):
            resolve_device(compose_run([]))
    else:
        assert resolve_device(compose_run([])) == "cpu"


@pytest.mark.parametrize("lacks", ["triton", "compiler"])
def test_what_triton_needs(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch)
    monkeypatch.setattr(compilers, "find_spec", lambda name: None if lacks == "triton" else name)
    monkeypatch.setenv("CC", "no_such_compiler")
    missing = {"triton": "triton is not installed", "compiler": "the C compiler 'no_such_compiler' was not found"}
    (result,) = [result for result in doctor.checks("results") if result["check"] == "compile"]
    assert (result["state"], missing[lacks] in result["finding"], bool(result["remedy"])) == ("note", True, True)
    with pytest.raises(ConfigError, match=rf"^compile=on: {missing[lacks]}; install .*, or use compile=off$"):
        resolve(compose_run(["compile=on", "precision=bf16"]))
    assert resolve(compose_run(["compile=off", "precision=bf16"])).compile == "off"


@pytest.mark.parametrize(
    ("overrides", "graph", "warning"),
    [
        (["devices=1"], "on", None),
        (["devices=1", "train.graph=off"], "off", None),
        (["devices=2"], "off", "devices=2: CUDA graphs are off"),
        (["devices=2", "train.graph=off"], "off", None),
        (["devices=2", "train.steps=50"], "off", None),  # a single GPU would have none either
        (["devices=2", "device=cpu"], "off", None),
    ],
)
def test_several_devices_report_that_they_have_no_graphs(
    overrides: list[str], graph: str, warning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch)
    config = compose_run(["precision=fp32", "compile=off", "train.steps=1000", *overrides])
    settings = resolve(config)
    assert settings.graph == graph
    found = settings.warnings(config, resumed=False)
    if warning is None:
        assert found == []
    else:
        assert [line.startswith(warning) for line in found] == [True]


@pytest.mark.parametrize(
    ("overrides", "resumed", "warns"),
    [
        (["device=cuda"], True, True),
        (["device=cuda"], False, False),
        (["device=cuda", "deterministic=true"], True, False),
        (["device=cpu"], True, False),
        (["device=cpu", "deterministic=false"], True, False),
    ],
)
def test_a_resume_on_a_gpu_without_deterministic_warns(
    overrides: list[str], resumed: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch)
    config = compose_run(["precision=fp32", "compile=off", *overrides])
    found = resolve(config).warnings(config, resumed=resumed)
    assert [("bit-identical" in line, "start the run with deterministic=true" in line) for line in found] == [
        (True, True)
    ] * warns


def test_the_attention_backend_is_on_record(overrides: list[str]) -> None:
    """That of a single run by torch, and that of a pack."""
    outcomes = train_pack([compose_run([*overrides, "train.steps=0"])], [[]])
    pair = [compose_run([*overrides, "train.steps=0", f"seed={seed}"]) for seed in (1, 2)]
    outcomes += train_pack(pair, [[], []])
    assert [load(outcome.folder.path).record.machine.attention for outcome in outcomes] == [
        "flash_attention", "eager", "eager",
    ]  # fmt: skip


def peak_of(overrides: list[str], *more: str) -> int:
    status = train(compose_run([*overrides, *more]), trackers=[]).status
    assert status.peak_memory_bytes is not None
    return int(status.peak_memory_bytes)


@pytest.mark.exhaustive
def test_a_run_after_a_large_one_reports_its_own_peak(overrides: list[str]) -> None:
    small = peak_of(overrides, "train.steps=1", "seed=1")
    large = peak_of(overrides, "train.steps=1", "seed=2", "train.batch_size=2048", "eval.sequences=2")
    after = peak_of(overrides, "train.steps=1", "seed=3")
    assert large > small + 64 * MIB
    assert after < large - 32 * MIB


def test_a_peak_that_cannot_be_reset_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier run of the process may have had it."""
    monkeypatch.setattr(process_memory, "PROCESS", tmp_path)
    (tmp_path / "status").write_text("VmPeak:\t  2000 kB\nVmHWM:\t  1000 kB\n")
    (tmp_path / "clear_refs").mkdir()  # a file that cannot be written, even by root
    assert PeakMemory("cpu").num_bytes() is None
    (tmp_path / "clear_refs").rmdir()
    assert PeakMemory("cpu").num_bytes() == 1000 * 1024
    assert (tmp_path / "clear_refs").read_text() == "5"
