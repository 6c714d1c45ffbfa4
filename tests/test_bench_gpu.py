"""`scripts/gpu` without a GPU: the dry run measures tiny models, and a part that fails does not stop the others."""

from __future__ import annotations

from pathlib import Path

import bench_gpu
import bench_train
import pytest
import torch


def test_failed_part_is_reported_and_the_next_part_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('no memory')")
    (tmp_path / "prints.py").write_text("print('tok/s 17')")
    parts = {"First": f"{tmp_path}/fails.py", "Second": f"{tmp_path}/prints.py"}
    monkeypatch.setattr(bench_gpu, "PARTS", parts)
    monkeypatch.setattr(bench_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 (pretended)")
    assert bench_gpu.main([]) == 1
    written = (tmp_path / "results/bench/gpu-nvidia-h200-pretended.md").read_text()
    assert f"torch {torch.__version__}" in written
    first, second = written.split("## ")[1:]
    assert "FAILED with exit code 1" in first
    assert "no memory" in first
    assert "passed" in second
    assert "tok/s 17" in second
    assert "no memory" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench_gpu.main([])
    assert "torch sees no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_step_with_the_vocabulary_of_another_tokenizer() -> None:
    line = bench_train.bench_step(["model=gpt2_nano"], 2, "cpu", None, vocab_size=1000)
    assert line.tokens_per_s[0] > 0
    assert line.mfu == (None, None)


@pytest.mark.process
def test_dry_run_of_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_gpu.main(["--dry-run"]) == 0
    assert capsys.readouterr().out.count(": passed in") == len(bench_gpu.PARTS)
