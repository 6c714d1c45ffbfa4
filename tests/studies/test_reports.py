"""Reports of studies: those in results/studies follow from their report.json, and what is in doubt is marked."""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from normlab.base.errors import StoreError
from normlab.store.format import with_checksum
from normlab.studies.base import STUDIES, AtLeast, Claim, load_studies
from normlab.studies.estimate import Estimate
from normlab.studies.estimators import Contrast, difference
from normlab.studies.index import command, write_index
from normlab.studies.judge import AtBest, Judgement
from normlab.studies.measures import StepsTo
from normlab.studies.report import write_report
from normlab.studies.verdict_figure import COLOURS, FORMATS, draw_verdicts

load_studies()
COMMITTED = Path(__file__).parents[2] / "results" / "studies"
NAMES = sorted(path.parent.name for path in COMMITTED.glob("*/report.json"))
NAME, OTHER = NAMES[:2]
EDITED = (COMMITTED / NAME / "report.json").read_bytes().replace(b"undecided", b"supported", 1)
"""Another verdict than the recorded one."""
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies the report of a study into a results folder without runs."""
    return lambda name: Path(shutil.copytree(COMMITTED / name, tmp_path / "results" / "studies" / name))


@pytest.mark.parametrize("name", NAMES)
def test_committed_pages_follow_from_report_json(
    name: str, copy: Callable[[str], Path], run_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`normlab study report` without runs writes the same pages; it needs seconds for the picture, left out here."""
    monkeypatch.setattr("normlab.studies.report.draw_verdicts", lambda judgements: dict.fromkeys(FORMATS, b""))
    folder = copy(name)
    code, out, err = run_command("study", "report", name)
    assert code == 0
    assert out.splitlines()[-1] == f"results/studies/{name}/README.md"
    assert {*re.findall(r"^warning: (.*)$", err, re.MULTILINE)} == {
        f"{each['setting']}, seeds from {each['first_seed']} on: {note}"
        for each in json.loads((folder / "report.json").read_text())["attempts"]
        for note in each["notes"]
    }
    for file in ("README.md", "report.json"):
        assert (folder / file).read_text() == (COMMITTED / name / file).read_text()


def test_committed_table_of_reports_follows_from_them(tmp_path: Path) -> None:
    for path in COMMITTED.glob("*/report.json"):
        (tmp_path / path.parent.name).mkdir()
        shutil.copy(path, tmp_path / path.parent.name)
    write_index(tmp_path)
    assert (tmp_path / "README.md").read_text() == (COMMITTED / "README.md").read_text()


def test_claims_with_little_power_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    report = json.loads((COMMITTED / NAME / "report.json").read_text())
    rows = report["attempts"][0]["claims"]
    report["attempts"] = report["attempts"][:1]
    for row in rows:
        row["power"] = {"value": 0.31, "low": 0.1, "high": 0.5, "seeds": 6}
    rows[0]["power"]["value"] = 0.29
    (tmp_path / NAME / "report.json").write_bytes(with_checksum(report))
    write_index(tmp_path)
    table = (tmp_path / "README.md").read_text()
    assert table.count("**; power below 30 % |") == 1
    counted = Counter(row["verdict"] in ("supported", "refuted") for row in rows[1:])
    count = f"{len(rows) - 1} claims count: {counted[True]} decided, {counted[False]} undecided, 0 void; 1 more have"
    assert count in table
    assert "None is replicated. " in table
    assert "0 of 1 studies were run in another setting.\n" in table


def _judged(row: dict[str, Any], verdict: str) -> dict[str, Any]:
    """Return a row with a verdict that the best learning rates alone have too."""
    return row | {"verdict": verdict, "verdict_in_words": verdict, "interval_at_best": ""}


