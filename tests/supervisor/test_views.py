"""What a user sees: text helpers, the live block, rows and the status table."""

import io
import os
from pathlib import Path
from typing import Any

import pytest

from mlxhost.supervisor.console import duration, fit, printable, size, width
from mlxhost.supervisor.liveview import LiveBlock, block
from mlxhost.supervisor.modelspec import Model as ModelSpec
from mlxhost.supervisor.report import fleet_message, status
from mlxhost.supervisor.rows import Row, progress_row, rows
from mlxhost.supervisor.state import State, new_fleet
from mlxhost.supervisor.table import status_text
from mlxhost.supervisor.view import example
from mlxhost.wire.control import Progress


def test_control_characters_never_reach_the_terminal() -> None:
    """Escape sequences, newlines and the like become visible signs."""
    assert printable("a\x1b[31mb\nc\r\x07é") == "a�[31mb�c��é"


@pytest.mark.parametrize(
    ("text", "columns", "shown"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("東京", 4, "東京"),
        ("東京", 3, "東…"),
        ("e\u0301", 1, "e\u0301"),
    ],
)
def test_text_is_cut_to_columns_not_characters(text: str, columns: int, shown: str) -> None:
    """Wide characters take two columns, combining ones none."""
    assert fit(text, columns) == shown
    assert width(shown) <= columns


def test_sizes_and_times_are_for_people() -> None:
    """Short, with units."""
    assert [size(n) for n in (5, 1_500, 98_362_432, 5e9, 5e10)] == [
        "5 B",
        "1.5 kB",
        "98 MB",
        "5.0 GB",
        "50 GB",
    ]
    assert [duration(s) for s in (0.44, 12.9, 185, 7800)] == ["0.4 s", "12 s", "3 min 5 s", "2 h 10 min"]


ROWS = [
    Row("demo", "converting", 0.5, "50 MB of 100 MB, 1.2 GB/s, 0.4 s"),
    Row("a-model-with-a-long-name/0", "starting", None, "0.4 s"),
    Row("東京", "ready", None, "in 2.0 s"),
]


@pytest.mark.parametrize("columns", [1, 5, 20, 40, 59, 60, 80, 200])
@pytest.mark.parametrize("height", [2, 3, 4, 24])
def test_the_block_fits_any_terminal(columns: int, height: int) -> None:
    """No line reaches the last column, and the block never fills the last row."""
    lines = block(ROWS, columns, height)
    assert len(lines) <= height - 1
    assert all(width(line) < max(columns, 2) for line in lines)


def test_the_block_shows_phase_bar_and_figures() -> None:
    """Aligned columns; a bar where a fraction is known."""
    lines = block(ROWS, 100, 24)
    assert "converting  ██████████░░░░░░░░░░   50 %  50 MB of 100 MB, 1.2 GB/s" in lines[0]
    assert lines[1].startswith("  a-model-with-a-long-name/0  starting    0.4 s")
    assert "█" not in block(ROWS, 50, 24)[0]
    assert block(ROWS, 100, 3)[-1] == "  and 2 more"


def test_a_redraw_goes_up_by_the_rows_that_a_narrowed_terminal_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines drawn at 80 columns take two rows at 40: both are replaced."""
    screen = [os.terminal_size((80, 24))]
    monkeypatch.setattr("shutil.get_terminal_size", lambda: screen[0])
    stream = io.StringIO()
    live = LiveBlock(stream)
    live.draw([Row("m", "loading", None, "x" * 90)])
    stream.truncate(0)
    screen[0] = os.terminal_size((40, 24))
    live.draw([Row("m", "loading", None, "y")], now=True)
    assert stream.getvalue().strip("\0").startswith("\x1b[2A\r")


@pytest.mark.parametrize(
    ("done", "total", "seconds", "detail", "fraction"),
    [
        (0, 0, 3.0, "3.0 s", None),
        (500_000_000, 1_000_000_000, 0.5, "500 MB of 1.0 GB, 1.0 GB/s, 0.5 s", 0.5),
        (5, 10, 0.0, "5 B of 10 B, 0.0 s", 0.5),
        (20, 10, 1.0, "20 B of 10 B, 20 B/s, 1.0 s", 1.0),
    ],
)
def test_progress_figures(done: int, total: int, seconds: float, detail: str, fraction: float | None) -> None:
    """Unknown totals show time only; too much is still 100 %."""
    assert progress_row("m", "loading", done, total, seconds) == Row("m", "loading", fraction, detail)


def fleet() -> Any:
    models = (ModelSpec("a", Path("/a"), 2, ("other",)), ModelSpec("b\x1b", Path("/b")))
    return new_fleet(name="f00", url="http://x:1", routing="round-robin", models=models, frontends=1)


def test_rows_name_replicas_only_where_there_are_several() -> None:
    """One replica goes by its model's name; hostile names are made printable."""
    state = fleet()
    first = next(state.replicas())
    first.state, first.progress = State.LOADING, Progress("loading", 1, 4)
    shown = list(rows(state, 10.0))
    assert [r.label for r in shown] == ["a/0", "a/1", "b�"]
    assert (shown[0].phase, shown[0].fraction) == ("loading", 0.25)


def test_status_table_lines_up_and_gives_reasons() -> None:
    """Figures to the right, a line for each failure, also without any process."""
    state = fleet()
    failed = next(state.replicas())
    failed.state, failed.reason = State.FAILED, "no such architecture"
    lines = status_text(status(state, state.started_at + 5)).splitlines()
    assert lines[0] == "fleet f00 on http://x:1, up 5.0 s"
    assert len({width(line) for line in lines[2:7]}) == 1
    assert lines[-1] == "a/0 failed: no such architecture"


def test_fleet_message_lists_frontends_once_they_can_be_dialled() -> None:
    """No endpoint, no entry; every replica is listed with its state and why it does not serve."""
    state = fleet()
    assert fleet_message(state).frontends == []
    state.frontends[0].endpoint, state.frontends[0].epoch = "ipc:///d", 3
    first = next(state.replicas())
    first.state, first.reason = State.FAILED, "gone"
    message = fleet_message(state)
    assert [(f.slot, f.epoch, f.endpoint) for f in message.frontends] == [("frontend/0", 3, "ipc:///d")]
    assert [r.state for r in message.models[0].replicas] == ["failed", "absent"]
    assert (message.models[0].reason, message.models[0].aliases) == ("gone", ["other"])


def test_the_example_request_survives_a_quote_in_the_name() -> None:
    """What is printed can be pasted into a shell."""
    assert "it'\\''s" in example("http://x:1", "it's")
