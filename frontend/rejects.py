"""REJECT -> the error that the HTTP client sees."""

from mlxhost.frontend.errors import (
    ApiError,
    BadRequest,
    InternalError,
    InvalidGrammar,
    QueueFull,
    RequestIdInUse,
    Unavailable,
)
from mlxhost.wire import data

_BAD_REQUESTS = {
    data.REJECT_CONTEXT: "context_length_exceeded",
    data.REJECT_UNSUPPORTED: "unsupported_parameter",
    data.REJECT_INVALID: None,
}


def reject_error(model: str, reject: data.Reject) -> ApiError:
    """The typed error for a row that the worker refused."""
    if reject.code == data.REJECT_QUEUE_FULL:
        return QueueFull(f"The model {model!r} is busy: {reject.message}", reject.retry_after_s or 1.0)
    if reject.code == data.REJECT_DRAINING:
        return Unavailable(
            f"The model {model!r} is draining: {reject.message}",
            "model_draining",
            retry_after_s=reject.retry_after_s or 10.0,
        )
    if reject.code == data.REJECT_SLEEPING:
        return Unavailable(
            f"The model {model!r} is sleeping: {reject.message}",
            "model_sleeping",
            retry_after_s=reject.retry_after_s or 30.0,
        )
    if reject.code == data.REJECT_DUPLICATE:  # the request that had the id before is not quite over there
        return RequestIdInUse(reject.message, retry_after_s=1.0)
    if reject.code == data.REJECT_GRAMMAR:
        return InvalidGrammar(reject.message)
    if reject.code in _BAD_REQUESTS:
        return BadRequest(reject.message, code=_BAD_REQUESTS[reject.code])
    return InternalError(f"The worker refused the request ({reject.code}): {reject.message}", reject.code)
