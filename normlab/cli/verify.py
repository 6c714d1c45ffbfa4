"""`normlab verify`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from normlab.base.errors import ConfigError, NormlabError, counted, warn
from normlab.cli.app import (
    Cfg,
    ConfigDir,
    ConfigName,
    Json,
    ResultsDir,
    Trust,
    app,
    echo,
    read_arguments,
    warn_of_replaced,
)

if TYPE_CHECKING:
    from normlab.config.compose import UserConfigs
    from normlab.verify.check import Check


@app.command()
def verify(
    overrides: Annotated[
        list[str] | None,
        Argument(
            metavar="OVERRIDE|RUN|SWEEP|FOLDER", help="A run by its overrides, recorded runs, or a transformers model."
        ),
    ] = None,
    json: Json = False,
    trust: Trust = False,
    cfg: Cfg = None,
    config_dir: ConfigDir = None,
    config_name: ConfigName = "train",
    results_dir: ResultsDir = "results",
) -> int:
    """Check norms and placements against references.

    Compares the block of a run with reference implementations, identities and closed-form laws. Without overrides,
    checks the complete catalogue. With only plugins=[FILE], checks every norm and placement of the file. Exit code 1 if
    a check fails, 2 if a run cannot be checked.

    With the names of recorded runs or sweeps, checks each different block of them once. One of the checks is that this
    version of the code computes what the run trained.

    With a folder that transformers has saved, or hf://OWNER/NAME, prints its class and the overrides of its norm,
    placement and model, and checks this block.

    The block of a run is also checked as a GPU trains it: compiled, in bf16 autocast, on the device of this machine.
    """
    import torch

    from normlab.config.compose import UserConfigs, norm_presets
    from normlab.hf.checks import verify_folder
    from normlab.hf.folder import is_model
    from normlab.report.tables import render
    from normlab.verify.selection import checks_of_catalogue

    texts, configs = read_arguments(overrides, cfg, config_dir, config_name)
    # A path may have a "=", so that only an argument that names no file can be an override.
    are_names = bool(texts) and all(os.path.exists(text) or "=" not in text for text in texts)
    are_models = are_names and all(is_model(name) for name in texts)
    if trust and (are_models or not are_names):
        raise ConfigError("--trust: has no effect without a recorded run; leave it out")
    torch.set_num_threads(1)  # the tensors are small, and more threads would wait for each other
    problems: list[NormlabError] = []
    if are_models:
        checks = chain.from_iterable(verify_folder(name) for name in texts)
    elif are_names:
        checks, problems = _checks_of_runs(texts, results_dir, trust=trust)
    elif texts or configs != UserConfigs():
        checks = _checks_of_overrides(texts, configs, config_name)
    else:
        checks = checks_of_catalogue(norm_presets())
    if json:
        results = list(checks)
        echo(render([asdict(check) for check in results], "json"), keep="\n")
    else:
        results = _print_checks(checks)
    if not all(check.passed for check in results):
        return 1
    return 2 if problems else 0


def _checks_of_runs(
    names: Sequence[str], results_dir: str, *, trust: bool
) -> tuple[Iterator[Check], list[NormlabError]]:
    """Return the checks of recorded runs, and why some runs have none.

    Raises:
        NormlabError: No run can be verified.
    """
    from normlab.store.query import select_runs
    from normlab.verify.runs import load_runs, verify_runs

    folders = [record.folder for record in select_runs(names, results_dir).started]
    runs, problems = load_runs(folders, trust=trust)
    if not runs:
        raise problems[0]
    for problem in problems:
        warn(f"{problem}; the run is not verified")
    return verify_runs(runs), problems


def _checks_of_overrides(texts: Sequence[str], configs: UserConfigs, config_name: str) -> Iterator[Check]:
    """Return the checks of the run that the overrides describe.

    Raises:
        ConfigError: The overrides give no run, or have no effect on the checks.
    """
    from normlab.config.compose import compose_run
    from normlab.model.init import notify_of_depth
    from normlab.verify.selection import select_checks

    warn_of_replaced(texts)  # before errors, which it may explain
    config = compose_run(texts, configs)
    notify_of_depth(config.model.depth)
    chosen = list(texts)
    if config_name != "train":
        # A primary config chooses a run, as +experiment=mine does.
        chosen.append(f"config={config_name}")
    checks = select_checks(config, chosen)
    for warning in config.warnings():
        warn(warning)
    return checks


def _print_checks(checks: Iterable[Check]) -> list[Check]:
    """Print each check as soon as its result is known, then the verdict; return all checks.

    A wrong formula fails all of its checks with the same message, so the failures that repeat one come last, in a line.
    """
    from normlab.analysis.phrases import name_some
    from normlab.verify.selection import verdict

    results: list[Check] = []
    failures = defaultdict[tuple[str, str], list[str]](list)
    """The subjects of the checks that fail with the same claim and message."""
    for check in checks:
        results.append(check)
        is_repeated = False
        if not check.passed:
            subjects = failures[check.claim, check.result]
            is_repeated = len(subjects) > 0
            subjects.append(check.subject)
        if not is_repeated:
            echo(str(check))
    for (claim, _), (first, *repeated) in failures.items():
        if repeated:
            subjects = name_some(list(dict.fromkeys(repeated)))
            more = counted(len(repeated), "more check")
            echo(f"FAIL  {more} with the error of {first}: {claim}  (of {subjects})")
    echo(verdict(results), keep="\n")
    return results
