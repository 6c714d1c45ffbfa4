"""Reports of studies: those in results/studies follow from their report.json, and what is in doubt is marked."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from normlab.studies.base import STUDIES, AtLeast, Claim, Study, load_studies
from normlab.studies.estimators import Contrast, Estimate, difference
from normlab.studies.index import write_index
from normlab.studies.judge import Judgement
from normlab.studies.measures import StepsTo
from normlab.studies.report import COLOURS, FORMATS, draw_verdicts
from support.browser import PHONE, WIDE, opened

load_studies()
COMMITTED = Path(__file__).parents[2] / "results" / "studies"
ALL_CLAIMS = [(study, claim) for study in STUDIES.values() for claim in (*study.claims, *study.controls)]
A4 = (703, 1000)
"""Pixels of an A4 page within margins of 12 mm."""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies the report of a study into a results folder without runs."""
    return lambda name: Path(shutil.copytree(COMMITTED / name, tmp_path / "results" / "studies" / name))


def body(html: str) -> str:
    """Return the text of a report's page without styles and pictures, which depend on matplotlib."""
    return re.sub('base64,[^"]*|<style>.*?</style>', "", html.partition('<main class="report">')[2], flags=re.DOTALL)


@pytest.mark.parametrize("name", sorted(path.parent.name for path in COMMITTED.glob("*/report.json")))
def test_committed_pages_follow_from_report_json(
    name: str, copy: Callable[[str], Path], run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`normlab study report` without runs writes the same pages; it needs seconds for the picture, left out here."""
    monkeypatch.setattr("normlab.studies.report.draw_verdicts", lambda judgements: dict.fromkeys(FORMATS, b""))
    folder = copy(name)
    code, out, err = run_command("study", "report", name)
    assert code == 0
    assert out.splitlines()[-1] == f"results/studies/{name}/README.md"
    assert err.startswith(f"warning: results has no runs of study {name}: its report is written again from ")
    assert {*re.findall(r"^warning: (.*)$", err, re.MULTILINE)[1:]} == {
        *json.loads((folder / "report.json").read_text())["notes"]
    }
    for file in ("README.md", "report.json"):
        assert (folder / file).read_text() == (COMMITTED / name / file).read_text()
    assert body((folder / "report.html").read_text()) == body((COMMITTED / name / "report.html").read_text())


def test_committed_table_of_reports_follows_from_them(tmp_path: Path) -> None:
    for path in COMMITTED.glob("*/report.json"):
        (tmp_path / path.parent.name).mkdir()
        shutil.copy(path, tmp_path / path.parent.name)
    write_index(tmp_path)
    assert (tmp_path / "README.md").read_text() == (COMMITTED / "README.md").read_text()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"])
def test_a_damaged_report_is_left_out_of_the_table(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("noise", "speed"):
        shutil.copytree(COMMITTED / name, tmp_path / name)
    (tmp_path / "noise" / "report.json").write_bytes(content)
    write_index(tmp_path)
    table = (tmp_path / "README.md").read_text()
    assert "study run speed" in table
    assert "study run noise" not in table
    assert capsys.readouterr().err.startswith(f"warning: {tmp_path}/noise/report.json: is damaged (")


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"criterion": 1}', b"\xff"])
def test_a_report_that_cannot_be_read_is_an_error(
    content: bytes, copy: Callable[[str], Path], run_command: Command
) -> None:
    folder = copy("noise")
    before = (folder / "README.md").read_bytes()
    (folder / "report.json").write_bytes(content)
    code, out, err = run_command("study", "report", "noise")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: results/studies/noise/report.json: cannot be read (")
    assert err.endswith("train its runs with `normlab study run noise`\n")
    assert (folder / "README.md").read_bytes() == before


def test_a_changed_criterion_needs_the_runs(copy: Callable[[str], Path], run_command: Command) -> None:
    path = copy("noise") / "report.json"
    path.write_text(path.read_text().replace(STUDIES["noise"].criterion_hash("small"), "0123456789ab"))
    code, out, err = run_command("study", "report", "noise")
    assert (code, out) == (2, "")
    assert "was judged by criterion 0123456789ab of study noise, now " in err


# Under review


def test_two_questions_are_under_review(run_command: Command) -> None:
    marked = {f"{study.name} {claim.name}" for study, claim in ALL_CLAIMS if claim.under_review}
    assert marked == {
        "bounded_stream peri_does_not", "warmup post_gains", "warmup post_gains_at_a_common_rate"
    }  # fmt: skip
    rows = [re.split(r" {2,}", line.strip()) for line in run_command("study", "list")[1].splitlines()]
    assert {row[0]: row[3] for row in rows if len(row) == 5} == {
        "study": "under review", "bounded_stream": "1", "warmup": "2"
    }  # fmt: skip


def test_a_claim_under_review_is_marked_wherever_its_verdict_is() -> None:
    reason = STUDIES["bounded_stream"].claims[1].under_review
    assert reason
    page, table = (COMMITTED / "bounded_stream" / "README.md").read_text(), (COMMITTED / "README.md").read_text()
    assert page.count(f"supported, under review ({reason})") == 2  # the sentence and the table
    assert "| under review (these runs: supported) |" in table
    assert f"Reason: {reason}." in table


def judged(claim: Claim) -> Judgement:
    return Judgement(claim, "supported", "", Estimate(0.5, 0.4, 0.6, 0.45, 0.55, n=4), None)


def test_the_review_changes_no_criterion() -> None:
    claim = Claim("post", "Post-norm has a higher loss.", difference("placement=post", "placement=pre"), AtLeast(0.05))
    study = Study("made", "Is post-norm worse?", {"small": []}, [claim])
    other = dataclasses.replace(study, claims=[dataclasses.replace(claim, under_review="it was not repeated")])
    assert other.criterion_hash("small") == study.criterion_hash("small")


# The picture


@pytest.mark.parametrize("under_review", ["", "it was not repeated"])
def test_the_picture_names_the_claim_and_the_unit(under_review: str) -> None:
    text = (
        "Post-norm has a loss that is higher than that of pre-norm by 0.05 nats/token or more at depth 4, in the mean."
    )
    estimator = difference("placement=post", "placement=pre")
    svg = draw_verdicts([judged(Claim("an_id", text, estimator, AtLeast(0.05), under_review=under_review))])["svg"]
    texts = re.findall("<!-- (.*?) -->", svg.decode(), re.DOTALL)
    mark = ", under review" if under_review else ""
    assert f"supported{mark}: {text}" in " ".join(texts)
    assert "difference in final validation loss, nats/token" in texts
    assert "an_id" not in svg.decode()
    assert (COLOURS["supported"] in svg.decode()) == (not under_review)


@pytest.mark.parametrize(("study", "claim"), ALL_CLAIMS, ids=lambda value: getattr(value, "name", ""))
def test_the_quantity_of_a_claim_has_a_name_and_a_unit(study: Study, claim: Claim) -> None:
    quantity = claim.estimator.quantity
    assert re.search(r"nats/token|share|ratio|slope|ln\(|growth|factor|norm_in_uniform|over first|highest", quantity)
    assert claim.name not in quantity
    assert quantity.count("(") == quantity.count(")")


def test_the_quantity_of_a_ratio_names_no_difference() -> None:
    arms = {"a": 1.0, "b": -1.0, "c": -1.0, "d": 1.0}
    assert Contrast(arms, StepsTo(2.5), is_ratio=True).quantity == "ratio of ratios of steps to validation loss 2.5"
    assert Contrast(arms, StepsTo(2.5)).quantity == "difference of differences in ln(steps to validation loss 2.5)"


# The page


@pytest.mark.parametrize("name", ["warmup", "gradient_flow"])
def test_the_page_is_as_wide_as_a_screen_a_phone_and_a_sheet_of_paper(
    name: str, browser, copy: Callable[[str], Path], run_command: Command
) -> None:
    path = copy(name) / "report.html"
    assert run_command("study", "report", name)[0] == 0
    for size in (WIDE, PHONE, A4):
        with opened(browser, path, size) as page:
            if size == A4:
                page.emulate_media(media="print")
                cut = page.locator(".scroll").evaluate_all(
                    "(all) => all.filter((place) => place.scrollWidth > place.clientWidth).length"
                )
                assert cut == 0
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
