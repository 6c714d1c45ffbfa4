"""Runs with numbers over training and with statistics, and the data of a page that was written of them."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normlab.stats.options  # noqa: F401  (with it every statistic is known)
from normlab.stats.profiles import Column, Layout, Profiles
from normlab.store.runs import RunFolder


def layout(depth: int) -> Layout:
    """The stream at every block and the head, a norm of two sites, the norms of two matrices, one number of all."""
    columns = [Column("resid_rms", "", place) for place in range(1, depth + 2)]
    columns += [Column("attn_rms", "", place) for place in range(1, depth + 1)]
    columns += [Column("norm_in_rms", site, at) for site in ("attn.in", "mlp.in") for at in range(1, depth + 1)]
    columns += [Column("update_norm", "mlp.up", place) for place in range(1, depth + 1)]
    columns += [Column("param_norm", "mlp.up", place) for place in range(1, depth + 1)]
    columns += [Column("grad_norm", "mlp.up", place) for place in range(1, depth + 1)]
    return Layout.of(columns, depth, {"mlp.up": "mlp"})[0]


@pytest.fixture
def trained(make_run: Callable[..., RunFolder]) -> Callable[..., RunFolder]:
    """Makes a run whose final validation loss is given (infinite: it diverged), with its record over training."""

    def make(
        run_id: str, loss: float = 2.0, *, steps: int = 20, measured: Sequence[int] = (), depth: int = 2,
        warmup: int = 5, losses: Sequence[float] | None = None, state: str | None = None, status=None, run=None, **told,
    ) -> RunFolder:  # fmt: skip
        state = state or ("diverged" if math.isinf(loss) else "finished")
        ended = {"val_loss": math.nan if math.isinf(loss) else loss, "best_val_loss": loss, "step": steps}
        if state == "diverged":
            ended |= {"diverged": {"step": steps, "loss": math.nan, "grad_norm": math.nan, "last_finite": None}}
        folder = make_run(run_id, state, status=ended | (status or {}), run=run, depth=depth, **told)
        record = folder.run()
        if run is None or "config" not in run:
            record["config"]["optim"] |= {"warmup_steps": warmup}
            record["config"]["train"] |= {"batch_size": 8, "accumulation": 2}
            record["config"]["model"] |= {"context": 64}
            (folder.path / "run.json").unlink()
            RunFolder.create(folder.path, {key: value for key, value in record.items() if key != "version"})
        chance = np.random.default_rng(zlib.crc32(run_id.encode()))
        seen = losses if losses is not None else (5 - np.arange(steps) / steps + chance.normal(0, 0.1, steps)).tolist()
        with folder.lock():
            folder.append([{"kind": "eval", "step": 0, "loss": 5.5}])
            folder.append(
                {"kind": "train", "step": step, "loss": one, "grad_norm": 1 + one, "clip": 1.0, "lr": 1e-3}
                for step, one in enumerate(seen)
            )
            folder.append([{"kind": "pace", "step": len(seen), "seconds": 1.5, "tokens_per_s": 9.0}])
            folder.append([{"kind": "eval", "step": len(seen), "loss": 2.0}])
            if len(measured):
                own = layout(depth)
                values = chance.uniform(0.5, 2, (len(measured), own.width)).astype(np.float32)
                folder.statistics.append("core", Profiles(own, np.array(measured), values))
        return folder

    return make


@pytest.fixture
def grid(trained: Callable[..., RunFolder]) -> Callable[[], list[RunFolder]]:
    """Makes two norms, two placements, two depths, two learning rates and three seeds; some diverged or failed."""

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
    """What a page shows."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture
def compare(run_command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The data of the page that some words write; the command must succeed."""

    def call(*words: str) -> dict[str, Any]:
        code, out, _ = run_command("compare", *words, "-o", str(tmp_path / "page.html"), "--results-dir", str(tmp_path))
        assert code == 0
        assert out.splitlines()[-1] == str(tmp_path / "page.html")
        return page_data(tmp_path / "page.html")

    return call
