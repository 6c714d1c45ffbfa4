#!/usr/bin/env python3
"""Write tests/golden/*.json, after a change of the maths that the commit explains.

Usage: OMP_NUM_THREADS=1 .venv/bin/python scripts/refresh_goldens.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.golden_losses import GOLDEN, environment, losses  # noqa: E402
from support.small_run import small_run  # noqa: E402

RUNS = {
    "rmsnorm-pre": ["norm=rmsnorm", "placement=pre"],
    "layernorm-post-llama": ["norm=layernorm", "placement=post", "model=llama_nano", "model.qk_norm=head"],
    "batchnorm-pre-accumulated": ["norm=batchnorm", "placement=pre", "train.accumulation=2"],
    "none-pre-sgd": ["norm=none", "placement=pre", "optim=sgd", "optim.nesterov=true", "optim.schedule=wsd"],
}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, overrides in RUNS.items():
        overrides = [*overrides, "train.steps=20"]
        with tempfile.TemporaryDirectory() as folder:
            common = small_run(Path(folder))
            values = losses([*common, *overrides])
        path = GOLDEN / f"{name}.json"
        path.write_text(
            json.dumps({"overrides": overrides, "environment": environment(), "losses": values}, indent=1) + "\n"
        )
        print(path.relative_to(ROOT), float.fromhex(values[-1]))


if __name__ == "__main__":
    main()
