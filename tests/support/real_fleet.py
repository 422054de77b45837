"""A real fleet, nothing replaced: the real command line, frontend and workers."""

import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI
from support.supervisor_up import Up

WORKER = [sys.executable, "-I", "-m", "mlxhost.worker"]


def fleet(home: Path, models: str, *options: str, **settings: Any) -> Up:
    """`mlxhost up` for `models` on a free port."""
    return Up(home, models, *options, worker_command=WORKER, **settings)


def client(up: Up) -> OpenAI:
    return OpenAI(base_url=up.url(60) + "/v1", api_key="none", max_retries=0, timeout=180)


def async_client(up: Up) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=up.url(60) + "/v1", api_key="none", max_retries=0, timeout=180)