def test_a_claim_that_its_best_rates_alone_do_not_decide_says_so_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    report = json.loads((COMMITTED / NAME / "report.json").read_text())
    words = "supported, but undecided at the best learning rates alone"
    more = {"verdict": "supported", "verdict_in_words": words, "reason": "", "power": None}
    more |= {"interval": "-0.168 [-0.219, -0.118]", "interval_at_best": "-0.121 [-0.286, 0.044]"}
    report["attempts"] = report["attempts"][:2]
    for attempt in report["attempts"]:
        attempt["claims"] = [attempt["claims"][0] | more]
    (tmp_path / NAME / "report.json").write_bytes(with_checksum(report))
    write_index(tmp_path)
    table = (tmp_path / "README.md").read_text()
    both = "-0.168 [-0.219, -0.118]; at the best learning rates alone -0.121 [-0.286, 0.044]"
    [line] = [line for line in table.splitlines() if both in line]
    assert f"| **supported**{words.removeprefix('supported')} | {both} |" in line
    assert f"| yes{words.removeprefix('supported')}: {both} |" in line
    assert "In 1 of the decided claims the interval at the best learning rates alone is not on the side of the" in table


def test_only_decided_claims_are_replicated_or_not(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    report = json.loads((COMMITTED / NAME / "report.json").read_text())
    first, again = (dict(report["attempts"][0]) for _ in range(2))
    verdicts = [("supported", "supported"), ("refuted", "undecided"), ("undecided", "supported"), ("void", "void")]
    row = report["attempts"][0]["claims"][0] | {"interval": "1 [0, 2]", "reason": "", "power": None, "p": 0.041}
    first["claims"], again["claims"] = ([_judged(row, pair[index]) for pair in verdicts] for index in (0, 1))
    other = {**again, "setting": "prose", "first_seed": 0}
    other["claims"] = [*again["claims"][:1], _judged(row, "supported"), *again["claims"][2:]]
    (tmp_path / NAME / "report.json").write_bytes(with_checksum(report | {"attempts": [first, again, other]}))
    write_index(tmp_path)
    table = (tmp_path / "README.md").read_text()
    replicated = [line.split(" | ")[6] for line in table.splitlines() if " 1 [0, 2] |" in line]
    texts = ("yes", "no, undecided", "supported", "void")
    assert replicated == [f"{text}: 1 [0, 2]" for text in texts]
    assert "4 claims count: 2 decided, 1 undecided, 1 void; 0 more" in table
    assert "1 of 2 decided claims were decided in the same way on fresh seeds; only 0 of these have a" in table
    assert "In 2 of the decided claims p is above 0.04" in table
    there = "of 2 verdicts there on decided claims 1 are the same, 1 the opposite and 0 none (undecided or void)"
    assert f"1 of 1 studies were run in another setting: {there}.\n" in table
    assert "in all settings" not in table
    wide = {**other, "setting": "wide"}
    (tmp_path / NAME / "report.json").write_bytes(with_checksum(report | {"attempts": [first, again, wide, other]}))
    write_index(tmp_path)
    assert (tmp_path / "README.md").read_text().count("| **supported**, in all settings | 1 [0, 2] |") == 1


def test_the_verdict_is_that_of_the_small_setting_and_its_command_is_named(
    copy: Callable[[str], Path], run_command: Command
) -> None:
    path = copy(NAME) / "report.json"
    report = json.loads(path.read_text())
    [wide, small, *_] = report["attempts"]
    wide, small = {**wide, "setting": "wide"}, {**small, "first_seed": 3000}
    path.write_bytes(with_checksum(report | {"attempts": [wide, small]}))
    assert run_command("study", "report", NAME)[0] == 0
    attempts = json.loads(path.read_text())["attempts"]
    assert [(each["setting"], each["first_seed"]) for each in attempts] == [("small", 3000), ("wide", 0)]
    first = f"normlab study replicate {NAME} --seeds 3000"
    assert f"`{first}`, `normlab study replicate {NAME} --seeds fresh`" in (path.parents[1] / "README.md").read_text()
    assert f"```sh\n{first}\n" in (path.parent / "README.md").read_text()
    assert command(NAME, "wide", 1000) == f"normlab study replicate {NAME} --seeds 1000 --setting wide"


@pytest.mark.parametrize("content", [b"", b"{}", EDITED])
def test_a_damaged_report_is_left_out_of_the_table(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (NAME, OTHER):
        shutil.copytree(COMMITTED / name, tmp_path / name)
    (tmp_path / NAME / "report.json").write_bytes(content)
    write_index(tmp_path)
    table = (tmp_path / "README.md").read_text()
    assert f"study run {OTHER}" in table
    assert f"study run {NAME}" not in table
    warning = f"warning: {tmp_path}/README.md leaves out {tmp_path}/{NAME}/report.json: is damaged ("
    assert capsys.readouterr().err.startswith(warning)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", EDITED])
def test_a_report_that_cannot_be_read_is_an_error(
    content: bytes, copy: Callable[[str], Path], run_command: Command
) -> None:
    folder = copy(NAME)
    before = (folder / "README.md").read_bytes()
    (folder / "report.json").write_bytes(content)
    code, out, err = run_command("study", "report", NAME)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: results/studies/{NAME}/report.json: is damaged (")
    assert err.endswith("or delete it: `normlab study report` writes it again from the records that are there\n")
    assert (folder / "README.md").read_bytes() == before


WRONG = (None, True, -1, 10**400, 1e308, "nan", "-inf", "\ud800\x1b[2J$\\frac{", "x" * 2**17, [], {}, [[]], {"a": {}})


def places(value: Any, below: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value, the first two of a list."""
    if below:
        yield below
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in pairs:
        yield from places(each, (*below, key))


@pytest.mark.exhaustive
def test_a_forged_report_is_read_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever changes a value computes the checksum again."""
    monkeypatch.setattr("normlab.studies.report.draw_verdicts", lambda judgements: dict.fromkeys(FORMATS, b""))
    monkeypatch.setattr("normlab.report.pages.shell.write_atomic", lambda path, content, **_: path.write_bytes(content))
    report = json.loads((COMMITTED / NAME / "report.json").read_text())
    (folder := tmp_path / NAME).mkdir()
    found = {"accepted": 0, "refused": 0}
    choose = random.Random(0)
    for place in places(report):
        for wrong in choose.sample(WRONG, 3):
            forged = json.loads(json.dumps(report))
            parent = forged
            for key in place[:-1]:
                parent = parent[key]
            parent[place[-1]] = wrong
            (folder / "report.json").write_bytes(with_checksum(forged))
            message = ""
            try:
                write_report(STUDIES[NAME], [], folder)
            except StoreError as error:
                message = str(error)
            found["refused" if message else "accepted"] += 1
            assert not message or str(folder / "report.json") in message or "has no runs" in message
            assert len(message) < 1000
            write_index(tmp_path)
            capsys.readouterr()
    assert min(found.values()) > 10, found


def test_a_changed_criterion_needs_the_runs(copy: Callable[[str], Path], run_command: Command) -> None:
    path = copy(NAME) / "report.json"
    report = json.loads(path.read_text())
    path.write_bytes(with_checksum(report | {"criterion": "0123456789ab"}))
    code, out, err = run_command("study", "report", NAME)
    assert (code, out) == (2, "")
    assert "was judged by criterion 0123456789ab, now " in err
    assert err.endswith(f"error: study {NAME}: has no runs; train them with `normlab study run {NAME}`\n")


# The picture


def test_the_picture_names_the_claim_and_the_unit() -> None:
    text = (
        "Post-norm has a loss that is higher than that of pre-norm by 0.05 nats/token or more at depth 4, in the mean."
    )
    claim = Claim("an_id", text, difference("placement=post", "placement=pre"), AtLeast(0.05))
    estimate = Estimate(0.5, lambda alpha: (0.5 - 0.005 / alpha, 0.5 + 0.005 / alpha), 4)
    judgement = Judgement(claim, "supported", "", estimate, at_best=AtBest(0.4, 0.0, 0.8))
    svg = draw_verdicts([judgement])["svg"]
    texts = re.findall("<!-- (.*?) -->", svg.decode(), re.DOTALL)
    assert f"supported, but undecided at the best learning rates alone: {text}" in " ".join(" ".join(texts).split())
    assert "difference in final validation loss of runs that have learned, nats/token" in texts
    assert "an_id" not in svg.decode()
    assert COLOURS["supported"] in svg.decode()


def test_the_quantity_of_a_ratio_names_no_difference() -> None:
    arms = {"a": 1.0, "b": -1.0, "c": -1.0, "d": 1.0}
    assert Contrast(arms, StepsTo(2.5), is_ratio=True).quantity == "ratio of ratios of steps to validation loss 2.5"
    assert Contrast(arms, StepsTo(2.5)).quantity == "difference of differences in ln(steps to validation loss 2.5)"
