"""The console tracker, with a terminal and without."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic_runs import Record

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
            "norm": {"preset": "llama"}, "model": {"preset": "nano"}, "train": {"steps": 1000, "batch_size": 16},
            "eval": {"every": 250},
        },
        "corpus": {
            "name": "[bold]stdlib", "baselines": {"uniform": 5.5491, "unigram": 3.2134, "bigram": 2.5046},
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


def interval(last: int, steps: int = 10, val: float | None = None, loss: float = 2.25) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": loss, "grad_norm": 1.0, "clip": 1.0, "lr": 1e-3}
        for step in range(last - steps + 1, last + 1)
    ]
    if val is not None:
        rows.append({"kind": "eval", "step": last, "loss": val})
    return [*rows, {"kind": "pace", "step": last, "seconds": 0.1, "tokens_per_s": 12345.6}]


def status(state: str = "finished", step: int = 1000, val_loss: float | None = 2.4, **more: Any) -> Status:
    numbers = {"step": step, "steps": 1000, "val_loss": val_loss, "best_val_loss": val_loss}
    return msgspec.convert({"state": state, **numbers, **more}, Status)


def whole_run(stream: io.StringIO, first: int = 0) -> list[str]:
    """Lines of a run of 1000 steps with an evaluation every 250."""
    tracker = Console(stream)
    tracker.start(RUN, first)
    for last in range(first + 10, 1001, 10):
        tracker.log(interval(last, val=2.5 if last % 250 == 0 else None))
    tracker.finish(status())
    return plain(stream).splitlines()


def plain(stream: io.StringIO) -> str:
    """What a reader sees: no control sequences, each drawing of the bar on a line of its own."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "\n")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["plain", "terminal"])
def test_header(stream: io.StringIO) -> None:
    tracker = Console(stream)
    tracker.start(RUN, 340)
    tracker.finish(status())
    assert plain(stream).splitlines()[:5] == [
        "run     rmsnorm-pre-3fa9c1 ([red]mine[/red])",
        "norm    llama, placement pre",
        "model   depth 4 x width 128, cpu fp32",
        "corpus  [bold]stdlib: uniform 5.5491, unigram 3.2134, bigram 2.5046 nats/token",
        "resumes from step 340",
    ]


def test_header_has_what_was_read_of_a_text() -> None:
    nothing = RUN["corpus"]["read"]
    formats = nothing | {"formats": {"csv": 1, "text": 1200}, "documents": 1230}
    left_out = {"empty": 60, "null": 1, "byte_order_marks": 2, "left_out": ["results"]}
    for read, line in (
        (formats, "1,230 documents (1 csv file, 1,200 text files)"),
        (nothing | {"formats": {"dataset": 1}, "documents": 1}, "1 document (1 dataset)"),
        (
            formats | left_out,
            "1,230 documents (1 csv file, 1,200 text files), without 60 empty rows, 1 null row, 2 byte order marks, "
            "results",
        ),
    ):
        stream = io.StringIO()
        Console(stream).start(RUN | {"corpus": RUN["corpus"] | {"read": read}}, 0)
        assert f"\ntext    {line}\n" in stream.getvalue()


def test_plain_output_is_about_twenty_lines_and_one_per_evaluation() -> None:
    lines = [line for line in whole_run(io.StringIO()) if line.startswith("step")]
    steps = [int(re.match(r"step (\d+)/1000", line).group(1)) for line in lines]  # type: ignore[union-attr]
    assert steps == [10, *range(50, 1001, 50)]
    assert [step for step, line in zip(steps, lines, strict=True) if "val 2.5000" in line] == [
        250,
        500,
        750,
        1000,
    ]
    assert re.fullmatch(r"step 500/1000  loss 2\.2500  val 2\.5000  lr 1\.0e-03  12,346 tok/s  .*left 0:00", lines[10])


