"""Write tests/corpus.txt, the text of the golden losses; kept to document how the file was made."""

from __future__ import annotations

import random
from pathlib import Path

SUBJECTS = [
    "the norm",
    "a layer",
    "the stream",
    "every head",
    "this gain",
    "one token",
    "the gradient",
    "a block",
]
VERBS = ["scales", "centres", "carries", "meets", "follows", "bounds", "leaves", "returns to"]
OBJECTS = [
    "the residual",
    "its mean",
    "the variance",
    "a unit sphere",
    "the next layer",
    "the loss",
    "its input",
]
ENDS = ["at depth", "in training", "without a bias", "before the sum", "after the sum", "at every step"]


def main() -> None:
    draw = random.Random(0)
    lines = []
    for _ in range(900):
        words = [draw.choice(SUBJECTS), draw.choice(VERBS), draw.choice(OBJECTS), draw.choice(ENDS)]
        if draw.random() < 0.3:
            words.append(str(draw.randrange(2, 200)))
        lines.append(" ".join(words).capitalize() + ".")
    Path(__file__).with_name("corpus.txt").write_text("\n".join(lines) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
