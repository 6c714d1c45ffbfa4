"""The workspace of a sweep at Weights & Biases: a saved view of its project, made with the library wandb-workspaces.

This module imports wandb only when the view is made or saved.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normlab.errors import ConfigError, NormlabError
from normlab.stats.statistic import OF
from normlab.store.plans import Plan
from normlab.store.runs import RunFolder
from normlab.tracking.payloads import config_of, keys_of
from normlab.tracking.uploads import Upload
from normlab.tracking.wandb import NO_LOGIN, wandb_environment

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

LR = "optim.lr"
LOSSES = ("train/loss", "eval/loss")
FINAL_LOSS = "val_loss"
"""The key of the final validation loss in a run's summary."""
SECTIONS = {"eval": "Evaluation", "train": "Optimisation", "perf": "Throughput"}
"""The titles of the sections of keys that are no statistics, by the keys' prefix."""

_CONFIG_KEYS = {
    "norm": ("norm.name", "norm.preset"),
    "placement": ("placement.name",),
    "model": ("model.preset",),
    "optim": ("optim.name",),
    "corpus": ("record.corpus.name",),
}
"""The keys, in a run's config at W&B, of the factors that are no config field."""


def save_workspace(plan: Plan, folders: Sequence[Path], factors: Sequence[str]) -> str:
    """Make the workspace of a sweep, or update it, and return its address.

    The view has a stable internal name, so a second call replaces its content.

    Args:
        plan: The plan of the sweep.
        folders: The folders of its runs.
        factors: The options by which its runs are grouped, in this order.

    Raises:
        ConfigError: wandb-workspaces is not installed, or W&B has no login.
        NormlabError: W&B has no run of the sweep, has them in several projects, or does not accept the workspace.
    """
    uploads = [upload for folder in folders if (upload := Upload.read(folder, "online")).entity]
    entity, project = _project(plan.name, uploads)
    os.environ["WANDB_ERROR_REPORTING"] = "false"  # W&B's reports about its own errors
    mode = wandb_environment().mode  # before any other import of wandb, whose temporary folders it deletes
    try:
        from wandb_workspaces import workspaces
    except ImportError as error:
        raise ConfigError(
            "--wandb: needs wandb-workspaces, which is not installed; pip install 'wandb-workspaces>=0.4.13,<0.5'"
        ) from error
    if mode == NO_LOGIN:
        raise ConfigError("--wandb: no login at W&B; log in with `wandb login`")
    runs = [RunFolder(folder) for folder in folders]
    contents = [run.run() for run in runs]
    keys = set[str]().union(*(keys_of(run, content) for run, content in zip(runs, contents, strict=True)))
    ids = [upload.id for upload in uploads]
    workspace = make_workspace(plan.name, entity, project, ids, keys, _config_keys(factors, contents))
    name = hashlib.sha256(f"normlab/{plan.name}".encode()).hexdigest()[:11]
    try:
        # The constructor of a view takes no internal name, and `save` updates only a view that has an id.
        workspace._internal_name = f"nw-{name}-v"
        try:
            workspace._internal_id = workspaces.Workspace.from_url(
                f"https://wandb.ai/{entity}/{project}?nw={name}"
            )._internal_id
        except ValueError as error:
            if not str(error).startswith("Workspace"):
                raise
        return workspace.save().url
    except Exception as error:
        reason = " ".join(f"{error}".split()).rstrip(".")[:300]
        raise NormlabError(
            f"--wandb: W&B did not accept the workspace of {plan.name} ({reason}); check the login with "
            "`wandb login --verify`"
        ) from error


def make_workspace(
    sweep: str,
    entity: str,
    project: str,
    ids: Sequence[str],
    keys: Collection[str],
    factors: Sequence[str],
) -> Workspace:
    """Return the workspace of a sweep.

    Args:
        sweep: The name of the sweep, which is that of the workspace.
        entity: The user or the team at W&B.
        project: The project at W&B.
        ids: The ids of the sweep's runs at W&B. A run of two sweeps has the group of one of them only.
        keys: The keys of all numbers of the runs.
        factors: The keys of the config by which the runs are grouped, in this order.
    """
    from wandb_workspaces import workspaces as ws

    return ws.Workspace(
        name=sweep,
        entity=entity,
        project=project,
        sections=_sections(keys, factors),
        settings=ws.WorkspaceSettings(max_runs=len(ids)),
        runset_settings=ws.RunsetSettings(
            filters=[ws.Metric("ID").isin(list(ids))],
            groupby=[ws.Config(key) for key in factors],
            order=[ws.Ordering(ws.Summary(FINAL_LOSS), ascending=True)],
            pinned_columns=[f"summary:{key}" for key in ("outcome", FINAL_LOSS)],
        ),
    )


def _sections(keys: Collection[str], factors: Sequence[str]) -> list[Section]:
    """Return the sections: losses, final losses, then one for each prefix of the keys."""
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
        final.append(
            wr.ScatterPlot(title="Learning rates", x=wr.Config(LR), y=wr.SummaryMetric(FINAL_LOSS), log_x=True)
        )
    sections = [
        ws.Section(name="Losses", panels=[_line(key) for key in LOSSES if key in keys], is_open=True),
        ws.Section(name="Final losses", panels=final, is_open=True),
    ]
    for prefix in (*SECTIONS, *OF):
        stems = {re.sub(r"/L\d+$", "", key) for key in keys if key.startswith(f"{prefix}/") and key not in LOSSES}
        panels = [_line(stem, layered=stem not in keys) for stem in sorted(stems - {"train/tokens"})]
        if panels:
            sections.append(ws.Section(name=SECTIONS.get(prefix, prefix), panels=panels))
    return sections


def _line(stem: str, *, layered: bool = False) -> Any:
    """Return a line plot over steps of a key, or of the keys of all layers."""
    from wandb_workspaces.reports import v2 as wr

    if layered:
        return wr.LinePlot(title=f"{stem} by layer", metric_regex=rf"^{re.escape(stem)}/L[0-9]+$")
    return wr.LinePlot(title=stem, y=[stem])


def _project(sweep: str, uploads: Sequence[Upload]) -> tuple[str, str]:
    """Return the entity and the project of the runs that W&B has."""
    projects = sorted({(upload.entity, upload.project) for upload in uploads})
    if not projects:
        raise NormlabError(f"--wandb: no run of {sweep} was sent to W&B; `normlab sync` sends them")
    if len(projects) > 1:
        names = ", ".join("/".join(each) for each in projects)
        raise NormlabError(f"--wandb: the runs of {sweep} are in several projects ({names}); name a sweep with one")
    return projects[0]


def _config_keys(factors: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys in the config of the runs at W&B that stand for some factors; only keys that vary."""
    configs = [config_of(run) for run in runs]
    keys = [key for factor in factors for key in _CONFIG_KEYS.get(factor, (factor,))]
    return [key for key in keys if len({repr(_value(config, key)) for config in configs}) > 1]


def _value(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
