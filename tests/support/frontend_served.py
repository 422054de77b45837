"""What the shared host of the frontend tests serves, and what it always answers."""

from dataclasses import dataclass
from pathlib import Path

from support.frontend_harness import Host
from support.frontend_models import byte_level_tokenizer

ANSWER = "naïve café 日本語 👩‍🚀 says hello"
TOKENIZER = byte_level_tokenizer()
ANSWER_IDS: list[int] = TOKENIZER.encode(ANSWER).ids


@dataclass
class Served:
    """A running host: "demo" (also "org/demo-135m") always answers ANSWER, "echo" repeats its prompt's ids,
    so that tests can see what the worker was sent."""

    host: Host
    directory: Path

    @property
    def url(self) -> str:
        return self.host.url
