"""What can go wrong in a worker, as types."""


class WorkerError(Exception):
    """Base of every worker error."""


class ModelError(WorkerError):
    """The model cannot be served. `code` travels in DEAD: bad_model, unsupported_architecture,
    unsupported_quantisation, unsupported_tokenizer, cannot_write, conversion_failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RowError(WorkerError):
    """One request cannot run. `code` is a wire REJECT_* name."""

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class CallError(WorkerError):
    """A control call cannot be done. `code` travels in REPLY: invalid, not_found, unsupported, failed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class EngineFailure(WorkerError):
    """The engine cannot go on; the process should end and be started anew."""
