"""What a norm, placement or init rule computes changes only together with its `version`.

`fingerprints.json` holds the version of each entry, and a hash of its rounded outputs with its defaults and with the
other values of each option. After raising a version, or adding an option, run `scripts/refresh` in the
checkout to record the new fingerprints.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from normlab.base.plugins import plugin_file
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import PLACEMENTS, SWITCHES
from normlab.catalogue.placements.base import load_all as load_placements
from normlab.catalogue.placements.init_rules import INIT_RULES, standard_deviations
from normlab.model.fingerprint import fingerprint
from normlab.model.small import small_config
from normlab.verify.variants import NAME_FIELDS, other_values

FILE = Path(__file__).with_name("fingerprints.json")
REFRESH = "scripts/refresh"
DEPTH = 4
"""Blocks of the placements' models: deep enough for rows whose first quarter differs."""
WIDTH = 16

load_norms()
load_placements()


Entry = dict[str, Any]
"""The `version` of an entry, its `fingerprint` with its defaults, and those of its `options`."""


def norm_fingerprint(norm: Any) -> str:
    return fingerprint(small_config(norm, PLACEMENTS["pre"], depth=1))


def placement_fingerprint(placement: Any) -> str:
    norm = NORMS["layernorm" if placement.has_norms(DEPTH) else "none"]()  # pyright: ignore[reportCallIssue]
    return fingerprint(small_config(norm, placement, depth=DEPTH))


def init_fingerprint(name: str) -> str:
    """Return a hash of the rule's standard deviations, to nine digits, in models of two sizes."""
    sizes = ({"depth": 1, "width": 32, "mlp_width": 128}, {"depth": 20, "width": 64, "mlp_width": 192})
    return _hash([f"{std:.8e}" for size in sizes for std in standard_deviations(name, vocab_size=100, **size)])


def with_options(thing: Any, fingerprint_of: Callable[[Any], str]) -> Entry:
    """Return the fingerprint of a norm or placement with its defaults, and a hash of those of each option's values."""
    fields = [field for field in dataclasses.fields(thing) if field.name not in (*NAME_FIELDS, *SWITCHES)]
    options = {field.name: list(other_values(thing, field, WIDTH)) for field in fields}
    hashes = {name: _hash(list(map(fingerprint_of, others))) for name, others in options.items() if others}
    return {"version": thing.version, "fingerprint": fingerprint_of(thing)} | ({"options": hashes} if hashes else {})


def _hash(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def current(kind: str, name: str) -> Entry:
    """Return the version and the fingerprints of an entry, as the code has them now."""
    match kind:
        case "norm":
            return with_options(NORMS[name](), norm_fingerprint)  # pyright: ignore[reportCallIssue]
        case "placement":
            return with_options(PLACEMENTS[name], placement_fingerprint)
        case _:
            return {"version": INIT_RULES[name].version, "fingerprint": init_fingerprint(name)}


ENTRIES = [
    (kind, name)
    for kind, names in (("norm", NORMS), ("placement", PLACEMENTS), ("init rule", INIT_RULES))
    for name in names
    if plugin_file(kind, name) is None
]


def problem(kind: str, name: str, recorded: Entry | None, now: Entry) -> str | None:
    """Return what is wrong with an entry and what to do about it, or None."""
    if recorded is None:
        return f"{kind} {name}: has no recorded fingerprint; run `{REFRESH}`"
    if now == recorded:
        return None
    if is_extended(recorded, now):
        return f"{kind} {name}: has an option without a recorded fingerprint; run `{REFRESH}`"
    if now["version"] == recorded["version"]:
        return (
            f"{kind} {name}: computes something else than version {now['version']} did; raise its `version`, "
            f"then run `{REFRESH}`"
        )
    return f"{kind} {name}: version {now['version']} is not recorded; run `{REFRESH}`"


def is_extended(recorded: Entry, now: Entry) -> bool:
    """Return whether an entry computes the same as recorded, and has other options."""
    before, after = recorded.get("options", {}), now.get("options", {})
    is_same = all(before[name] == after[name] for name in before.keys() & after.keys())
    return is_same and now | {"options": {}} == recorded | {"options": {}}


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
    found: dict[str, dict[str, Entry]] = {}
    refused: list[str] = []
    for kind, name in ENTRIES:
        before, now = recorded.get(kind, {}).get(name), current(kind, name)
        is_same = before is None or before == now or is_extended(before, now)
        if before is not None and not is_same and before["version"] == now["version"]:
            refused.append(str(problem(kind, name, before, now)))
            now = before
        found.setdefault(kind, {})[name] = now
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    if refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    refresh()
