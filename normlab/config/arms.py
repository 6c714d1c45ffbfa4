"""The arms of a sweep: named sets of overrides, which multiply with its grid.

`arm=[pre: placement=pre, peri: placement=peri init=gpt2]`
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from normlab.base.errors import ConfigError

PREFIX = "arm="
RECIPE = "recipe="
EXAMPLE = "'arm=[pre: placement=pre, peri: placement=peri init=gpt2]'"
_NAME = re.compile(r"\s*([\w.+-]+):(?=\s|$)")
"""An arm's name with its colon."""
_RECIPES = re.compile(RECIPE + r"[\w-]+(\s*,\s*[\w-]+)+")
_PAIRS = {"[": "]", "{": "}", "(": ")"}


@dataclass(frozen=True, slots=True)
class SweepDesign:
    """What the command of a sweep varies on purpose: the options that it sets, without their values.

    Options are named as in the command: `model.width`, or `model` for a preset. A reader of several sweeps needs them
    to distinguish what arms differ in on purpose from what differs only between the sweeps.
    """

    shared: list[str] = field(default_factory=list)
    """The options that it sets for all arms."""
    arms: dict[str, list[str]] = field(default_factory=dict)
    """The options that each arm sets, by its name."""
    searched: list[str] = field(default_factory=list)
    """The options that a search has tuned in each cell."""
    baseline: str = ""
    """The condition of `seed=until(...)`, such as `arm=pre`; empty without one."""

    def extended_by(self, new: SweepDesign) -> SweepDesign:
        """Return the design of a sweep to which a command with a new design has added runs."""
        shared = list(dict.fromkeys([*self.shared, *new.shared]))
        return replace(new, shared=shared, arms=self.arms | new.arms)


NO_DESIGN = SweepDesign()
"""The design of runs that were selected without a sweep."""


def design_of(overrides: Sequence[str]) -> SweepDesign:
    """Return the design of a sweep by its overrides, without searches.

    Raises:
        ConfigError: As `read_arms`.
    """
    by_arm, shared = read_arms(overrides)
    arms = {name: _options_set_by(texts) for name, texts in by_arm.items() if name}
    return SweepDesign(_options_set_by(shared), arms)


def _options_set_by(overrides: Iterable[str]) -> list[str]:
    options: list[str] = []
    for text in overrides:
        option = text.lstrip("+").partition("=")[0]
        # Where a sweep runs does not change what it varies.
        if option not in options and not option.startswith("sweep."):
            options.append(option)
    return options


def read_arms(overrides: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the overrides of each arm by its name, and the overrides that all arms share.

    An arm's overrides may have several values, which are a grid of that arm, such as its own learning rates. They
    follow the shared ones and so replace them. Without `arm=` each of several recipes is an arm of its name, since a
    recipe sets many options; else there is one arm, of no name and no overrides.

    Raises:
        ConfigError: There are two lists, a list is not one of arms or has a comma too many, two arms have one name, an
            arm has an option of the sweep or plugins, or sets an option twice.
    """
    lists = [text for text in overrides if text.startswith(PREFIX)]
    shared = [text for text in overrides if not text.startswith(PREFIX)]
    if not lists:
        return _arms_of_recipes(shared)
    if len(lists) > 1:
        raise ConfigError(f"{lists[1]}: a sweep has one list of arms; write all arms in {lists[0]}")
    arms: dict[str, list[str]] = {}
    for name, body in _texts_of_arms(lists[0]).items():
        arms[name] = [text for text in _split(body, " ") if text]
        _check_arm(name, arms[name])
    return arms, shared


def _arms_of_recipes(overrides: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return an arm for each of several recipes, and the other overrides; without recipes one arm without a name."""
    for text in overrides:
        if _RECIPES.fullmatch(text):
            names = [name.strip() for name in text.removeprefix(RECIPE).split(",")]
            overrides.remove(text)
            return {name: [RECIPE + name] for name in names}, overrides
    return {"": []}, overrides


def _texts_of_arms(text: str) -> dict[str, str]:
    """Return the overrides of each arm of a list `arm=[NAME: OVERRIDES, ...]` as one text, by the arm's name.

    Raises:
        ConfigError: It is no such list, has a comma too many, or two arms of one name.
    """
    body = text.removeprefix(PREFIX).strip()
    is_list = body.startswith("[") and body.endswith("]")
    parts = list(_split(body[1:-1], ",")) if is_list else [""]
    texts: dict[str, str] = {}
    last = ""
    for index, part in enumerate(parts):
        if len(parts) > 1 and not part.strip():
            raise ConfigError(f"{text}: {_comma_too_many(parts, index)}")
        name = _NAME.match(part)
        if name:
            last = name[1]
            if last in texts:
                raise ConfigError(f"{text}: two arms have the name {last}; give each its own")
            texts[last] = part[name.end() :]
        elif texts:
            # The comma was one between several values of the arm, as in optim.lr=1e-3,3e-3.
            texts[last] += f",{part}"
        else:
            raise ConfigError(f"{text}: not a list of arms; write {EXAMPLE}")
    return texts


def _comma_too_many(parts: Sequence[str], index: int) -> str:
    """Return which comma to leave out of a list of arms, of which the part with this index is blank."""
    if not index:
        return "has a comma before the first arm; leave it out"
    if index == len(parts) - 1:
        return "has a comma after the last arm; leave it out"
    return f"has nothing between two commas after {parts[index - 1].strip()!r}; leave one comma out"


def _check_arm(name: str, overrides: Sequence[str]) -> None:
    """Reject overrides that are no arm's, and an option that one arm sets twice."""
    first: dict[str, str] = {}
    for text in overrides:
        if _NAME.fullmatch(text):
            raise ConfigError(f"arm {name}: there is no comma before the next arm; write ', {text}'")
        if "=" not in text and not text.startswith("~"):
            if text == ":":
                raise ConfigError(f"arm {name}: ':' follows no name; write ', NAME: OPTION=VALUE'")
            raise ConfigError(
                f"arm {name}: {text!r} has no value and no colon; write '{text}=VALUE' or ', {text}: OPTION=VALUE'"
            )
        if text.lstrip("+-").startswith(("sweep.", "plugins=")):
            raise ConfigError(f"{text}: is for all arms; write it outside of arm=[...]")
        option = text.lstrip("+").partition("=")[0]
        if option in first:
            raise ConfigError(f"arm {name}: sets {option} twice, {first[option]} and {text}; leave one of them out")
        first[option] = text


def _split(text: str, separator: str) -> Iterator[str]:
    """Yield the parts of a text between separators that are in no quotes and no brackets."""
    start, quote, closing = 0, "", list[str]()
    index = 0
    while index < len(text):
        character = text[index]
        if character == "\\":
            # The next character is escaped: it begins or ends nothing.
            index += 1
        elif quote:
            if character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == separator and not closing:
            yield text[start:index]
            start = index + 1
        index += 1
    yield text[start:]
