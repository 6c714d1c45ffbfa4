"""Requests to the Hugging Face hub with a short timeout.

The libraries retry for 23 seconds, so a first request checks whether the hub answers at all. `HF_ENDPOINT`, `HF_HOME`,
`HF_HUB_OFFLINE` and `HF_TOKEN` keep their meaning. The libraries are imported inside functions: the imports take
seconds, and a cached corpus does not need them.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from normlab.errors import DataError

DEFAULT_TIMEOUT_S = 1.5
"""Seconds until the hub must answer the first request, for one commit; a command should fail within 5 s."""
TIMEOUT_VARIABLE = "NORMLAB_HUB_PATIENCE"
"""Environment variable with another timeout, in seconds."""

T = TypeVar("T")


class NoAnswer(Exception):
    """The hub did not answer, or HF_HUB_OFFLINE is set; the message is the reason."""


def import_hub(override: str) -> None:
    """Import `huggingface_hub`, which parses its environment variables.

    Raises:
        DataError: A variable that must be a number is none.
    """
    try:
        import huggingface_hub.constants  # noqa: F401
    except ValueError as error:
        raise DataError(
            f"{override}: huggingface_hub cannot be imported ({error}); fix or unset its HF_ variable"
        ) from error


def endpoint() -> str:
    """Return the address of the hub or its mirror."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def first_timeout() -> float:
    """Return the timeout of the first request in seconds: `NORMLAB_HUB_PATIENCE`, or `DEFAULT_TIMEOUT_S`.

    Raises:
        DataError: The variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise DataError(f"{TIMEOUT_VARIABLE}={text:.40}: must be a positive number of seconds, such as 30; or unset it")
    return seconds


def query_hub(request: Callable[[float], T]) -> T:
    """Return the result of a request to the hub, within the timeout even if name resolution hangs.

    Args:
        request: Sends the request, with a timeout in seconds.

    Raises:
        DataError: The timeout is not a positive number.
        NoAnswer: No network, a failing hub, or HF_HUB_OFFLINE. A refusal of the hub is raised unchanged.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise NoAnswer("HF_HUB_OFFLINE is set")
    seconds = first_timeout()
    results: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def send() -> None:
        try:
            results.put((request(seconds), None))
        except Exception as error:
            results.put((None, error))

    # A name that does not resolve can block its thread for longer than any timeout; the thread is then abandoned.
    threading.Thread(target=send, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswer(
            f"no answer from {constants.ENDPOINT} within {seconds:g} s ({TIMEOUT_VARIABLE}=30 waits longer)"
        ) from None
    if error is None:
        return result  # pyright: ignore[reportReturnType]
    if isinstance(error, OfflineModeIsEnabled):
        raise NoAnswer("HF_HUB_OFFLINE is set") from error
    if isinstance(error, HFValidationError) or (isinstance(error, HfHubHTTPError) and not _is_outage(error)):
        raise error
    reason = " ".join(str(error).split()) or type(error).__name__
    raise NoAnswer(f"no answer from {constants.ENDPOINT} ({reason:.150})") from error


def _is_outage(error: Exception) -> bool:
    """Return whether the hub failed or limits the rate of requests, rather than refused this request."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status == 429 or status >= 500
