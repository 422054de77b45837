"""Writing to the user's terminal or log: text made safe, and a closed or vanished output never fatal.

A fleet outlives the terminal it was started from (`mlxhost up | head`, a closed window), so a write that
fails is dropped: the models keep serving.
"""

import contextlib
import sys
import unicodedata
from typing import TextIO


def out(text: str = "") -> None:
    """One line on stdout."""
    write(sys.stdout, text + "\n")


def err(text: str) -> None:
    """One line on stderr."""
    write(sys.stderr, text + "\n")


def write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


def printable(text: str) -> str:
    """`text` without control characters: names and worker output may hold any bytes."""
    return "".join(c if unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in text)


def printable_lines(text: str) -> str:
    """`text` of several lines, each made printable."""
    return "\n".join(map(printable, text.split("\n")))


def width(text: str) -> int:
    """Terminal columns that printable `text` takes."""
    columns = 0
    for char in text:
        if not unicodedata.combining(char):
            columns += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return columns


def fit(text: str, columns: int) -> str:
    """`text` cut to at most `columns` columns, with an ellipsis when something was cut."""
    if width(text) <= columns:
        return text
    kept, used = [], 0
    for char in text:
        used += width(char)
        if used > columns - 1:
            break
        kept.append(char)
    return "".join(kept) + "…" if columns > 0 else ""


def size(count: float) -> str:
    """Bytes for people: 1.5 GB, 143 MB, 12 kB (powers of ten, as disks and networks count)."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            value = count / scale
            return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Time for people: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
