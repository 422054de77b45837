"""The start-up view on a terminal: a block of lines that is redrawn in place, with other output above it."""

import shutil
import time
from collections.abc import Sequence
from typing import TextIO

from mlxhost.supervisor.console import fit, width, write
from mlxhost.supervisor.rows import Row

REDRAW_SECONDS = 0.1
BAR_COLUMNS = 20
# A terminal narrower than this shows no bar, only the figures.
NARROW_COLUMNS = 60


class LiveBlock:
    """Lines at the bottom of the terminal. What was drawn is remembered by width, because a terminal that
    got narrower has wrapped it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn: list[int] = []
        self._drawn_at = 0.0

    def draw(self, rows: Sequence[Row], *, now: bool = False) -> None:
        """Replace the block; too soon after the last time only when `now`."""
        clock = time.monotonic()
        if not now and clock - self._drawn_at < REDRAW_SECONDS:
            return
        columns, height = self._size()
        self._replace(block(rows, columns, height), columns)
        self._drawn_at = clock

    def finish(self, rows: Sequence[Row]) -> None:
        """Write the block once more, in full and to stay."""
        columns, _ = self._size()
        self._replace(block(rows, columns, len(rows) + 1), columns)
        self._drawn = []

    def clear(self) -> None:
        """Take the block away, so that ordinary lines can be written."""
        if self._drawn:
            self._replace([], self._size()[0])

    def _replace(self, lines: Sequence[str], columns: int) -> None:
        """Line by line: some terminals keep what "erase to the end of the screen" erases as history."""
        up = sum(max(1, -(-drawn // columns)) for drawn in self._drawn)
        left = max(0, up - len(lines))
        text = f"\x1b[{up}A\r" if up else ""
        text += "".join(f"{line}\x1b[K\n" for line in lines)
        text += "\x1b[K\n" * left + (f"\x1b[{left}A" if left else "")
        write(self._stream, text)
        self._drawn = [width(line) for line in lines]

    def _size(self) -> tuple[int, int]:
        columns, height = shutil.get_terminal_size()
        return max(1, columns), max(2, height)


def block(rows: Sequence[Row], columns: int, height: int) -> list[str]:
    """The lines for `rows`, none wider than the terminal and not more than fit on it."""
    room = height - 1
    shown, hidden = list(rows), 0
    if len(shown) > room:
        hidden = len(shown) - max(0, room - 1)
        shown = shown[: max(0, room - 1)]
    label_columns = min(max((width(r.label) for r in shown), default=0), max(8, columns // 3))
    phase_columns = max((width(r.phase) for r in shown), default=0)
    lines = [_line(row, label_columns, phase_columns, columns) for row in shown]
    if hidden:
        lines.append(f"  and {hidden} more")
    # The last column stays free: some terminals wrap as soon as it is written.
    return [fit(line, columns - 1) for line in lines]


def _line(row: Row, label_columns: int, phase_columns: int, columns: int) -> str:
    label = fit(row.label, label_columns)
    line = f"  {label}{' ' * (label_columns - width(label))}  "
    line += row.phase + " " * (phase_columns - width(row.phase))
    if row.fraction is not None:
        if columns >= NARROW_COLUMNS:
            full = round(BAR_COLUMNS * row.fraction)
            line += f"  {'█' * full}{'░' * (BAR_COLUMNS - full)}"
        line += f"  {100 * row.fraction:3.0f} %"
    return f"{line}  {row.detail}".rstrip()
