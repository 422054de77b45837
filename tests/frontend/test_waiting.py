"""Requests that wait for a model: a real table and queue, a supervisor that the test plays."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from mlxhost.frontend import waiting
from mlxhost.frontend.errors import (
    DoesNotFit,
    ModelNotFound,
    ModelNotReady,
    QueueFull,
    ShuttingDown,
    Unavailable,
)
from mlxhost.frontend.models import ModelTable
from mlxhost.frontend.waiting import Waiting
from mlxhost.wire.control import Fleet, FleetModel, FleetReplica, ModelCard, News, Reply

CARD = ModelCard("/m", [], "llama", 10, [0])


def fleet(state: str, *, on_demand: bool = True, accepting: bool = True) -> Fleet:
    replica = FleetReplica("m/0", 0, 1, state, max_model_len=64)
    model = FleetModel("m", ["alias"], [replica], "round-robin", CARD, on_demand=on_demand)
    return Fleet(1, [], [model], accepting)


class Supervisor:
    """Answers `want` with what the test puts into `replies`, once there is something."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.asked_again = asyncio.Event()
        self.replies: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.tell: Callable[[News], None] = lambda _: None

    async def __call__(
        self,
        op: str,
        args: dict[str, Any],
        deadline_s: float,
        *,
        target: str,
        grace_s: float,
        on_news: Callable[[News], None],
    ) -> Reply:
        if self.asked:
            self.asked_again.set()
        self.asked.append(f"{op} {target}")
        self.tell = on_news
        code, message = await self.replies.get()
        return Reply("id", code, message, {"code": "too_large"} if code == "refused" else {})


class Made:
    def __init__(self, state: str, **more: Any) -> None:
        limits = {name: more.pop(name) for name in ("wait_s", "most") if name in more}
        self.table, self.supervisor = ModelTable(), Supervisor()
        self.table.update(fleet(state, **more))
        self.waiting = Waiting(self.table, self.supervisor, **limits)

    def becomes(self, state: str, **more: Any) -> None:
        self.table.update(fleet(state, **more))
        self.waiting.wake()

    async def begun(self, name: str = "m") -> "asyncio.Task[FleetModel]":
        task = asyncio.create_task(self.waiting.resident(name))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task


def test_a_ready_model_is_there_at_once_and_nobody_is_asked() -> None:
    """No wait and no message for what is resident."""

    async def run() -> None:
        made = Made("ready")
        assert (await made.waiting.resident("alias")).name == "m"
        assert made.supervisor.asked == []

    asyncio.run(run())


@pytest.mark.parametrize("state", ["absent", "starting", "loading", "backoff", "draining", "drained"])
def test_all_wait_and_the_supervisor_is_asked_once(state: str) -> None:
    """Many requests, by any name, are one question; all go on when FLEET says that the model is ready."""

    async def run() -> None:
        made = Made(state)
        tasks = [await made.begun(name) for name in ("m", "alias", "m")]
        assert len(made.waiting) == 3
        made.supervisor.tell(News("id", "loading 40 %", {"state": "loading", "done": 4, "total": 10}))
        assert made.waiting.progress("alias") == {
            "message": "loading 40 %",
            "state": "loading",
            "done": 4,
            "total": 10,
        }
        made.becomes("loading")
        made.becomes("ready")
        assert {m.name for m in await asyncio.gather(*tasks)} == {"m"}
        assert made.supervisor.asked == ["want m"]
        assert len(made.waiting) == 0
        await made.waiting.close()

    asyncio.run(run())


