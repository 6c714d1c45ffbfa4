"""Overrides that normlab suggests for a name in other code: each composes, builds, and is exported."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from normlab.base.errors import ConfigError
from normlab.catalogue.norms import base as norms
from normlab.catalogue.other_names import NAMES, OTHER_NAMES
from normlab.catalogue.placements import base as placements
from normlab.config.compose import compose_run
from normlab.config.schema import RunConfig
from normlab.data.tokenizers import BytesTokenizer
from normlab.hf.classes import class_of
from normlab.hf.export import write_folder
from normlab.hf.folder import ModelFolder
from normlab.model.init import build_model
from normlab.verify.names import SMALL_WIDTH
from support.run_folders import Command

OVERRIDE = re.compile(r"\b(?:placement|model|norm|optim|init)[\w.]*=[\w.-]*\w(?![\w^(])")
"""An override with a value: not that of a formula, such as K^(1/4)."""
EXPORTED = {
    "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM", "gemma4": "Gemma4ForCausalLM",
    "transformers, Qwen 3": "Qwen3ForCausalLM",
}  # fmt: skip
"""The hints for models of transformers, with the class that computes them."""
NOTES = {
    f"{kind}={name}": text
    for kind, registered in (("norm", norms.load_all()), ("placement", placements.load_all()))
    for name, each in registered.items()
    if OVERRIDE.search(text := " ".join([getattr(each, "note", ""), *each.pitfalls]))
}
"""The notes and pitfalls in which overrides are."""


def build_and_export(name: str, config: RunConfig, folder: Path) -> None:
    """Build the model of a hint, and write it as a folder if a class of transformers is expected to compute it."""
    tokenizer = BytesTokenizer()
    model = build_model(config, tokenizer.vocab_size)
    if name not in EXPORTED:
        with pytest.raises(ConfigError, match="no class of transformers"):
            class_of(config)
        return
    assert class_of(config).name == EXPORTED[name]
    write_folder(folder / "model", class_of(config), config, model, tokenizer, "")
    assert ModelFolder.open(str(folder / "model")).check(config, tokenizer) == []


@pytest.mark.few(4)
@pytest.mark.parametrize("name", OTHER_NAMES)
def test_what_has_another_name_is_options_here(name: str, run_command: Command, tmp_path: Path) -> None:
    kind = "norm" if name == "tapernorm" else "placement"
    (code, _, err), (_, _, other) = (
        run_command(*words) for words in (("train", f"{kind}={name}"), ("list", f"{kind}s", name))
    )
    here, same = (text.partition("in normlab it is ")[2] for text in (err, other))
    overrides = OVERRIDE.findall(here)
    assert (code, bool(overrides), same) == (2, True, here)
    build_and_export(name, compose_run(overrides), tmp_path)
    # "or post, deepnorm or lns in place of pre"
    if others := re.search(r", or ([\w, ]+) in place of (\w+)", here):
        for each in re.split(", | or ", others[1]):
            build_model(compose_run([text.replace(f"={others[2]}", f"={each}") for text in overrides]), 11)


def test_numbers_of_a_hint_are_those_of_its_model() -> None:
    """Also those that a class of transformers does not check."""
    prores = compose_run(OVERRIDE.findall(OTHER_NAMES["prores"]))
    # scripts/run_130m.sh of dandingsky/ProRes at 5253e0d: 12000 for 12 blocks.
    placement: Any = prores.placement
    assert placement.branch_warmup == 12000 / 12 * prores.model.depth
    (gemma4,) = (overrides for _, code, _, overrides in NAMES if "Gemma 4" in code)
    for overrides in (gemma4, OTHER_NAMES["gemma4"]):
        model = compose_run(OVERRIDE.findall(overrides)).model
        assert model.qk_scale == (model.width / model.heads) ** 0.25
        assert (model.width, model.heads) == (SMALL_WIDTH, 2)  # of the models that `list names` compares


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "code", "overrides"), [(name, code, here) for name, code, _, here in NAMES])
def test_what_public_code_calls_by_a_name_is_options_here(name: str, code: str, overrides: str, tmp_path: Path) -> None:
    assert OVERRIDE.findall(overrides) == overrides.split()
    build_and_export(code, compose_run(["norm=rmsnorm", *overrides.split()]), tmp_path)


@pytest.mark.parametrize("entry", NOTES)
def test_overrides_in_a_note_are_options_here(entry: str) -> None:
    """Together, or those of each sentence if they exclude each other."""
    needed = [entry] if entry.startswith("norm=") else ["norm=rmsnorm", entry]
    sentences = (OVERRIDE.findall(sentence) for sentence in re.split(r"[.;] ", NOTES[entry]))
    for overrides in filter(None, sentences):
        build_model(compose_run([*needed, *overrides]), 11)


def test_hints_are_known() -> None:
    """A hint that changes its name is still exported."""
    known = itertools.chain(OTHER_NAMES, (code for _, code, _, _ in NAMES))
    assert EXPORTED.keys() <= {*known}
