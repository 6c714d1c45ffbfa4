"""Functions in references of config files: an option of a recipe that follows from the size of the model.

`${normlab.power:${model.width},0.5}` is the root of the width, also of one that the command sets.
"""

import math

from omegaconf import OmegaConf


def power(base: float, exponent: float) -> float:
    """Return base^exponent, and NaN where it is no real number: the check of the option that has it reports NaN."""
    try:
        # Of floats: a whole number with a large exponent would take for ever.
        result = float(base) ** float(exponent)
    except (ValueError, TypeError, ArithmeticError):
        return math.nan
    return result if isinstance(result, float) else math.nan


def divide(number: int, divisor: int) -> int:
    """Return a whole number over another one, rounded down to at least 1, and 0 where there is none."""
    try:
        return max(1, int(number) // int(divisor))
    except (ValueError, TypeError, ArithmeticError):
        return 0


def register_functions() -> None:
    """Let references call the functions of this module, under names that no other program of the process has."""
    for function in (power, divide):
        OmegaConf.register_new_resolver(f"normlab.{function.__name__}", function, replace=True)
