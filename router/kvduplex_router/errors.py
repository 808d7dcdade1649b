"""Every failure a client can be told about, with its HTTP status and OpenAI error fields.

Raised anywhere below the API layer and rendered once, in `kvduplex_router.api.reply`. Messages name what failed and
the way out, and never carry prompt text, keys or engine addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

__all__ = [
    "AuthenticationError",
    "BadGatewayError",
    "BadRequestError",
    "BodyTooLargeError",
    "ConfigError",
    "EngineAnswerError",
    "GatewayTimeoutError",
    "NotFoundError",
    "PermissionDeniedError",
    "RateLimitedError",
    "RequestTimeoutError",
    "RouterError",
    "SaturatedError",
    "StoppingError",
    "UnavailableError",
    "UnsupportedMediaTypeError",
]


class ConfigError(Exception):
    """The configuration cannot be used; one line that names file, line, key, value and what is allowed."""


class RouterError(Exception):
    """A turn ended without an answer.

    Args:
        message: What happened and what to do, fit for a client's eyes.
        param: Name of the offending request field.
        retry_after_s: Whole seconds after which a retry makes sense.
        reason: Entry of a closed list, for metrics and logs.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    reason: str = "internal"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if reason is not None:
            self.reason = reason

    def headers(self) -> Mapping[str, str]:
        """Extra response headers."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class BadRequestError(RouterError):
    """The request cannot be understood."""

    status = 400
    type = "invalid_request_error"
    reason = "bad_request"


class UnsupportedMediaTypeError(BadRequestError):
    """The body is of a type that is not read here; 400, as engines answer."""

    reason = "unsupported_media_type"


class AuthenticationError(RouterError):
    """No API key, or one that is not known."""

    status = 401
    type = "authentication_error"
    reason = "unauthenticated"


class PermissionDeniedError(RouterError):
    """The API key is known, but not for this."""

    status = 403
    type = "permission_error"
    reason = "forbidden"


class NotFoundError(RouterError):
    """No such path or model."""

    status = 404
    type = "not_found_error"
    reason = "not_found"


class RequestTimeoutError(RouterError):
    """The client sent its body too slowly."""

    status = 408
    type = "invalid_request_error"
    reason = "upload_timeout"


class BodyTooLargeError(RouterError):
    """The body is larger than the configured limit."""

    status = 413
    type = "invalid_request_error"
    reason = "body_too_large"


class RateLimitedError(RouterError):
    """The API key used up its rate."""

    status = 429
    type = "rate_limit_error"
    reason = "rate_limited"


class SaturatedError(RouterError):
    """Every usable engine is at its limit; others may come later."""

    status = 429
    type = "overloaded_error"
    reason = "saturated"


class BadGatewayError(RouterError):
    """An engine failed or answered nonsense."""

    status = 502
    type = "upstream_error"
    reason = "engine_failed"


class UnavailableError(RouterError):
    """No usable engine for a hop."""

    status = 503
    type = "service_unavailable_error"
    reason = "no_engine"


class StoppingError(UnavailableError):
    """The router was told to stop, and the turn took longer than it waits."""

    reason = "stopping"


class GatewayTimeoutError(RouterError):
    """An engine kept silent past a limit."""

    status = 504
    type = "upstream_timeout_error"
    reason = "engine_timeout"


class EngineAnswerError(RouterError):
    """An engine answered with an error that is the client's to see.

    Args:
        status: Its status.
        body: Its body when that is an error object, freed of fields the client must not see; None for one made from
            the other arguments.
        message: What it said.
        type: Its error type.
        retry_after: Its Retry-After.
    """

    reason = "engine_refused"

    def __init__(
        self,
        status: int,
        *,
        body: bytes | None,
        message: str,
        type: str = "invalid_request_error",  # noqa: A002 - the API's own word
        retry_after: str | None = None,
    ) -> None:
        super().__init__(message, retry_after_s=None if retry_after is None else int(retry_after))
        self.engine_status = status
        self.engine_type = type
        self.body = body
