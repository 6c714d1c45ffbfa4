"""The model of a run that is loaded: on the GPU of a machine that has one, as the machine would train the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normlab.config.compose import compose_run
from normlab.training.start import train
from support.small_run import small_run


@pytest.mark.exhaustive
@pytest.mark.parametrize(("override", "device"), [("device=auto", "cuda"), ("device=cpu", "cpu")])
def test_a_loaded_run_uses_the_gpu_unless_it_was_trained_with_device_cpu(
    override: str, device: str, use_loaded_run: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    """The run was trained on a CPU. Fake tensors raise if the model and its inputs are on different devices."""
    run = train(compose_run([*small_run(tmp_path), "train.steps=1", override]), trackers=[]).folder
    used = use_loaded_run(run.path)
    assert used["devices"] == [device]
    assert [count > 20 for count in used["launches"].values()] == [device == "cuda"] * 2
