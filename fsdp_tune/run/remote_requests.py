"""Requests to a store: repeated after transient errors, and why others would fail again."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar
from urllib.error import HTTPError, URLError

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.hub import causes_of
from fsdp_tune.core.library_errors import first_line

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before a request is repeated."""

T = TypeVar("T")
Refusal = Literal["absent", "credentials", "clock", "full", "package", "other"]

_NO_CREDENTIALS = {
    *(
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "ProfileNotFound",
    ),
    *(
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
        "NoAuthTokenError",
        "UnauthorizedSSOTokenError",
    ),
}
"""Names of exceptions of botocore, google-auth and azure."""
_SKEWED = re.compile(
    r"RequestTimeTooSkewed|request time and the (current|server) time is too large", re.IGNORECASE
)


class UrlError(OSError):
    """A file at a URL cannot be read or written; the message is the reason."""

    def __init__(self, message: str, refusal: Refusal | None = None) -> None:
        """`refusal`: why repeating does not help; None for an error that may pass."""
        super().__init__(message)
        self.refusal: Refusal | None = refusal


class ContentError(Exception):
    """Bytes are not those that were expected; the message is a sentence about the file."""


class NoConditionalWritesError(Exception):
    """A store does not know the condition that there is no such file."""


def retried(request: Callable[[], T], waits: Sequence[float] | None = None) -> T:
    """Return the result of `request`, repeated after transient errors. Raises: UrlError."""
    pauses = WAITS if waits is None else waits
    for wait in (*pauses, None):
        try:
            return request()
        except (FsdpTuneError, ContentError):
            raise
        except Exception as error:
            refusal = refusal_of(error)
            if refusal is not None:
                raise UrlError(reason_of(error), refusal) from error
            if wait is None:
                raise UrlError(f"{reason_of(error)} ({len(pauses) + 1} attempts)") from error
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def refusal_of(error: Exception) -> Refusal | None:
    """Return why a request would fail again; None for an error that may pass."""
    causes = causes_of(error)
    if any(_SKEWED.search(str(cause)) or _code_of(cause) == "RequestTimeTooSkewed" for cause in causes):
        return "clock"
    if isinstance(error, UrlError):
        return error.refusal
    if {type(cause).__name__ for cause in causes} & _NO_CREDENTIALS or isinstance(error, PermissionError):
        return "credentials"
    if isinstance(error, FileNotFoundError):
        return "absent"
    if isinstance(error, ImportError):
        return "package"
    if _has_invalid_parameter(error):
        return "other"
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    if (status := _status_of(error)) is not None:
        return None if status in (408, 429) or status >= 500 else "other"
    return "other" if isinstance(error, IsADirectoryError | TypeError | ValueError) else None


def _has_invalid_parameter(error: BaseException) -> bool:
    """Return whether botocore refused to send a request, such as for the name of a bucket."""
    return type(error).__name__ == "ParamValidationError"


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a response of gcsfs, adlfs or urllib."""
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _code_of(error: BaseException) -> str | None:
    """Return the error code of a response of botocore."""
    response: object = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code")) if isinstance(response, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def is_already_there(error: Exception) -> bool:
    """Return whether a conditional write was refused because there is a file."""
    codes = {_code_of(cause) for cause in causes_of(error)}
    return isinstance(error, FileExistsError) or not codes.isdisjoint({"PreconditionFailed", "412"})


def is_beyond_the_end(error: Exception) -> bool:
    """Return whether a store refused a range because the file is shorter."""
    causes = causes_of(error)
    return any(_code_of(cause) in ("InvalidRange", "416") or _status_of(cause) == 416 for cause in causes)


def has_no_conditions(error: Exception) -> bool:
    """Return whether a store does not know conditional writes."""
    codes = {_code_of(cause) for cause in causes_of(error)}
    return getattr(error, "errno", None) == errno.ENOSYS or not codes.isdisjoint({"NotImplemented", "501"})


def reason_of(error: Exception) -> str:
    """Return the reason of a failed request, for a message."""
    if isinstance(error, UrlError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if _has_invalid_parameter(error):  # the first line has no reason
        return " ".join(str(error).split())
    if isinstance(error, HTTPError):
        return f"the server responds with {error.code} {error.reason}"
    return str(error.reason) if isinstance(error, URLError) else first_line(error)
