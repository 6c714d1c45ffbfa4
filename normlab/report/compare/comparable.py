"""The options in which runs differ, and the reasons why their losses or speeds are not comparable.

An option is set by the user. A circumstance (corpus, device, torch version) is not, and defines no cell.
"""

from __future__ import annotations

from collections.abc import Sequence

from normlab.report.cells import RunResult
from normlab.report.settings import (
    LR,
    SEEDS,
    differing_settings,
    format_setting,
    is_config_option,
    setting,
)
from normlab.store.record import Setting

MAIN_OPTIONS = ("norm", "placement", "model.depth")
"""The options that come first in a cell's name."""
DEFAULT_OPTIONS = ("norm", "placement")
"""The options of cells if the runs do not differ."""
MAX_OPTIONS = 4
"""The most options that define cells by default."""
UNKNOWN = "unknown"
"""The value of a setting that the record lacks."""
_NUMERICS = "numerics ("


def distinguishing_options(outcomes: Sequence[RunResult]) -> list[str]:
    """Return the options in which runs differ, without learning rate and seeds; `MAIN_OPTIONS` first.

    An option that separates no more runs than the options before it is left out, as one that follows from the width.
    """
    options = [option for option in differing_settings([run.settings for run in outcomes]) if is_config_option(option)]
    runs = [outcome.record for outcome in outcomes]
    keys: list[tuple[Setting, ...]] = [() for _ in runs]
    distinguishing: list[str] = []
    for option in dict.fromkeys([*MAIN_OPTIONS, *options]):
        values = [setting(run, option) for run in runs]
        longer_keys = [(*key, value) for key, value in zip(keys, values, strict=True)]
        if len(set(values)) > 1 and (option in MAIN_OPTIONS or len(set(longer_keys)) > len(set(keys))):
            distinguishing.append(option)
            keys = longer_keys
    return distinguishing


def default_cell_options(outcomes: Sequence[RunResult]) -> list[str]:
    """Return the options that define cells without `--by`."""
    return distinguishing_options(outcomes)[:MAX_OPTIONS] or list(DEFAULT_OPTIONS)


def varying_options(outcomes: Sequence[RunResult]) -> list[str]:
    """Return all options in which runs differ, learning rate and seeds last; data.seed only if it is not the seed."""
    runs = [outcome.record for outcome in outcomes]
    same_seeds = all(outcome.replicate[0] == outcome.replicate[1] for outcome in outcomes)
    seeds = SEEDS[:1] if same_seeds else SEEDS
    varying = [option for option in (LR, *seeds) if len({setting(run, option) for run in runs}) > 1]
    return [*distinguishing_options(outcomes), *varying]


def comparability_warnings(outcomes: Sequence[RunResult]) -> list[str]:
    """Return the differences between runs that make losses, speeds or bits not comparable."""
    consequences = {
        "corpora": "their losses are not comparable",
        "tokenizers": "tokens differ, so their losses are not comparable",
        "precisions": "a difference between them may be rounding",
        "devices": "their speeds and last digits are not comparable",
    }
    warnings = [
        f"the runs use {len(values)} {plural}: {', '.join(values)}: {consequences[plural]}"
        for plural, values in _circumstances(outcomes).items()
    ]
    differing = differing_settings([run.settings for run in outcomes])
    listed = [
        f"{name.removeprefix(_NUMERICS).removesuffix(')')} {' and '.join(_values(outcomes, name))}"
        for name in differing
        if name.startswith(_NUMERICS)
    ]
    if listed:
        warnings.append(f"the runs' numerics differ: {'; '.join(listed)}: equal options and seeds give different bits")
    return warnings


def reason_not_comparable(outcomes: Sequence[RunResult]) -> str:
    """Return why the losses of runs cannot be ranked; empty if they can."""
    listed = [
        f"{len(values)} {plural} ({', '.join(values)})"
        for plural, values in _circumstances(outcomes).items()
        if plural in ("corpora", "tokenizers")
    ]
    return f"the runs use {' and '.join(listed)}, so their losses are not comparable" if listed else ""


def _circumstances(outcomes: Sequence[RunResult]) -> dict[str, list[str]]:
    """Return the values of each circumstance in which runs differ, by its plural."""
    kinds = {"corpora": "corpus", "tokenizers": "", "precisions": "precision", "devices": "device"}
    values = {plural: _values(outcomes, name) if name else _tokenizers(outcomes) for plural, name in kinds.items()}
    return {plural: texts for plural, texts in values.items() if len(texts) > 1}


def _tokenizers(outcomes: Sequence[RunResult]) -> list[str]:
    """Return each tokenizer with its vocabulary size."""
    corpora = [outcome.record.corpus for outcome in outcomes]
    values = [[corpus.tokenizer, corpus.vocab_size] for corpus in corpora]
    return sorted({" ".join(str(part) for part in parts if part is not None) or UNKNOWN for parts in values})


def _values(outcomes: Sequence[RunResult], name: str) -> list[str]:
    """Return each value of a setting once, as text."""
    values = [outcome.settings.get(name) for outcome in outcomes]
    return sorted({UNKNOWN if value is None else format_setting(value) for value in values})