def test_the_question_is_put_again_while_somebody_waits() -> None:
    """`pending` is no answer; once nobody waits, nobody asks."""

    async def run() -> None:
        made = Made("absent")
        task = await made.begun()
        made.supervisor.replies.put_nowait(("pending", "busy"))
        await made.supervisor.asked_again.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(made.waiting) == 0
        made.supervisor.replies.put_nowait(("pending", "busy"))
        await asyncio.sleep(0.05)
        assert len(made.supervisor.asked) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "error", "retryable"), [("refused", DoesNotFit, False), ("failed", Unavailable, False)]
)
def test_a_refusal_fails_all_that_wait_and_the_next_request_asks_anew(
    code: str, error: type[Unavailable], retryable: bool
) -> None:
    """503 with the supervisor's words; it is not kept for later requests."""

    async def run() -> None:
        made = Made("absent")
        tasks = [await made.begun(), await made.begun()]
        made.supervisor.replies.put_nowait((code, "needs 9 GB"))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, error)
            assert "needs 9 GB" in result.message
            assert result.retryable is retryable
            assert result.status == 503
        again = await made.begun()
        made.becomes("ready")
        assert (await again).name == "m"
        assert made.supervisor.asked == ["want m", "want m"]
        await made.waiting.close()

    asyncio.run(run())


def test_the_queue_and_the_wait_are_bounded() -> None:
    """One too many is 429, one too long 503, both with Retry-After; the last progress is told."""

    async def run() -> None:
        made = Made("absent", most=1, wait_s=0.2)
        first = await made.begun()
        with pytest.raises(QueueFull) as full:
            await made.waiting.resident("m")
        assert (full.value.status, full.value.retry_after_s) == (429, 10.0)
        made.supervisor.tell(News("id", "waits for x", {}))
        with pytest.raises(Unavailable, match="waits for x") as late:
            await first
        assert (late.value.code, late.value.retry_after_s) == ("model_loading", 10.0)
        assert len(made.waiting) == 0
        await made.waiting.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("state", "more", "error"),
    [
        ("paused", {}, ModelNotReady),
        ("sleeping", {}, ModelNotReady),
        ("failed", {}, ModelNotReady),
        ("absent", {"on_demand": False}, ModelNotReady),
        ("draining", {"on_demand": False}, ModelNotReady),
        ("absent", {"accepting": False}, ShuttingDown),
    ],
)
def test_what_no_waiting_helps_fails_at_once(
    state: str, more: dict[str, Any], error: type[Exception]
) -> None:
    """What an operator has stopped is not waited for, nor anything once the server stops."""

    async def run() -> None:
        made = Made(state, **more)
        with pytest.raises(error):
            await made.waiting.resident("m")
        assert made.supervisor.asked == []

    asyncio.run(run())


def test_waiting_ends_when_the_server_stops_or_the_model_is_taken_away() -> None:
    """Nobody waits for what will not come."""

    async def run() -> None:
        made = Made("absent")
        task = await made.begun()
        made.becomes("absent", accepting=False)
        with pytest.raises(ShuttingDown):
            await task
        await made.waiting.close()
        made = Made("absent")
        task = await made.begun()
        made.table.update(Fleet(2, [], []))
        made.waiting.wake()
        with pytest.raises(ModelNotFound):
            await task
        await made.waiting.close()

    asyncio.run(run())


def test_a_row_that_waits_elsewhere_keeps_the_question_up() -> None:
    """A request whose worker was lost asks for its model, too."""

    async def run() -> None:
        made = Made("absent")
        made.waiting.wish("m")
        await asyncio.sleep(0)
        assert made.supervisor.asked == ["want m"]
        await made.waiting.close()

    asyncio.run(run())


def test_a_wish_hears_of_a_refusal_and_is_made_anew_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused while somebody wished is told; a later wish is a question of its own."""
    monkeypatch.setattr(waiting, "WISH_S", 0.2)

    async def run() -> None:
        made = Made("absent")
        made.supervisor.replies.put_nowait(("refused", "needs 9 GB"))
        made.waiting.wish("m")
        await asyncio.sleep(0.02)
        with pytest.raises(DoesNotFit, match="needs 9 GB"):
            made.waiting.wish("m")
        await asyncio.sleep(0.3)
        made.waiting.wish("m")
        await asyncio.sleep(0)
        assert made.supervisor.asked == ["want m", "want m"]
        await made.waiting.close()

    asyncio.run(run())
