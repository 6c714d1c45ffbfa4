"""The console tracker, with a terminal and without."""

import io
import math
import re
import sys
from typing import Any

import msgspec
import pytest
from synthetic_runs import Record

from normlab.store.run_json import Run
from normlab.store.status import Status
from normlab.tracking import console
from normlab.tracking.console import Console
from support.made_runs import merged

RUN: dict[str, Any] = merged(
    Record().run(),
    {
        "run_id": "rmsnorm-pre-3fa9c1",
        "name": "[red]mine[/red]",
        "config": {
            "norm": {"name": "rmsnorm", "preset": "llama"}, "placement": {"name": "pre"},
            "model": {"preset": "nano", "depth": 4, "width": 128}, "train": {"steps": 1000, "batch_size": 16},
            "eval": {"every": 250},
        },
        "resolved": {"device": "cpu", "precision": "fp32", "devices": 1},
        "corpus": {
            "name": "[bold]mine", "baselines": {"uniform": 5.5491, "unigram": 3.2134, "bigram": 2.5046},
            "read": {"rows": 1292, "documents": 1230, "empty": 60, "null": 2},
        },
    },
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")


def parsed(run: dict[str, Any]) -> Run:
    return msgspec.convert(run, Run)


def interval(last: int, steps: int = 10) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": 2.25, "grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}
        for step in range(last - steps + 1, last + 1)
    ]
    return [*rows, {"kind": "pace", "step": last, "seconds": 0.1, "tokens_per_s": 12345.6}]


def evaluation(step: int, loss: float = 2.5) -> list[dict[str, Any]]:
    return [{"kind": "eval", "step": step, "loss": loss}]


def status(state: str = "finished", step: int = 1000, val_loss: float | None = 2.4, **more: Any) -> Status:
    numbers = {"step": step, "steps": 1000, "val_loss": val_loss, "best_val_loss": val_loss}
    return msgspec.convert({"state": state, **numbers, **more}, Status)


def output(stream: io.StringIO, first: int = 0, end: Status | None = None) -> list[str]:
    """Print a run of 1000 steps with an evaluation every 250, and return its lines as a reader sees them.

    They have no control sequences, and each drawing of the moving line is a line of its own.
    """
    tracker = Console(stream)
    tracker.start(parsed(RUN), first)
    for last in range(first + 10, 1001, 10):
        tracker.log(interval(last))
        if last % 250 == 0:
            tracker.log(evaluation(last))
    tracker.finish(end or status())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    return [line for line in re.split(r"[\r\n]", text) if line]


@pytest.mark.parametrize("kind", [io.StringIO, Terminal], ids=["plain", "terminal"])
def test_header(kind: type[io.StringIO]) -> None:
    assert output(kind(), 340)[:6] == [
        "run     rmsnorm-pre-3fa9c1 ([red]mine[/red])",
        "norm    llama, placement pre",
        "model   depth 4 x width 128, cpu fp32",
        "corpus  [bold]mine: uniform 5.5491, unigram 3.2134, bigram 2.5046 nats/token",
        "text    1,230 documents, without 60 empty, 2 null",
        "resumes from step 340",
    ]


@pytest.mark.parametrize(
    ("documents", "line"),
    [(1, "text    1 document, without 60 empty, 2 null"), (1230, "text    1,230 documents, without 60 empty, 2 null")],
)
def test_documents_are_counted(documents: int, line: str) -> None:
    run = merged(RUN, {"corpus": {"read": {"documents": documents}}})
    tracker = Console(stream := io.StringIO())
    tracker.start(parsed(run), 0)
    assert line in stream.getvalue().splitlines()


def test_plain_output_is_about_twenty_lines_and_one_per_evaluation() -> None:
    lines = [line for line in output(io.StringIO()) if line.startswith("step")]
    steps = [int(line.removeprefix("step ").partition("/")[0]) for line in lines]
    assert steps == [10, *range(50, 1001, 50)]
    evaluated = [step for step, line in zip(steps, lines, strict=True) if "val 2.5000" in line]
    assert evaluated == [250, 500, 750, 1000]
    assert re.fullmatch(
        r"step 500/1000  loss 2\.2500  val 2\.5000  lr 1\.0e-03  12,346 tok/s  left 0 s  .* TFLOP/s", lines[10]
    )


