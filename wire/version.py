"""Protocol version and schema hash, compared in the handshake.

A different major version or schema hash is refused. The hash covers every message's name, fields and
types, so two builds that would misread each other never get to try.
"""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from mlxhost.wire import control, data

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0


def build() -> str:
    """The installed version of mlxhost, or "0" in a bare source tree."""
    try:
        return version("mlxhost")
    except PackageNotFoundError:
        return "0"


def _schema() -> str:
    described: list[Any] = []
    for message in (*data.MESSAGES, *control.MESSAGES):
        described.append(msgspec.json.schema(message))
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


SCHEMA = _schema()