def test_speed_in_flops_is_printed_where_the_record_has_it():
    resolved = {"device": "cuda", "devices": 1, "precision": "bf16", "device_name": "NVIDIA A100 80GB PCIe"}
    lines = {}
    for name, run in {"gpu": {**RUN, "resolved": resolved}, "cpu": RUN}.items():
        stream = io.StringIO()
        tracker = Console(stream)
        tracker.start({**run, "flops_per_token": 2e9}, 0)
        tracker.log(interval(499, steps=500))
        lines[name] = stream.getvalue().splitlines()[-1]
    assert "  12,346 tok/s  24.7 TFLOP/s  MFU 7.9 %" in lines["gpu"]
    assert "  12,346 tok/s  24.7 TFLOP/s" in lines["cpu"]
    assert "MFU" not in lines["cpu"]


@pytest.mark.parametrize(("columns", "shown"), [("80", False), ("120", True)])
def test_a_narrow_bar_leaves_out_flops(monkeypatch, columns, shown):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0)
    terminal = Terminal()
    tracker = Console(terminal)
    tracker.start({**RUN, "flops_per_token": 2e9}, 0)
    tracker.log(interval(249, steps=250, val=2.5))
    tracker.log(interval(499))
    drawn = terminal.getvalue().rpartition("\r")[2]
    assert "12,346 tok/s" in drawn
    assert "left" in drawn
    assert ("TFLOP/s" in drawn) == shown
    tracker.finish(Status("finished", step=499))


def test_plain_output_shows_evaluations_between_its_lines() -> None:
    stream = io.StringIO()
    tracker = Console(stream)
    tracker.start(RUN, 0)
    tracker.log([{"kind": "eval", "step": 0, "loss": 5.5}])
    tracker.log(interval(10))
    tracker.log([*interval(15, steps=5, val=2.5), *interval(20, steps=5, val=math.nan)])
    assert [line.split("  lr")[0] for line in stream.getvalue().splitlines()[4:]] == [
        "step 0/1000  val 5.5000",
        "step 15/1000  loss 2.2500  val 2.5000",
        "step 20/1000  loss 2.2500  val nan",
    ]


def test_plain_output_has_one_line_for_a_step_with_an_evaluation() -> None:
    """As the loop has it: the evaluation comes after the step's own rows, or not at all."""
    stream = io.StringIO()
    tracker = Console(stream)
    tracker.start(RUN, 490)
    for last, val in ((500, 2.5), (750, None), (800, None), (1000, 2.4)):
        tracker.log(interval(last))
        if val is not None:
            tracker.log([{"kind": "eval", "step": last, "loss": val}])
    assert [line.split("  lr")[0] for line in stream.getvalue().splitlines()[5:]] == [
        "step 500/1000  loss 2.2500  val 2.5000",
        "step 750/1000  loss 2.2500",
        "step 800/1000  loss 2.2500",
        "step 1000/1000  loss 2.2500  val 2.4000",
    ]


def test_plain_output_ends_with_the_last_step() -> None:
    stream = io.StringIO()
    tracker = Console(stream)
    tracker.start(RUN, 490)
    tracker.log(interval(500))
    tracker.finish(status("diverged", 500, diverged={"step": 500}))
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()[5:]] == [
        "step 500/1000",
        "diverged at step 500/1000",
    ]


def test_terminal_has_one_moving_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0.0)
    lines = whole_run(Terminal())
    drawn = [line for line in lines if "step 750/1000" in line]
    assert re.search(r"step 750/1000  loss 2\.2500  val 2\.5000  lr 1\.0e-03  12,346 tok/s  .*left 0:0\d$", drawn[0])
    assert not drawn[0].startswith("step"), "no bar"
    assert [line for line in lines if "step 760/1000" in line and "val 2.5000" in line], "val is kept in sight"
    assert lines[-1] == "finished at step 1000/1000  val 2.4000, 0.1046 below bigram 2.5046"


