"""How the Hugging Face hub is asked, and how long it is waited for.

Whether the hub answers is asked first, with little patience: its libraries wait and try again for 23 seconds.

`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE`, `HF_TOKEN` mean what they mean to the libraries, which are imported
inside functions: they take seconds, and a corpus that is in our cache does not need them.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from normlab.errors import DataError

ANSWER_S = 1.5
"""Seconds that the hub has for its first answer, a commit and no more; starting the command takes most of 5."""
PATIENCE = "NORMLAB_HUB_PATIENCE"
"""The environment variable that gives it longer."""

T = TypeVar("T")


class NoAnswer(Exception):
    """The hub did not answer, or was not to be asked; its words say why."""


@contextlib.contextmanager
def less_patient() -> Iterator[None]:
    """Let a stream that breaks off be tried again twice, not for half an hour.

    Each time `huggingface_hub` has already tried six times, over 23 seconds.
    """
    from datasets import config

    names = ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES")
    before = {name: getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, 2)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def import_hub(said: str) -> None:
    """Import Hugging Face's library.

    Raises:
        DataError: It reads a number from one of its variables, and there is none.
    """
    try:
        import huggingface_hub.constants  # noqa: F401
    except ValueError as error:
        raise DataError(
            f"{said}: huggingface_hub cannot be imported ({error}); mend or unset its HF_ variable"
        ) from error


def endpoint() -> str:
    """The hub's address, or its mirror's."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def patience() -> float:
    """Seconds that the hub has for its first answer: `NORMLAB_HUB_PATIENCE`, or `ANSWER_S`.

    Raises:
        DataError: The variable is no positive number.
    """
    said = os.environ.get(PATIENCE) or str(ANSWER_S)
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise DataError(f"{PATIENCE}={said:.40}: must be a positive number of seconds, such as 30; or unset it")
    return seconds


def answer(ask: Callable[[float], T]) -> T:
    """What the hub says to a question, within its time, whatever it hangs on: its name, or its silence.

    Args:
        ask: Puts the question, given the seconds that it may take.

    Raises:
        DataError: That time is set to no positive number.
        NoAnswer: No network, a hub in trouble, or HF_HUB_OFFLINE. What the hub refuses is raised as it is.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise NoAnswer("HF_HUB_OFFLINE is set")
    seconds = patience()
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def wait() -> None:
        try:
            answers.put((ask(seconds), None))
        except Exception as error:
            answers.put((None, error))

    # A name that does not resolve can hold its thread for longer than any timeout; it is left to itself then.
    threading.Thread(target=wait, daemon=True).start()
    try:
        said, error = answers.get(timeout=seconds)
    except queue.Empty:
        longer = f"within {seconds:g} s ({PATIENCE}=30 waits longer)"
        raise NoAnswer(f"no answer from {constants.ENDPOINT} {longer}") from None
    if error is None:
        return said  # pyright: ignore[reportReturnType]
    if isinstance(error, OfflineModeIsEnabled):
        raise NoAnswer("HF_HUB_OFFLINE is set") from error
    if isinstance(error, HFValidationError) or (isinstance(error, HfHubHTTPError) and not _is_trouble(error)):
        raise error
    reason = " ".join(str(error).split()) or type(error).__name__
    raise NoAnswer(f"no answer from {constants.ENDPOINT} ({reason:.150})") from error


def _is_trouble(error: Exception) -> bool:
    """Whether an error is the hub's state, not its answer: too many requests, or a failure of its own."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status == 429 or status >= 500
