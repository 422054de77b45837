"""Errors as the OpenAI API shows them."""

import json

import pytest

from mlxhost.frontend import errors
from mlxhost.frontend.errors import ApiError
from mlxhost.frontend.openai.errors import error_body, error_headers
from mlxhost.frontend.rejects import reject_error
from mlxhost.wire.data import Reject

INVALID, SERVER, RATE = "invalid_request_error", "server_error", "rate_limit_error"
NO = {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code", "headers"),
    [
        (errors.BadRequest("m", param="n"), 400, INVALID, "n", None, NO),
        (errors.UnsupportedParameter("tools"), 400, INVALID, "tools", "unsupported_parameter", NO),
        (errors.ContextLengthExceeded(9, 8, "prompt"), 400, INVALID, "prompt", "context_length_exceeded", NO),
        (errors.NoSuchRoute("GET", "/x"), 404, INVALID, None, "not_found", NO),
        (errors.WrongMethod("PUT", "/x", ["GET"]), 405, INVALID, None, "method_not_allowed", NO),
        (errors.ModelNotFound("m", ["a"]), 404, INVALID, "model", "model_not_found", NO),
        (errors.BodyTimeout(1), 408, INVALID, None, "request_timeout", NO),
        (errors.BodyTooLarge(5), 413, INVALID, None, "request_too_large", NO),
        (errors.UnsupportedEncoding("br"), 415, INVALID, None, "unsupported_encoding", NO),
        (errors.QueueFull("m", 1.2), 429, RATE, None, "queue_full", {"Retry-After": "2"}),
        (errors.InternalError("m"), 500, SERVER, None, "internal_error", NO),
        (errors.CardError("m"), 500, SERVER, None, "bad_model_files", NO),
        (errors.ShuttingDown(), 503, SERVER, None, "shutting_down", {"Retry-After": "5"}),
        (errors.WorkerLost("m", "w"), 503, SERVER, None, "worker_lost", {"Retry-After": "1"}),
        (
            errors.ModelNotReady("m", "failed", "r", 30, False),
            503,
            SERVER,
            None,
            "model_failed",
            {"Retry-After": "30", "x-should-retry": "false"},
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ApiError) else "",
)
def test_bodies_and_headers(
    error: ApiError, status: int, kind: str, param: str | None, code: str | None, headers: dict[str, str]
) -> None:
    """Each failure has its status, the four fields, and says whether to try again."""
    assert error.status == status
    body = json.loads(error_body(error))["error"]
    assert body == {"message": error.message, "type": kind, "param": param, "code": code} | error.details
    assert error_headers(error) == headers


@pytest.mark.parametrize(
    ("reject", "status", "code", "retry_after"),
    [
        (Reject(1, "queue_full", "5 wait", 3.0), 429, "queue_full", 3.0),
        (Reject(1, "queue_full", "5 wait"), 429, "queue_full", 1.0),
        (Reject(1, "draining", "stops", 4.0), 503, "model_draining", 4.0),
        (Reject(1, "context_length_exceeded", "9 > 8"), 400, "context_length_exceeded", None),
        (Reject(1, "unsupported", "no penalties"), 400, "unsupported_parameter", None),
        (Reject(1, "invalid_grammar", "no such rule"), 400, "invalid_grammar", None),
        (Reject(1, "invalid_request", "bad"), 400, None, None),
        (Reject(1, "duplicate_request", "again"), 409, "duplicate_request_id", 1.0),
        (Reject(1, "bad_message", "?"), 500, "bad_message", None),
        (Reject(1, "internal", "?"), 500, "internal", None),
        (Reject(1, "code of the future", "?"), 500, "code of the future", None),
    ],
    ids=lambda value: value.code if isinstance(value, Reject) else "",
)
def test_rejections_become_http(
    reject: Reject, status: int, code: str | None, retry_after: float | None
) -> None:
    """Each REJECT code has its HTTP status, and the worker's words reach the client."""
    error = reject_error("demo", reject)
    assert (error.status, error.code, error.retry_after_s) == (status, code, retry_after)
    assert reject.message in error.message


def test_a_lost_worker_says_what_came_and_whether_to_try_again() -> None:
    """Beside its four fields the error has the number of tokens that came, and whether a retry may help."""
    lost = errors.WorkerLost("m", "killed").after(7)
    body = json.loads(error_body(lost))["error"]
    assert (body["tokens_emitted"], body["retryable"], "7 tokens" in body["message"]) == (7, True, True)
    hopeless = errors.WorkerLost("m", "killed", retryable=False)
    assert json.loads(error_body(hopeless))["error"]["retryable"] is False
    assert error_headers(hopeless)["x-should-retry"] == "false"