def test_bar_is_drawn_rarely_and_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "REFRESH_SECONDS", 3600.0)
    stream = Terminal()
    tracker = Console(stream)
    threads = threading.active_count()
    tracker.start(RUN, 0)
    assert threading.active_count() == threads
    tracker.log(interval(10))
    drawn = stream.getvalue()
    assert "step 10/1000" in drawn
    for last in range(20, 500, 10):
        tracker.log(interval(last))
    assert stream.getvalue() == drawn
    tracker.finish(status("interrupted", step=490))
    assert "step 490/1000" in plain(stream).splitlines()[-2], "the last drawing is up to date"


def test_time_left_counts_from_the_first_training_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 100.0, 110.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    tracker = Console(stream)
    tracker.start(RUN, 0)
    tracker.log([{"kind": "eval", "step": 0, "loss": 5.5}])
    tracker.log(interval(100))
    assert "left" not in stream.getvalue()
    tracker.log(interval(150))
    assert "left 2:50" in stream.getvalue()  # 850 steps at 5 a second


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (status(), "finished at step 1000/1000  val 2.4000, 0.1046 below bigram 2.5046"),
        (
            status("interrupted", 340, 3.0),
            "interrupted at step 340/1000  val 3.0000, 0.4954 above bigram 2.5046",
        ),
        (
            status("diverged", 350, math.nan, diverged={"step": 347}),
            "diverged at step 347/1000  last val nan",
        ),
        (
            status("diverged", val_loss=2.3e9, outcome="diverged", diverged={"step": 1000}),
            "diverged at step 1000/1000  last val 2.3e+09",
        ),
        (
            status(val_loss=3.3, outcome="stuck"),
            "stuck at step 1000/1000  val 3.3000, 0.0866 above unigram 3.2134: no better than a "
            "model that knows only how often tokens occur",
        ),
        (
            status(val_loss=3.3, outcome="regressed", best_val_loss=2.6),
            "regressed at step 1000/1000  val 3.3000, up from a best of 2.6000: it lost what it had learned",
        ),
        (
            status(val_loss=4.93, outcome="finished"),
            "finished at step 1000/1000  val 4.9300, 1.7166 above unigram 3.2134: it has not yet learned how often "
            "tokens occur",
        ),
        (status("failed", 3, None), "failed at step 3/1000"),
    ],
    ids=["finished", "interrupted", "nan", "diverged", "stuck", "regressed", "short", "failed"],
)
def test_last_line(end: Status, line: str) -> None:
    stream = io.StringIO()
    tracker = Console(stream)
    tracker.start(RUN, 0)
    tracker.finish(end)
    assert stream.getvalue().splitlines()[-1] == line


def test_default_stream_is_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    tracker = Console()
    tracker.start(RUN, 0)
    tracker.log(interval(10))
    print("a result")
    print("a [bold]warning[/bold]", file=sys.stderr)
    tracker.finish(status())
    assert sys.stderr is terminal
    assert capsys.readouterr().out == "a result\n"
    assert "\na [bold]warning[/bold]\n" in plain(terminal)


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "no space"), ValueError("closed file")])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_failing_stream_is_ignored(kind: type[io.StringIO], error: Exception) -> None:
    class Failing(kind):
        def write(self, text: str) -> int:
            raise error

    assert whole_run(Failing()) == []


def test_closed_pipe_is_ignored(tmp_path: Path) -> None:
    """The real thing: stderr is a pipe whose other end closes after the header."""
    script = (
        "import sys; from test_console import *\n"
        "tracker = Console(); tracker.start(RUN, 0); sys.stdin.readline()\n"
        "for last in range(10, 1001, 10): tracker.log(interval(last))\n"
        "tracker.finish(status()); print('trained')\n"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline().startswith("run ")
        process.stderr.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.stdout.read() == "trained\n"
        assert process.wait() == 0


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_log_call_takes_less_than_a_millisecond(kind: type[io.StringIO]) -> None:
    tracker = Console(kind())
    tracker.start(RUN, 0)
    rows = [interval(last) for last in range(10, 10010, 10)]
    started = time.process_time()
    for batch in rows:
        tracker.log(batch)
    assert (time.process_time() - started) / len(rows) < 0.5e-3
