"""Which words tell runs apart, and what must be said before their losses are compared.

A word is one of the command line; a circumstance (corpus, device, torch) is none that anybody chose between.
"""

from __future__ import annotations

from collections.abc import Sequence

from normlab.report.outcomes import RunResult
from normlab.report.settings import (
    LR,
    SEEDS,
    Setting,
    differing_settings,
    format_setting,
    get_nested,
    is_config_option,
    setting,
)

FIRST = ("norm", "placement", "model.depth")
"""The words that come first, and are looked at first."""
USUAL = ("norm", "placement")
"""The words of cells where runs do not differ."""
MOST_WORDS = 4
"""Words of cells that are chosen unasked."""
UNKNOWN = "unknown"
"""What stands for what a record does not say."""
_NUMERICS = "numerics ("


def telling(outcomes: Sequence[RunResult]) -> list[str]:
    """The words in which runs were told different things, learning rate and seeds left out, `FIRST` before others.

    Of the others one that tells no more runs apart than those before it is left out: what a model's width implies.
    """
    options = [word for word in differing_settings([one.settings for one in outcomes]) if is_config_option(word)]
    runs = [one.entry.run for one in outcomes]
    told: list[tuple[Setting, ...]] = [() for _ in runs]
    words: list[str] = []
    for word in dict.fromkeys([*FIRST, *options]):
        values = [setting(run, word) for run in runs]
        further = [(*known, value) for known, value in zip(told, values, strict=True)]
        if len(set(values)) > 1 and (word in FIRST or len(set(further)) > len(set(told))):
            words.append(word)
            told = further
    return words


def default_by(outcomes: Sequence[RunResult]) -> list[str]:
    """The words that cells are made of unless others are named."""
    return telling(outcomes)[:MOST_WORDS] or list(USUAL)


def varied(outcomes: Sequence[RunResult]) -> list[str]:
    """Return the options in which runs differ, learning rate and seeds last; a data.seed equal to seed is left out."""
    runs = [one.entry.run for one in outcomes]
    follows = all(one.replicate[0] == one.replicate[1] for one in outcomes)
    seeds = SEEDS[:1] if follows else SEEDS
    return [*telling(outcomes), *(word for word in (LR, *seeds) if len({setting(run, word) for run in runs}) > 1)]


def banners(outcomes: Sequence[RunResult]) -> list[str]:
    """What runs differ in that keeps their losses, or their bits, from being compared."""
    kinds = (
        ("corpora", corpora(outcomes), "their losses do not compare"),
        ("tokenizers", tokenizers(outcomes), "a token is not the same, and their losses do not compare"),
        ("precisions", _told(outcomes, "precision"), "what differs between them may be the rounding"),
        ("devices", _told(outcomes, "device"), "their speeds do not compare, nor their last digits"),
    )
    said = [
        f"the runs are on {len(values)} {many}: {', '.join(values)}: {so}"
        for many, values, so in kinds
        if len(values) > 1
    ]
    numerics = [word for word in differing_settings([one.settings for one in outcomes]) if word.startswith(_NUMERICS)]
    if told := [f"{_inner(word)} {' and '.join(_told(outcomes, word))}" for word in numerics]:
        said.append(f"the runs' numerics differ: {'; '.join(told)}: the same words and seeds do not give the same bits")
    return said


def incomparable(outcomes: Sequence[RunResult]) -> str:
    """Why no run may be called better than another; empty where they may."""
    kinds = (("corpora", corpora(outcomes)), ("tokenizers", tokenizers(outcomes)))
    told = [f"{len(values)} {many} ({', '.join(values)})" for many, values in kinds if len(values) > 1]
    return f"the runs are on {' and '.join(told)}, and losses compare only within one" if told else ""


def corpora(outcomes: Sequence[RunResult]) -> list[str]:
    """What runs were trained on, each once."""
    return _told(outcomes, "corpus")


def tokenizers(outcomes: Sequence[RunResult]) -> list[str]:
    """What their text was cut by, and into how many kinds of token, each once."""
    kept = [[get_nested(one.entry.run, f"corpus.{word}") for word in ("tokenizer", "vocab_size")] for one in outcomes]
    return sorted({" ".join(str(part) for part in parts if part is not None) or UNKNOWN for parts in kept})


def _told(outcomes: Sequence[RunResult], word: str) -> list[str]:
    values = [one.settings.get(word) for one in outcomes]
    return sorted({UNKNOWN if value is None else format_setting(value) for value in values})


def _inner(word: str) -> str:
    return word.removeprefix(_NUMERICS).removesuffix(")")
