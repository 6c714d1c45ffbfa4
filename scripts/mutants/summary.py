"""Of each entry how many mutants were seen, and what is wrong."""

from __future__ import annotations

from typing import Any

from mutants import judging
from mutants.equivalent import EQUIVALENT
from mutants.judging import DIED, NO_ANSWER
from mutants.mutant import AS_IT_IS, Mutant

WRONG = {
    "survivors": "SURVIVES",
    "stale": "STALE, a reason without a survivor:",
    "unsound": "SEEN, WITH NOTHING WRONG:",
}
"""What is an error, and how it is called in a line."""


def verdict(entry: str, mutants: list[Mutant], seen: list[str]) -> dict[str, Any]:
    """Counts, and what is wrong: survivors without a reason, reasons without a survivor, and what is sound but seen."""
    alive = [mutant.text for mutant, by in zip(mutants, seen, strict=True) if not by and mutant.text != AS_IT_IS]
    unsound = [by for mutant, by in zip(mutants, seen, strict=True) if by and mutant.text == AS_IT_IS]
    told = [text for of, text in EQUIVALENT if of == entry]
    survivors = [text for text in alive if text not in told]
    count = sum(mutant.text != AS_IT_IS for mutant in mutants)
    return {
        "entry": entry, "mutants": count, "killed": count - len(alive),
        "no_answer": sum(by.startswith(NO_ANSWER) for by in seen), "died": seen.count(DIED), "survived": len(survivors),
        "equivalent": len(alive) - len(survivors), "survivors": survivors, "unsound": unsound,
        "stale": [text for text in told if text not in alive],
    }  # fmt: skip


def line(told: dict[str, Any]) -> str:
    """A verdict, or the sum of all of them, as it is printed."""
    counts = f"{told['mutants']:>8} {told['killed']:>8} {told['survived']:>8} {told['equivalent']:>10}"
    wrong = [f"  {word} {text}" for kind, word in WRONG.items() for text in told.get(kind, ())]
    unseen = told["no_answer"], told["died"]
    if any(unseen) or "survivors" not in told:  # of all entries always
        counts += f"  of the killed {unseen[0]} by no answer in {judging.SECONDS} s, {unseen[1]} by a dead process"
    return "\n".join([f"{told['entry']:<28} {counts}", *wrong])
