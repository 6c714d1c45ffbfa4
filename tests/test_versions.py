"""What a norm, placement or init rule computes changes only together with its `version`.

`fingerprints.json` holds the version of each entry and a hash of its rounded outputs. After raising a version, run
`python tests/test_versions.py` in the checkout to record the new fingerprints.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from normlab.model.fingerprint import fingerprint
from normlab.model.small import small_config
from normlab.norms.base import NORMS
from normlab.norms.base import load_all as load_norms
from normlab.placements.base import PLACEMENTS, SWITCHES
from normlab.placements.base import load_all as load_placements
from normlab.placements.init_rules import INIT_RULE_VERSIONS, INIT_RULES, standard_deviations
from normlab.plugins import plugin_file
from normlab.verify.variants import NAME_FIELDS, other_values

FILE = Path(__file__).with_name("fingerprints.json")
REFRESH = "python tests/test_versions.py"
DEPTH = 4
"""Blocks of the placements' models: deep enough for rows whose first quarter differs."""
WIDTH = 16

load_norms()
load_placements()


def norm_fingerprint(name: str) -> str:
    """Return a hash of the norm with its default options, and with every other value of each option."""
    norm = NORMS[name]()  # pyright: ignore[reportCallIssue]
    return _hash([fingerprint(small_config(each, PLACEMENTS["pre"], depth=1)) for each in _each_option(norm)])


def placement_fingerprint(name: str) -> str:
    """Return a hash of the placement with its default options, and with every other value of each option."""
    norm = NORMS["layernorm" if PLACEMENTS[name].has_norms(DEPTH) else "none"]()  # pyright: ignore[reportCallIssue]
    return _hash([fingerprint(small_config(norm, each, depth=DEPTH)) for each in _each_option(PLACEMENTS[name])])


def init_fingerprint(name: str) -> str:
    """Return a hash of the rule's standard deviations, to nine digits, in models of two sizes."""
    sizes = ({"depth": 1, "width": 32, "mlp_width": 128}, {"depth": 20, "width": 64, "mlp_width": 192})
    return _hash([f"{std:.8e}" for size in sizes for std in standard_deviations(name, vocab_size=100, **size)])


def _each_option(thing: Any) -> list[Any]:
    fields = [field for field in dataclasses.fields(thing) if field.name not in (*NAME_FIELDS, *SWITCHES)]
    return [thing, *(other for field in fields for other in other_values(thing, field, WIDTH))]


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def current(kind: str, name: str) -> dict[str, int | str]:
    """Return the version and the fingerprint of an entry, as the code has them now."""
    match kind:
        case "norm":
            return {"version": NORMS[name].version, "fingerprint": norm_fingerprint(name)}
        case "placement":
            return {"version": PLACEMENTS[name].version, "fingerprint": placement_fingerprint(name)}
        case _:
            return {"version": INIT_RULE_VERSIONS.get(name, 1), "fingerprint": init_fingerprint(name)}


ENTRIES = [
    (kind, name)
    for kind, names in (("norm", NORMS), ("placement", PLACEMENTS), ("init rule", INIT_RULES))
    for name in names
    if plugin_file(kind, name) is None
]


def problem(kind: str, name: str, recorded: dict[str, int | str] | None, now: dict[str, int | str]) -> str | None:
    """Return what is wrong with an entry and what to do about it, or None."""
    if recorded is None:
        return f"{kind} {name}: has no recorded fingerprint; run `{REFRESH}`"
    if now == recorded:
        return None
    if now["version"] == recorded["version"]:
        return (
            f"{kind} {name}: computes something else than version {now['version']} did; raise its `version`, "
            f"then run `{REFRESH}`"
        )
    return f"{kind} {name}: version {now['version']} is not recorded; run `{REFRESH}`"


@pytest.mark.few(10)
@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_a_changed_computation_has_a_raised_version(kind: str, name: str) -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8")).get(kind, {}).get(name)
    assert problem(kind, name, recorded, current(kind, name)) is None


def test_no_fingerprint_of_a_removed_entry_is_recorded() -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    assert {(kind, name) for kind, names in recorded.items() for name in names} <= set(ENTRIES)


def refresh() -> None:
    """Record the fingerprints of the code as it is; refuse a changed one whose version is not raised."""
    recorded = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    found: dict[str, dict[str, dict[str, int | str]]] = {}
    refused: list[str] = []
    for kind, name in ENTRIES:
        before, now = recorded.get(kind, {}).get(name), current(kind, name)
        if before is not None and before != now and before["version"] == now["version"]:
            refused.append(str(problem(kind, name, before, now)))
            now = before
        found.setdefault(kind, {})[name] = now
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    refresh()
