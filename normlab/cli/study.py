"""`normlab study`."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from normlab.base.errors import ConfigError, counted, unknown, warn
from normlab.base.parsing import is_whole_number
from normlab.cli.app import DryRun, OnDevice, ResultsDir, RetryFailed, app, echo, warn_of_replaced

if TYPE_CHECKING:
    from normlab.studies.base import Claim, Study

study_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Test a claim of the field: plan, run, verdict."
)
app.add_typer(study_app, name="study")

Name = Annotated[str, Argument(metavar="STUDY", help="A study of `normlab study list`, or of a plugin.")]
SettingOption = Annotated[
    str, Option(metavar="SETTING", help="small, wide (width 128), prose (another corpus) or gpu (larger models).")
]
Seeds = Annotated[str, Option(metavar="SEEDS", help="fresh (the next thousand), or a multiple of 1000.")]
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
    # A plugin may register the study itself.
    plugins = _plugins_in(overrides)
    if plugins:
        register_plugins(plugins)
    if name not in STUDIES:
        raise ConfigError(unknown("study", name, STUDIES))
    return STUDIES[name]


def _plugins_in(overrides: list[str] | None) -> list[str]:
    return [override for override in overrides or [] if override.startswith("plugins=")]


@study_app.command("list")
def list_() -> None:
    """List the studies and their questions."""
    from normlab.report.tables import render
    from normlab.studies.base import STUDIES, load_studies

    load_studies()
    rows = [
        {
            "study": name,
            "question": study.question,
            "claims": len(study.claims),
        }
        for name, study in sorted(STUDIES.items())
    ]
    echo(render(rows), keep="\n")


@study_app.command()
def show(name: Name, overrides: Overrides = None, results_dir: ResultsDir = "results") -> None:
    """Print the plan of a study: its claims, criteria and power, and its grids with the runs of the choosing seeds.

    It ends with the noise over seeds of models of these sizes, by the runs on record. A paired difference has up to the
    root of 2 times it, which the standard deviation beside a power is of.
    """
    from normlab.studies.run import Attempt, check_arms
    from normlab.sweeps.needed_seeds import noise_lines

    study = _find(name, overrides)
    warn_of_replaced(overrides or [])
    attempt = Attempt(study, results_dir)
    grids = list(attempt.compose(attempt.blocks[0], overrides or []))
    check_arms(study, [config for _, _, composed in grids for _, config in composed])
    echo(f"{study.name}: {study.question}")
    for claim in study.claims:
        _print_claim("claim", claim, study)
    for claim in study.controls:
        _print_claim("control", claim, study)
    for grid, _, composed in grids:
        tokens = 0
        for _, config in composed:
            tokens += config.train.steps * config.train.batch_size * config.model.context
        echo(f"grid {grid.name}: {counted(len(composed), 'run')}, {tokens:,} tokens, for the choosing seeds")
        echo("  " + " ".join([grid.command, *map(shlex.quote, _plugins_in(overrides))]))
    identities = [config.identity() for _, _, composed in grids for _, config in composed]
    for line in noise_lines(identities, results_dir):
        echo(line)
    echo(f"criterion {study.criterion_hash()}")


def _print_claim(kind: str, claim: Claim, study: Study) -> None:
    """Print a claim or control, with its criterion and its power."""
    from normlab.studies.base import LOOKS
    from normlab.studies.power import GOOD_POWER, largest_deviation

    source = f" ({claim.source})" if claim.source else ""
    echo(f"{kind} {claim.name}: {claim.text}{source}")
    echo(f"  estimator: {claim.estimator.text}")
    echo(f"  supported if: {claim.criterion.text}")
    deviation = largest_deviation(claim, len(study.claims))
    if deviation is not None:
        echo(
            f"  power: {GOOD_POWER:.0%} at {claim.effect:g} with {LOOKS[-1]} seeds whose standard deviation is "
            f"{deviation:.2g} or less"
        )
    elif claim.effect is None:
        echo("  power: unknown, because no effect is stated")
    elif claim.estimator.has_power:
        echo(f"  power: below {GOOD_POWER:.0%} at {claim.effect:g} with any standard deviation")
    else:
        echo("  power: unknown, because the estimate is not a contrast")


@study_app.command()
def run(
    name: Name,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    retry_failed: RetryFailed = False,
    setting: SettingOption = "small",
    results_dir: ResultsDir = "results",
    on: OnDevice = None,
) -> int:
    """Run a study block by block of seeds until its claims are decided, or resume it, and write its report."""
    if on is not None:
        from normlab.sweeps.named_devices import named_device

        named_device(on)  # an unknown one is an error before the plan
        dry_run = True
    return _test(name, overrides, setting, 0, results_dir, dry_run=dry_run, on=on, retry_failed=retry_failed)


@study_app.command()
def replicate(
    name: Name,
    overrides: Overrides = None,
    seeds: Seeds = "fresh",
    dry_run: DryRun = False,
    retry_failed: RetryFailed = False,
    setting: SettingOption = "small",
    results_dir: ResultsDir = "results",
) -> int:
    """Run the criterion of a study again on other seeds, or resume that, and add both verdicts to its report."""
    from normlab.studies.evidence import attempts_of
    from normlab.studies.judge import is_finished
    from normlab.studies.report import folder_of, read_report
    from normlab.studies.run import REPLICATION

    first = int(seeds) if is_whole_number(seeds) else 0
    if seeds == "fresh":
        study = _find(name, overrides)
        reported, _ = read_report(study, folder_of(results_dir, study))
        last = max((attempt.first_seed for attempt in reported if attempt.setting == setting), default=0)
        first = last + REPLICATION
        # The attempt on the seeds from 0 is the study itself, and no replication.
        unfinished: list[int] = []
        for attempt in attempts_of(study, results_dir):
            if attempt.setting == setting and attempt.first_seed and not is_finished(attempt):
                unfinished.append(attempt.first_seed)
        if unfinished:
            first = unfinished[-1]
            echo(f"resuming the replication on the seeds from {first} on")
    if first < REPLICATION or first % REPLICATION:
        raise ConfigError(f"--seeds {seeds}: choose fresh, or a multiple of {REPLICATION}")
    return _test(name, overrides, setting, first, results_dir, dry_run=dry_run, retry_failed=retry_failed)


def _test(
    name: str,
    overrides: list[str] | None,
    setting: str,
    first_seed: int,
    results_dir: str,
    *,
    dry_run: bool,
    retry_failed: bool,
    on: str | None = None,
) -> int:
    """Run an attempt of a study; with `dry_run`, print the plans up to the first block that is not completed."""
    from normlab.cli.train import print_plan, train_planned
    from normlab.store.files import write_atomic
    from normlab.store.format import CHECKS_FILE, with_checksum
    from normlab.studies.evidence import check_records, read_evidence, verify_blocks
    from normlab.studies.judge import open_claims
    from normlab.studies.run import Attempt, check_arms
    from normlab.sweeps.stored_plan import all_completed

    study = _find(name, overrides)
    warn_of_replaced(overrides or [])
    if setting not in study.settings:
        raise ConfigError("--setting: " + unknown("setting", setting, study.settings))
    attempt = Attempt(study, results_dir, setting, first_seed)
    composed = [run for _, _, grid in attempt.compose(attempt.blocks[0], overrides or []) for run in grid]
    # Arms that differ in compute are an error before anything trains.
    check_arms(study, [config for _, config in composed])
    # A block that `verify` rejects is trained all the same, and its verdicts are void.
    checks = verify_blocks([] if dry_run else composed)
    for block, problem in checks.failed.items():
        warn(f"`normlab verify` fails for the block {block}, so its verdicts will be void: {problem}")
    claims, results = [*study.claims, *study.controls], []
    for block in attempt.blocks:
        is_completed = True
        for grid in attempt.plan(block, claims, results, overrides or []):
            print_plan(grid.sweep, grid.options, with_packs=dry_run, on=on, retry_failed=retry_failed)
            if dry_run:
                is_completed &= all_completed(grid.sweep.folder, grid.sweep.plan.runs)
                continue
            code = train_planned(grid.sweep, grid.options, retry_failed=retry_failed)
            if code:
                return code
            of_sweep = replace(checks, sweep=grid.sweep.folder.name)
            write_atomic(grid.sweep.folder / CHECKS_FILE, with_checksum(asdict(of_sweep)))
        if not is_completed:
            echo(f"then more seeds, up to seed {attempt.blocks[-1].stop - 1} at most, until every claim is decided")
            return 0
        evidence = read_evidence(attempt, block)
        check_records(evidence)
        results, claims = evidence.results, open_claims(study, evidence)
        echo(f"seeds up to {block.stop - 1}: claims and controls that more seeds may decide: {len(claims)}")
        if not claims:
            break
    if not dry_run:
        _report(study, results_dir)
    return 0


@study_app.command()
def report(name: Name, overrides: Overrides = None, results_dir: ResultsDir = "results") -> None:
    """Write the report of a study from the records of its runs; attempts without records stay as in its report.json."""
    study = _find(name, overrides)
    warn_of_replaced(overrides or [])
    _report(study, results_dir)


def _report(study: Study, results_dir: str) -> None:
    from normlab.studies.evidence import attempts_of, read_evidence
    from normlab.studies.report import folder_of, write_report

    attempts = attempts_of(study, results_dir)
    # A lost plan is an error before any record is judged.
    for attempt in attempts:
        attempt.check_plans()
    evidence = [(attempt, read_evidence(attempt)) for attempt in attempts]
    tested, page = write_report(study, evidence, folder_of(results_dir, study))
    for test in tested:
        for note in test.verdicts.notes:
            warn(f"{test.label}: {note}")
        for judgement in test.verdicts.claims:
            echo(f"{test.label}: {judgement.sentence}")
        for judgement in test.verdicts.controls:
            echo(f"{test.label}: control {judgement.sentence}")
    echo(str(page))
