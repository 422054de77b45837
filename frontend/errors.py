"""Every way a request can fail, as a type that carries its HTTP answer.

The API in use turns an ApiError into its own body (openai.errors for the OpenAI dialect). `retryable`
False becomes `x-should-retry: false`: SDKs retry 408, 409, 429 and 5xx by themselves, which is a waste
when the same request is bound to fail again.
"""

from collections.abc import Iterable

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """A failed request. `retry_after_s` becomes the Retry-After header (whole seconds, at least 1)."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.retryable = retryable

    @property
    def details(self) -> dict[str, object]:
        """Fields of the error object beside the four that every error has."""
        return {}


class BadRequest(ApiError):
    """400: the request itself is wrong."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=400, param=param, code=code)


class UnsupportedParameter(BadRequest):
    """400: a valid field that this server cannot honour, refused rather than ignored."""

    def __init__(self, param: str, why: str = "is not supported by this server") -> None:
        super().__init__(f"`{param}` {why}; leave it out", param=param, code="unsupported_parameter")


class InvalidGrammar(BadRequest):
    """400: the worker cannot constrain the output as asked; the message says why."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="invalid_grammar")


class ContextLengthExceeded(BadRequest):
    """400: the prompt leaves no room for a single new token."""

    def __init__(self, prompt_tokens: int, max_model_len: int, param: str) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, the prompt has "
            f"{prompt_tokens}, and at least 1 must be left for the answer. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )


class InvalidKey(ApiError):
    """401: the route needs an API key, and none, or a wrong one, was shown."""

    def __init__(self, *, given: bool) -> None:
        what = "the API key is not valid" if given else "this needs an API key"
        super().__init__(
            f"{what}; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            status=401,
            code="invalid_api_key",
        )


class Forbidden(ApiError):
    """403: the key, or the way the request came, does not open this route."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=403, code="forbidden")


class NoSuchRoute(ApiError):
    """404: unknown path."""

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"no such route: {method} {path}", status=404, code="not_found")


class WrongMethod(ApiError):
    """405: the path exists, the method does not."""

    def __init__(self, method: str, path: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"{method} is not allowed on {path}; use {' or '.join(sorted(allowed))}",
            status=405,
            code="method_not_allowed",
        )


class ModelNotFound(ApiError):
    """404: no model of that name is served."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        served = ", ".join(known) or "none"
        super().__init__(
            f"The model {name!r} does not exist here. Models served: {served}.",
            status=404,
            param="model",
            code="model_not_found",
        )


class RequestIdInUse(ApiError):
    """409: a request with the same X-Request-Id is being answered. Retrying is of no use before it ends,
    which `retry_after_s` says when it is near."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(
            message,
            status=409,
            code="duplicate_request_id",
            retry_after_s=retry_after_s,
            retryable=retry_after_s is not None,
        )


class BodyTimeout(ApiError):
    """408: the client did not send its body in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the request body did not arrive within {seconds:g} s", status=408, code="request_timeout"
        )


class BodyTooLarge(ApiError):
    """413: the body passes the cap, also after decompression."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the request body is larger than {limit} bytes", status=413, code="request_too_large"
        )


class UnsupportedEncoding(ApiError):
    """415: a Content-Encoding that cannot be decoded."""

    def __init__(self, encoding: str) -> None:
        super().__init__(
            f"Content-Encoding {encoding!r} is not supported; send plain, gzip or deflate",
            status=415,
            code="unsupported_encoding",
        )


class QueueFull(ApiError):
    """429: the worker's queue is full."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(
            message,
            status=429,
            kind=RATE_LIMIT,
            code="queue_full",
            retry_after_s=retry_after_s,
            retryable=True,
        )


class InternalError(ApiError):
    """500: our fault."""

    def __init__(self, message: str, code: str = "internal_error") -> None:
        super().__init__(message, status=500, kind=SERVER_ERROR, code=code)


class Unavailable(ApiError):
    """503: this cannot be served now; retrying later may work unless `retryable` is False."""

    def __init__(
        self, message: str, code: str, *, retry_after_s: float | None = 1.0, retryable: bool = True
    ) -> None:
        super().__init__(
            message,
            status=503,
            kind=SERVER_ERROR,
            code=code,
            retry_after_s=retry_after_s,
            retryable=retryable,
        )


class ShuttingDown(Unavailable):
    """503: the whole server is stopping."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down", "shutting_down", retry_after_s=5.0)


class ModelNotReady(Unavailable):
    """503: the model is known but no replica of it can take a request in its present state."""

    def __init__(self, name: str, state: str, reason: str, retry_after_s: float, retryable: bool) -> None:
        because = f": {reason}" if reason else ""
        super().__init__(
            f"The model {name!r} is {state}{because}",
            f"model_{state}",
            retry_after_s=retry_after_s,
            retryable=retryable,
        )


class DoesNotFit(Unavailable):
    """503: the model is not in memory, and there is no room for it, however long one waits."""

    def __init__(self, name: str, reason: str, why: str) -> None:
        super().__init__(
            f"The model {name!r} cannot be loaded: {reason}",
            "model_does_not_fit",
            retry_after_s=None,
            retryable=False,
        )
        self.why = why

    @property
    def details(self) -> dict[str, object]:
        return {"why": self.why}


class ReplicaNotReady(Unavailable):
    """503: the request names one replica, and that one cannot take it now."""

    def __init__(self, name: str, index: int, state: str) -> None:
        super().__init__(
            f"Replica {index} of the model {name!r} is {state}", "replica_not_ready", retry_after_s=2.0
        )


class WorkerLost(Unavailable):
    """503, or a stream's last event: the process that ran this request is gone."""

    def __init__(self, model: str, why: str, *, tokens: int = 0, retryable: bool = True) -> None:
        after = f"; {tokens} tokens had been generated" if tokens else ""
        super().__init__(
            f"The worker of model {model!r} was lost ({why}{after})", "worker_lost", retryable=retryable
        )
        self.model = model
        self.why = why
        self.tokens = tokens

    @property
    def details(self) -> dict[str, object]:
        return {"tokens_emitted": self.tokens, "retryable": self.retryable}

    def after(self, tokens: int) -> "WorkerLost":
        """The same, saying how much of the answer had come."""
        return WorkerLost(self.model, self.why, tokens=tokens, retryable=self.retryable)


class Aborted(Unavailable):
    """503, or a stream's last event: an operator ended the request, so sending it again is not invited."""

    def __init__(self, model: str, why: str, *, tokens: int = 0) -> None:
        super().__init__(
            f"The request to {model!r} was ended: {why}", "aborted", retry_after_s=None, retryable=False
        )
        self.model = model
        self.why = why
        self.tokens = tokens

    @property
    def details(self) -> dict[str, object]:
        return {"tokens_emitted": self.tokens, "retryable": False}

    def after(self, tokens: int) -> "Aborted":
        """The same, saying how much of the answer had come."""
        return Aborted(self.model, self.why, tokens=tokens)


class CardError(InternalError):
    """500: a model's tokenizer or template files cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "bad_model_files")
