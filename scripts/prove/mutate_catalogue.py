#!/usr/bin/env python3
"""Put mistakes into the catalogue, and test that `normlab verify` detects them.

    .venv/bin/python scripts/prove/mutate_catalogue.py [--only rmsnorm,deepnorm] [--list] [--json] [--workers 2]

A mutant is an entry with one mistake of a kind that public code has made:

- in the code of a norm, a wiring or an init rule: eps dropped, moved through the root or multiplied by a width; a
  term, factor, root, cast or statement dropped; a sign or exponent flipped; a sum instead of a mean; another number,
  axis or kind of variance; another stream or branch; a norm skipped or applied twice; a parameter shared
  by mistake; a stop-gradient dropped; a condition inverted;
- in a row of the algebra: a norm at another site, a missing norm, an additional norm; another factor of depth;
- in any placement: the init rule of another placement;
- in any norm: another default, or twice its output;
- in the updates of the optimisers, as in the code of a norm;
- in a built module: a buffer of zeros, as after a round trip through the meta device.

Names, declarations of an entry and references are not mutated. Each mutant runs in a process of its own. A failed
check, an exception, a minute of computing and a process that dies count as detection.

The script prints survivors. A survivor is an error unless `mutants/equivalent.py` gives a reason why it computes the
same. A reason is also an error if its mutant does not exist or is detected.
"""

import argparse
import json
import sys
import time
from collections import Counter

from mutants.entries import catalogue
from mutants.judging import ERRORS, judge, summarise, table_line


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default="", help="entries, separated by commas (default: all)")
    parser.add_argument("--list", action="store_true", help="list the mutants without running them")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each entry")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: 2)")
    options = parser.parse_args()
    started = time.monotonic()
    entries = catalogue()
    chosen = [name for name in options.only.split(",") if name] or list(entries)
    if unknown := set(chosen) - set(entries):
        parser.error(f"--only {','.join(sorted(unknown))}: unknown entry; choose from {', '.join(entries)}")
    if options.list:
        print("\n".join(f"{name}: {mutant.text}" for name in chosen for mutant in entries[name][0]))
        return 0
    failed, total = False, Counter()
    if not options.json:
        print(f"{'entry':<28} {'mutants':>8} {'killed':>8} {'survived':>8} {'equivalent':>10}")
    for name in chosen:
        mutants, checks = entries[name]
        summary = summarise(name, mutants, judge([(mutant, checks) for mutant in mutants], options.workers))
        total.update({key: value for key, value in summary.items() if isinstance(value, int)})
        failed |= any(summary[key] for key in ERRORS)
        print(json.dumps(summary) if options.json else table_line(summary), flush=True)
    if not options.json:
        print(table_line({"entry": f"all, in {time.monotonic() - started:.0f} s", **total}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
