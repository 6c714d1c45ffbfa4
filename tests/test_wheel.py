"""The wheel is complete: it trains from any folder without the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def call(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        arguments, cwd=cwd, env={**os.environ, **more}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.process
def test_the_wheel_trains_a_run(tmp_path: Path, overrides: list[str]) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path / "wheel")]
    call(*pip, *build, str(ROOT), cwd=tmp_path)
    (wheel,) = (tmp_path / "wheel").glob("normlab-*.whl")
    with zipfile.ZipFile(wheel) as content:
        tops = {name.split("/")[0] for name in content.namelist()}
        packaged = {name for name in content.namelist() if name.startswith("normlab/conf/")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"normlab"}
    configs = {path.relative_to(ROOT / "conf").as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert {name.removeprefix("normlab/conf/") for name in packaged} == configs

    site = tmp_path / "site"
    call(*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), cwd=tmp_path)
    # -P and PYTHONPATH select the installed copy before the checkout.
    python = [sys.executable, "-P"]
    location = call(*python, "-c", "import normlab; print(normlab.__file__)", cwd=tmp_path, PYTHONPATH=str(site))
    assert location.stdout.startswith(str(site))
    run = [*overrides, "norm=layernorm_gpt2", "train.steps=2"]
    call(*python, "-m", "normlab", "train", *run, cwd=tmp_path, PYTHONPATH=str(site))
    done = call(*python, "-m", "normlab", "summarize", "results", cwd=tmp_path, PYTHONPATH=str(site))
    assert "layernorm_gpt2" in done.stdout
