"""Parse overrides by Hydra's grammar, with one rule more (`keep_text`), and multiply them to the runs of a grid."""

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString, RangeSweep
from hydra.errors import OverrideParseException

from normlab.base.errors import ConfigError
from normlab.config import arms
from normlab.config.known_options import TOO_MANY_DIGITS, text_options
from normlab.config.override_checks import check_override
from normlab.config.override_errors import malformed

MOST_RUNS = 10_000
"""Maximum number of runs in a grid: every run is composed before the first one starts."""

RunOverrides = tuple[Override, ...]
"""The overrides of one run, each with one value."""


@lru_cache(1024)  # a grid parses the same texts again and again
def parse(text: str) -> Override:
    """Return an override of Hydra's grammar.

    Raises:
        ConfigError: The text is none.
    """
    try:
        return _parser().parse_overrides([text])[0]
    except OverrideParseException as error:
        raise malformed(text) from error
    except ValueError as error:  # Python's int() refuses more than 4,300 digits
        raise ConfigError(f"{text}: {TOO_MANY_DIGITS}") from error
    except (ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{text}: cannot be read ({' '.join(str(error).split())}); set another value") from error


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def read(text: str) -> Override:
    """Parse an override of a run, check it, and keep a text as it was typed.

    Raises:
        ConfigError: The text is no override, or would be ignored or has no meaning here.
    """
    override = parse(text)
    check_override(override)
    return keep_text(override)


def keep_text(override: Override) -> Override:
    """Return an override, with what was typed where Hydra has read a number or a boolean for an option of type text.

    Hydra reads `run.name=2024_01_05` as 20240105, `1e3` as 1000.0 and `true` as True, and OmegaConf would turn these
    values into texts again. A typed number has neither quotes nor commas, so that commas separate the values.
    """
    value, typed = override.value(), override.get_value_string().strip()
    values, texts = [value], [typed]
    if isinstance(value, ChoiceSweep) and value.simple_form:  # typed as 1,2 and not as choice(1,2)
        values, texts = value.list, typed.split(",")
    elif isinstance(value, list):
        values, texts = value, typed[1:-1].split(",")
    has_numbers = any(isinstance(element, int | float) for element in values)
    if not has_numbers or override.key_or_group not in text_options():
        return override
    if len(texts) != len(values):
        raise ConfigError(f"{override.input_line}: has a number among texts with commas; quote each text")
    # Only numbers are quoted: a text may have quotes, a function or a reference, which keep Hydra's meaning.
    for index, element in enumerate(values):
        if isinstance(element, int | float):
            texts[index] = quote(texts[index].strip())
    kept = ",".join(texts)
    if isinstance(value, list):
        kept = f"[{kept}]"
    return parse(f"{override.get_key_element()}={kept}")


def quote(text: str) -> str:
    """Return a text in quotes, escaped for Hydra's grammar and for OmegaConf's, in which ${x} is a reference."""
    without_references = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return QuotedString(without_references, Quote.single).with_quotes()


def jobs(overrides: Sequence[str]) -> Iterator[tuple[RunOverrides, list[str]]]:
    """Yield the overrides of each run of a grid, and as texts its arm and the varied overrides.

    The last option varies fastest, and the arm slowest.
    """
    texts_by_arm, shared_texts = arms.read_arms(overrides)
    shared = list(map(read, shared_texts))
    by_arm = {name: list(map(read, texts)) for name, texts in texts_by_arm.items()}
    keys_by_arm: list[set[str]] = []
    for arm in by_arm.values():
        keys_by_arm.append({override.get_key_element() for override in arm})
    for override in shared:
        if override.is_sweep_override() and all(override.get_key_element() in keys for keys in keys_by_arm):
            raise ConfigError(f"{override.input_line}: every arm sets this option too; leave one of them out")
    count = 0
    # Each arm may be small enough, and all of them together too many.
    for name, arm in by_arm.items():
        for job, varied in _jobs_of_arm([*shared, *arm]):
            count += 1
            if count > MOST_RUNS:
                raise ConfigError(f"arm={name}: the arms make a grid of more than {MOST_RUNS} runs; sweep fewer")
            if name:
                varied = [f"{arms.PREFIX}{name}", *varied]
            yield job, varied


def _jobs_of_arm(overrides: Sequence[Override]) -> Iterator[tuple[RunOverrides, list[str]]]:
    choices: dict[str, list[Override]] = {}
    for override in overrides:
        key = override.get_key_element()
        # A later override of an option replaces an earlier one. Those that all arms share come first.
        choices[key] = [override]
        if override.is_sweep_override():
            values = _swept_values(override)
            # Before the product is made: a range of a billion seeds would fill the memory.
            if len(values) * math.prod(map(len, choices.values())) > MOST_RUNS:
                raise ConfigError(f"{override.input_line}: makes a grid of more than {MOST_RUNS} runs; sweep fewer")
            if len(set(values)) < len(values):  # the warning about equal runs names the values as they were typed
                values = _typed_values(override) or values
            choices[key] = [parse(f"{key}={value}") for value in values]
    varied = {key for key, values in choices.items() if len(values) > 1}
    for job in itertools.product(*choices.values()):
        yield job, [str(override.input_line) for override in job if override.get_key_element() in varied]


def _swept_values(override: Override) -> list[str]:
    """Return the values of a sweep as texts, at most one more than a grid may have."""
    value = override.value()
    if isinstance(value, RangeSweep) and value.shuffle:
        # Hydra makes a list of all numbers before it shuffles them.
        values = list(itertools.islice(value.range(), MOST_RUNS + 1))
        if len(values) > MOST_RUNS:
            return [str(number) for number in values]
    return list(itertools.islice(override.sweep_string_iterator(), MOST_RUNS + 1))


def _typed_values(override: Override) -> list[str]:
    """Return the values of `1e-3,0.001` or `choice(1e-3,0.001)` as they were typed, so that a warning can name both.

    Return [] for another function, which may change their order, and for values that hold commas.
    """
    values, typed = override.value(), override.get_value_string()
    choice = re.fullmatch(r"choice\((.*)\)", typed)
    if choice:
        typed = choice[1]
    texts = typed.split(",")
    if isinstance(values, ChoiceSweep) and "(" not in typed and len(texts) == len(values.list):
        return [text.strip() for text in texts]
    return []
