"""`normlab verify`."""

import os
from dataclasses import asdict
from typing import Annotated

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
    from collections import defaultdict
    from itertools import chain

    import torch

    from normlab.analysis.phrases import name_some
    from normlab.config.compose import UserConfigs, compose_run, norm_presets
    from normlab.hf.checks import verify_folder
    from normlab.hf.folder import is_model
    from normlab.model.init import notify_of_depth
    from normlab.report.tables import render
    from normlab.store.query import select_runs
    from normlab.verify.check import Check
    from normlab.verify.runs import load_runs, verify_runs
    from normlab.verify.selection import checks_of_catalogue, select_checks, verdict

    texts, configs = read_arguments(overrides, cfg, config_dir, config_name)
    names = texts if all(os.path.exists(each) or "=" not in each for each in texts) else None
    models = bool(names) and all(map(is_model, texts))
    if trust and (models or not names):
        raise ConfigError("--trust: has no effect without a recorded run; leave it out")
    torch.set_num_threads(1)  # the tensors are small, and more threads would wait for each other
    problems: list[NormlabError] = []
    if models:
        checks = chain.from_iterable(map(verify_folder, texts))
    elif names:
        folders = [record.folder for record in select_runs(names, results_dir).started]
        runs, problems = load_runs(folders, trust=trust)
        if not runs:
            raise problems[0]
        for problem in problems:
            warn(f"{problem}; the run is not verified")
        checks = verify_runs(runs)
    elif texts or configs != UserConfigs():
        warn_of_replaced(texts)  # before errors, which it may explain
        config = compose_run(texts, configs)
        notify_of_depth(config.model.depth)
        # A primary config chooses a run, as +experiment=mine does.
        checks = select_checks(config, [*texts, *([f"config={config_name}"] if config_name != "train" else [])])
        for warning in config.warnings():
            warn(warning)
    else:
        checks = checks_of_catalogue(norm_presets())
    results: list[Check] = []
    failures = defaultdict[tuple[str, str], list[str]](list)
    """The subjects of the checks that fail with the same claim and message: a wrong formula fails all of its checks."""
    for check in checks:
        results.append(check)
        is_new = True
        if not check.passed:
            subjects = failures[check.claim, check.result]
            subjects.append(check.subject)
            is_new = len(subjects) == 1
        if is_new and not json:
            echo(str(check))
    if json:
        echo(render([asdict(check) for check in results], "json"), keep="\n")
    else:
        for (claim, _), (first, *others) in failures.items():
            if others:
                more = name_some([*dict.fromkeys(others)])
                echo(f"FAIL  {counted(len(others), 'more check')} with the error of {first}: {claim}  (of {more})")
        echo(verdict(results), keep="\n")
    return int(not all(check.passed for check in results)) or (2 if problems else 0)
