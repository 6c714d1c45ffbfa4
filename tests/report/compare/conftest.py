"""Runs with metrics and statistics, and the data of a page of them."""

import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normlab.catalogue.statistics.profiles import Layout, Profiles, StatisticColumn
from normlab.store.runs import RunFolder


def layout(depth: int) -> Layout:
    """Columns of the residual stream, a norm at two sites, and one matrix."""
    columns = [StatisticColumn("resid_rms", "", place) for place in range(1, depth + 2)]
    columns += [StatisticColumn("attn_rms", "", place) for place in range(1, depth + 1)]
    columns += [
        StatisticColumn("norm_in_rms", site, at) for site in ("attn.in", "mlp.in") for at in range(1, depth + 1)
    ]
    columns += [StatisticColumn("update_norm", "mlp.up", place) for place in range(1, depth + 1)]
    columns += [StatisticColumn("param_norm", "mlp.up", place) for place in range(1, depth + 1)]
    columns += [StatisticColumn("grad_norm", "mlp.up", place) for place in range(1, depth + 1)]
    return Layout.of(columns, depth, {"mlp.up": "mlp"})[0]


@pytest.fixture
def trained(make_run: Callable[..., RunFolder]) -> Callable[..., RunFolder]:
    """Return a function that writes a run with a final validation loss (infinite: diverged) and its metrics."""

    def make(
        run_id: str, loss: float = 2.0, *, steps: int = 20, measured: Sequence[int] = (), depth: int = 2,
        warmup: int = 5, losses: Sequence[float] | None = None, state: str | None = None, status=None, run=None,
        **options,
    ) -> RunFolder:  # fmt: skip
        state = state or ("diverged" if math.isinf(loss) else "finished")
        ending = {"val_loss": math.nan if math.isinf(loss) else loss, "best_val_loss": loss, "step": steps}
        if state == "diverged":
            ending |= {"diverged": {"step": steps, "loss": math.nan, "grad_norm": math.nan, "last_finite": None}}
        folder = make_run(run_id, state, status=ending | (status or {}), run=run, depth=depth, **options)
        record = folder.run()
        if run is None or "config" not in run:
            record["config"]["optim"] |= {"warmup_steps": warmup}
            record["config"]["train"] |= {"batch_size": 8, "accumulation": 2}
            record["config"]["model"] |= {"context": 64}
            record["identity"]["config"] |= {name: record["config"][name] for name in ("optim", "train", "model")}
            (folder.path / "run.json").unlink()
            RunFolder.create(folder.path, {key: value for key, value in record.items() if key != "version"})
        rng = np.random.default_rng(zlib.crc32(run_id.encode()))
        step_losses = (
            losses if losses is not None else (5 - np.arange(steps) / steps + rng.normal(0, 0.1, steps)).tolist()
        )
        with folder.lock():
            folder.append([{"kind": "eval", "step": 0, "loss": 5.5}])
            folder.append(
                {"kind": "train", "step": step, "loss": value, "grad_norm": 1 + value, "clip": 1.0, "lr": 1e-3}
                for step, value in enumerate(step_losses)
            )
            folder.append([{"kind": "pace", "step": len(step_losses), "seconds": 1.5, "tokens_per_s": 9.0}])
            folder.append([{"kind": "eval", "step": len(step_losses), "loss": 2.0}])
            if len(measured):
                columns = layout(depth)
                values = rng.uniform(0.5, 2, (len(measured), columns.width)).astype(np.float32)
                folder.statistics.append("core", Profiles(columns, np.array(measured), values))
        return folder

    return make


@pytest.fixture
def grid(trained: Callable[..., RunFolder]) -> Callable[[], list[RunFolder]]:
    """Return a function that writes 48 runs: 2 norms, placements, depths, rates; 3 seeds; some diverged or failed."""

    def make() -> list[RunFolder]:
        made = []
        for number in range(48):
            seed, lr, depth, norm, placement = (
                number % 3, (1e-3, 1e-2)[number // 3 % 2], (2, 4)[number // 6 % 2],
                ("rmsnorm", "layernorm")[number // 12 % 2], ("pre", "post")[number // 24],
            )  # fmt: skip
            loss = 2 + 0.1 * (norm == "rmsnorm") + 0.01 * seed + 0.05 * (lr == 1e-2) + 0.02 * (depth == 2)
            loss = math.inf if number in (47, 30, 31, 32) else loss
            state = {40: "failed", 41: "interrupted"}.get(number)
            options = {"norm": norm, "placement": placement, "lr": lr, "seed": seed, "depth": depth}
            made.append(trained(f"run{number:02}", loss, state=state, measured=range(0, 20, 2), **options))
        return made

    return make


def page_data(path: Path) -> dict[str, Any]:
    """Return the data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture
def compare(run_command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that runs `normlab compare` and returns the data of the page."""

    def call(*arguments: str) -> dict[str, Any]:
        code, out, _ = run_command(
            "compare", *arguments, "-o", str(tmp_path / "page.html"), "--results-dir", str(tmp_path)
        )
        assert code == 0
        assert out.splitlines()[-1] == str(tmp_path / "page.html")
        return page_data(tmp_path / "page.html")

    return call
