"""No text of a record reaches a terminal, a table, a figure or a page as anything but text."""

import csv
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from synthetic_runs import Record

from normlab.base.errors import notify, printable, warn
from normlab.cli.app import echo, show_progress
from normlab.report.pages.shell import write_output
from normlab.report.tables import FORMATS, render
from normlab.store.format import with_checksum
from normlab.store.run_json import Run
from normlab.store.runs import RunFolder
from normlab.studies.base import AtLeast, Claim, Study
from normlab.studies.estimate import Estimate
from normlab.studies.estimators import difference
from normlab.studies.index import write_index
from normlab.studies.judge import Judgement
from normlab.studies.report import write_report
from normlab.studies.report_format import as_row
from normlab.studies.verdict_figure import FORMATS as FIGURES
from normlab.tracking.console import Console
from normlab.tracking.payloads import labels_of
from support.made_runs import merged

Command = Callable[..., tuple[int, str, str]]

SPLIT = "SPLIT"
BREAKS = "".join(f"x{char}{SPLIT}" for char in "\n\t\r\v\f\x1c\x85\u2028\u2029")
"""Every character that may end a line; no line of the output begins with the word after it."""
ESCAPES = f"\x1b[2J\x1b]0;title\x07 {BREAKS} \u202egnp \ud800 \x9b1m"
MARKUP = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> $\\frac$ cost $^{$ | `x` [y](http://z) \\input{x} & % # _"
)
FORMULAS = ["=cmd()", "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "\t=1+1", "\r=1+1", " =1+1", "\uff1d1+1"]
TEXT = f"={ESCAPES} {MARKUP}"
RESOLVED_TEXTS = ("init", "device", "device_name", "precision", "decayed", "instructions", "attention")
LATEX_LINE = r"\\(begin|end|toprule|midrule|bottomrule)\b.*|% .*|.* & .* \\\\"
"""The lines of a table in LaTeX: commands of booktabs, comments and rows."""


def assert_shown(text: str, subject: object = "") -> None:
    assert printable(text, keep="\n") == text, subject
    assert [line for line in text.splitlines() if line.lstrip().startswith(SPLIT)] == [], subject
    assert "Traceback" not in text, subject


def assert_no_formula(text: str) -> None:
    """Assert that a spreadsheet evaluates no cell."""
    for row in csv.reader(io.StringIO(text)):
        for cell in row:
            try:
                float(cell)
            except ValueError:
                assert not cell.strip().startswith(("=", "+", "-", "@", "\uff1d")), row


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a text that is not escaped starts a new line."""
    monkeypatch.setenv("COLUMNS", "100000")


@pytest.fixture(params=[TEXT])
def runs(request: pytest.FixtureRequest, make_run: Callable[..., RunFolder]) -> list[str]:
    """Make runs whose names, norms and corpora are hostile texts, in the current folder; return an id and a name."""
    corpus = {"name": f"@{TEXT}", "sha256": "a" * 64, "baselines": {"uniform": 5.5, "unigram": 3.2, "bigram": 2.5}}
    for index, name in enumerate(FORMULAS):
        norm, seed, lr = "rmsnorm" if index < 2 else request.param, index % 2, (1 + index // 4) * 1e-3
        resolved = dict.fromkeys(RESOLVED_TEXTS, "gpt2" if index < 2 else request.param)
        run = {"name": name + TEXT, "corpus": corpus, "resolved": resolved}
        folder = make_run(
            f"run{index}", norm=norm, seed=seed, lr=lr, run=run,
            status={"val_loss": 2.0 + seed / 10 - 100 * lr},
        )  # fmt: skip
        folder.append([{"kind": "eval", "step": step, "loss": 3.0 - step / 100} for step in (0, 50, 100)])
    return ["run0", FORMULAS[0] + TEXT]


@pytest.mark.parametrize("format", FORMATS)
def test_tables(format: str, runs: list[str], run_command: Command) -> None:
    for options in (["--runs"], ["--by", "norm"], ["--by", "norm", "--test", "counts"], ["--where", f"norm={TEXT}"]):
        code, out, err = run_command("summarize", ".", *options, "--format", format)
        assert code == 0 or "--where" in options, err
        assert_shown(out + err, options)
        if format == "csv":
            assert_no_formula(out)
        elif format == "json" and code == 0:
            json.loads(out)
        elif format == "markdown":
            assert "<script" not in out
            assert [line for line in out.splitlines() if not re.match(r"\| |- |\d+ corpora: |$", line)] == []
        elif format == "latex":
            assert [line for line in out.splitlines() if not re.fullmatch(LATEX_LINE, line)] == []
            assert "\\input" not in re.sub(r"^% .*", "", out, flags=re.MULTILINE)


@pytest.mark.exhaustive
def test_commands_that_print(runs: list[str], run_command: Command) -> None:
    commands = [["summarize", "."], ["summarize", ".", "--format", "json"]]
    commands += [[name, run] for name in ("inspect", "sample", "verify", "sync") for run in runs]
    commands += [["inspect", runs[0], "spikes"], ["summarize", TEXT], ["summarize", ".", "--by", TEXT]]
    for command in commands:
        _, out, err = run_command(*command, "--results-dir", ".")
        assert_shown(out + err, command)


@pytest.mark.parametrize("runs", ["a\nSPLIT \x1b[2J \ud800 <script> $\\frac$ $^{$"], indirect=True, ids=ascii)
@pytest.mark.parametrize("kind", ["loss", "lr", "factor"])
def test_figures(kind: str, runs: list[str], run_command: Command) -> None:
    for output in ("f.svg", "f.pdf", "f.png") if kind == "factor" else ("f.svg",):
        code, out, err = run_command("figure", kind, ".", "--by", "norm", "-o", output)
        assert code == 0, err
        assert_shown(out + err)
        if output == "f.svg":
            content = Path(output).read_text()
            assert_shown(content)
            assert "<script" not in content
            assert r"a\nSPLIT" in content


def test_the_page(runs: list[str], run_command: Command) -> None:
    code, out, err = run_command("compare", ".", "-o", "page.html")
    assert code == 0, err
    assert_shown(out + err)
    page = Path("page.html").read_text()
    assert_shown(page)
    assert "<script>alert" not in page
    assert "<img src=x" not in page


def test_reports_of_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normlab.studies.report.draw_verdicts", lambda judgements: dict.fromkeys(FIGURES, b""))
    named = Claim("x", "It is.", difference("a", "b"), AtLeast(0.0))
    study = Study("x", "Is it?", [], [named])
    row = as_row(Judgement(named, "void", TEXT, Estimate(math.nan, rates={TEXT: [1.0]})))
    arm = {"where": TEXT, "rates": [1.0], "chosen": [1.0], "best": 1.0, "losses": {TEXT: 1.0}, "runs": 1}
    attempt = {"setting": "small", "first_seed": 0, "runs": 1, "tokens": 1, "devices": [TEXT], "corpora": [TEXT],
               "plugins": [TEXT], "shared": {"norm": TEXT}, "claims": [row], "controls": [], "notes": [TEXT],
               "arms": [arm]}  # fmt: skip
    report = {"criterion": study.criterion_hash(), "captions": [TEXT], "attempts": [attempt],
              "study": "x", "question": TEXT, "limits": TEXT, "amendments": {"hash": TEXT}}  # fmt: skip
    write_output(tmp_path / "x" / "report.json", with_checksum(report))
    page = write_report(study, [], tmp_path / "x")[1].read_text()
    row |= dict.fromkeys(("text", "source", "verdict", "verdict_in_words", "criterion"), TEXT)
    row |= dict.fromkeys(("interval", "interval_at_best"), TEXT)
    write_output(tmp_path / "study" / "report.json", with_checksum(report | {"study": "study"}))
    write_index(tmp_path)
    for text in (page, (tmp_path / "README.md").read_text()):
        assert_shown(text)
        assert "<script>alert" not in text


def test_lines_for_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    for line in (echo, warn, notify, show_progress):
        line(TEXT)
    config = {"norm": {"name": TEXT}, "placement": {"name": TEXT}}
    texts = {"name": TEXT, "config": config, "corpus": {"name": TEXT}, "resolved": {"device": TEXT}}
    Console().start(msgspec.convert(merged(Record().run(), texts), Run), 0)
    captured = capsys.readouterr()
    assert_shown(captured.out + captured.err)


def test_labels_at_a_service() -> None:
    tracking = {"group": TEXT, "job_type": TEXT, "tags": [TEXT]}
    config = {"norm": {"name": TEXT, "preset": ""}, "placement": {"name": TEXT}, "model": {"depth": 1}}
    config["tracking"] = tracking
    labels = labels_of({"run_id": "id", "name": TEXT, "config": config}, None)
    for label in (labels["name"], labels["group"], labels["job_type"], *labels["tags"]):
        assert_shown(str(label))


def test_numbers_in_csv_stay_numbers() -> None:
    row = {"a": -1.5, "b": float("-inf"), "c": "-0.25", "d": "+3e-4", "e": "x-1", "-f": None}
    assert render([row], "csv") == "a,b,c,d,e,'-f\n-1.5,-inf,-0.25,+3e-4,x-1,"
