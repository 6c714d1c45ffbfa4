"""The arms of a sweep: named sets of overrides, which multiply with its grid.

`arm=[pre: placement=pre, peri: placement=peri init=gpt2]`
"""

import re
import shlex
from collections.abc import Sequence

from normlab.errors import ConfigError

PREFIX = "arm="
_NAME = re.compile(r"(?:^|,)\s*([\w.+-]+):(?=\s|,|$)")
"""An arm's name with its colon, at the start of a list or after a comma."""


def read_arms(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the overrides of each arm by its name, and the overrides that all arms share.

    Without `arm=` there is one arm, of no name and no overrides. An arm's overrides may have several values, which are
    a grid of that arm, such as its own learning rates. They follow the shared ones and so replace them.

    Raises:
        ConfigError: There are two lists, a list is not one of arms, or two arms have one name.
    """
    lists = [text for text in overrides if text.startswith(PREFIX)]
    shared = [text for text in overrides if not text.startswith(PREFIX)]
    if not lists:
        return {"": []}, shared
    if len(lists) > 1:
        raise ConfigError(f"{lists[1]}: a sweep has one list of arms; write all arms in {lists[0]}")
    body = lists[0].removeprefix(PREFIX).strip()
    names = list(_NAME.finditer(body[1:-1])) if body[:1] + body[-1:] == "[]" else []
    if not names or names[0].start() > 0:
        raise ConfigError(
            f"{lists[0]}: not a list of arms; write 'arm=[pre: placement=pre, peri: placement=peri init=gpt2]'"
        )
    arms: dict[str, list[str]] = {}
    for name, end in zip(names, [*(each.start() for each in names[1:]), len(body) - 2], strict=True):
        if name[1] in arms:
            raise ConfigError(f"{lists[0]}: two arms have the name {name[1]}; give each its own")
        try:
            arms[name[1]] = shlex.split(body[1:-1][name.end() : end])
        except ValueError as error:
            raise ConfigError(f"{lists[0]}: {error}; close each quote") from error
    return arms, shared
