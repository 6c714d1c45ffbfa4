"""The names of several functions, and how far these are from each other."""

import json
from collections import defaultdict
from collections.abc import Callable

import pytest

from normlab.verify.names import name_entries

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.exhaustive
def test_each_name_has_several_functions_and_each_function_its_distance() -> None:
    uses = defaultdict(list)
    for entry in name_entries():
        uses[entry["name"]].append(entry)
    for name, entries in uses.items():
        assert len({entry["fingerprint"] for entry in entries}) == len(entries) > 1, name
        assert entries[0]["distance"] == 0, name
        assert all(entry["distance"] > 1e-9 for entry in entries[1:]), name
    megatron, untransposed, of_sigmoids = (entry["distance"] for entry in uses["mHC"][1:])
    assert megatron < 1e-5 < 1e-2 < untransposed < of_sigmoids  # another eps, another matrix, other weights


def test_the_uses_of_one_name_are_listed(run_command: Command) -> None:
    out = run_command("list", "names", "sandwich", "--json")[1]
    assert {entry["name"] for entry in json.loads(out)} == {"sandwich"}
    code, _, err = run_command("list", "names", "sandwhich")
    assert (code, "did you mean 'sandwich'" in err) == (2, True)
