"""A sample of scripts/prove/fuzz_records.py: damaged files of a run."""

import fuzz_records
import pytest


@pytest.mark.exhaustive
def test_damaged_files_are_refused_or_read_as_written() -> None:
    counts, failures = fuzz_records.fuzz(2, range(4))
    assert not failures, "\n".join(failures)
    assert counts["cases"] == 4
    assert counts["accepted"] + counts["refused"] >= 4


def test_the_fuzzer_detects_problems() -> None:
    result = fuzz_records.Result
    assert "traceback" in fuzz_records.exit_problem(result(1, "", "", "Traceback\nKeyError: 'x'"))
    assert "exit 3" in fuzz_records.exit_problem(result(3, "", ""))
    assert "leaks" in fuzz_records.exit_problem(result(2, "", "error: KeyError: 'files'; give another\n"))
    assert "2 lines" in fuzz_records.exit_problem(result(2, "", "error: a; give b\nerror: c; give d\n"))
    assert "does not name" in fuzz_records.exit_problem(result(2, "", "error: x=3; give 4\n"), ["y"])
    assert fuzz_records.exit_problem(result(2, "", "error: x=3; give 4\n"), ["x"]) == ""
    undamaged = dict.fromkeys(("run", "state", "note", "step"), "x") | {"step": 6, "state": "finished"}
    assert "shows step 5 for 6" in fuzz_records.wrong_row([undamaged | {"step": 5}], undamaged)
    assert "no note" in fuzz_records.wrong_row([undamaged | {"step": None, "note": ""}], undamaged)
