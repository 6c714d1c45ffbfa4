"""Requests to the Hugging Face hub with a short timeout, and errors of its libraries as messages for the user.

The libraries retry for 23 seconds, so a first request checks whether the hub answers at all. `HF_ENDPOINT`, `HF_HOME`,
`HF_HUB_OFFLINE` and `HF_TOKEN` keep their meaning. The libraries are imported inside functions, because the imports
take seconds and a cached corpus does not need them.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from normlab.errors import DataError

DEFAULT_TIMEOUT_S = 1.5
"""Seconds within which the hub must answer the first request, so that a command without a network fails within 5 s."""
TIMEOUT_VARIABLE = "NORMLAB_HUB_PATIENCE"
"""Environment variable that replaces this timeout, in seconds."""

T = TypeVar("T")


class NoAnswer(Exception):
    """The hub did not answer, or HF_HUB_OFFLINE is set; the message is the reason."""


def import_hub(override: str) -> None:
    """Import `huggingface_hub`; the import parses its environment variables.

    Raises:
        DataError: A variable that must be a number is not a number.
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


def query_hub(request: Callable[[float], T]) -> T:
    """Return the result of a request to the hub; raise NoAnswer after the timeout.

    Args:
        request: Sends the request, with a timeout in seconds.

    Raises:
        DataError: The timeout is not a positive number.
        NoAnswer: There is no network, the hub fails, or HF_HUB_OFFLINE is set.
        Exception: The hub refuses the request; the error of `huggingface_hub` is raised unchanged.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_DATASETS_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise NoAnswer("HF_HUB_OFFLINE is set")
    seconds = _timeout()
    results: list[T | Exception] = []

    def send() -> None:
        try:
            results.append(request(seconds))
        except Exception as error:
            results.append(error)

    # Name resolution can block for longer than any timeout; the thread is then abandoned.
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise NoAnswer(f"no answer from {endpoint()} within {seconds:g} s ({TIMEOUT_VARIABLE}=30 waits longer)")
    error = results[0]
    if not isinstance(error, Exception):
        return error  # the result
    if isinstance(error, OfflineModeIsEnabled):
        raise NoAnswer("HF_HUB_OFFLINE is set") from error
    status = getattr(getattr(error, "response", None), "status_code", 0)
    is_outage = status == 429 or status >= 500
    if isinstance(error, HFValidationError) or (isinstance(error, HfHubHTTPError) and not is_outage):
        raise error
    raise NoAnswer(f"no answer from {endpoint()} ({reason_of(error):.150})") from error


def hub_error(error: Exception, override: str, repository: str, alternative: str) -> DataError:
    """Convert an error of the hub's libraries to a DataError with what to do.

    Args:
        error: An error of `huggingface_hub` or `datasets`, or a `NoAnswer`.
        override: The override that names the repository.
        repository: Its path on the hub: org/name for a model, datasets/org/name for a dataset.
        alternative: Advice on other choices, which need no download.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    address = f"{endpoint()}/{repository}"
    causes = _causes(error)
    statuses = [getattr(getattr(cause, "response", None), "status_code", 0) for cause in causes]
    if isinstance(error, NoAnswer):
        name = repository.removeprefix("datasets/")
        problem = f"{error}, and {name} is neither in the local cache nor a path on this machine"
        remedy = f"connect to a network, or set HF_ENDPOINT to a mirror; {alternative}"
    elif isinstance(error, RevisionNotFoundError):
        problem, remedy = f"{address} has no such commit, branch or tag", "choose another data.revision"
    elif isinstance(error, EntryNotFoundError):
        problem, remedy = f"{address} has no tokenizer.json", "choose another model"
    elif isinstance(error, HFValidationError) or (
        isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)
    ):
        problem = f"no repository {address}, and no such path on this machine"
        remedy = f"choose another org/name, or log in if it is private (hf auth login, or HF_TOKEN); {alternative}"
    elif {401, 403} & {*statuses} or any("gated" in str(cause) for cause in causes):
        problem = f"{endpoint()} denies access"
        remedy = f"log in (hf auth login, or HF_TOKEN), and accept the terms at {address}"
    else:
        problem = f"reading from {endpoint()} failed ({reason_of(error)})"
        remedy = f"run the same command again; {alternative}"
    return DataError(f"{override}: {problem}; {remedy}")


def reason_of(error: Exception) -> str:
    """Return the class of an error and the start of its message, on one line."""
    if isinstance(error, StopIteration):  # `datasets` raises it for files without a row
        return "no rows"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message:.200}" if message else type(error).__name__


def _causes(error: Exception) -> list[BaseException]:
    """Return an error and the chain of its causes, the root cause last."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def _timeout() -> float:
    """Return the timeout in seconds: `NORMLAB_HUB_PATIENCE`, or `DEFAULT_TIMEOUT_S`.

    Raises:
        DataError: The variable is not a positive number.
    """
    text = os.environ.get(TIMEOUT_VARIABLE) or str(DEFAULT_TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise DataError(f"{TIMEOUT_VARIABLE}={text:.40}: must be a positive number of seconds; set 30, or unset it")
    return seconds
