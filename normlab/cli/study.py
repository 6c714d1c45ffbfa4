"""`normlab study`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from normlab.cli.app import ResultsDir, RetryFailed, app, echo
from normlab.errors import ConfigError, unknown, warn

if TYPE_CHECKING:
    from normlab.studies.base import Study

study_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Test a claim of the field: plan, run, verdict."
)
app.add_typer(study_app, name="study")

Name = Annotated[str, Argument(metavar="STUDY", help="A study of `normlab study list`, or of a plugin.")]
Overrides = Annotated[
    list[str] | None,
    Argument(metavar="OVERRIDE", help="Options that change no result: sweep.jobs=2, device=cpu, plugins=[FILE]."),
]


def _find(name: str, overrides: list[str] | None) -> Study:
    from normlab.config.compose import register_plugins
    from normlab.studies.base import STUDIES, load_studies
    from normlab.studies.run import check_overrides

    check_overrides(overrides or [])
    load_studies()
    if plugins := [override for override in overrides or [] if override.startswith("plugins=")]:
        register_plugins(plugins)
    if name not in STUDIES:
        raise ConfigError(unknown("study", name, STUDIES))
    return STUDIES[name]


@study_app.command("list")
def list_() -> None:
    """List the studies: questions, and how many claims are under review."""
    from normlab.report.tables import render
    from normlab.studies.base import STUDIES, load_studies

    load_studies()
    rows = [
        {
            "study": name,
            "question": study.question,
            "claims": len(study.claims),
            "under review": sum(bool(claim.under_review) for claim in study.claims) or "",
        }
        for name, study in sorted(STUDIES.items())
    ]
    echo(render(rows), keep="\n")


@study_app.command()
def show(name: Name, overrides: Overrides = None, results_dir: ResultsDir = "results") -> None:
    """Print the plan of a study: its claims and criteria, and its grids with their runs and tokens."""
    from normlab.studies.run import check_arms, compose

    study = _find(name, overrides)
    grids = list(compose(study, results_dir, overrides or []))
    check_arms(study, [config for _, _, composed in grids for _, config in composed])
    echo(f"{study.name}: {study.question}")
    for kind, claims in (("claim", study.claims), ("control", study.controls)):
        for claim in claims:
            echo(f"{kind} {claim.name}: {claim.text}{f' ({claim.source})' if claim.source else ''}")
            echo(f"  estimator: {claim.estimator.text}")
            needs = "; small models cannot decide it" if claim.needs_large else ""
            echo(f"  supported if: {claim.criterion.text}{needs}")
            if claim.under_review:
                echo(f"  under review: {claim.under_review}")
    for grid, _, composed in grids:
        configs = [config for _, config in composed]
        tokens = sum(config.train.steps * config.train.batch_size * config.model.context for config in configs)
        echo(f"grid {grid.name}: {len(configs)} runs, {tokens:,} tokens")
        echo(f"  {grid.command}")
    echo(f"criterion {study.criterion_hash()}")


@study_app.command()
def run(
    name: Name,
    overrides: Overrides = None,
    retry_failed: RetryFailed = False,
    results_dir: ResultsDir = "results",
) -> int:
    """Run the grids of a study, or resume them, and write its report."""
    from normlab.cli.train import print_plan, train_planned
    from normlab.store.files import write_atomic
    from normlab.store.format import CHECKS_FILE, with_checksum
    from normlab.studies.run import check_arms, plan, verify_blocks

    study = _find(name, overrides)
    grids = list(plan(study, results_dir, overrides or []))
    check_arms(study, [config for grid in grids for _, config in grid.composed])
    for grid in grids:
        print_plan(grid.sweep, grid.options, with_packs=False)
        checks = verify_blocks(grid.composed)
        for block, problem in checks.failed.items():
            warn(f"`normlab verify` fails for the block {block}, so its verdicts will be void: {problem}")
        if code := train_planned(grid.sweep, grid.options, retry_failed=retry_failed):
            return code
        write_atomic(grid.sweep.folder / CHECKS_FILE, with_checksum(asdict(checks)))
    report(name, overrides, results_dir)
    return 0


@study_app.command()
def report(name: Name, overrides: Overrides = None, results_dir: ResultsDir = "results") -> None:
    """Write the report of a study from the records of its runs, or without them from its report.json."""
    from normlab.studies.judge import judge
    from normlab.studies.report import DATA, folder_of, rewrite_report, write_report
    from normlab.studies.run import has_runs, read_evidence

    study = _find(name, overrides)
    folder = folder_of(results_dir, study)
    if not has_runs(study, results_dir) and (folder / DATA).exists():
        warn(f"{results_dir} has no runs of study {study.name}: its report is written again from {folder / DATA}")
        verdicts, page = rewrite_report(study, folder)
    else:
        evidence = read_evidence(study, results_dir)
        verdicts = judge(
            study, evidence.results,
            unverified=evidence.unverified, missing=evidence.missing, notes=evidence.notes,
        )  # fmt: skip
        page = write_report(verdicts, evidence, folder)
    for note in verdicts.notes:
        warn(note)
    for each in verdicts.claims:
        echo(each.sentence)
    for each in verdicts.controls:
        echo(f"control {each.sentence}")
    echo(str(page))
