"""The workspace of a sweep at Weights & Biases: a saved view of its project, made with the library wandb-workspaces.

This module imports wandb only when the view is made and saved.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from normlab.errors import ConfigError, NormlabError
from normlab.stats.registry import STATISTICS
from normlab.stats.statistic import CORE
from normlab.store.record import RunRecord
from normlab.tracking.payloads import LAYERED
from normlab.tracking.uploads import Upload
from normlab.tracking.wandb import NO_LOGIN, wandb_environment

LR = "optim.lr"
LOSSES = ("train/loss", "eval/loss")
FINAL_LOSS = "val_loss"
"""The key of the final validation loss in a run's summary."""
_CONFIG_KEYS = {
    "norm": ("norm.name", "norm.preset"),
    "placement": ("placement.name",),
    "model": ("model.preset",),
    "optim": ("optim.name",),
    "corpus": ("record.corpus.name",),
}
"""The keys, in a run's config at W&B, of the factors that are no config field."""


def save_workspace(sweep: str, records: Sequence[RunRecord], factors: Sequence[str]) -> str:
    """Make the workspace of a sweep, or update it, and return its address.

    The view has a stable internal name, so a second call replaces its content.

    Args:
        sweep: The name of the sweep.
        records: Its runs.
        factors: The options by which its runs are grouped, in this order.

    Raises:
        ConfigError: wandb-workspaces is not installed, or W&B has no login.
        NormlabError: W&B has no run of the sweep, has them in several projects, or does not accept the workspace.
    """
    uploads = [upload for record in records if (upload := Upload.read(record.folder.path, "online")).entity]
    projects = sorted({(upload.entity, upload.project) for upload in uploads})
    if not projects:
        raise NormlabError(f"--wandb: no run of {sweep} was sent to W&B; `normlab sync` sends them")
    if len(projects) > 1:
        names = ", ".join(map("/".join, projects))
        raise NormlabError(f"--wandb: the runs of {sweep} are in several projects ({names}); name a sweep with one")
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B's reports about its own errors
    try:
        from wandb_workspaces import workspaces as ws
    except ImportError as error:
        raise ConfigError(
            "--wandb: needs wandb-workspaces, which is not installed; pip install 'wandb-workspaces>=0.4.13,<0.5'"
        ) from error
    if wandb_environment()[0] == NO_LOGIN:
        raise ConfigError("--wandb: no login at W&B; log in with `wandb login`")
    (entity, project), ids = projects[0], [upload.id for upload in uploads]
    config_keys = _config_keys(factors, records)
    workspace = ws.Workspace(
        name=sweep,
        entity=entity,
        project=project,
        sections=_sections(config_keys),
        auto_generate_panels=True,  # of the other keys
        settings=ws.WorkspaceSettings(max_runs=len(ids)),
        runset_settings=ws.RunsetSettings(
            filters=[ws.Metric("ID").isin(ids)],  # a run of two sweeps has the group of one of them only
            groupby=[ws.Config(key) for key in config_keys],
            order=[ws.Ordering(ws.Summary(FINAL_LOSS), ascending=True)],
            pinned_columns=[f"summary:{key}" for key in ("outcome", FINAL_LOSS)],
        ),
    )
    name = hashlib.sha256(f"normlab/{sweep}".encode()).hexdigest()[:11]
    address = f"https://wandb.ai/{entity}/{project}?nw={name}"
    try:
        # The constructor of a view takes no internal name, and `save` updates only a view that has an id.
        workspace._internal_name = f"nw-{name}-v"
        with suppress(ValueError):  # there is none yet
            workspace._internal_id = ws.Workspace.from_url(address)._internal_id
        return workspace.save().url
    except Exception as error:
        reason = " ".join(f"{error}".split()).rstrip(".")[:300]
        raise NormlabError(
            f"--wandb: W&B did not accept the workspace of {sweep} ({reason}); check the login with "
            "`wandb login --verify`"
        ) from error


def _sections(factors: Sequence[str]) -> list[Any]:
    """Return the sections: losses, final losses by factor, and the statistics that have a key for each layer."""
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    final: list[Any] = [
        # The lowest loss, because a mean over learning rates says nothing about the best one.
        wr.BarPlot(
            title=f"Lowest {FINAL_LOSS} by {key}", metrics=[FINAL_LOSS], groupby=wr.Config(key), groupby_aggfunc="min"
        )
        for key in factors
        if key != LR
    ]
    if LR in factors:
        scatter = wr.ScatterPlot(title="Learning rates", x=wr.Config(LR), y=wr.SummaryMetric(FINAL_LOSS), log_x=True)
        final.append(scatter)
    keys = [f"{STATISTICS[name].of}/{name}" for name in LAYERED if STATISTICS[name].tier == CORE]
    layers: list[Any] = [wr.LinePlot(title=f"{key} by layer", metric_regex=f"^{key}/(.*/)?L[0-9]+$") for key in keys]
    return [
        ws.Section(name="Losses", panels=[wr.LinePlot(title=key, y=[key]) for key in LOSSES], is_open=True),
        ws.Section(name="Final losses", panels=final, is_open=True),
        ws.Section(name="Layers", panels=layers),
    ]


def _config_keys(factors: Sequence[str], records: Sequence[RunRecord]) -> list[str]:
    """Return the keys in the config of the runs at W&B that stand for some factors; only keys that vary."""
    settings = [{**record.options, "record.corpus.name": record.corpus.name} for record in records]
    keys = [key for factor in factors for key in _CONFIG_KEYS.get(factor, (factor,))]
    return [key for key in keys if len({repr(values.get(key)) for values in settings}) > 1]
