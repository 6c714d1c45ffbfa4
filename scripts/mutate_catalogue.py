#!/usr/bin/env python3
"""Break every entry of the catalogue, and see that the checks of `normlab verify` that concern it fail.

    .venv/bin/python scripts/mutate_catalogue.py [--only rmsnorm,deepnorm] [--list] [--json] [--workers 2]

A mutant is an entry with one thing wrong, as public code has had it wrong:

- in the code of a norm, a wiring or an init rule: eps dropped, moved through the root or times a width; a term, a
  factor, a root, a cast or a statement dropped; a sign or an exponent flipped; a mean for a sum; a number changed; an
  axis or a kind of variance changed; one stream or branch in another's place; a norm skipped or applied twice; a
  parameter shared that should not be; a stop-gradient dropped; a condition turned round;
- in a row of the algebra: a norm at another site, one missing, one too many; a factor of depth that is another;
- in any placement: the init rule of another;
- of any norm: a default that is another, and twice its output;
- in a built module: a buffer that is all zeros, as after a round trip through the meta device.

What a class says of itself, and the reference that it is held against, are left alone: a mutant differs from them.
Each runs in a process of its own; an exception is a mutant that is seen. So is a minute without an answer, or a process
that dies; these are killed by no check, and are counted apart. Those that nothing sees are printed, and are an error
unless `mutants/equivalent.py` says why they compute the same. So is a line there that is no mutant any more, or one
that is seen.

It does not break the names of things.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter

from mutants.entries import catalogue
from mutants.judging import judge
from mutants.summary import WRONG, line, verdict


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default="", help="entries, separated by commas; all, unless given")
    parser.add_argument("--list", action="store_true", help="print the mutants and run none")
    parser.add_argument("--json", action="store_true", help="print a JSON object an entry")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    begun = time.monotonic()
    found = catalogue()
    chosen = [name for name in options.only.split(",") if name] or list(found)
    if unknown := set(chosen) - set(found):
        parser.error(f"no entry {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    if options.list:
        print("\n".join(f"{name}: {mutant.text}" for name in chosen for mutant in found[name][0]))
        return 0
    bad, total = False, Counter()
    if not options.json:
        print(f"{'entry':<28} {'mutants':>8} {'killed':>8} {'survived':>8} {'equivalent':>10}")
    for name in chosen:
        mutants, checks = found[name]
        told = verdict(name, mutants, judge([(mutant, checks) for mutant in mutants], options.workers))
        total.update({key: value for key, value in told.items() if isinstance(value, int)})
        bad |= any(told[kind] for kind in WRONG)
        print(json.dumps(told) if options.json else line(told), flush=True)
    if not options.json:
        print(line({"entry": f"all, in {time.monotonic() - begun:.0f} s", **total}))
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
