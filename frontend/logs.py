"""Structured logs on stderr: one line an event, `time level process event key=value ...`."""

import logging
import sys
import time

from aiohttp.http_exceptions import HttpProcessingError

_logger = logging.getLogger("mlxhost.frontend")


class _LineFormatter(logging.Formatter):
    """One line whatever happens: newlines of a message or traceback are escaped."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        text = record.getMessage()
        if record.exc_info:
            text += f" traceback={self.formatException(record.exc_info)!r}"
        head = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {self._process}"
        return f"{head} {text}".replace("\n", "\\n")


def set_up(process: str) -> None:
    """Send this process's logs, and warnings of the libraries it uses, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("aiohttp.server").addFilter(_without_client_mistakes)
    _logger.setLevel(logging.INFO)


def _without_client_mistakes(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback when a client sends something that is not HTTP; one word is enough."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args, record.exc_info = f"bad_http reason={error.message!r}", (), None
    return True


def set_level(level: str) -> str:
    """Log this process's own events from `level` (debug, info, warning, error) on; the level before."""
    was = logging.getLevelName(_logger.level).lower()
    _logger.setLevel(level.upper())
    return was


def info(event: str, **fields: object) -> None:
    """Log something that happened."""
    _logger.info(_line(event, fields))


def warning(event: str, **fields: object) -> None:
    """Log something that should not have happened, but was survived."""
    _logger.warning(_line(event, fields))


def exception(event: str, **fields: object) -> None:
    """Log the exception being handled, with its traceback."""
    _logger.exception(_line(event, fields))


def _line(event: str, fields: dict[str, object]) -> str:
    return " ".join([event, *(f"{k}={_value(v)}" for k, v in fields.items())])


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    plain = text and text.isprintable() and not any(c in text for c in ' "=')
    return text if plain else repr(text)
