"""What the cells of a table differ in besides the options that define them: warnings below the table.

What differs between the runs of one cell is a warning of the cell (`Cell.warnings`).
"""

from collections.abc import Iterable, Sequence

from normlab.analysis.cells import Cell, runs_of
from normlab.analysis.comparability import differences, names_of, obstacles
from normlab.analysis.factors import level_label
from normlab.analysis.phrases import name_some
from normlab.analysis.settings import LR, NUMERICS, RESOLVED, format_setting, is_config_option, sort_key
from normlab.base.errors import counted
from normlab.store.record import Setting

LONGEST_NAMES = 300
"""The most characters of the names of cells beside the values of one setting; more would hide the values."""


def resolved_differences(cells: Sequence[Cell]) -> list[str]:
    """Return a line that names the resolved settings in which cells differ, with the cells of each value, or no line.

    Options that define the cells are left out, and so are runs whose record lacks a setting.
    """
    parts: list[str] = []
    for name, read in RESOLVED.items():
        if any(name in cell.by for cell in cells):
            continue
        # A cell may mix values, such as two numbers of threads: then the mixture is its value.
        cells_of: dict[tuple[str, ...], list[Cell]] = {}
        for cell in cells:
            values = set(map(read, cell.runs)) - {None}
            if values:
                texts = tuple(map(format_setting, sorted(values, key=sort_key)))
                cells_of.setdefault(texts, []).append(cell)
        if len(cells_of) > 1:
            names = _shortest_names(list(cells_of.values()))
            listed: list[str] = []
            for texts, cells_with_value in zip(cells_of, names, strict=True):
                listed.append(f"{' and '.join(texts)} ({cells_with_value})")
            parts.append(f"{name}: {', '.join(listed)}")
    if not parts:
        return []
    return [f"the cells also differ in {'; '.join(parts)}"]


def _shortest_names(groups: Sequence[Sequence[Cell]]) -> list[str]:
    """Return a name of each group of cells: the levels of one option if it separates the groups, else the cells.

    Many cells, or cells with long names, are counted.
    """
    for index, option in enumerate(groups[0][0].by):
        levels_of_groups: list[list[Setting]] = []
        for group in groups:
            levels_of_groups.append(list(dict.fromkeys(cell.key[index] for cell in group)))
        # The option separates the groups if no two of them share a level.
        different = set[Setting]().union(*levels_of_groups)
        if len(different) == sum(map(len, levels_of_groups)):
            return [_level_names(option, levels) for levels in levels_of_groups]
    names = [name_some([cell.label for cell in group]) for group in groups]
    if sum(map(len, names)) > LONGEST_NAMES:
        return [counted(len(group), "cell") for group in groups]
    return names


def _level_names(option: str, levels: Iterable[Setting]) -> str:
    return name_some([level_label(option, level) for level in levels])


def table_warnings(cells: Sequence[Cell], by: Sequence[str]) -> list[str]:
    """Return why the cells of a table are not comparable, except mixtures in a cell and `resolved_differences`."""
    # What differs within a cell is a warning of the cell, and resolved settings have their own line below a table.
    reported: list[str] = []
    for name in RESOLVED:
        reported += name, f"{NUMERICS}{name})"
    for cell in cells:
        reported += names_of(differences(cell.runs))
    warnings: list[str] = []
    different = differences(runs_of(cells), [*by, *reported])
    if different:
        warnings.append(f"the cells differ in more than {', '.join(by)}: {'; '.join(map(str, different))}")
    for warning in (_obstacle_warning(cells, by), _rates_warning(cells, by)):
        if warning:
            warnings.append(warning)
    return warnings


def _obstacle_warning(cells: Sequence[Cell], by: Sequence[str]) -> str:
    """Return a warning that cells are not ranked because they differ in compute or data, or an empty text."""
    apart = names_of(obstacles([cell.runs for cell in cells], by))
    if not apart:
        return ""
    line = f"cells that differ in {' or '.join(apart)} are neither ranked nor tested against each other"
    options = list(filter(is_config_option, apart))
    if options:
        line += f"; --by {','.join([*by, *options])} compares cells with equal values"
    if "corpus" in apart:
        line += "; summarize each corpus by itself"
    return line


def _rates_warning(cells: Sequence[Cell], by: Sequence[str]) -> str:
    """Return a warning that the cells have different learning rates, or an empty text."""
    grids: set[tuple[float, ...]] = set()
    for cell in cells:
        if cell.losses:
            grids.add(tuple(cell.losses))
    if LR in by or len(grids) <= 1:
        return ""
    # A search gives each cell its own rates.
    if all(LR in run.design.searched for run in runs_of(cells)):
        return ""
    if all(len(grid) == 1 for grid in grids):
        return "each cell has one learning rate, not the same one: compare them only if it was tuned for each"
    # A cell with more learning rates has more chances of a low loss.
    return "the cells have different learning rates: their best losses are not comparable"
