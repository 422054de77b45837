"""The parts behind the control operations: modes, sessions, settings, the profile's figures."""

import itertools
import json
import time
from pathlib import Path

import pytest
from support.engine_driver import Driver

from mlxhost.wire.control import Ctl, Lease, Reply, WorkerConfig
from mlxhost.worker import selftest, sessions
from mlxhost.worker.backend import detect
from mlxhost.worker.errors import CallError
from mlxhost.worker.events import Status
from mlxhost.worker.modes import Hold, Holds, Mode
from mlxhost.worker.operations import Operations
from mlxhost.worker.profile import Profile
from mlxhost.worker.residence import Residence
from mlxhost.worker.sessions import Sessions


@pytest.mark.parametrize(
    ("hold", "asleep", "reloading", "awaiting", "running", "mode"),
    [
        (Hold.NONE, False, False, 0, 0, Mode.RUNNING),
        (Hold.NONE, False, False, 0, 3, Mode.RUNNING),
        (Hold.NONE, False, False, 1, 3, Mode.PAUSING),
        (Hold.NONE, False, False, 1, 0, Mode.RUNNING),
        (Hold.QUIET, False, False, 0, 3, Mode.PAUSING),
        (Hold.QUIET, False, False, 0, 0, Mode.PAUSED),
        (Hold.FREEZE, False, False, 0, 3, Mode.PAUSED),
        (Hold.FREEZE, False, False, 1, 3, Mode.PAUSED),
        (Hold.NONE, True, False, 0, 0, Mode.SLEEPING),
        (Hold.QUIET, True, False, 0, 0, Mode.SLEEPING),
        (Hold.NONE, True, True, 0, 0, Mode.RELOADING),
        (Hold.QUIET, False, True, 0, 0, Mode.RELOADING),
    ],
)
def test_mode_follows_from_what_holds_the_engine(
    hold: Hold, asleep: bool, reloading: bool, awaiting: int, running: int, mode: Mode
) -> None:
    """One mode for every combination, the strongest reason first."""
    holds = Holds()
    holds.hold, holds.asleep, holds.reloading, holds.awaiting_quiet = hold, asleep, reloading, awaiting
    assert holds.mode(running) is mode


@pytest.mark.parametrize(
    ("mode", "running", "waiting", "busy"),
    [
        (Mode.RUNNING, 0, 0, False),
        (Mode.RUNNING, 1, 0, True),
        (Mode.RUNNING, 0, 1, True),
        (Mode.PAUSING, 1, 1, True),
        (Mode.PAUSED, 1, 1, False),
        (Mode.RELOADING, 0, 1, False),
        (Mode.SLEEPING, 0, 0, False),
    ],
)
def test_a_worker_that_stands_still_on_purpose_is_not_busy(
    mode: Mode, running: int, waiting: int, busy: bool
) -> None:
    """Or its tick, which does not move, would look like a hang."""
    assert Status(running=running, waiting=waiting, mode=mode).busy is busy


def test_sessions_are_bounded_and_running_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used that runs nothing makes room."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    book = Sessions()
    book.started("busy")
    for name in ("a", "b", "c"):
        book.open(name)
    assert [s["id"] for s in book.listed(10)] == ["c", "b", "busy"]
    assert book.forgotten == 1
    book.ended("a", 1, 1)  # forgotten meanwhile: nothing to count


def test_a_session_id_too_long_is_refused() -> None:
    """A client cannot fill memory through ids."""
    with pytest.raises(CallError, match="256 bytes"):
        Sessions().open("x" * 257)


def test_no_setting_makes_rows_share_steps_that_their_model_cannot_share(
    tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that the self-test found not to batch runs one row at a time, whatever max_rows is set to."""
    monkeypatch.setitem(selftest._TOLERANCE, "float32", -1.0)
    config = WorkerConfig("m", str(tiny_models["llama"]), dtype="float32")
    residence = Residence(config, detect(), Lease(), lambda _: None)
    loaded = residence.load().loaded
    assert residence.capacity(16).max_rows == 1
    driver = Driver(loaded.model, loaded.vocab_size, max_rows=1)
    operations = Operations(
        driver.engine, residence, driver, max_queued=9, open_for=lambda _: None, directory=tmp_path, label="m"
    )
    operations.call(Ctl("1", "set_state", "m", {"max_rows": 4}))
    operations.call(Ctl("2", "set_state", "m", {"max_rows": 1}))
    first, second = (m for m in driver.messages if isinstance(m, Reply))
    assert (first.code, "does not batch" in first.message) == ("invalid", True)
    assert (second.code, second.result["max_rows"]) == ("ok", 1)


@pytest.mark.parametrize("op", ["sleep", "reload_weights", "pause"])
def test_a_call_that_nobody_waits_for_any_more_is_not_done_later(
    op: str, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Something runs past the call's deadline: the answer says so in time, and what runs ends in peace."""
    config = WorkerConfig("m", str(tiny_models["llama"]), dtype="float32")
    residence = Residence(config, detect(), Lease(), lambda _: None)
    loaded = residence.load().loaded
    driver = Driver(loaded.model, loaded.vocab_size)
    operations = Operations(
        driver.engine, residence, driver, max_queued=9, open_for=lambda _: None, directory=tmp_path, label="m"
    )
    driver.add(1, [5, 6, 7], 400)
    driver.tick(3)
    operations.call(Ctl("1", op, "m", {}, deadline_s=0.1))
    end = time.monotonic() + 60
    while not (replies := [m for m in driver.messages if isinstance(m, Reply)]):
        assert time.monotonic() < end
        driver.tick()
    assert not driver.results[1].terminals
    assert (replies[0].code, "1 requests still run after 0.1 s" in replies[0].message) == ("failed", True)
    assert driver.engine.mode is (Mode.PAUSING if op == "pause" else Mode.RUNNING)
    while not driver.results[1].terminals:
        driver.tick()
    driver.tick(3)
    assert [m for m in driver.messages if isinstance(m, Reply)] == replies
    assert driver.engine.model is loaded.model


def test_profile_figures(tmp_path: Path) -> None:
    """Laps follow one another, and the summary is over what is kept."""
    profile = Profile(max_events=3)
    for name in ("a", "b", "a", "b"):
        profile.lap(name, 2)
    summary = profile.summary()
    assert (summary["a"]["count"], summary["b"]["count"]) == (1, 2)
    assert summary["b"]["max_ms"] >= summary["b"]["p50_ms"] >= 0
    assert profile.recorded - len(profile) == 1
    path = profile.write(tmp_path / "new", "w")
    events = json.loads(path.read_text())["traceEvents"]
    assert [e["name"] for e in events] == ["b", "a", "b"]
    assert all(later["ts"] >= event["ts"] for event, later in itertools.pairwise(events))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