@pytest.mark.parametrize(("columns", "is_shown"), [("80", False), ("110", True)])
def test_a_narrow_terminal_leaves_out_flops(columns: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0)
    resolved = {"device": "cuda", "precision": "bf16", "device_name": "NVIDIA A100 80GB PCIe"}
    terminal = Terminal()
    tracker = Console(terminal)
    tracker.start(parsed(merged(RUN, {"resolved": resolved, "flops_per_token": 2e9})), 0)
    for rows in (interval(249), evaluation(249), interval(499)):
        tracker.log(rows)
    drawn = terminal.getvalue().split("\r")[-2]
    assert "val 2.5000  lr 1.0e-03  12,346 tok/s" in drawn
    assert ("left 0 s  24.7 TFLOP/s  MFU 7.9 %" in drawn) == is_shown
    tracker.finish(status(step=499))


def test_terminal_has_one_moving_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0.0)
    lines = output(Terminal())
    drawn = [line for line in lines if "step 750/1000" in line and "val" in line]
    assert re.search(r"step 750/1000  loss 2\.2500  val 2\.5000  lr 1\.0e-03  12,346 tok/s  left \d s", drawn[-1])
    assert [line for line in lines if "step 760/1000" in line and "val 2.5000" in line], "val is kept in sight"
    assert lines[-1] == "finished at step 1000/1000  val 2.4000, 0.1046 below bigram 2.5046"


def test_line_is_drawn_rarely_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REFRESH_SECONDS", 3600.0)
    lines = output(Terminal())
    assert len([line for line in lines if "step 10/1000" in line]) == 1
    assert not [line for line in lines if "step 500/1000" in line]
    assert "step 1000/1000" in lines[-2]


def test_time_left_counts_from_the_first_training_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 100.0, 110.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    tracker = Console(stream)
    tracker.start(parsed(RUN), 0)
    for rows in (evaluation(0), interval(100)):
        tracker.log(rows)
    assert "left" not in stream.getvalue()
    tracker.log(interval(150))
    assert "left 2 min 50 s" in stream.getvalue()  # 850 steps at 5 a second


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (status("interrupted", 340, 3.0), "interrupted at step 340/1000  last val 3.0000, 0.4954 above bigram 2.5046"),
        (
            status("diverged", 350, math.nan, diverged={"step": 347, "loss": math.nan, "grad_norm": math.nan}),
            "diverged at step 347/1000  last val nan",
        ),
        (
            status(val_loss=3.3, outcome="stuck"),
            "stuck at step 1000/1000  val 3.3000, 0.0866 above unigram 3.2134: about that of a "
            "model that knows only how often tokens occur",
        ),
        (status("failed", 3, None), "failed at step 3/1000"),
    ],
    ids=["interrupted", "diverged", "stuck", "failed"],
)
def test_last_line(end: Status, line: str) -> None:
    assert output(io.StringIO(), end=end)[-1] == line


def test_default_stream_is_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    tracker = Console()
    tracker.start(parsed(RUN), 0)
    tracker.log(interval(10))
    print("a result")
    print("a [bold]warning[/bold]", file=sys.stderr)
    tracker.finish(status())
    assert capsys.readouterr().out == "a result\n"
    assert "\ra [bold]warning[/bold]\n" in terminal.getvalue()


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("closed file")])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_failing_stream_is_ignored(kind: type[io.StringIO], error: Exception) -> None:
    class Failing(kind):
        def write(self, text: str) -> int:
            raise error

    assert output(Failing()) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (1022, "17 min 2 s"),
        (3599.9, "1 h 0 min"),
        (7505, "2 h 5 min"),
    ],
)
def test_a_duration_has_units(seconds: float, text: str) -> None:
    """Unlike 17:02, which is a time of day too."""
    assert console.format_duration(seconds) == text
