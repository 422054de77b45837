"""Requests that wait for their model: it is configured but not in memory, or on its way in or out.

The supervisor is asked once for all requests of a model, again and again while any waits (`want`); FLEET says
when it is there. The queue is bounded, and so is the wait.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxhost.frontend.errors import ApiError, DoesNotFit, ModelNotReady, QueueFull, Unavailable
from mlxhost.frontend.models import PASSING_STATES, ModelTable, state_of
from mlxhost.wire.control import FleetModel, News, Reply

ASK_S = 10.0  # how long the supervisor may keep one question
GRACE_S = 3.0
# It serves, and the FLEET that says so is under way.
SOON_S = 0.02
# A question is kept up so long for a request that nobody holds here (see `wish`).
WISH_S = 3.0
RETRY_AFTER_S = 10.0


class Ask(Protocol):
    """ControlLink.call."""

    async def __call__(
        self,
        op: str,
        args: dict[str, Any],
        deadline_s: float,
        *,
        target: str,
        grace_s: float,
        on_news: Callable[[News], None],
    ) -> Reply: ...


@dataclass(slots=True)
class _Queue:
    """The requests that wait for one model, and what the supervisor last said of it."""

    waiting: int = 0
    wished_until: float = 0.0
    asking: "asyncio.Task[None] | None" = None
    refused: ApiError | None = None
    progress: dict[str, Any] = field(default_factory=dict)


class Waiting:
    """`wait_s`: how long a request may wait; `most`: how many may for one model."""

    def __init__(self, table: ModelTable, ask: Ask, *, wait_s: float = 300.0, most: int = 256) -> None:
        self._table, self._ask, self._wait_s, self._most = table, ask, wait_s, most
        self._queues: dict[str, _Queue] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return sum(queue.waiting for queue in self._queues.values())

    def wake(self) -> None:
        """There is a new FLEET."""
        self._changed.set()
        self._changed = asyncio.Event()

    def progress(self, name: str) -> dict[str, Any]:
        """What the supervisor last said of the load of `name`: {message, state, phase, done, total}."""
        queue = self._queues.get(self._table.resolve(name).name)
        return queue.progress if queue else {}

    def wish(self, name: str) -> None:
        """A request that waits elsewhere (for another worker, see replay) needs the model. Called again and
        again; raises what the supervisor has refused it with."""
        model = self._table.resolve(name)
        if model.on_demand:
            queue = self._queues.setdefault(model.name, _Queue())
            now = time.monotonic()
            if not queue.waiting and now > queue.wished_until:
                queue.refused = None  # that was another time
            queue.wished_until = now + WISH_S
            if queue.refused:
                raise queue.refused
            self._keep_asking(model.name, queue)

    def now(self, name: str) -> FleetModel | None:
        """The model of that name if it can take a request at once. Raises like `resident`, but for waits."""
        try:
            return self._table.current(name)
        except ModelNotReady:
            return None

    async def resident(self, name: str) -> FleetModel:
        """The model of that name once a replica can take a request.

        Raises ModelNotReady when it is not loaded on demand, DoesNotFit when it cannot be loaded, QueueFull
        when too many wait already, Unavailable when it takes too long, ShuttingDown, or ModelNotFound.
        """
        queue: _Queue | None = None
        deadline = time.monotonic() + self._wait_s
        try:
            while True:
                changed = self._changed
                try:
                    return self._table.current(name)
                except ModelNotReady:
                    model = self._table.resolve(name)
                    if not model.on_demand or state_of(model) not in PASSING_STATES:
                        raise
                queue = queue or self._join(model.name)
                if queue.refused:
                    raise queue.refused
                if (left := deadline - time.monotonic()) <= 0:
                    raise self._too_late(model.name, queue)
                self._keep_asking(model.name, queue)
                waiter = asyncio.ensure_future(changed.wait())
                try:
                    await asyncio.wait((waiter,), timeout=left)
                finally:
                    waiter.cancel()
        finally:
            if queue:
                queue.waiting -= 1

    def _join(self, model: str) -> _Queue:
        queue = self._queues.setdefault(model, _Queue())
        if queue.waiting >= self._most:
            raise QueueFull(
                f"{queue.waiting} requests wait for the model {model!r} to be loaded", RETRY_AFTER_S
            )
        if not queue.waiting:
            queue.refused = None  # that was another time
        queue.waiting += 1
        return queue

    def _too_late(self, model: str, queue: _Queue) -> Unavailable:
        last = queue.progress.get("message", "nothing is known of it")
        return Unavailable(
            f"The model {model!r} was not loaded within {self._wait_s:g} s ({last})",
            "model_loading",
            retry_after_s=RETRY_AFTER_S,
        )

    def _keep_asking(self, model: str, queue: _Queue) -> None:
        if queue.asking is None or queue.asking.done():
            queue.asking = asyncio.create_task(self._ask_on(model, queue))

    async def _ask_on(self, model: str, queue: _Queue) -> None:
        """Ask for `model` as long as somebody waits for it."""

        def tell(news: News) -> None:
            queue.progress = {"message": news.message, **news.data}

        while not queue.refused and (queue.waiting or time.monotonic() < queue.wished_until):
            try:
                reply = await self._ask("want", {}, ASK_S, target=model, grace_s=GRACE_S, on_news=tell)
            except TimeoutError:
                continue
            match reply.code:
                case "ok":
                    await asyncio.sleep(SOON_S)
                case "pending":
                    queue.progress.setdefault("message", reply.message)
                case "refused":
                    queue.refused = DoesNotFit(model, reply.message, str(reply.result.get("code", "")))
                case _:
                    queue.refused = Unavailable(
                        f"The model {model!r} cannot be loaded: {reply.message}",
                        "model_failed",
                        retryable=False,
                    )
        self.wake()

    async def close(self) -> None:
        """Ask for nothing more."""
        tasks = [queue.asking for queue in self._queues.values() if queue.asking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
