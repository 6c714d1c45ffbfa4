"""Each entry of the catalogue documents its formula, source, options and units of eps."""

import re

from normlab.catalogue import entries as catalogue
from normlab.catalogue.norms.base import NORMS
from normlab.catalogue.norms.base import load_all as load_norms
from normlab.catalogue.placements.base import load_all as load_placements

load_norms()
load_placements()

PUBLISHED = r"arXiv:\d{4}\.\d{5}|[a-zA-Z-]+/[a-zA-Z-]+"
"""An arXiv id, or a repository."""
UNPUBLISHED = {"zscore", "minmax", "pre_post"}
"""Entries from textbooks, or without a known paper."""
ENTRIES = {entry["name"]: entry for entry in (*catalogue.norms(), *catalogue.placements()) if "preset_of" not in entry}


def test_every_entry_has_a_formula_and_a_source() -> None:
    for name, entry in ENTRIES.items():
        assert entry["formula"], name
        assert name in UNPUBLISHED or re.search(PUBLISHED, entry["source"]), entry["source"]


def test_every_option_has_help_and_every_eps_a_unit() -> None:
    entries = [*ENTRIES.values(), *catalogue.data(), *catalogue.optim()]
    options = [*catalogue.options(), *(option for entry in entries for option in entry["options"])]
    assert [option for option in options if not option["about"]] == []
    units = [option["about"] for name in NORMS for option in ENTRIES[name]["options"] if option["option"] == "eps"]
    assert [about for about in units if not re.search(r"unit of x( squared)?\b", about, re.IGNORECASE)] == []
