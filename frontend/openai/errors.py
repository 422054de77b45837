"""ApiError -> the OpenAI error body and headers."""

import math

import msgspec

from mlxhost.frontend.errors import ApiError


def error_object(error: ApiError) -> dict[str, object]:
    """The value of `error` in a body or a stream's last event."""
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return body | error.details


def error_body(error: ApiError) -> bytes:
    """JSON of a failed request."""
    return msgspec.json.encode({"error": error_object(error)})


def error_headers(error: ApiError) -> dict[str, str]:
    """Whether, and after how many seconds, the client should try again."""
    headers = {} if error.retryable else {"x-should-retry": "false"}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return headers
