"""The baseline of a comparison: the levels that `--against` names."""

from collections.abc import Sequence

from normlab.analysis.cells import Cell
from normlab.analysis.conditions import parse_conditions
from normlab.analysis.settings import format_setting, sort_key
from normlab.base.errors import ConfigError, unknown
from normlab.catalogue import entries as catalogue
from normlab.config.option_names import meanings
from normlab.store.record import Setting


def baseline_levels(cells: Sequence[Cell], by: Sequence[str], against: str) -> dict[str, Setting]:
    """Return the levels that `--against` names, by option.

    Raises:
        ConfigError: An option is not in `by`, or no cell has such a level.
    """
    levels: dict[str, Setting] = {}
    for condition in parse_conditions([against], "--against", signs=("=",)):
        # A baseline is a cell, and only the options of --by tell cells apart.
        options = meanings(condition.option, by)
        if len(options) != 1:
            raise ConfigError(f"--against {against}: {condition.option} is not in --by {','.join(by)}; add it there")
        [option] = options
        known = sorted({cell.levels[option] for cell in cells}, key=sort_key)
        matches: list[Setting] = []
        for level in known:
            if condition.accepts(level):
                matches.append(level)
        if not matches:
            texts = map(format_setting, known)
            titles = catalogue.titles(option)
            raise ConfigError(f"--against {against}: " + unknown(option, condition.value, texts, titles=titles))
        if option in levels:
            raise ConfigError(f"--against {against}: names {option} twice; a baseline has one level of each option")
        levels[option] = matches[0]
    return levels
