#!/usr/bin/env python3
"""Write the goldens again, after a change of maths or of an output that the commit explains.

Usage: OMP_NUM_THREADS=1 .venv/bin/python scripts/prove/refresh_goldens.py losses     # tests/golden/*.json
       OMP_NUM_THREADS=1 .venv/bin/python scripts/prove/refresh_goldens.py outputs    # tests/golden/outputs/*
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts" / "bench")]

from support import frozen_outputs  # noqa: E402
from support.golden_losses import GOLDEN, environment, losses  # noqa: E402
from support.small_run import small_run  # noqa: E402

RUNS = {
    "rmsnorm-pre": ["norm=rmsnorm", "placement=pre"],
    "layernorm-post-llama": ["norm=layernorm", "placement=post", "model=llama_nano", "model.qk_norm=head"],
    "batchnorm-pre-accumulated": ["norm=batchnorm", "placement=pre", "train.accumulation=2"],
    "none-pre-sgd": ["norm=none", "placement=pre", "optim=sgd", "optim.nesterov=true", "optim.schedule=wsd"],
}


def write_outputs() -> None:
    os.environ.update(frozen_outputs.ENVIRONMENT)
    time.tzset()
    with tempfile.TemporaryDirectory() as folder:
        outputs = frozen_outputs.Outputs(Path(folder))
        contents = {name: outputs.of(name) for name in frozen_outputs.NAMES}
    # The old files go once all new ones are known, so that an error leaves them.
    shutil.rmtree(frozen_outputs.FOLDER, ignore_errors=True)
    for name, content in contents.items():
        print(frozen_outputs.write(name, content).relative_to(ROOT))


def write_losses() -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("losses", "outputs"))
    if parser.parse_args().what == "losses":
        write_losses()
    else:
        write_outputs()


if __name__ == "__main__":
    main()
