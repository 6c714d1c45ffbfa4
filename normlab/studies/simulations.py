"""How often studies decide where there is nothing to decide: results of a simulation, and the text that states them.

`scripts/prove/study_characteristics.py` simulates these shares, and fails where one is larger than here. If the rule of
the choice of learning rates changes, write its new numbers here.
"""

FALSE_DIFFERENCES = {
    # (other rates, noise): share
    (1, 1.0): 0.042,
    (2, 1.0): 0.069,
    (4, 1.0): 0.102,
    (6, 1.0): 0.132,
    (1, 3.0): 0.077,
    (2, 3.0): 0.118,
    (4, 3.0): 0.175,
    (6, 3.0): 0.202,
}
"""The share of studies that find one of two equal arms to have the lower loss, at worst over how much worse the other
rates of an arm are: by their number, and by their noise as a multiple of that of the best rate."""
MOST_FALSE_DIFFERENCES = {1.0: 0.14, 2.0: 0.18, 3.0: 0.21}
"""The largest of these shares over the number of other rates, by noise."""
MOST_AGAINST_A_SHARP_ARM = {1.0: 0.22, 2.0: 0.39, 3.0: 0.50}
"""The largest share of studies that find an arm with other rates worse than one of equal best loss without them."""
NOISES = {1.0: "equal noise", 3.0: "three times the noise"}
"""The columns of the table in the text."""

TEMPLATE = """\
The choice of learning rates adds to it. `scripts/prove/study_characteristics.py` simulates two arms with the same
losses at every rate. Each has some other rates beside its best one, all with a loss that is higher by the same 0 to 4
standard deviations over seeds, and with the noise of the best rate or three times as much. Losses are normal, and
independent over seeds and rates. The share of studies that decide for the one arm, at worst; as many decide for the
other:

{table}

An arm's loss is what six seeds of tuning find, not its best possible one: against an arm with the same best loss and no
other rate near it, an arm of this family is judged worse in at most {equal} of studies if the noise is equal, and \
in {three}
if it is three times as large.
"""


def choice_of_rates() -> str:
    """Return what the choice of learning rates does at worst, as Markdown."""
    lines = [f"| other rates | {' | '.join(NOISES.values())} |", "| --- | --- | --- |"]
    for others in sorted({others for others, _ in FALSE_DIFFERENCES}):
        shares = [f"{100 * FALSE_DIFFERENCES[others, noise]:.1f} %" for noise in NOISES]
        lines.append(f"| {others} | {' | '.join(shares)} |")
    return TEMPLATE.format(
        table="\n".join(lines),
        equal=f"{100 * MOST_AGAINST_A_SHARP_ARM[1.0]:.0f} %",
        three=f"{100 * MOST_AGAINST_A_SHARP_ARM[3.0]:.0f} %",
    )
