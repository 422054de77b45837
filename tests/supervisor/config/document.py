"""Writes the reference in docs/configuration.md from the tables of options: run it after changing one."""

import re
from pathlib import Path

from mlxhost.supervisor.config.reference import reference

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"
_MADE = re.compile(r"(<!-- made by [^\n]*-->\n)(.*)(<!-- end -->)", re.DOTALL)


def updated(text: str) -> str:
    """`text` with the reference as the code has it."""
    return _MADE.sub(lambda found: f"{found[1]}\n{reference()}\n{found[3]}", text)


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text()))
